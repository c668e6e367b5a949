"""What every model offers: one capability class per trait of the seed, each with the seed's defaults.

A model that lacks a capability keeps the base class's behaviour. Streams are `torch.cuda.Stream` on a GPU; on a CPU
`None` stands for the only one, in which everything runs in order.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from engine.errors import Unsupported
from engine.sequence import Sequence
from engine.view import ForwardView

Stream = torch.cuda.Stream | None


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """One sequence's part of a batched prefill: the chunk [chunk_start, chunk_start + chunk_len) of `tokens`."""

    tokens: SequenceOf[int]
    seq: Sequence
    chunk_start: int
    chunk_len: int
    is_last_chunk: bool


@dataclass(frozen=True, slots=True)
class MixedForwardResult:
    """decode_logits: `[sequences, vocab]`, None without any; prefill_logits: `[1, vocab]`, None unless the chunk was the last."""

    decode_logits: Tensor | None
    prefill_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class MixedBatchResult:
    """As MixedForwardResult, with one entry of prefill_logits per prefill slice, in order."""

    decode_logits: Tensor | None
    prefill_logits: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class PrefixReclaim:
    """What `reclaim_prefix_blocks_for` did: blocks the prompt's own cached prefix will reuse, and blocks it freed."""

    reused_blocks: int
    reclaimed_blocks: int


class ModelForward:
    """Prefill, decode and mixed passes, and the shape queries."""

    is_mla = False
    hc_mult = 0
    supports_beam = False

    @property
    def kv_block_size(self) -> int | None:
        """Tokens per paged-KV block, or None without a paged cache."""
        return None

    def normalize_ssm_states(self, seq: Sequence, stream: Stream = None) -> None:
        """Normalise the sequence's recurrent state between prefill chunks. Default: nothing."""

    def prefill_tail_split(self, tokens: SequenceOf[int]) -> int | None:
        """The token at which a prefill is split so that a snapshot lands there, or None."""
        return None


class ModelLifecycle:
    """Sequences and the pools they live in."""

    num_free_blocks = 0
    num_total_blocks = 0

    def save_sequence_state(self, seq: Sequence, writer: BinaryIO) -> None:
        """Write the sequence's KV blocks and recurrent state without freeing anything. Default: an error."""
        raise Unsupported("this model can't save a sequence's state.")

    def restore_sequence_state(self, seq: Sequence, num_blocks: int | None, reader: BinaryIO) -> None:
        """Read a saved state into an allocated sequence. Default: an error."""
        raise Unsupported("this model can't restore a sequence's state.")

    def cache_sequence(self, seq: Sequence) -> None:
        """Insert the sequence's tokens into the prefix cache, while its blocks are valid. Default: nothing."""

    def reclaim_prefix_blocks(self, num_blocks: int) -> int:
        """Evict up to num_blocks from the prefix cache; returns how many became free. Default 0."""
        return 0


class ModelSsmState:
    """Recurrent state. A model without recurrent layers keeps these defaults."""

    @property
    def has_ssm_layers(self) -> bool:
        """Whether some layer keeps a state that is advanced in place, which lowering a token count doesn't rewind."""
        return False

    @property
    def decode_rollback_unsupported(self) -> bool:
        """Whether some layer keeps per-sequence state that no snapshot covers; a rewind is then declined."""
        return False

    @property
    def decode_rollback_ring_slots(self) -> int:
        """Snapshot slots for rewinds per running sequence; 0 without any."""
        return 0

    def ssm_snapshot_occupancy(self) -> tuple[int, int] | None:
        """Snapshot slots (used, total), or None without a snapshot pool."""
        return None

    def checkpoint_ssm_states(self, seq: Sequence) -> None:
        """Save the state before a verify. Default: nothing."""

    def rollback_ssm_states(self, seq: Sequence, num_accepted: int) -> None:
        """Restore the state to where `num_accepted` rows of the last verify were accepted. Default: nothing."""

    def save_decode_ssm_snapshot(self, seq: Sequence, ring_slot: int) -> None:
        """Save the state into a ring entry. Default: nothing."""

    def restore_decode_ssm_snapshot(self, seq: Sequence, ring_slot: int) -> None:
        """Restore the state from a ring entry. Default: nothing."""

    def decode_marconi_checkpoint(self, seq: Sequence) -> None:
        """Keep a block-aligned snapshot during decode. Default: nothing."""

    def start_checkpoint_async(self, seq: Sequence) -> None:
        """`checkpoint_ssm_states` on the secondary stream; `sync_secondary` before the next verify."""
        self.checkpoint_ssm_states(seq)

    def start_rollback_and_checkpoint_async(self, seq: Sequence, num_accepted: int) -> None:
        """Rollback, then checkpoint, on the secondary stream."""
        self.rollback_ssm_states(seq, num_accepted)
        self.checkpoint_ssm_states(seq)

    def sync_secondary(self) -> None:
        """Wait for the secondary stream. Default: nothing runs there."""

    def commit_accepted_prefix(self, seq: Sequence, num_accepted: int, k: int) -> None:
        """Commit the accepted prefix of a verify of k rows. Default: nothing."""


class ModelVerify:
    """Verify passes over drafted tokens. Default: none is offered."""

    def decode_verify(self, tokens: SequenceOf[int], seq: Sequence, stream: Stream = None) -> list[int]:
        """Run `tokens` as one pass and return the argmax id at each position. Default: an error."""
        raise Unsupported("this model has no verify pass.")

    def can_batch_verify(self, ks: SequenceOf[int]) -> bool:
        """Whether several sequences can be verified in one pass, ks[i] rows each. Default: no."""
        return False


class ModelStreams:
    """Streams and events. Default: one stream, in order, so that every event has always completed."""

    @property
    def default_stream(self) -> Stream:
        return None

    def create_stream(self) -> Stream:
        """A new stream."""
        return None

    def create_event(self) -> torch.cuda.Event | None:
        """A new event."""
        return None

    def record_event(self, event: torch.cuda.Event | None, stream: Stream = None) -> None:
        """Record the event on the stream."""

    def stream_wait_event(self, stream: Stream, event: torch.cuda.Event | None) -> None:
        """Make the stream wait for the event on the device; the host doesn't block."""

    def synchronize(self, stream: Stream = None) -> None:
        """Block the host until the stream's work has completed."""

    def event_query(self, event: torch.cuda.Event | None) -> bool:
        """Whether the work recorded against the event has completed; never blocks."""
        return True

    def event_synchronize(self, event: torch.cuda.Event | None) -> None:
        """Block the host until the event has completed."""

    def destroy_event(self, event: torch.cuda.Event | None) -> None:
        """Let the event go."""


class ModelCircuit:
    """Which forward serves. Default: `legacy` and nothing else."""

    def set_forward(self, name: str) -> None:
        """Serve with circuit `name` from the next step. Default: only "legacy" is accepted."""
        if name != "legacy":
            raise Unsupported(f"circuit {name!r} can't serve this model; only legacy can.")

    def forward_disclosure(self) -> ForwardView:
        """The forward that runs now."""
        return ForwardView(name="legacy", digest="", launches_per_step=None)
