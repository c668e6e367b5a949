"""Q4_0 and Q4_1: 32 elements of 4 bits with one scale, and for Q4_1 one minimum.

Source: `block_q4_0`, `block_q4_1` in ggml-common.h; `dequantize_row_q4_0`, `dequantize_row_q4_1` in ggml-quants.c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.formats.format import Format


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    """`float32 [n, 32]`: d · (q − 8). Block, 18 bytes: d (float16), then 16 bytes; byte j holds q[j] low, q[j + 16] high."""
    scale = blocks[:, 0:2].view(torch.float16).float()
    packed = blocks[:, 2:]
    out = torch.empty(blocks.shape[0], 32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out.sub_(8.0).mul_(scale)


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    """`float32 [n, 32]`: d · q + m. Block, 20 bytes: d, m (float16), then 16 bytes as in Q4_0."""
    scale = blocks[:, 0:2].view(torch.float16).float()
    minimum = blocks[:, 2:4].view(torch.float16).float()
    packed = blocks[:, 4:]
    out = torch.empty(blocks.shape[0], 32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    # Two roundings, as ggml's: a fused multiply-add would differ in the last bit.
    return out.mul_(scale).add_(minimum)


Q4_0 = Format("Q4_0", 32, 18, _unpack_q4_0)
Q4_1 = Format("Q4_1", 32, 20, _unpack_q4_1)
