"""Q4_K, Q5_K and Q6_K: super-blocks of 256 elements, whose sub-blocks have small integer scales under one float16 scale.

Source: `block_q4_K`, `block_q5_K`, `block_q6_K` in ggml-common.h; `get_scale_min_k4` and `dequantize_row_q4_K`,
`_q5_K`, `_q6_K` in ggml-quants.c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.formats.format import Format


def _unpack_q4_k(blocks: Tensor) -> Tensor:
    """`float32 [n, 256]`: (d · sc) · q − (dmin · mn) over 8 sub-blocks of 32.

    Block, 144 bytes: d, dmin (float16), 12 bytes of eight 6-bit sc and mn, then 128 bytes: each run of 32 bytes holds
    one sub-block in its low and the next one in its high halves.
    """
    scales, minima = _scales_and_minima(blocks)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    out = torch.empty(blocks.shape[0], 4, 2, 32)
    out[:, :, 0] = packed & 15
    out[:, :, 1] = packed >> 4
    return out.view(-1, 8, 32).mul_(scales).sub_(minima).view(-1, 256)


def _unpack_q5_k(blocks: Tensor) -> Tensor:
    """`float32 [n, 256]`: as Q4_K with 5-bit q.

    Block, 176 bytes: d, dmin, scales as Q4_K; 32 bytes whose bit i is the fifth bit of sub-block i; 128 bytes as Q4_K.
    """
    scales, minima = _scales_and_minima(blocks)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1) << 4
    packed = blocks[:, 48:].reshape(-1, 4, 32)
    quants = torch.stack((packed & 15, packed >> 4), dim=2).view(-1, 8, 32).bitwise_or_(fifth)
    return quants.float().mul_(scales).sub_(minima).view(-1, 256)


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    """`float32 [n, 256]`: (d · sc) · (q − 32) over 16 sub-blocks of 16.

    Block, 210 bytes: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed bytes sc, d (float16). Each half of
    the block, 128 elements, is four runs of 32: byte l of its low bits holds runs 0 | 2 (then 32 bytes on runs 1 | 3) in
    low | high halves, byte l of its high bits the four runs' pairs from the lowest bits up.
    """
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scale = blocks[:, 208:210].view(torch.float16).float() * blocks[:, 192:208].view(torch.int8)
    pairs = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1) & 3) << 4
    quants = torch.cat((low & 15, low >> 4), dim=2).bitwise_or_(pairs)
    return quants.view(-1, 16, 16).float().sub_(32.0).mul_(scale.unsqueeze(2)).view(-1, 256)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """`d · sc` and `dmin · mn` of a Q4_K or Q5_K block, each `float32 [n, 8, 1]`.

    Of the 12 bytes, 0–3 hold sc[0…3], 4–7 mn[0…3] in their low 6 bits; 8–11 hold the low 4 bits of sc[4…7] (low half)
    and mn[4…7] (high half), whose upper 2 bits are the top bits of bytes 0–3 and 4–7.
    """
    factors = blocks[:, 0:4].view(torch.float16).float()
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=1)
    return (factors[:, 0:1] * scales).unsqueeze(2), (factors[:, 1:2] * minima).unsqueeze(2)


Q4_K = Format("Q4_K", 256, 144, _unpack_q4_k)
Q5_K = Format("Q5_K", 256, 176, _unpack_q5_k)
Q6_K = Format("Q6_K", 256, 210, _unpack_q6_k)
