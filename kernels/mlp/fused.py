"""The gate of a gated MLP whose gate and up rows come from one product."""

from __future__ import annotations

from torch import Tensor

from kernels.mlp import eager


def gate(both: Tensor, activation: str) -> Tensor:
    """`act(gate) · up`, `[rows, intermediate]`, from `[rows, 2 · intermediate]`, the gate's channels first."""
    half = both.shape[1] // 2
    return eager.gate(both[:, :half], both[:, half:], activation)
