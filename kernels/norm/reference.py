"""RMS norm in fp32, the obvious way."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension, fp32 `[..., hidden]` (arXiv 1910.07467, eq. 4)."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
