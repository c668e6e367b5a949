"""Format: how one stored tensor format packs elements into blocks, and how to get them back as float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """A stored format: `block_elements` consecutive elements of a row lie in `block_bytes` bytes.

    `unpack` maps blocks `uint8 [n, block_bytes]` to `float32 [n, block_elements]`.
    """

    name: str
    block_elements: int
    block_bytes: int
    unpack: Callable[[Tensor], Tensor]

    def dequantise(self, raw: Tensor) -> Tensor:
        """The rows as `float32 [rows, cols]`, from their stored blocks `uint8 [rows, bytes_per_row]`.

        Raises `ValueError` when a row isn't a whole number of blocks.
        """
        rows, row_bytes = raw.shape
        if row_bytes % self.block_bytes:
            raise ValueError(f"a {self.name} row is a multiple of {self.block_bytes} bytes, not {row_bytes}.")
        cols = row_bytes // self.block_bytes * self.block_elements
        return self.unpack(raw.reshape(-1, self.block_bytes)).reshape(rows, cols)
