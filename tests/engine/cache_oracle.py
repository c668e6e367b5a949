"""The cache oracle: what an engine computed with the help of its prefix cache, computed again without one.

`record` keeps every forward pass of an engine: which tokens of which request, and the logits. `recompute` runs the same passes,
the same rows in the same order and the same chunks, on a model that never reuses a block: what a request took from the cache is
computed for it alone first. The same splits and batch give the same bits, so the logits must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import PlanRow, StepPlan
from engine.config import EngineConfig
from engine.device import choose_device
from engine.model.forward import Forward
from engine.model.transformer import TransformerModel, load_model
from engine.sequence import Sequence as Stream
from engine.weights.checkpoint import open_checkpoint


@dataclass(frozen=True)
class Part:
    """One request's rows in a pass: the ids up to their end, how many of these were computed before, how many get logits."""

    request_id: int
    ids: tuple[int, ...]
    computed: int
    num_logits: int


@dataclass(frozen=True)
class Pass:
    parts: tuple[Part, ...]
    num_decode: int
    logits: Tensor | None


def record(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """A list that every forward pass from now on is added to."""
    passes: list[Pass] = []
    run = Forward.run

    def recording(forward: Forward, plan: StepPlan, *args: Any) -> Tensor | None:
        parts = tuple(
            Part(
                row.seq.owner,
                tuple(row.seq.token_ids[: row.seq.num_computed_tokens + row.q_len]),
                row.seq.num_computed_tokens,
                row.num_logits,
            )
            for row in plan.rows
        )
        logits = run(forward, plan, *args)
        passes.append(Pass(parts, plan.num_decode, None if logits is None else logits.clone()))
        return logits

    monkeypatch.setattr(Forward, "run", recording)
    return passes


def recompute(config: EngineConfig, passes: Sequence[Pass], splits: Callable[[Part], Sequence[int]]) -> int:
    """Compute the passes again and compare their logits; returns how many tokens had come from the cache.

    splits: for a request that began with cached tokens, the chunks in which those had been computed.
    """
    device = choose_device(config)
    device.bind_to_thread()
    streams: dict[int, Stream] = {}
    num_cached = 0
    with open_checkpoint(Path(config.model)) as checkpoint, load_model(checkpoint, config, device) as model:
        for index, each in enumerate(passes):
            for part in each.parts:
                if part.request_id not in streams:
                    streams[part.request_id] = model.lifecycle.alloc_sequence()
                    if part.computed:
                        _fill(model, streams[part.request_id], part, splits(part))
                        num_cached += part.computed
                assert streams[part.request_id].num_computed_tokens == part.computed, "a request was preempted"
            rows = []
            for part in each.parts:
                seq = streams[part.request_id]
                seq.append(list(part.ids[seq.num_tokens :]))
                rows.append(PlanRow(seq, len(part.ids) - part.computed, part.num_logits))
            logits = model.forward.run(StepPlan(tuple(rows), each.num_decode))
            assert (logits is None) == (each.logits is None)
            assert logits is None or each.logits is None or torch.equal(logits, each.logits), f"{each.parts[0]} has other logits"
            live = {part.request_id for later in passes[index + 1 :] for part in later.parts}
            for request_id in set(streams) - live:
                model.lifecycle.free_sequence(streams.pop(request_id))
    return num_cached


def _fill(model: TransformerModel, seq: Stream, part: Part, chunks: Sequence[int]) -> None:
    assert sum(chunks) == part.computed
    for size in chunks:
        seq.append(list(part.ids[seq.num_tokens : seq.num_tokens + size]))
        model.forward.run(StepPlan((PlanRow(seq, size, 0),)))
