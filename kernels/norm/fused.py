"""RMS norm in five dispatches on a CPU, where torch's own takes about ten; the input may be wider than the output."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, scaled_weight: Tensor, eps_norm: Tensor, dtype: torch.dtype) -> Tensor:
    """RMS norm over the last dimension, `[rows, hidden]` in `dtype`, computed in fp32.

    scaled_weight: the weight times √hidden, fp32 `[hidden]`; eps_norm: √(hidden · eps), fp32, of one element. With them
    x · weight / √(mean(x²) + eps) is x · scaled_weight / hypot(‖x‖, eps_norm).
    """
    norms = torch.hypot(torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32), eps_norm)
    return (x * scaled_weight).div_(norms).to(dtype)
