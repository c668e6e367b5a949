"""The gate of a gated MLP with torch's operators."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def gate(gate_rows: Tensor, up_rows: Tensor, activation: str) -> Tensor:
    """`act(gate) · up`, `[rows, intermediate]` in the inputs' dtype; activation "silu" or "gelu_tanh"."""
    acted = functional.silu(gate_rows) if activation == "silu" else functional.gelu(gate_rows, approximate="tanh")
    return acted.mul_(up_rows)
