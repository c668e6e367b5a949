"""A tiny hybrid model without an engine around it: turns of chats as the engine's loop takes them, and poison for what is free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from closeness import Expected, Split, expect, judge, pieces
from tiny_engine import tiny_config
from torch import Tensor

from engine.batch import PlanRow, StepPlan
from engine.cache.prefix import PrefixMatch
from engine.cache.ssm_layout import RING_ENTRIES
from engine.device import choose_device
from engine.model.forward import Forward
from engine.model.lifecycle import Lifecycle
from engine.model.transformer import TransformerModel, load_model
from engine.sequence import Sequence as Stream
from engine.weights.checkpoint import open_checkpoint


@contextmanager
def loaded(path: Path, **flags: Any) -> Iterator[TransformerModel]:
    """The model at `path` on one thread, in float32; at its end its pools' books must balance."""
    config = tiny_config(path, **({"num_kv_blocks": 200, "max_batch_tokens": 512, "max_batch": 256, "ssm_cache_slots": 8} | flags))
    device = choose_device(config)
    device.bind_to_thread()
    with open_checkpoint(path) as checkpoint, load_model(checkpoint, config, device) as model:
        yield model
        model.lifecycle.check()


def run(model: TransformerModel, seq: Stream, count: int, num_logits: int = 1) -> Tensor | None:
    """Compute the next `count` known ids of one sequence."""
    logits = model.forward.run(StepPlan((PlanRow(seq, count, num_logits),), int(count == 1)))
    return None if logits is None else logits.clone()


def cold(model: TransformerModel, ids: Sequence[int], split: Split) -> Tensor:
    """The logits of every position, `[tokens, vocab]`, computed in chunks of `split` without the prefix cache."""
    seq, out, at = model.lifecycle.alloc_sequence(), [], 0
    for size in split:
        seq.append(list(ids[at : at + size]))
        logits = run(model, seq, size, size)
        assert logits is not None
        out.append(logits)
        at += size
    model.lifecycle.free_sequence(seq)
    return torch.cat(out)


_OWN: WeakKeyDictionary[TransformerModel, dict[tuple[int, ...], Expected]] = WeakKeyDictionary()


def own(model: TransformerModel, ids: Sequence[int]) -> Expected:
    """What the model itself says of the ids when nothing is cached, and its ε over five splits; worked out once for each ids."""
    known = _OWN.setdefault(model, {})
    if tuple(ids) not in known:
        count = len(ids)
        sizes = (count, count - 1, 64, 37, 20) if count > 70 else (count, count - 1, count - 2, 3, 1)
        splits = tuple(pieces(count, each) for each in sizes)
        known[tuple(ids)] = expect(lambda split: cold(model, ids, split), count, splits)
    return known[tuple(ids)]


@dataclass(frozen=True)
class Turn:
    """A turn of a chat: its ids, the answer's included, what the prefix cache held of its prompt, and the logits that chose each
    id of the answer, `[answer, vocab]`."""

    ids: list[int]
    prompt_tokens: int
    found: PrefixMatch
    logits: Tensor

    @property
    def cached(self) -> int:
        return self.found.num_tokens

    def equals(self, expected: Expected) -> None:
        """Fails unless the logits are those of `expected` by the rule in `closeness`."""
        rows = list(range(self.prompt_tokens - 1, self.prompt_tokens - 1 + len(self.logits)))
        verdict = judge(self.logits, expected, rows)
        assert verdict.holds, verdict


def take_turn(model: TransformerModel, prompt: Sequence[int], answer: int | Sequence[int] = 1, chunk: int = 10**9) -> Turn:
    """One turn as the engine's loop takes it: what is cached is adopted, the rest computed in chunks, then the answer is decoded
    (greedily, or the ids given) and the sequence retired."""
    seq = model.lifecycle.alloc_sequence()
    found = model.lifecycle.adopt_prefix(seq, list(prompt))
    logits = None
    while (missing := seq.num_tokens - seq.num_computed_tokens) > 0:
        logits = run(model, seq, min(chunk, missing))
        model.lifecycle.cache_sequence(seq)
    assert logits is not None
    rows, forced = [logits], list(answer) if not isinstance(answer, int) else None
    length = len(forced) if forced is not None else int(answer)  # type: ignore[call-overload]  # one or the other
    for i in range(length - 1):
        seq.append([forced[i] if forced is not None else int(rows[-1].argmax())])
        logits = run(model, seq, 1)
        model.ssm_state.decode_marconi_checkpoint(seq)
        assert logits is not None
        rows.append(logits)
    ids = [*seq.token_ids, forced[-1] if forced else int(rows[-1].argmax())]
    model.lifecycle.retire_sequence(seq)
    model.lifecycle.check()
    return Turn(ids, len(prompt), found, torch.cat(rows))


def snapshots_of(model: TransformerModel, ids: Sequence[int]) -> list[int]:
    """The token counts of these ids at which a snapshot of the state is cached."""
    prefix, size = model.lifecycle.prefix, model.lifecycle.blocks.block_size
    keys = prefix.keys(ids, 0, len(ids))
    return [(i + 1) * size for i, key in enumerate(keys) if prefix.has_snapshot(key)]


# Poison


def poison_free(lifecycle: Lifecycle, kv_cache: Tensor) -> None:
    """Fill with NaN what no sequence and no cached prefix holds: KV blocks, live slots, rings, draft rows, snapshots."""
    size, blocks = lifecycle.blocks.block_size, lifecycle.blocks
    with torch.inference_mode():
        for block in list(blocks._free):
            kv_cache[:, :, block * size : (block + 1) * size] = torch.nan
        if lifecycle.ssm is None:
            return
        pool = lifecycle.ssm.pool
        taken = {seq.ssm_slot: seq for seq in lifecycle.live()}
        spoiled = list(pool._free_snapshots)
        for live in range(pool.sizes.max_live):
            rings = taken[live].ring_tokens if live in taken else [None] * RING_ENTRIES
            spoiled += [pool.ring_slot(live, entry) for entry, tokens in enumerate(rings) if tokens is None]
            if live not in taken:
                spoiled.append(live)
                spoiled += [pool.draft_slot(live, row) for row in range(pool.sizes.draft_rows)]
                spoiled += [pool.checkpoint_slot(live)] if pool.sizes.draft_rows else []
        for slot in spoiled:
            pool.h[:, slot] = torch.nan
            pool.conv[:, slot] = torch.nan


def poison_before_every_pass(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on whatever is free is filled with NaN before every forward pass; returns a list that grows by one with each."""
    done: list[int] = []
    before = Forward.run

    def poisoned(forward: Forward, plan: StepPlan, *args: Any, **kwargs: Any) -> Tensor | None:
        poison_free(forward.lifecycle, forward.lifecycle.states.kv_cache)
        done.append(len(plan.rows))
        return before(forward, plan, *args, **kwargs)

    monkeypatch.setattr(Forward, "run", poisoned)
    return done
