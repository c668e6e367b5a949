"""The shape of recurrent state and the number of slots for it; imports no torch, so that a plan can be made without it."""

from __future__ import annotations

from dataclasses import dataclass

RING_ENTRIES = 2


@dataclass(frozen=True, slots=True)
class SsmShape:
    """The recurrent state of one sequence: per layer an h-state `[num_heads, key_dim, value_dim]` in fp32 and a conv-state
    `[conv_taps, conv_channels]`, the last raw inputs of the convolution, in the model's dtype."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_taps: int

    def slot_bytes(self, itemsize: int) -> int:
        """Bytes of one slot over all layers, conv elements taking `itemsize` each."""
        h = self.num_heads * self.key_dim * self.value_dim * 4
        return self.num_layers * (h + self.conv_channels * self.conv_taps * itemsize)


@dataclass(frozen=True, slots=True)
class SsmSizes:
    """How many slots of each kind: `max_live` sequences, `draft_rows` for each of them, `num_snapshots` in all."""

    max_live: int
    draft_rows: int
    num_snapshots: int

    @property
    def num_slots(self) -> int:
        return self.max_live * (1 + RING_ENTRIES + self.rows_per_live) + self.num_snapshots

    @property
    def rows_per_live(self) -> int:
        """Draft rows and, where there are any, one slot more for the state before a verify."""
        return self.draft_rows + 1 if self.draft_rows else 0
