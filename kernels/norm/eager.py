"""RMS norm with torch's own operator."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, `[..., hidden]` in x's dtype (torch accumulates bf16 in fp32)."""
    return functional.rms_norm(x, (weight.shape[0],), weight, eps)
