"""Qwen2 against transformers on tiny random checkpoints, by the rule in `closeness`: biases on q, k and v that aren't zero."""

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
from tiny_families import LATER_WINDOWS, MIXED_WINDOWS, PROMPT, VOCAB, WINDOW, Variants, make_qwen2, rounded_to, write_gguf
from under_test import all_logits, loaded

from engine.errors import CheckpointError
from engine.model.transformer import TransformerModel

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "large rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "windows in later layers": LATER_WINDOWS,
    "windows between": {**MIXED_WINDOWS, "use_sliding_window": True},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)
each_block_size = pytest.mark.parametrize("block_size", [4, 16])


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(make_qwen2, VARIANTS, tmp_path_factory.mktemp("qwen2"))


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


def test_the_biases_of_the_checkpoints_are_not_zero(variants: Variants) -> None:
    biases = [tensor for name, tensor in variants["grouped"].model.state_dict().items() if name.endswith(".bias")]
    assert len(biases) == 3 * 3
    assert all(float(bias.abs().min()) > 0 for bias in biases)


def _no_bias(model: TransformerModel) -> None:
    model.store.get("model.layers.1.self_attn.k_proj.bias").zero_()


def _no_v_bias(model: TransformerModel) -> None:
    model.store.get("model.layers.2.self_attn.v_proj.bias").zero_()


def _wrong_rope(model: TransformerModel) -> None:
    with_wrong_rope(model, 10000.0)


@pytest.mark.parametrize("spoil", [_no_bias, _no_v_bias, _wrong_rope])
def test_the_rule_fails_when_a_bias_or_the_rope_is_wrong(variants: Variants, spoil: Callable[[TransformerModel], None]) -> None:
    tiny = variants["grouped"]
    with loaded(tiny.path, max_batch=len(PROMPT)) as model:
        assert judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds


def test_the_rule_fails_when_a_window_is_one_token_longer(variants: Variants) -> None:
    tiny = variants["windows in later layers"]
    with loaded(tiny.path, max_batch=len(PROMPT)) as model:
        windows = [layer.mixer.window for layer in model.forward.layers]  # type: ignore[attr-defined]  # attention, all of them
        assert windows == [None, WINDOW, WINDOW]
        assert judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds
        model.forward.layers[2].mixer.window = WINDOW + 1  # type: ignore[attr-defined]  # as above
        assert not judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds


# GGUF


@pytest.mark.parametrize("name", ["grouped", "multi-head, tied", "large rope base"])
def test_a_float32_gguf_file_equals_the_safetensors_it_was_made_of(variants: Variants, tmp_path: Path, name: str) -> None:
    tiny = variants[name]
    write_gguf(tiny.model, tmp_path / "tiny.gguf")
    with loaded(tiny.path, max_batch=48) as one, loaded(tmp_path / "tiny.gguf", max_batch=48) as other:
        assert torch.equal(all_logits(one, PROMPT, (40, 30)), all_logits(other, PROMPT, (40, 30)))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_a_quantised_gguf_file_equals_transformers_on_the_dequantised_weights(
    variants: Variants, tmp_path: Path, kind: Kind
) -> None:
    original = variants["grouped"]
    write_gguf(original.model, tmp_path / "tiny.gguf", kind)
    expected = expected_of(rounded_to(original.model, kind), PROMPT)
    with loaded(tmp_path / "tiny.gguf", max_batch=48) as model:
        ours = all_logits(model, PROMPT, (40, 30))
    verdict = judge(ours, expected)
    assert verdict.holds, verdict
    assert not judge(ours, original.expected).holds, "the rounding changed nothing: the file wasn't what was read"


def test_a_gguf_file_equals_transformers_own_load_of_it(variants: Variants, tmp_path: Path) -> None:
    write_gguf(variants["grouped"].model, tmp_path / "tiny.gguf", Kind.Q8_0, vocab_size=VOCAB)
    expected = expected_of(oracle_from_gguf(tmp_path / "tiny.gguf"), PROMPT)
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
        ({"use_mrope": True}, "use_mrope"),
        ({"num_experts": 60}, "num_experts"),
        ({"decoder_sparse_step": 1}, "decoder_sparse_step"),
        ({"logits_scaling": 2.0}, "logits_scaling"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "Qwen2VLForConditionalGeneration"),
        ({"num_key_value_heads": 3}, "4 heads can't share 3 kv heads"),
    ],
)
def test_a_config_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(
    variants: Variants, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    for file in variants["grouped"].path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=named), loaded(tmp_path):
        pass


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "yarn"),
        ({"rope__scaling__attn_factor": 0.5}, r"qwen2\.rope\.scaling\.attn_factor"),
        ({"attention__sliding_window": WINDOW}, r"qwen2\.attention\.sliding_window"),
        ({"expert_count": 60}, r"qwen2\.expert_count"),
        ({"attention__value_length": 8}, r"qwen2\.attention\.value_length"),
        ({"logit_scale": 2.0}, r"qwen2\.logit_scale"),
    ],
)
def test_a_gguf_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(
    variants: Variants, tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    write_gguf(variants["grouped"].model, tmp_path / "tiny.gguf", Kind.F32, **metadata)
    with pytest.raises(CheckpointError, match=named), loaded(tmp_path / "tiny.gguf"):
        pass
