"""A small engine on the tiny model, and prompts and parameters for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine import EngineConfig, SamplingParams

VOCAB = 512


def tiny_config(path: Path, **flags: Any) -> EngineConfig:
    """A small engine on one CPU thread, in float32."""
    sizes = {"num_kv_blocks": 64, "block_size": 16, "max_batch": 8, "max_batch_tokens": 64}
    return EngineConfig(**{"model": str(path), "device": "cpu", "dtype": "float32", "threads": 1} | sizes | flags)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids; without the three control ids that the tiny tokenizer has."""
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)
