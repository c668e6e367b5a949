"""Qwen3.5, text, against transformers on tiny random checkpoints, by the rule in `closeness`."""

from __future__ import annotations

import json
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
    prompts_in_one_pass,
    split_logits,
)
from oracle import oracle_logits
from tiny_hybrids import ROPE, make_qwen3_5, save_beside_vision

from engine.errors import CheckpointError
from engine.model.transformer import TransformerModel

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "as many key heads, tied": {"linear_num_key_heads": 4, "linear_value_head_dim": 24, "tie_word_embeddings": True},
    "three taps, other sizes": {"linear_conv_kernel_dim": 3, "linear_key_head_dim": 32, "linear_num_key_heads": 1},
    "half the head turns": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "rope_theta": 1e6}},
    "attention first and last": {"layer_types": ["full_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(make_qwen3_5, VARIANTS, tmp_path_factory.mktemp("qwen3-5"))


def test_the_oracle_goes_on_from_its_own_state(variants: Variants) -> None:
    """An oracle that forgot its state between chunks would agree with itself on nothing, and pass a lenient rule."""
    tiny = variants["grouped"]
    whole = oracle_logits(tiny.model, IDS, (len(IDS),))
    for split in MANY_CHUNKS:
        assert float((oracle_logits(tiny.model, IDS, split) - whole).abs().max()) < 1e-4 * float(whole.abs().max()), split
    alone = oracle_logits(tiny.model, IDS[64:128], (64,))
    assert float((alone - whole[64:128]).abs().max()) > 0.1 * float(whole.abs().max()), "what came before hardly matters"


@pytest.mark.parametrize(("name", "block_size"), [("grouped", 4), *((name, 16) for name in VARIANTS)])
def test_every_position_equals_transformers_in_chunks_of_any_size(variants: Variants, name: str, block_size: int) -> None:
    tiny = variants[name]
    with loaded_hybrid(tiny.path, block_size=block_size) as model:
        for split in chunk_sizes(SHORT):
            verdict = judge(split_logits(model, split), tiny.expected(SHORT))
            assert verdict.holds, (split, verdict)
            assert verdict.decided > 0.9 * SHORT, "hardly any greedy id was compared: the logits are too flat"


def test_every_split_into_two_chunks_equals_transformers(variants: Variants) -> None:
    tiny = variants["grouped"]
    with loaded_hybrid(tiny.path) as model:
        for first in range(1, SHORT):
            verdict = judge(split_logits(model, (first, SHORT - first)), tiny.expected(SHORT))
            assert verdict.holds, (first, verdict)


@pytest.mark.parametrize("name", ["grouped", "three taps, other sizes"])
def test_splits_around_the_scan_s_chunks_equal_transformers(variants: Variants, name: str) -> None:
    tiny = variants[name]
    with loaded_hybrid(tiny.path) as model:
        for split in ((len(IDS),), *MANY_CHUNKS):
            verdict = judge(split_logits(model, split), tiny.expected())
            assert verdict.holds, (split, verdict)


@each_variant
def test_decoding_alone_together_and_beside_chunks_equals_transformers(variants: Variants, name: str) -> None:
    tiny = variants[name]
    with loaded_hybrid(tiny.path, max_batch=64) as model:
        for logits, at in (
            step_decode(model, IDS, 5),
            batched_decode(model, IDS, (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 100), 8),
            chunks_beside_decodes(model, IDS, (3, 16, 63, 64, 90), (1, 12, 51, 1, 64, 21)),
            prompts_in_one_pass(model, (5, 64, 65, 130, 1, 148), 1),
            prompts_in_one_pass(model, (100, 3, 70, 16), 2),
        ):
            verdict = judge(logits, tiny.expected(), at)
            assert verdict.holds, verdict


@pytest.mark.parametrize("spoil", FAULTS)
def test_the_rule_fails_when_one_thing_is_wrong(variants: Variants, spoil: Callable[[TransformerModel], None]) -> None:
    tiny = variants["grouped"]
    with loaded_hybrid(tiny.path) as model:
        assert judge(split_logits(model, (40, 30)), tiny.expected(SHORT)).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(split_logits(model, (40, 30)), tiny.expected(SHORT)).holds


def test_bfloat16_follows_float32(variants: Variants) -> None:
    tiny = variants["grouped"]
    with loaded_hybrid(tiny.path, dtype="bfloat16") as model:
        verdict = judge(split_logits(model, (40, 30)), tiny.expected(SHORT))
    assert verdict.tolerance < verdict.error < 0.1 * float(tiny.expected(SHORT).logits.abs().max())


# Checkpoints


@pytest.mark.parametrize("name", ["grouped", "as many key heads, tied"])
def test_a_checkpoint_with_vision_is_served_as_its_text_model(variants: Variants, name: str, tmp_path: Path) -> None:
    tiny = variants[name]
    save_beside_vision(tiny.model, tmp_path, "Qwen3_5ForConditionalGeneration", "qwen3_5")
    with loaded_hybrid(tmp_path) as beside, loaded_hybrid(tiny.path) as alone:
        assert beside.config.family == "qwen3_5"
        assert beside.store.num_parameters == alone.store.num_parameters
        ours = split_logits(beside, (40, 30))
        assert torch.equal(ours, split_logits(alone, (40, 30)))
    assert judge(ours, tiny.expected(SHORT)).holds


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "yarn"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["mamba"] * 4}, "layer_types"),
        ({"linear_num_value_heads": 3}, "Gated DeltaNet sizes"),
        ({"linear_conv_kernel_dim": 0}, "Gated DeltaNet sizes"),
        ({"a_key_of_tomorrow": 2}, "a_key_of_tomorrow"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(
    variants: Variants, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    for file in variants["grouped"].path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=named), loaded_hybrid(tmp_path):
        pass
