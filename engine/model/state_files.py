"""Saving a sequence's KV and recurrent state to a file, and restoring it into an allocated sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import torch
from torch import Tensor

from engine.cache.ssm_pool import SsmPool
from engine.errors import SavedStateError
from engine.model.saved_state import StateHeader, StateReader, write_state
from engine.sequence import Sequence


class StateFiles:
    """Moves computed tokens between a model's caches and files. It owns nothing: blocks and slots are the sequence's.

    kv_cache: `[layers, 2, slots, kv_heads, head_dim]`. weights: gives the SHA-256 of the weights, worked out when first asked for.
    """

    def __init__(self, kv_cache: Tensor, ssm: SsmPool | None, weights: Callable[[], str], block_size: int, vocab_size: int) -> None:
        self.kv_cache = kv_cache
        self.ssm = ssm
        self.weights = weights
        self.block_size = block_size
        self.vocab_size = vocab_size

    def _slots(self, block_table: list[int], num_tokens: int) -> Tensor:
        blocks = torch.tensor(block_table, dtype=torch.int64)[:, None] * self.block_size
        slots = (blocks + torch.arange(self.block_size)).flatten()[:num_tokens]
        return slots.to(self.kv_cache.device)

    def header(self, token_ids: tuple[int, ...]) -> StateHeader:
        """The header a state of these tokens has here."""
        layers, two, _, heads, dim = self.kv_cache.shape
        h_shape, conv_shape = self._state_shapes()
        return StateHeader(
            weights=self.weights(),
            adapter="",
            dtype=str(self.kv_cache.dtype).removeprefix("torch."),
            block_size=self.block_size,
            token_ids=token_ids,
            kv_shape=(layers, two, len(token_ids), heads, dim),
            h_shape=h_shape,
            conv_shape=conv_shape,
        )

    def _state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.ssm is None:
            return (), ()
        h, conv = self.ssm.h, self.ssm.conv
        return (h.shape[0], *h.shape[2:]), (conv.shape[0], *conv.shape[2:])

    def gather(self, seq: Sequence) -> list[Tensor]:
        """A copy on the host of what the sequence has computed: KV, and of a hybrid model h- and conv-state."""
        tensors = [self.kv_cache.index_select(2, self._slots(seq.block_table, seq.num_computed_tokens)).cpu()]
        if self.ssm is not None:
            h, conv = self.ssm.h[:, seq.ssm_slot], self.ssm.conv[:, seq.ssm_slot]
            tensors += [h.to("cpu", copy=True), conv.to("cpu", copy=True)]
        return tensors

    def save(self, seq: Sequence, writer: BinaryIO) -> None:
        """Write the sequence's computed tokens; it is left as it is. Raises `SavedStateError` when the file can't be written."""
        self.write(writer, tuple(seq.token_ids[: seq.num_computed_tokens]), self.gather(seq))

    def write(self, writer: BinaryIO, token_ids: tuple[int, ...], tensors: list[Tensor]) -> None:
        """Write gathered tensors with the header these tokens have here."""
        write_state(writer, self.header(token_ids), tensors)

    def read(self, reader: BinaryIO, file_bytes: int) -> tuple[tuple[int, ...], list[Tensor]]:
        """The token ids and tensors of a file that this model wrote."""
        opened = self.open(reader, file_bytes, file_bytes)
        return opened.header.token_ids, self.load(opened)

    def open(self, reader: BinaryIO, max_tokens: int, file_bytes: int | None = None) -> StateReader:
        """Read and check a file's header against this model (and its claims against the file's size, where that is known).
        Raises `SavedStateError` naming what differs."""
        state = StateReader(reader, file_bytes)
        found = state.header
        if len(found.token_ids) > max_tokens:
            raise SavedStateError(f"the saved state holds {len(found.token_ids):,} tokens, and there is room for {max_tokens:,}.")
        if not found.token_ids or max(found.token_ids) >= self.vocab_size:
            raise SavedStateError("the saved state's token ids aren't of this model's vocabulary.")
        expected = self.header(found.token_ids)
        for name, what in (
            ("weights", "other weights"),
            ("adapter", "another adapter"),
            ("dtype", f"dtype {found.dtype}"),
            ("block_size", f"block size {found.block_size}"),
            ("kv_shape", "another KV shape"),
            ("h_shape", "another recurrent state"),
            ("conv_shape", "another convolution state"),
        ):
            if getattr(found, name) != getattr(expected, name):
                raise SavedStateError(f"the saved state was made with {what} than this engine has; it can't be used here.")
        return state

    def load(self, state: StateReader) -> list[Tensor]:
        """Read and check an opened file's payload, on the host."""
        header = state.header
        like = [torch.empty(header.kv_shape, dtype=self.kv_cache.dtype, device="meta")]
        if self.ssm is not None:
            like += [
                torch.empty(header.h_shape, dtype=self.ssm.h.dtype, device="meta"),
                torch.empty(header.conv_shape, dtype=self.ssm.conv.dtype, device="meta"),
            ]
        return state.read(like)

    @torch.inference_mode()
    def install(self, seq: Sequence, token_ids: tuple[int, ...], tensors: list[Tensor]) -> None:
        """Put a loaded state into a sequence that has the blocks for it and no tokens yet."""
        self.kv_cache.index_copy_(2, self._slots(seq.block_table, len(token_ids)), tensors[0].to(self.kv_cache.device))
        if self.ssm is not None:
            self.ssm.h[:, seq.ssm_slot].copy_(tensors[1])
            self.ssm.conv[:, seq.ssm_slot].copy_(tensors[2])
        seq.append(list(token_ids))
        seq.advance(len(token_ids))
