"""A linear projection with torch's GEMM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x · weightᵀ + bias`, `[rows, out]` in x's dtype, from `[rows, in]` and `[out, in]`."""
    if x.shape[0] == 1 and not x.is_cuda:
        # A CPU's bf16 GEMM reorders the weight on every call; for one row the matrix-vector product is a quarter faster.
        y = torch.mv(weight, x[0])
        return (y if bias is None else y + bias)[None]
    return functional.linear(x, weight, bias)
