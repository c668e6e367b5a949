"""A linear projection as a layer."""

from __future__ import annotations

from torch import Tensor

from kernels.linear.eager import linear


class Linear:
    """`[rows, in]` → `[rows, out]`; weight `[out, in]`, bias `[out]` or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
