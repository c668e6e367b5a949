"""Q5_0 and Q5_1: 32 elements of 5 bits with one scale, and for Q5_1 one minimum; the fifth bits lie apart.

Source: `block_q5_0`, `block_q5_1` in ggml-common.h; `dequantize_row_q5_0`, `dequantize_row_q5_1` in ggml-quants.c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.formats.format import Format


def _unpack_q5_0(blocks: Tensor) -> Tensor:
    """`float32 [n, 32]`: d · (q − 16). Block, 22 bytes: d (float16), the 32 fifth bits, then 16 bytes as in Q4_0."""
    scale = blocks[:, 0:2].view(torch.float16).float()
    return _five_bits(blocks[:, 2:6], blocks[:, 6:]).float().sub_(16.0).mul_(scale)


def _unpack_q5_1(blocks: Tensor) -> Tensor:
    """`float32 [n, 32]`: d · q + m. Block, 24 bytes: d, m (float16), the 32 fifth bits, then 16 bytes as in Q4_0."""
    scale = blocks[:, 0:2].view(torch.float16).float()
    minimum = blocks[:, 2:4].view(torch.float16).float()
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]).float().mul_(scale).add_(minimum)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """`uint8 [n, 32]` of 0…31, from bit j of `high` (`[n, 4]`, little-endian) for element j, and 4 bits of `low` (`[n, 16]`)."""
    fifth = (high[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1) << 4
    quants = torch.cat((low & 15, low >> 4), dim=1)
    return quants.bitwise_or_(fifth.view(-1, 32))


Q5_0 = Format("Q5_0", 32, 22, _unpack_q5_0)
Q5_1 = Format("Q5_1", 32, 24, _unpack_q5_1)
