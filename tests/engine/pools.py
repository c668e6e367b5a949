"""A Lifecycle over small pools without a model: what allocates, shares, caches, evicts and frees, and nothing that computes."""

from __future__ import annotations

from typing import Any

import torch

from engine.batch import BatchBuilder
from engine.cache.blocks import BlockPool
from engine.model.lifecycle import Lifecycle


def small_lifecycle(num_blocks: int, block_size: int, max_batch: int = 4, max_seq_len: int = 256) -> Lifecycle:
    """A Lifecycle of `num_blocks` blocks of a model without recurrent state; it can't save sequences."""
    builder = BatchBuilder(max_batch, 64, max_batch, num_blocks, block_size, num_blocks * block_size, torch.device("cpu"))
    nothing: Any = None
    return Lifecycle(
        blocks=BlockPool(num_blocks, block_size),
        builder=builder,
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        kv_block_bytes=0,
        states=nothing,
        spill_dir=None,
        streams=nothing,
    )
