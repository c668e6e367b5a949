"""Rotary position embedding of all heads of queries and keys at once."""

from __future__ import annotations

from torch import Tensor


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x rotated in place as `eager.rotate` does where all channels rotate, to the same bits: x `[rows, heads, head_dim]`, each
    row's heads contiguous; cos, sin `[rows, 1, head_dim]`. The halves change places by one flip instead of two slices and a
    concatenation."""
    swapped = x.view(x.shape[0], x.shape[1], 2, -1).flip(2).view(x.shape)
    return x.mul_(cos).addcmul_(swapped, sin)
