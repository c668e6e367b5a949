"""The depthwise causal convolution of a Gated DeltaNet layer in fp32: one row and one tap at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """(`silu(bias + Σ_j weight[j] · x_{t − taps + 1 + j})` fp32 `[rows, channels]`, the state after the rows).

    x: `[rows, channels]`; weight: `[taps, channels]`, the last tap weighs the row itself; bias: `[channels]` or None;
    state: `[taps − 1, channels]`, the raw inputs before the first row, oldest first; returned in its dtype.
    """
    taps = weight.shape[0]
    inputs = [row.float() for row in state] + [row.float() for row in x]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        y = torch.zeros(x.shape[1], device=x.device) if bias is None else bias.float()
        for j in range(taps):
            y = y + weight[j].float() * inputs[t + j]
        out[t] = y / (1 + torch.exp(-y))
    last = inputs[len(inputs) - taps + 1 :]
    return out, torch.stack(last).to(state.dtype) if last else state.clone()
