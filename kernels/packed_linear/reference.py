"""A linear projection from 4-bit quanta in fp32, one group at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_linear(x: Tensor, quanta: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """`x · Wᵀ`, fp32 `[rows, out]`, with W = (q − 8) · scale + zero in groups along a row.

    x: `[rows, in]`; quanta: whole numbers of 0…15, `[out, in]`; scales, zeros: `[out, in / group]`.
    """
    group = quanta.shape[1] // scales.shape[1]
    out = torch.zeros(x.shape[0], quanta.shape[0], dtype=torch.float32)
    for index in range(scales.shape[1]):
        part = slice(index * group, (index + 1) * group)
        weights = (quanta[:, part].float() - 8.0) * scales[:, index, None].float() + zeros[:, index, None].float()
        out += x[:, part].float() @ weights.T
    return out
