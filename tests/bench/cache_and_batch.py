"""What the prefix cache and batching bring on SmolLM2: `python tests/bench/cache_and_batch.py [--repeats 5] [--threads 2]`.

Time to the first token of a second turn whose history of 1,024 tokens is cached, against the same turn cold (at most 0.25 of it),
and the decode rate of 16 chats at once against one chat's (at least 3 times). Medians; the two sides of a ratio take turns, so that
a machine that is busy for a while is so for both. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "100")

from engine import Engine, EngineConfig, SamplingParams
from engine.bench import Workload, measure
from engine.commands import FlushPrefixCache
from engine.config import DEFAULT_MODEL

HISTORY_TOKENS = 1024
ANSWER_TOKENS = 32
QUESTION_TOKENS = 24


def second_turns(engine: Engine, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token of warm and cold second turns; fresh ids each time."""
    assert engine.view.model is not None
    vocab_size = engine.view.model.vocab_size
    warm_ms, cold_ms = [], []
    for repeat in range(repeats + 1):
        ids = random.Random(repeat)
        history = [ids.randrange(vocab_size) for _ in range(HISTORY_TOKENS - ANSWER_TOKENS)]
        answer = engine.generate(history, SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)).token_ids
        turn = [*history, *answer, *(ids.randrange(vocab_size) for _ in range(QUESTION_TOKENS))]
        first_token = SamplingParams(max_tokens=1, ignore_eos=True)
        warm = engine.generate(turn, first_token).stats
        assert warm.cached_tokens >= HISTORY_TOKENS - 16, warm
        engine.command(FlushPrefixCache()).result()
        cold = engine.generate(turn, first_token).stats
        assert cold.cached_tokens == 0
        engine.command(FlushPrefixCache()).result()
        if repeat:  # the first one warms up
            assert warm.ttft_ms is not None and cold.ttft_ms is not None
            warm_ms.append(warm.ttft_ms)
            cold_ms.append(cold.ttft_ms)
    return warm_ms, cold_ms


def decode_rates(engine: Engine, repeats: int, new_tokens: int) -> tuple[list[float], list[float]]:
    """Tokens a second of one chat alone, and of 16 together, in turns."""
    one, many = [], []
    for _ in range(repeats):
        for batch, rates in ((1, one), (16, many)):
            workload = Workload(batch=batch, prompt_tokens=64, new_tokens=new_tokens, repeats=1)
            rate = measure(engine, workload).median.decode_tokens_per_s_total
            assert rate is not None
            rates.append(rate)
    return one, many


def main() -> int:
    parser = argparse.ArgumentParser(description="second turns and batched decode on SmolLM2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    config = EngineConfig(
        model=DEFAULT_MODEL, device="cpu", dtype=args.dtype, threads=args.threads, num_kv_blocks=256, max_seq_len=2048, max_batch=16
    )
    with Engine.load(config=config) as engine:
        warm, cold = second_turns(engine, args.repeats)
        one, many = decode_rates(engine, args.repeats, args.new_tokens)
        model = engine.view.model
    assert model is not None
    figures = {
        "threads": model.threads,
        "dtype": model.dtype,
        "warm_ttft_ms": statistics.median(warm),
        "cold_ttft_ms": statistics.median(cold),
        "warm_over_cold": statistics.median(warm) / statistics.median(cold),
        "one_chat_tokens_per_s": statistics.median(one),
        "sixteen_chats_tokens_per_s": statistics.median(many),
        "sixteen_over_one": statistics.median(many) / statistics.median(one),
        "runs": {"warm_ttft_ms": warm, "cold_ttft_ms": cold, "one": one, "sixteen": many},
    }
    json.dump(figures, sys.stdout, indent=1)
    print()
    return 0 if figures["warm_over_cold"] <= 0.25 and figures["sixteen_over_one"] >= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
