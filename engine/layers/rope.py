"""Rotary tables: one per RopeConfig of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.families.config import RopeConfig


class RopeTable:
    """cos and signed sin of every position below `max_seq_len`, `[max_seq_len, rotary_dim]`, made in fp64 and kept in `dtype`."""

    def __init__(self, config: RopeConfig, max_seq_len: int, device: torch.device, dtype: torch.dtype) -> None:
        angles = torch.arange(max_seq_len, dtype=torch.float64)[:, None] * torch.tensor(config.inv_freq(), dtype=torch.float64)
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each `[rows, 1, rotary_dim]`, at int64 positions `[rows]`."""
        return self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]

    @property
    def num_bytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes
