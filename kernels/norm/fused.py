"""RMS norm of few rows in three dispatches on a CPU, where torch's own takes about ten."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight_twice: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, `[rows, hidden]` in x's dtype, contiguous.

    weight_twice: the weight, twice, `[2 · hidden]`. The mean of (x, −x) is 0 and its variance the mean of x², so that torch's
    layer norm, one kernel that sums in fp32, is x's RMS norm.
    """
    both = functional.layer_norm(torch.cat((x, x.neg()), dim=-1), weight_twice.shape, weight_twice, None, eps)
    return both[:, : x.shape[1]].contiguous()
