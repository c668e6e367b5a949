"""Rotary position embedding with precomputed tables."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of x, `[rows, heads, head_dim]` in x's dtype.

    cos, sin: `[rows, 1, r]`, the two halves equal but for sin's first half, which carries the minus sign of the
    rotation; channels from r on pass through.
    """
    rotary = cos.shape[-1]
    head = x if rotary == x.shape[-1] else x[..., :rotary]
    half = rotary // 2
    swapped = torch.cat((head[..., half:], head[..., :half]), dim=-1)
    out = torch.addcmul(head * cos, swapped, sin)
    return out if rotary == x.shape[-1] else torch.cat((out, x[..., rotary:]), dim=-1)
