"""Qwen3 against transformers on tiny random checkpoints, by the rule in `closeness`: a norm on each head of q and k."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import judge, pieces
from family_scenes import batched_decode, chunks_beside_decodes, step_decode, with_wrong_rope
from gguf import GGMLQuantizationType as Kind
from oracle import expected_of, oracle_from_gguf
from tiny_families import MIXED_WINDOWS, PROMPT, VOCAB, WINDOW, Variants, make_qwen3, rounded_to, write_gguf
from under_test import all_logits, loaded

from engine.errors import CheckpointError
from engine.model.transformer import TransformerModel

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, wide heads": {},
    "multi-head, tied": {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "rms_norm_eps": 1e-5},
    "large rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "windows between": {**MIXED_WINDOWS, "use_sliding_window": True},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)
each_block_size = pytest.mark.parametrize("block_size", [4, 16])


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(make_qwen3, VARIANTS, tmp_path_factory.mktemp("qwen3"))


@each_variant
@each_block_size
def test_every_position_equals_transformers_in_chunks_of_any_size(variants: Variants, name: str, block_size: int) -> None:
    tiny = variants[name]
    with loaded(tiny.path, block_size=block_size, max_batch=len(PROMPT), max_batch_tokens=len(PROMPT)) as model:
        for size in (len(PROMPT), 1, 3, 16, WINDOW + 1):
            verdict = judge(all_logits(model, PROMPT, pieces(len(PROMPT), size)), tiny.expected)
            assert verdict.holds, (size, verdict)
            assert verdict.decided > 0.9 * len(PROMPT), "hardly any greedy id was compared: the logits are too flat"


@each_variant
@each_block_size
def test_decoding_alone_together_and_beside_chunks_equals_transformers(variants: Variants, name: str, block_size: int) -> None:
    tiny = variants[name]
    with loaded(tiny.path, block_size=block_size) as model:
        for logits, at in (
            step_decode(model, PROMPT, 5),
            batched_decode(model, PROMPT, (1, 4, 15, 16, 17, WINDOW, 40), 8),
            chunks_beside_decodes(model, PROMPT, (3, 16, 23, 50), (1, 12, 11, 1, 16, 29)),
        ):
            verdict = judge(logits, tiny.expected, at)
            assert verdict.holds, verdict


def _no_query_norm(model: TransformerModel) -> None:
    model.store.get("model.layers.1.self_attn.q_norm.weight").fill_(1.0)


def _swapped_norms(model: TransformerModel) -> None:
    q, k = (model.store.get(f"model.layers.0.self_attn.{name}_norm.weight") for name in "qk")
    q_before = q.clone()
    q.copy_(k)
    k.copy_(q_before)


def _wrong_norm_epsilon(model: TransformerModel) -> None:
    mixer = model.forward.layers[2].mixer
    mixer.norms[1].eps = 1e-3  # type: ignore[attr-defined]  # attention with norms, all of them


def _wrong_rope(model: TransformerModel) -> None:
    with_wrong_rope(model, 10000.0)


@pytest.mark.parametrize("spoil", [_no_query_norm, _swapped_norms, _wrong_norm_epsilon, _wrong_rope])
def test_the_rule_fails_when_a_norm_of_the_heads_or_the_rope_is_wrong(
    variants: Variants, spoil: Callable[[TransformerModel], None]
) -> None:
    tiny = variants["grouped, wide heads"]
    with loaded(tiny.path, max_batch=len(PROMPT)) as model:
        assert judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds


# GGUF


@pytest.mark.parametrize("name", ["grouped, wide heads", "multi-head, tied", "biases", "large rope base"])
def test_a_float32_gguf_file_equals_the_safetensors_it_was_made_of(variants: Variants, tmp_path: Path, name: str) -> None:
    tiny = variants[name]
    write_gguf(tiny.model, tmp_path / "tiny.gguf")
    with loaded(tiny.path, max_batch=48) as one, loaded(tmp_path / "tiny.gguf", max_batch=48) as other:
        assert torch.equal(all_logits(one, PROMPT, (40, 30)), all_logits(other, PROMPT, (40, 30)))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_a_quantised_gguf_file_equals_transformers_on_the_dequantised_weights(
    variants: Variants, tmp_path: Path, kind: Kind
) -> None:
    original = variants["grouped, wide heads"]
    write_gguf(original.model, tmp_path / "tiny.gguf", kind)
    expected = expected_of(rounded_to(original.model, kind), PROMPT)
    with loaded(tmp_path / "tiny.gguf", max_batch=48) as model:
        ours = all_logits(model, PROMPT, (40, 30))
    verdict = judge(ours, expected)
    assert verdict.holds, verdict
    assert not judge(ours, original.expected).holds, "the rounding changed nothing: the file wasn't what was read"


def test_a_gguf_file_equals_transformers_own_load_of_it(variants: Variants, tmp_path: Path) -> None:
    write_gguf(variants["grouped, wide heads"].model, tmp_path / "tiny.gguf", Kind.Q8_0, vocab_size=VOCAB)
    expected = expected_of(oracle_from_gguf(tmp_path / "tiny.gguf", head_dim=24), PROMPT)
    with loaded(tmp_path / "tiny.gguf", max_batch=48) as model:
        verdict = judge(all_logits(model, PROMPT, (40, 30)), expected)
    assert verdict.holds, verdict


# Configs


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5}}, "attention_factor"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, "sliding_window"),
        ({"num_experts": 128}, "num_experts"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"attention_dropout_rescale": 0.9}, "attention_dropout_rescale"),
        ({"architectures": ["Qwen3OmniForConditionalGeneration"]}, "Qwen3OmniForConditionalGeneration"),
        ({"num_key_value_heads": 3}, "4 heads can't share 3 kv heads"),
    ],
)
def test_a_config_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(
    variants: Variants, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    for file in variants["grouped, wide heads"].path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=named), loaded(tmp_path):
        pass


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "yarn"),
        ({"rope__scaling__attn_factor": 0.5}, r"qwen3\.rope\.scaling\.attn_factor"),
        ({"attention__sliding_window": WINDOW}, r"qwen3\.attention\.sliding_window"),
        ({"expert_count": 60}, r"qwen3\.expert_count"),
        ({"attention__value_length": 8}, r"qwen3\.attention\.value_length"),
        ({"logit_scale": 2.0}, r"qwen3\.logit_scale"),
    ],
)
def test_a_gguf_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(
    variants: Variants, tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    write_gguf(variants["grouped, wide heads"].model, tmp_path / "tiny.gguf", Kind.F32, **metadata)
    with pytest.raises(CheckpointError, match=named), loaded(tmp_path / "tiny.gguf"):
        pass
