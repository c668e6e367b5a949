"""Rotary position embedding in fp32: one pair at a time, as a complex rotation."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of x by `positions · inv_freq[i]`: fp32 `[rows, heads, head_dim]`.

    x: `[rows, heads, head_dim]`; positions: `[rows]`; inv_freq: `[r/2]`, radians per token; channels from r on
    pass through. arXiv 2104.09864, eq. 34, in the "half-split" layout of Hugging Face checkpoints.
    """
    x = x.float()
    half = inv_freq.shape[0]
    angle = positions.float()[:, None, None] * inv_freq.float()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)
