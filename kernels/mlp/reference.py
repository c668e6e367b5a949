"""The gate of a gated MLP in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gate(gate_rows: Tensor, up_rows: Tensor, activation: str) -> Tensor:
    """`act(gate) · up`, fp32 `[rows, intermediate]`: "silu" x·σ(x), or "gelu_tanh" (arXiv 1606.08415, section 2)."""
    g, u = gate_rows.float(), up_rows.float()
    if activation == "silu":
        return g / (1 + torch.exp(-g)) * u
    return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
