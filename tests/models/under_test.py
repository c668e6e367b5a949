"""The model under test: loaded straight from its files, without an engine around it, and asked for logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from closeness import Split
from torch import Tensor

from engine.batch import PlanRow, StepPlan
from engine.config import EngineConfig
from engine.device import choose_device
from engine.model.transformer import TransformerModel, load_model
from engine.sequence import Sequence as Stream
from engine.weights.checkpoint import open_checkpoint


@contextmanager
def loaded(path: Path, **flags: Any) -> Iterator[TransformerModel]:
    """The model at `path`, in float32 on one CPU thread unless `flags`, fields of EngineConfig, say otherwise.
    At its end the pools' books must balance."""
    config = EngineConfig(
        **{"model": str(path), "device": "cpu", "dtype": "float32", "threads": 1, "num_kv_blocks": 96, "max_batch": 64} | flags
    )
    device = choose_device(config)
    device.bind_to_thread()
    with open_checkpoint(path) as checkpoint, load_model(checkpoint, config, device) as model:
        yield model
        model.lifecycle.check()


def chunk_logits(model: TransformerModel, seq: Stream, ids: Sequence[int]) -> Tensor:
    """Append `ids` and compute them as one chunk: the logits of each of them, `[len(ids), vocab]`."""
    seq.append(list(ids))
    logits = model.forward.run(StepPlan((PlanRow(seq, len(ids), len(ids)),)))
    assert logits is not None
    return logits.clone()


def all_logits(model: TransformerModel, ids: Sequence[int], split: Split) -> Tensor:
    """The logits of every position, `[tokens, vocab]`, with the ids computed in chunks of `split`."""
    assert sum(split) == len(ids)
    seq, out, start = model.lifecycle.alloc_sequence(), [], 0
    for size in split:
        out.append(chunk_logits(model, seq, ids[start : start + size]))
        start += size
    model.lifecycle.free_sequence(seq)
    return torch.cat(out)


def chunks_of(model: TransformerModel, ids: list[int], size: int) -> Iterator[Tensor]:
    """The logits of every position, chunk by chunk."""
    seq = model.lifecycle.alloc_sequence()
    for start in range(0, len(ids), size):
        yield chunk_logits(model, seq, ids[start : start + size])
    model.lifecycle.free_sequence(seq)
