"""A small engine on the tiny model, and prompts and parameters for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine import Completion, EngineConfig, SamplingParams

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


def watched(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy unless `more` says otherwise, with each token's logprob: ids alone would hardly notice a wrong cache."""
    return SamplingParams(**{"max_tokens": max_tokens, "logprobs": 1, **more})


def assert_same(found: Completion, expected: Completion) -> None:
    """The same ids, and the same logprobs but for the rounding of other batches and chunks."""
    assert found.token_ids == expected.token_ids
    assert found.logprobs is not None and expected.logprobs is not None
    ours, theirs = ([entry.logprob for entry in each.logprobs or ()] for each in (found, expected))
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
