"""Sequences of a model: they are made, grown and freed here, by calls to the pools' owners. No count is kept here."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from engine.batch import BatchBuilder
from engine.cache.blocks import BlockPool
from engine.cache.prefix import PrefixMatch, PrefixTree
from engine.cache.spill import Spill
from engine.cache.ssm_pool import SsmPool
from engine.errors import BatchRefused, InvariantBroken
from engine.model.base import ModelLifecycle, ModelStreams, PrefixReclaim
from engine.model.ssm_state import SsmState
from engine.model.state_files import StateFiles
from engine.sequence import Sequence


class Lifecycle(ModelLifecycle):
    """The only caller of the pools' alloc and free."""

    def __init__(
        self,
        blocks: BlockPool,
        builder: BatchBuilder,
        max_batch: int,
        max_seq_len: int,
        kv_block_bytes: int,
        states: StateFiles,
        spill_dir: Path | None,
        streams: ModelStreams,
        ssm: SsmPool | None = None,
        checkpoint_interval: int = 256,
    ) -> None:
        self.blocks = blocks
        self.prefix = PrefixTree(blocks, ssm)
        self.ssm = SsmState(ssm, self.prefix, blocks.block_size, checkpoint_interval, streams) if ssm is not None else None
        self.builder = builder
        self.states = states
        self.spill = Spill(spill_dir, states.write, states.read) if spill_dir is not None else None
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
        if self.ssm is not None:
            seq.ssm_slot = self.ssm.pool.alloc_live()
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

    # The prefix cache

    def prompt_keys(self, tokens: SequenceOf[int], adapter_id: int = 0) -> list[bytes]:
        """The prefix keys of a prompt's full blocks."""
        return self.prefix.keys(tokens, adapter_id, len(tokens))

    def adopt_prefix(self, seq: Sequence, tokens: SequenceOf[int], keys: SequenceOf[bytes] | None = None) -> PrefixMatch:
        """Append a prompt to an empty sequence and share what the prefix cache holds of it: those tokens count as computed."""
        if seq.num_tokens or seq.block_table:
            raise InvariantBroken("a prefix can only be adopted by an empty sequence.")
        keys = self.prompt_keys(tokens, seq.adapter_id) if keys is None else keys
        found = self.prefix.match(keys, len(tokens))
        self.prefix.num_lookups += 1
        self.prefix.num_hits += found.num_tokens > 0
        self.blocks.share(found.blocks, seq.owner)
        seq.block_keys = list(keys[: len(found.blocks)])
        self.prefix.touch(seq.block_keys)
        seq.block_table = list(found.blocks)
        seq.append(list(tokens))
        seq.advance(found.num_tokens)
        seq.num_cached_tokens = found.num_tokens
        if self.ssm is not None:
            self.ssm.resume(seq, found, len(tokens))
        return found

    def cache_sequence(self, seq: Sequence) -> None:
        """Insert the sequence's computed tokens, prompt and generated, into the prefix cache: its full blocks. Call it before
        `free_sequence`, while they are valid."""
        if seq.row >= 0 and seq.num_computed_tokens // self.blocks.block_size > len(seq.block_keys):
            seq.block_keys = self.prefix.keys(seq.token_ids, seq.adapter_id, seq.num_computed_tokens, seq.block_keys)
            self.prefix.insert(seq.block_keys, seq.block_table)
        if self.ssm is not None:
            self.ssm.attach_pending(seq)

    def retire_sequence(self, seq: Sequence) -> None:
        """Cache what the sequence computed, its turn's end included, then free it."""
        if self.ssm is not None:
            self.ssm.keep_turn_end(seq)
        self.cache_sequence(seq)
        self.free_sequence(seq)

    def discard_prefix(self, seq: Sequence) -> None:
        """Take what the sequence put into the prefix cache out again: it ended in an error that may have spoiled it."""
        self.prefix.discard(seq.block_keys)

    def reclaim_prefix_blocks(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` from the prefix cache; returns how many became free."""
        return self.prefix.evict(num_blocks)

    def reclaim_prefix_blocks_for(
        self, prompt: SequenceOf[int], adapter_id: int, blocks_needed: int, keys: SequenceOf[bytes] | None = None
    ) -> PrefixReclaim:
        """Evict until `num_free_blocks` covers `blocks_needed`, the caller's count for the whole prompt, less the cached blocks
        the prompt will reuse, which aren't evicted. An empty prompt reuses nothing."""
        keys = self.prompt_keys(prompt, adapter_id) if keys is None else keys
        reused = self.prefix.match(keys, len(prompt)).blocks if prompt else ()
        missing = blocks_needed - len(reused) - self.num_free_blocks
        if missing <= 0:
            return PrefixReclaim(len(reused), 0)
        return PrefixReclaim(len(reused), self.prefix.evict(missing, frozenset(reused)))

    def free_sequence(self, seq: Sequence) -> None:
        """Release the sequence's blocks and row; idempotent."""
        if seq.row < 0:
            return
        if self._live.get(seq.row) is not seq:
            raise InvariantBroken(f"sequence row {seq.row} is freed by a sequence that doesn't hold it.")
        if self.ssm is not None:
            self.ssm.drop_pending(seq)
            if seq.ssm_slot >= 0:
                self.ssm.pool.free_live(seq.ssm_slot)
                seq.ssm_slot = -1
        # The tail first: when the pool runs out, the beginning of a cached prefix is what should last longest.
        self.blocks.release(reversed(seq.block_table))
        del self._live[seq.row]
        self._free_rows.append(seq.row)
        seq.block_table = []
        seq.block_keys = []
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        seq.row = -1

    # Saved sequences

    def save_sequence_state(self, seq: Sequence, writer: BinaryIO) -> None:
        """Write the sequence's KV and recurrent state, freeing nothing. Raises `SavedStateError` when it can't be written."""
        self.states.save(seq, writer)

    def restore_sequence_state(self, seq: Sequence, num_blocks: int | None, reader: BinaryIO) -> None:
        """Read a saved state into an allocated, empty sequence, giving it `num_blocks` KV blocks (None: as many as it needs).
        Raises `SavedStateError` or `BatchRefused`, leaving the sequence empty."""
        if seq.num_tokens or seq.block_table:
            raise InvariantBroken("a state can only be restored into an empty sequence.")
        state = self.states.open(reader, seq.budget_tokens)
        count = len(state.header.token_ids)
        if num_blocks is not None and num_blocks * self.blocks.block_size < count:
            raise BatchRefused(f"{num_blocks} KV blocks don't hold the {count} saved tokens.")
        tensors = self.states.load(state)
        self.reserve(seq, count if num_blocks is None else num_blocks * self.blocks.block_size)
        self.install_state(seq, state.header.token_ids, tensors)

    def install_state(self, seq: Sequence, token_ids: tuple[int, ...], tensors: list[Tensor], num_tokens: int = 0) -> None:
        """Put a loaded state into an empty sequence that has the blocks for it and will hold `num_tokens` known tokens."""
        self.states.install(seq, token_ids, tensors)
        if self.ssm is not None:
            self.ssm.restored(seq, num_tokens)

    # Preempted sequences on disk

    def spill_sequence(self, seq: Sequence) -> int | None:
        """Copy a sequence's state out before it is preempted; returns its key, None where nothing is spilled."""
        if self.spill is None or not seq.num_computed_tokens:
            return None
        return self.spill.put(tuple(seq.token_ids[: seq.num_computed_tokens]), self.states.gather(seq))

    def unspill_sequence(self, seq: Sequence, tokens: SequenceOf[int], key: int) -> bool:
        """Bring a spilled state back into an empty sequence and append the tokens beyond it; False, leaving the sequence empty,
        when the disk lost it."""
        found = self.spill.take(key) if self.spill is not None else None
        if found is None:
            return False
        token_ids, tensors = found
        self.reserve(seq, len(token_ids))
        self.install_state(seq, token_ids, tensors, len(tokens))
        seq.append(list(tokens[len(token_ids) :]))
        return True

    def compact_sequence(self, seq: Sequence, new_slot: int) -> None:
        """Move the sequence's recurrent state, its ring and draft rows included, to live slot `new_slot`: a free one, or that of a
        retired sequence, which must then be detached (`detach_slot_for_reuse`) at once."""
        if self.ssm is None or new_slot == seq.ssm_slot:
            return
        if self.ssm.pool.is_free_live(new_slot):
            self.ssm.pool.claim_live(new_slot)
        self.ssm.move(seq, new_slot)

    def detach_slot_for_reuse(self, seq: Sequence) -> None:
        """Give up a retired sequence's recurrent-state slot, which `compact_sequence` has given to a surviving one: freeing this
        sequence then doesn't release it."""
        seq.ssm_slot = -1

    def check(self) -> None:
        """Recount blocks and rows from the live sequences; raises `InvariantBroken` on any difference."""
        self.blocks.check((seq.block_table for seq in self._live.values()), self.prefix.blocks())
        self.prefix.check()
        if self.ssm is not None:
            pending = [slot for seq in self._live.values() for slot, _ in seq.pending_snapshots]
            # A sequence whose slot was detached holds none until it is freed.
            slots = [seq.ssm_slot for seq in self._live.values() if seq.ssm_slot >= 0]
            self.ssm.pool.check(slots, [*self.prefix.snapshots(), *pending])
        rows = sorted([*self._live, *self._free_rows])
        if rows != list(range(len(rows))):
            raise InvariantBroken(f"sequence rows {rows} aren't each free or held once.")

    def live(self) -> SequenceOf[Sequence]:
        """The sequences that hold a row."""
        return list(self._live.values())
