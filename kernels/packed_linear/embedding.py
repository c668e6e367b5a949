"""Rows of an embedding that is held packed, as the tied head's product reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.packed_linear.packing import GROUP, PackedWeight, tile_rows


def packed_embedding(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows `ids` (int64 `[rows]`) of the weight, fp32 `[rows, num_columns]`."""
    tile, half = tile_rows(), tile_rows() // 2
    width = weight.planes * weight.num_columns
    tiles = weight.tiles.view(-1, width, half)
    inside = ids % tile
    # [rows, width] bytes: byte inside % half of every column of the row's tile; its low half holds the tile's first rows.
    found = tiles[ids // tile, :, inside % half]
    quanta = torch.where((inside >= half)[:, None], found >> 4, found & 15)
    scales, zeros = weight.scales_zeros[:, ids].float().unsqueeze(-2).unbind(-1)  # [groups, rows, 1]
    by_group = quanta.view(ids.shape[0], -1, GROUP).transpose(0, 1)
    rows = ((by_group.float() - 8.0) * scales + zeros).transpose(0, 1).reshape(ids.shape[0], weight.planes, -1)
    return rows.sum(1)
