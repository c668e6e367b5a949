"""A linear projection in fp32."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x · weightᵀ + bias`: fp32 `[rows, out]` from `[rows, in]` and `[out, in]`."""
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()
