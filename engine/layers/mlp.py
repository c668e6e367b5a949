"""The gated MLP."""

from __future__ import annotations

from torch import Tensor

from engine.layers.linear import Linear
from kernels.mlp.eager import gate


class GatedMlp:
    """`down(act(gate(x)) · up(x))`, `[rows, hidden]` → the same (arXiv 2002.05202, section 2)."""

    def __init__(self, gate_proj: Linear, up_proj: Linear, down_proj: Linear, activation: str) -> None:
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x), self.activation))
