"""Sequences of a model: they are made, grown and freed here, by calls to the pools' owners. No count is kept here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.batch import BatchBuilder
from engine.cache.blocks import BlockPool
from engine.errors import BatchRefused, InvariantBroken
from engine.model.base import ModelLifecycle
from engine.sequence import Sequence


class Lifecycle(ModelLifecycle):
    """The only caller of the pools' alloc and free."""

    def __init__(self, blocks: BlockPool, builder: BatchBuilder, max_batch: int, max_seq_len: int, kv_block_bytes: int) -> None:
        self.blocks = blocks
        self.builder = builder
        self.max_seq_len = max_seq_len
        self.kv_block_bytes = kv_block_bytes
        self._free_rows = list(range(max_batch - 1, -1, -1))
        self._live: dict[int, Sequence] = {}

    @property
    def num_free_blocks(self) -> int:  # type: ignore[override]  # the base's class attribute is the default, this the live figure
        return self.blocks.num_free

    @property
    def num_total_blocks(self) -> int:  # type: ignore[override]  # as above
        return self.blocks.num_blocks

    @property
    def num_free_rows(self) -> int:
        """Device rows that no sequence holds."""
        return len(self._free_rows)

    def alloc_sequence(self) -> Sequence:
        """A new sequence that may grow to the model's whole context."""
        return self.alloc_sequence_for(self.max_seq_len)

    def alloc_sequence_for(self, budget_tokens: int, owner: int = -1) -> Sequence:
        """A new sequence for at most `budget_tokens` (prompt and generated). Raises `BatchRefused` when every row is taken."""
        if not self._free_rows:
            raise BatchRefused(f"all {len(self._live)} sequence rows are taken; wait for one to end or raise --max-batch.")
        seq = Sequence(min(budget_tokens, self.max_seq_len), self._free_rows.pop(), owner)
        self._live[seq.row] = seq
        self.builder.forget_row(seq.row)
        return seq

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks missing from the sequence's table to hold `num_tokens`."""
        return max(0, -(-num_tokens // self.blocks.block_size) - len(seq.block_table))

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Give the sequence the blocks for `num_tokens`. Raises `BatchRefused`, changing nothing, when too few are free."""
        missing = self.blocks_needed(seq, num_tokens)
        if missing:
            seq.block_table += self.blocks.allocate(missing, seq.owner)

    def free_sequence(self, seq: Sequence) -> None:
        """Release the sequence's blocks and row; idempotent."""
        if seq.row < 0:
            return
        if self._live.get(seq.row) is not seq:
            raise InvariantBroken(f"sequence row {seq.row} is freed by a sequence that doesn't hold it.")
        # The tail first: when the pool runs out, the beginning of a cached prefix is what should last longest.
        self.blocks.release(reversed(seq.block_table))
        del self._live[seq.row]
        self._free_rows.append(seq.row)
        seq.block_table = []
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        seq.row = -1

    def check(self) -> None:
        """Recount blocks and rows from the live sequences; raises `InvariantBroken` on any difference."""
        self.blocks.check(seq.block_table for seq in self._live.values())
        rows = sorted([*self._live, *self._free_rows])
        if rows != list(range(len(rows))):
            raise InvariantBroken(f"sequence rows {rows} aren't each free or held once.")

    def live(self) -> SequenceOf[Sequence]:
        """The sequences that hold a row."""
        return list(self._live.values())
