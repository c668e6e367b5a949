"""StepPlan (host) → Batch (device): what one forward works on, moved in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.families.config import RopeConfig
from engine.sequence import Sequence
from kernels.attention.eager import AttentionPlan, Span, plan_attention


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's part of a step: its next `q_len` uncomputed tokens; the last `num_logits` of those rows get logits
    (0: a chunk that isn't the prompt's last, 1: decode or a last chunk, more: verify rows). snapshots: (offset, slot) pairs, where
    the recurrent state after `offset` of the rows is copied to; row_slots: where that after each row goes."""

    seq: Sequence
    q_len: int
    num_logits: int
    snapshots: tuple[tuple[int, int], ...] = ()
    row_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: `num_decode` decode rows first, prefill rows after. Logits rows come in the same order."""

    rows: tuple[PlanRow, ...]
    num_decode: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.q_len for row in self.rows)

    @property
    def num_logits(self) -> int:
        return sum(row.num_logits for row in self.rows)


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Rows [start, start + q_len) of one sequence, for recurrent layers: `slot` holds its state. snapshots: (offset, slot) pairs,
    the state after the first `offset` rows goes to that slot too. row_slots: of a verify, where the state after each row goes."""

    start: int
    q_len: int
    slot: int
    snapshots: tuple[tuple[int, int], ...] = ()
    row_slots: tuple[int, ...] = ()


def _first_slot(block_table: list[int], block_size: int) -> int:
    """The token slot of a sequence's first position where its blocks follow one another, else −1."""
    first, count = block_table[0], len(block_table)
    in_a_row = block_table[-1] - first == count - 1 and block_table == list(range(first, first + count))
    return first * block_size if in_a_row else -1


@dataclass(slots=True)
class Batch:
    """One ragged batch on the device. token_ids, positions, slots: int64 `[rows]`, slots being token slots of the KV pool;
    logit_rows: int64 `[num_logits]`, which rows get logits. rope: (cos, sin) of the rows for every rope of the
    model. Of a hybrid model, state_slots: int64 `[decode rows]`, and a StateSpan for every longer part."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    attention: AttentionPlan
    state_slots: Tensor
    state_spans: tuple[StateSpan, ...] = ()
    rope: Mapping[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)


class BatchBuilder:
    """Fixed buffers for the largest batch, and the way a StepPlan gets into them.

    block_tables: int64 `[max_batch, max_blocks]`, one row for each device row; entries a row doesn't use are stale.
    """

    def __init__(
        self,
        max_batch: int,
        max_batch_tokens: int,
        max_logits: int,
        max_blocks: int,
        block_size: int,
        null_slot: int,
        device: torch.device,
    ) -> None:
        self.max_tokens = max_batch_tokens
        self.max_logits = max_logits
        self.block_size = block_size
        self.null_slot = null_slot
        pinned = device.type == "cuda"
        self._host = torch.zeros(3 * max_batch_tokens + max_logits + max_batch, dtype=torch.int64, pin_memory=pinned)
        self._numbers = self._host.numpy()
        self._device = torch.zeros_like(self._host, device=device) if pinned else self._host
        self._host_tables = torch.zeros((max_batch, max_blocks), dtype=torch.int64, pin_memory=pinned)
        self._table_numbers = self._host_tables.numpy()
        self.block_tables = torch.zeros_like(self._host_tables, device=device) if pinned else self._host_tables
        self._filled = [0] * max_batch

    @property
    def num_bytes(self) -> int:
        shared = self._device is self._host
        return (self._host.nbytes + self._host_tables.nbytes) * (1 if shared else 2)

    def forget_row(self, row: int) -> None:
        """The device row has a new owner: none of its block table is valid any more."""
        self._filled[row] = 0

    def build(self, plan: StepPlan) -> Batch:
        """The Batch of a plan whose sequences have their blocks already."""
        tokens = plan.num_tokens
        numbers, size = self._numbers, self.block_size
        ids, positions, slots = numbers[:tokens], numbers[tokens : 2 * tokens], numbers[2 * tokens : 3 * tokens]
        logit_rows: list[int] = []
        spans: list[Span] = []
        at = 0
        for part in plan.rows:
            seq, first, count = part.seq, part.seq.num_computed_tokens, part.q_len
            self._update_table(seq)
            if count == 1:
                ids[at] = seq.token_ids[first]
                positions[at] = first
                slots[at] = seq.block_table[first // size] * size + first % size
            else:
                where = np.arange(first, first + count)
                ids[at : at + count] = seq.token_ids[first : first + count]
                positions[at : at + count] = where
                slots[at : at + count] = self._table_numbers[seq.row, where // size] * size + where % size
            spans.append(Span(at, count, first + count, seq.row, _first_slot(seq.block_table, size)))
            at += count
            logit_rows += range(at - part.num_logits, at)
        end = 3 * tokens + len(logit_rows)
        numbers[3 * tokens : end] = logit_rows
        num_decode = next((i for i, span in enumerate(spans) if span.q_len != 1), len(spans))
        states_end = end + num_decode
        numbers[end:states_end] = [part.seq.ssm_slot for part in plan.rows[:num_decode]]
        if self._device is not self._host:
            self._device[:states_end].copy_(self._host[:states_end], non_blocking=True)
            self.block_tables.copy_(self._host_tables, non_blocking=True)
        device = self._device
        return Batch(
            token_ids=device[:tokens],
            positions=device[tokens : 2 * tokens],
            slots=device[2 * tokens : 3 * tokens],
            logit_rows=device[3 * tokens : end],
            attention=plan_attention(spans, self.block_tables, size, self.null_slot),
            state_slots=device[end:states_end],
            state_spans=tuple(
                StateSpan(span.start, span.q_len, part.seq.ssm_slot, part.snapshots, part.row_slots)
                for span, part in zip(spans[num_decode:], plan.rows[num_decode:], strict=True)
            ),
        )

    def _update_table(self, seq: Sequence) -> None:
        filled, held = self._filled[seq.row], len(seq.block_table)
        if filled < held:
            self._table_numbers[seq.row, filled:held] = seq.block_table[filled:]
        self._filled[seq.row] = held
