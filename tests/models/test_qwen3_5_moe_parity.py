"""Qwen3.5-MoE, text, against transformers on tiny random checkpoints, by the rule in `closeness`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
from tiny_hybrids import make_qwen3_5_moe, save_beside_vision

from engine.model.transformer import TransformerModel

VARIANTS: dict[str, dict[str, Any]] = {
    "two of six experts": {},
    "one expert each, tied": {"num_experts_per_tok": 1, "tie_word_embeddings": True, "linear_num_key_heads": 4},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(make_qwen3_5_moe, VARIANTS, tmp_path_factory.mktemp("qwen3-5-moe"))


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


def test_a_checkpoint_with_vision_is_served_as_its_text_model(variants: Variants, tmp_path: Path) -> None:
    tiny = variants["two of six experts"]
    save_beside_vision(tiny.model, tmp_path, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe")
    with loaded_hybrid(tmp_path) as beside, loaded_hybrid(tiny.path) as alone:
        assert beside.config.family == "qwen3_5_moe"
        assert torch.equal(split_logits(beside, (40, 30)), split_logits(alone, (40, 30)))
