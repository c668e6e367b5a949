"""SsmPool: the only owner of recurrent-state slots.

A slot holds the h-state and the conv-state of every recurrent layer, which always move together. There are live slots (one a
running sequence), and for each of them a two-entry ring (states at block boundaries) and draft rows (states after each row of
a verify); and snapshot slots, which the prefix tree ties to block boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.cache.ssm_layout import RING_ENTRIES, SsmShape, SsmSizes
from engine.errors import BatchRefused, InvariantBroken
from engine.view import SsmView


class SsmPool:
    """Slots of a fixed address: `h` fp32 `[layers, slots, heads, key_dim, value_dim]`, `conv` `[layers, slots, taps, channels]`.

    Slot numbers: live slots first, then rings, draft rows and snapshots.
    """

    def __init__(self, shape: SsmShape, sizes: SsmSizes, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.sizes = shape, sizes
        slots = sizes.num_slots
        self.h = torch.empty(
            (shape.num_layers, slots, shape.num_heads, shape.key_dim, shape.value_dim), device=device, dtype=torch.float32
        ).fill_(0)
        self.conv = torch.empty((shape.num_layers, slots, shape.conv_taps, shape.conv_channels), device=device, dtype=dtype).fill_(
            0
        )
        self.slot_bytes = shape.slot_bytes(dtype.itemsize)
        self._free_live = list(range(sizes.max_live - 1, -1, -1))
        self._first_ring = sizes.max_live
        self._first_draft = self._first_ring + RING_ENTRIES * sizes.max_live
        self._first_snapshot = self._first_draft + sizes.rows_per_live * sizes.max_live
        self._free_snapshots = list(range(slots - 1, self._first_snapshot - 1, -1))

    @property
    def num_free_live(self) -> int:
        return len(self._free_live)

    @property
    def num_bytes(self) -> int:
        return self.h.nbytes + self.conv.nbytes

    def alloc_live(self) -> int:
        """A live slot, zeroed. Raises `BatchRefused` when all are taken."""
        if not self._free_live:
            raise BatchRefused(f"all {self.sizes.max_live} recurrent-state slots are taken; raise --max-batch.")
        slot = self._free_live.pop()
        self.zero(slot)
        return slot

    def free_live(self, slot: int) -> None:
        """Give a live slot back."""
        if not 0 <= slot < self.sizes.max_live or slot in self._free_live:
            raise InvariantBroken(f"recurrent-state slot {slot} isn't a live slot that is taken.")
        self._free_live.append(slot)

    def ring_slot(self, live: int, entry: int) -> int:
        """The slot of ring entry 0 or 1 of a live slot."""
        if not 0 <= entry < RING_ENTRIES:
            raise InvariantBroken(f"ring entry {entry} doesn't exist; there are {RING_ENTRIES}.")
        return self._first_ring + live * RING_ENTRIES + entry

    def draft_slot(self, live: int, row: int) -> int:
        """The slot that holds the state after verify row `row` of a live slot."""
        if not 0 <= row < self.sizes.draft_rows:
            raise InvariantBroken(f"draft row {row} doesn't exist; there are {self.sizes.draft_rows} for a sequence.")
        return self._first_draft + live * self.sizes.rows_per_live + row

    def checkpoint_slot(self, live: int) -> int:
        """The slot that holds the state before a live slot's verify. Raises `BatchRefused` in a pool without draft rows."""
        if not self.sizes.draft_rows:
            raise BatchRefused("this engine keeps no draft rows of recurrent state; start it with --ssm-draft-rows.")
        return self._first_draft + live * self.sizes.rows_per_live + self.sizes.draft_rows

    def slots_of(self, live: int) -> list[int]:
        """A live slot and all that belong to it, in one order for all: its ring, its draft rows, its checkpoint."""
        first = self._first_draft + live * self.sizes.rows_per_live
        rings = [self.ring_slot(live, entry) for entry in range(RING_ENTRIES)]
        return [live, *rings, *range(first, first + self.sizes.rows_per_live)]

    def claim_live(self, slot: int) -> None:
        """Take one particular live slot, contents left as they are."""
        if slot not in self._free_live:
            raise InvariantBroken(f"recurrent-state slot {slot} isn't free.")
        self._free_live.remove(slot)

    def is_free_live(self, slot: int) -> bool:
        """Whether a live slot is free."""
        return slot in self._free_live

    def alloc_snapshot(self) -> int | None:
        """A snapshot slot, contents undefined; None when none is free (the caller may evict one)."""
        return self._free_snapshots.pop() if self._free_snapshots else None

    def free_snapshot(self, slot: int) -> None:
        """Give a snapshot slot back."""
        if not self._first_snapshot <= slot < self.sizes.num_slots or slot in self._free_snapshots:
            raise InvariantBroken(f"recurrent-state slot {slot} isn't a snapshot that is taken.")
        self._free_snapshots.append(slot)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy every layer's h-state and conv-state from one slot to another."""
        self.h[:, target].copy_(self.h[:, source])
        self.conv[:, target].copy_(self.conv[:, source])

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """The state before the first token."""
        self.h[:, slot].zero_()
        self.conv[:, slot].zero_()

    def occupancy(self) -> tuple[int, int]:
        """Snapshot slots (used, total)."""
        return self.sizes.num_snapshots - len(self._free_snapshots), self.sizes.num_snapshots

    def view(self, hits: int, lookups: int) -> SsmView:
        """The pool as the console draws it."""
        used, total = self.occupancy()
        live = self.sizes.max_live - len(self._free_live)
        return SsmView(
            num_live=live,
            max_live=self.sizes.max_live,
            ring_entries=RING_ENTRIES,
            draft_rows=self.sizes.draft_rows,
            num_snapshots=used,
            max_snapshots=total,
            slot_bytes=self.slot_bytes,
            num_hits=hits,
            num_lookups=lookups,
        )

    def check(self, live: Iterable[int], snapshots: Iterable[int]) -> None:
        """Recount from the holders; raises `InvariantBroken` on any difference."""
        for kind, held, free, slots in (
            ("live", list(live), self._free_live, range(self.sizes.max_live)),
            ("snapshot", list(snapshots), self._free_snapshots, range(self._first_snapshot, self.sizes.num_slots)),
        ):
            if sorted([*held, *free]) != list(slots):
                raise InvariantBroken(
                    f"{kind} recurrent-state slots: held {sorted(held)} and free {sorted(free)} aren't each slot once."
                )
