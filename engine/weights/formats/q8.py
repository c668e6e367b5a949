"""Q8_0: 32 elements of 8 bits with one scale.

Source: `block_q8_0` in ggml-common.h; `dequantize_row_q8_0` in ggml-quants.c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.formats.format import Format


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    """`float32 [n, 32]`: d · q. Block, 34 bytes: d (float16), then 32 signed bytes q."""
    scale = blocks[:, 0:2].view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)


Q8_0 = Format("Q8_0", 32, 34, _unpack_q8_0)
