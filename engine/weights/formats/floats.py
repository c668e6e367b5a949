"""F64, F32, F16, BF16: plain little-endian floats, a block is one element."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.weights.formats.format import Format


def _unpack_f64(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float64).to(torch.float32)


def _unpack_f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _unpack_f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).to(torch.float32)


def _unpack_bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).to(torch.float32)


F64 = Format("F64", 1, 8, _unpack_f64)
F32 = Format("F32", 1, 4, _unpack_f32)
F16 = Format("F16", 1, 2, _unpack_f16)
BF16 = Format("BF16", 1, 2, _unpack_bf16)
