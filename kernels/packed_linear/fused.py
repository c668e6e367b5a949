"""A linear projection from packed 4-bit weights on a CPU: few rows from the tiles, many from a dequantised scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.packed_linear.packing import GROUP, PackedWeight, tile_rows

# Up to this many rows the product reads the tiles; beyond it one dequantised copy of the matrix and a GEMM cost less.
MAX_TILE_ROWS = 48

_product = torch.ops.aten._weight_int4pack_mm_for_cpu.default


class Scratch:
    """Memory that one matrix at a time is dequantised into, as large as the largest of `weights`; shared by a model's layers."""

    def __init__(self, weights: list[PackedWeight]) -> None:
        elements = max((weight.tiles.numel() * 2 for weight in weights), default=0)
        self.weights = torch.empty(elements, dtype=torch.bfloat16)
        self.quanta = torch.empty(elements // 2, dtype=torch.int8)

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.quanta.nbytes


def packed_linear(x: Tensor, weight: PackedWeight, scratch: Scratch | None) -> Tensor:
    """`x · Wᵀ`, bfloat16 `[rows, num_rows of W]`, from bfloat16 x `[rows, num_columns]`, contiguous. Without a scratch, for a
    matrix too large to dequantise, many rows are taken few at a time."""
    if weight.planes == 2:
        x = torch.cat((x, x), dim=1)
    if x.shape[0] <= MAX_TILE_ROWS:
        out: Tensor = _product(x, weight.tiles, GROUP, weight.scales_zeros)
    elif scratch is None:
        out = torch.cat([_product(some, weight.tiles, GROUP, weight.scales_zeros) for some in torch.split(x, MAX_TILE_ROWS)])
    else:
        out = torch.mm(x, dequantise(weight, scratch))
    return out if weight.num_rows == weight.padded_rows else out[:, : weight.num_rows]


def dequantise(weight: PackedWeight, scratch: Scratch) -> Tensor:
    """Wᵀ with its planes one below the other, bfloat16 `[planes · num_columns, padded rows]`, in the scratch: valid until the next
    call."""
    rows, columns = weight.padded_rows, weight.planes * weight.num_columns
    tile, half = tile_rows(), tile_rows() // 2
    out = scratch.weights[: rows * columns].view(columns, rows)
    by_tile = out.view(columns, rows // tile, 2, half)
    packed = weight.tiles.view(-1)
    quanta = scratch.quanta[: packed.numel()]
    # One pass of bytes for each half of the tiles, then one that widens and puts the rows side by side.
    for index in (0, 1):
        if index:
            torch.bitwise_right_shift(packed, 4, out=quanta.view(torch.uint8))
        else:
            torch.bitwise_and(packed, 15, out=quanta.view(torch.uint8))
        quanta.sub_(8)
        by_tile[:, :, index].copy_(quanta.view(rows // tile, columns, half).transpose(0, 1))
    scales, zeros = weight.scales_zeros.permute(2, 0, 1).contiguous().unsqueeze(2).unbind(0)
    grouped = out.view(columns // GROUP, GROUP, rows)
    torch.addcmul(zeros, grouped, scales, out=grouped)
    return out
