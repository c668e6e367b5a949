"""Recurrent state of the running sequences: slots, snapshots, the decode ring, checkpoint and rollback.

A recurrent state is advanced in place and can't be truncated; whatever a sequence may return to is copied out in time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.batch import PlanRow
from engine.cache.prefix import PrefixMatch, PrefixTree
from engine.cache.ssm_layout import RING_ENTRIES
from engine.cache.ssm_pool import SsmPool
from engine.errors import BatchRefused, InvariantBroken
from engine.model.base import ModelSsmState, ModelStreams
from engine.sequence import Sequence


class SsmState(ModelSsmState):
    """The seed's ModelSsmState over one SsmPool. The asynchronous forms run on a secondary stream; a CPU has only one, in order."""

    def __init__(self, pool: SsmPool, prefix: PrefixTree, block_size: int, checkpoint_interval: int, streams: ModelStreams) -> None:
        self.pool = pool
        self.streams = streams
        self.secondary = streams.create_stream()
        self.prefix = prefix
        self.block_size = block_size
        self.checkpoint_interval = checkpoint_interval

    @property
    def has_ssm_layers(self) -> bool:
        return True

    @property
    def decode_rollback_ring_slots(self) -> int:
        return RING_ENTRIES

    def ssm_snapshot_occupancy(self) -> tuple[int, int] | None:
        used, total = self.pool.occupancy()
        return (used, total) if total else None

    def resume(self, seq: Sequence, found: PrefixMatch, num_tokens: int) -> None:
        """Start a sequence from what the prefix cache holds of its prompt, and decide where its prefill takes snapshots: at the
        last block boundary below the prompt's end, and where it leaves the cached blocks (a junction others may come to)."""
        if found.snapshot is not None:
            self.pool.copy(found.snapshot, seq.ssm_slot)
            self.save_decode_ssm_snapshot(seq, 0)
        self._plan_snapshots(seq, num_tokens, found.kv_tokens)

    def restored(self, seq: Sequence, num_tokens: int) -> None:
        """After a saved state was put into the live slot of a sequence that will hold `num_tokens` known ones: at a block boundary
        it goes into the ring; the last boundary below the prompt's end gets its snapshot, now or when the prefill comes there."""
        if seq.num_computed_tokens % self.block_size == 0:
            self.save_decode_ssm_snapshot(seq, 0)
        if seq.num_computed_tokens == self.tail_split(num_tokens):
            self._keep(seq, seq.ssm_slot, seq.num_computed_tokens)
        self._plan_snapshots(seq, num_tokens)

    def _keep(self, seq: Sequence, source: int, tokens: int) -> None:
        """Copy the state in a slot, after `tokens` tokens of the sequence, into a snapshot for when they are cached."""
        slot = self.prefix.take_snapshot_slot()
        if slot is not None:
            self.pool.copy(source, slot)
            seq.pending_snapshots.append((slot, tokens))

    def _plan_snapshots(self, seq: Sequence, num_tokens: int, junction: int = 0) -> None:
        points = {junction, self.tail_split(num_tokens) or 0}
        seq.snapshot_points = sorted(point for point in points if point > seq.num_computed_tokens)

    def tail_split(self, num_tokens: int) -> int | None:
        """The largest block multiple below a prompt's length; None for a prompt within one block."""
        return (num_tokens - 1) // self.block_size * self.block_size or None

    def take_snapshots(self, seq: Sequence, q_len: int) -> tuple[tuple[int, int], ...]:
        """Slots for the snapshot points within the sequence's next q_len rows, as (offset, slot) pairs."""
        first, taken = seq.num_computed_tokens, []
        for point in seq.snapshot_points:
            if first < point <= first + q_len and (slot := self.prefix.take_snapshot_slot()) is not None:
                taken.append((point - first, slot))
        return tuple(taken)

    def give_back(self, taken: tuple[tuple[int, int], ...]) -> None:
        """Free snapshot slots whose step failed: what was written there is no state to keep."""
        for _, slot in taken:
            self.pool.free_snapshot(slot)

    def move(self, seq: Sequence, new_slot: int) -> None:
        """Move the state, the ring and what a verify left to another live slot, which the caller has taken; free the old one."""
        old = seq.ssm_slot
        for source, target in zip(self.pool.slots_of(old), self.pool.slots_of(new_slot), strict=True):
            self.pool.copy(source, target)
        self.pool.free_live(old)
        seq.ssm_slot = new_slot

    # The ring: states at the last two block boundaries

    def save_decode_ssm_snapshot(self, seq: Sequence, ring_slot: int) -> None:
        """Save the sequence's state, which is the one after its computed tokens, into its ring entry 0 or 1."""
        self.pool.copy(seq.ssm_slot, self.pool.ring_slot(seq.ssm_slot, ring_slot))
        seq.ring_tokens[ring_slot] = seq.num_computed_tokens

    def restore_decode_ssm_snapshot(self, seq: Sequence, ring_slot: int) -> None:
        """Make the state of a ring entry the sequence's own, and its token count the sequence's computed tokens. Raises
        `BatchRefused` for an entry that was never written, or lies within what the prefix cache holds of the sequence: going on
        from there would overwrite it."""
        tokens = seq.ring_tokens[ring_slot]
        if tokens is None:
            raise BatchRefused(f"ring entry {ring_slot} of the sequence in row {seq.row} was never written.")
        cached = len(seq.block_keys) * self.block_size
        if tokens < cached:
            raise BatchRefused(f"the sequence can't go back to {tokens} tokens: the prefix cache holds its first {cached}.")
        self.pool.copy(self.pool.ring_slot(seq.ssm_slot, ring_slot), seq.ssm_slot)
        seq.num_computed_tokens = tokens
        # Later states are of tokens that may be others when the sequence comes there again.
        seq.ring_tokens = [None if at is not None and at > tokens else at for at in seq.ring_tokens]
        for slot, at in seq.pending_snapshots:
            if at > tokens:
                self.pool.free_snapshot(slot)
        seq.pending_snapshots = [(slot, at) for slot, at in seq.pending_snapshots if at <= tokens]

    def after_step(self, part: PlanRow) -> None:
        """Once a step's state is final: note its snapshots, and at a block boundary copy it into the older ring entry. The state
        of a verify is final when it is settled (`after_verify`)."""
        seq = part.seq
        if part.q_len == 1:
            # A single row goes through the recurrent step, which writes the live slot alone.
            for slot in (*(slot for _, slot in part.snapshots), *part.row_slots):
                self.pool.copy(seq.ssm_slot, slot)
        for offset, slot in part.snapshots:
            seq.pending_snapshots.append((slot, seq.num_computed_tokens - part.q_len + offset))
        if seq.num_computed_tokens % self.block_size == 0 and seq.num_computed_tokens and not part.row_slots:
            self.save_decode_ssm_snapshot(seq, self._older_entry(seq))

    def after_verify(self, seq: Sequence, first: int) -> None:
        """Once a verify from token `first` on is settled: copy the state at the last block boundary among its accepted rows into
        the older ring entry."""
        boundary = seq.num_computed_tokens // self.block_size * self.block_size
        if boundary > first:
            entry = self._older_entry(seq)
            self.pool.copy(self.pool.draft_slot(seq.ssm_slot, boundary - first - 1), self.pool.ring_slot(seq.ssm_slot, entry))
            seq.ring_tokens[entry] = boundary

    def _older_entry(self, seq: Sequence) -> int:
        return min(range(RING_ENTRIES), key=lambda entry: seq.ring_tokens[entry] or -1)

    def decode_marconi_checkpoint(self, seq: Sequence) -> None:
        """During decode, every `checkpoint_interval` tokens, keep the state at a block boundary as a snapshot, so that a long
        answer's next turn can resume inside it."""
        tokens = seq.num_computed_tokens
        if tokens % self.block_size or tokens % self.checkpoint_interval or not tokens:
            return
        self._keep(seq, seq.ssm_slot, tokens)

    def keep_turn_end(self, seq: Sequence) -> None:
        """Before a finished sequence is cached: the newest ring entry becomes a snapshot of its block boundary."""
        entry = max(range(RING_ENTRIES), key=lambda each: seq.ring_tokens[each] or -1)
        tokens = seq.ring_tokens[entry]
        if tokens is None or tokens > seq.num_computed_tokens or any(tokens == at for _, at in seq.pending_snapshots):
            return
        index = tokens // self.block_size - 1
        if index < len(seq.block_keys) and self.prefix.has_snapshot(seq.block_keys[index]):
            return
        self._keep(seq, self.pool.ring_slot(seq.ssm_slot, entry), tokens)

    def attach_pending(self, seq: Sequence) -> None:
        """Tie the sequence's written snapshots to its cached blocks; those that find none are given back."""
        left: list[tuple[int, int]] = []
        for slot, tokens in seq.pending_snapshots:
            index = tokens // self.block_size - 1
            if index >= len(seq.block_keys):
                left.append((slot, tokens))
            elif not self.prefix.attach_snapshot(seq.block_keys[index], slot):
                self.pool.free_snapshot(slot)
        seq.pending_snapshots = left

    def drop_pending(self, seq: Sequence) -> None:
        """Give the sequence's untied snapshots back."""
        for slot, _ in seq.pending_snapshots:
            self.pool.free_snapshot(slot)
        seq.pending_snapshots = []

    # Verify: one state per row, committed by index

    def checkpoint_ssm_states(self, seq: Sequence) -> None:
        """Save the state before a verify, so that a rollback to no accepted row can bring it back."""
        self.pool.copy(seq.ssm_slot, self.pool.checkpoint_slot(seq.ssm_slot))

    def rollback_ssm_states(self, seq: Sequence, num_accepted: int) -> None:
        """Restore the state to where `num_accepted` rows of the last verify were accepted; 0: to the last checkpoint."""
        if num_accepted:
            self.commit_accepted_prefix(seq, num_accepted, self.pool.sizes.draft_rows)
        else:
            self.pool.copy(self.pool.checkpoint_slot(seq.ssm_slot), seq.ssm_slot)

    def commit_accepted_prefix(self, seq: Sequence, num_accepted: int, k: int) -> None:
        """Make the state after `num_accepted` of the last verify's k rows (anchor included) the live one."""
        if not 1 <= num_accepted <= min(k, self.pool.sizes.draft_rows):
            raise InvariantBroken(f"{num_accepted} accepted rows of {k}, with {self.pool.sizes.draft_rows} draft rows.")
        self.pool.copy(self.pool.draft_slot(seq.ssm_slot, num_accepted - 1), seq.ssm_slot)

    def start_checkpoint_async(self, seq: Sequence) -> None:
        """`checkpoint_ssm_states` on the secondary stream, after what the default stream has been given so far."""
        with self._on_secondary():
            self.checkpoint_ssm_states(seq)

    def start_rollback_and_checkpoint_async(self, seq: Sequence, num_accepted: int) -> None:
        """Rollback, then checkpoint, on the secondary stream."""
        with self._on_secondary():
            self.rollback_ssm_states(seq, num_accepted)
            self.checkpoint_ssm_states(seq)

    def sync_secondary(self) -> None:
        """Make the default stream wait for the secondary stream's work; the host doesn't block."""
        if self.secondary is not None:
            done = self.streams.create_event()
            self.streams.record_event(done, self.secondary)
            self.streams.stream_wait_event(self.streams.default_stream, done)

    @contextlib.contextmanager
    def _on_secondary(self) -> Iterator[None]:
        if self.secondary is None:
            yield
            return
        given = self.streams.create_event()
        self.streams.record_event(given)
        self.streams.stream_wait_event(self.secondary, given)
        with torch.cuda.stream(self.secondary):
            yield
