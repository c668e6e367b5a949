"""Qwen3-Next against transformers on tiny random checkpoints, by the rule in `closeness`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import judge
from family_scenes import batched_decode, chunks_beside_decodes, step_decode
from hybrid_scenes import (
    FAULTS,
    IDS,
    MANY_CHUNKS,
    SHORT,
    Variants,
    chunk_sizes,
    loaded_hybrid,
    no_shared_expert_gate,
    prompts_in_one_pass,
    split_logits,
)
from tiny_hybrids import make_qwen3_next

from engine.model.transformer import TransformerModel

VARIANTS: dict[str, dict[str, Any]] = {
    "two of six experts": {},
    "weights as they are, a dense layer": {"norm_topk_prob": False, "mlp_only_layers": [1], "linear_num_key_heads": 4},
    "one key head, every second sparse": {"linear_num_key_heads": 1, "decoder_sparse_step": 2, "linear_value_head_dim": 24},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(make_qwen3_next, VARIANTS, tmp_path_factory.mktemp("qwen3-next"))


@each_variant
def test_every_position_equals_transformers_in_chunks_of_any_size(variants: Variants, name: str) -> None:
    tiny = variants[name]
    with loaded_hybrid(tiny.path) as model:
        for split in chunk_sizes(SHORT):
            verdict = judge(split_logits(model, split), tiny.expected(SHORT))
            assert verdict.holds, (split, verdict)
            assert verdict.decided > 0.9 * SHORT, "hardly any greedy id was compared: the logits are too flat"


def test_every_split_into_two_chunks_equals_transformers(variants: Variants) -> None:
    tiny = variants["two of six experts"]
    with loaded_hybrid(tiny.path) as model:
        for first in range(1, SHORT):
            verdict = judge(split_logits(model, (first, SHORT - first)), tiny.expected(SHORT))
            assert verdict.holds, (first, verdict)


def test_splits_around_the_scan_s_chunks_equal_transformers(variants: Variants) -> None:
    tiny = variants["two of six experts"]
    with loaded_hybrid(tiny.path) as model:
        for split in ((len(IDS),), *MANY_CHUNKS):
            verdict = judge(split_logits(model, split), tiny.expected())
            assert verdict.holds, (split, verdict)


@each_variant
def test_decoding_alone_together_and_beside_chunks_equals_transformers(variants: Variants, name: str) -> None:
    tiny = variants[name]
    with loaded_hybrid(tiny.path, max_batch=64) as model:
        for logits, at in (
            step_decode(model, IDS, 40),
            batched_decode(model, IDS, (1, 3, 16, 17, 63, 64, 65, 100), 6),
            chunks_beside_decodes(model, IDS, (3, 64, 90), (1, 63, 64, 22)),
            prompts_in_one_pass(model, (5, 64, 65, 130, 1, 148), 1),
        ):
            verdict = judge(logits, tiny.expected(), at)
            assert verdict.holds, verdict


@pytest.mark.parametrize("spoil", [*FAULTS, no_shared_expert_gate])
def test_the_rule_fails_when_one_thing_is_wrong(variants: Variants, spoil: Callable[[TransformerModel], None]) -> None:
    tiny = variants["two of six experts"]
    with loaded_hybrid(tiny.path) as model:
        assert judge(split_logits(model, (40, 30)), tiny.expected(SHORT)).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(split_logits(model, (40, 30)), tiny.expected(SHORT)).holds
