"""Gemma 3 text against transformers on tiny random checkpoints, by the rule in `closeness`: local layers with a window of 24
tokens and a rope of their own, a global one in six, norms around each branch. Prompts are longer than the window."""

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
from tiny_families import PROMPT, VOCAB, WINDOW, Variants, make_gemma3, rounded_to, write_gguf
from under_test import all_logits, chunk_logits, loaded

from engine.errors import CheckpointError
from engine.model.transformer import TransformerModel

LOCAL, GLOBAL = 10000.0, 1000000.0
LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL},
    "full_attention": {"rope_type": "linear", "rope_theta": GLOBAL, "factor": 8.0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 24},
    "scaled global rope": {"rope_parameters": LINEAR},
    "another scale, untied": {"query_pre_attn_scalar": 40, "tie_word_embeddings": False},
    "windows elsewhere": {"layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"], "sliding_window": 7},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)
each_block_size = pytest.mark.parametrize("block_size", [4, 16])


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    return Variants(make_gemma3, VARIANTS, tmp_path_factory.mktemp("gemma3"))


def test_the_prompt_is_longer_than_the_window_and_a_global_layer_stands_among_local_ones(variants: Variants) -> None:
    with loaded(variants["grouped"].path) as model:
        windows = [layer.mixer.window for layer in model.forward.layers]  # type: ignore[attr-defined]  # attention, all of them
        thetas = [layer.mixer.rope.theta for layer in model.forward.layers]  # type: ignore[attr-defined]  # as above
    assert windows == [WINDOW] * 5 + [None, WINDOW]
    assert thetas == [LOCAL] * 5 + [GLOBAL, LOCAL]
    assert len(PROMPT) > 2 * WINDOW


@each_variant
@each_block_size
def test_every_position_equals_transformers_in_chunks_of_any_size(variants: Variants, name: str, block_size: int) -> None:
    tiny = variants[name]
    with loaded(tiny.path, block_size=block_size, max_batch=len(PROMPT), max_batch_tokens=len(PROMPT)) as model:
        for size in (len(PROMPT), 1, 16, 17):
            verdict = judge(all_logits(model, PROMPT, pieces(len(PROMPT), size)), tiny.expected)
            assert verdict.holds, (size, verdict)
            assert verdict.decided > 0.9 * len(PROMPT), "hardly any greedy id was compared: the logits are too flat"


@each_block_size
@pytest.mark.parametrize("around", [WINDOW, 2 * WINDOW])
def test_a_chunk_may_end_anywhere_around_the_window(variants: Variants, block_size: int, around: int) -> None:
    tiny = variants["grouped"]
    with loaded(tiny.path, block_size=block_size, max_batch=len(PROMPT), max_batch_tokens=len(PROMPT)) as model:
        for split in range(around - 2, around + 3):
            for chunks in ((split, len(PROMPT) - split), (split - 1, 1, 1, len(PROMPT) - split - 1)):
                verdict = judge(all_logits(model, PROMPT, chunks), tiny.expected)
                assert verdict.holds, (chunks, verdict)


@each_variant
@each_block_size
def test_decoding_alone_together_and_beside_chunks_equals_transformers(variants: Variants, name: str, block_size: int) -> None:
    tiny = variants[name]
    with loaded(tiny.path, block_size=block_size) as model:
        for logits, at in (
            step_decode(model, PROMPT, 20),
            # Rows before, at and past the window in one batch, so that each has a mask of its own.
            batched_decode(model, PROMPT, (1, 15, 16, WINDOW - 1, WINDOW, WINDOW + 1, 48), 8),
            chunks_beside_decodes(model, PROMPT, (3, 23, 50), (1, 22, 1, 17, 29)),
        ):
            verdict = judge(logits, tiny.expected, at)
            assert verdict.holds, verdict


def test_the_same_splits_and_batch_give_the_same_bits(variants: Variants) -> None:
    with loaded(variants["grouped"].path, block_size=4) as one, loaded(variants["grouped"].path, block_size=4) as other:
        fresh = chunks_beside_decodes(one, PROMPT, (3, 23, 50), (1, 22, 1, 17, 29))[0]
        assert torch.equal(fresh, chunks_beside_decodes(other, PROMPT, (3, 23, 50), (1, 22, 1, 17, 29))[0])
        all_logits(other, PROMPT[::-1], (30, 40))  # other keys in the blocks, another order of blocks
        assert torch.equal(fresh, chunks_beside_decodes(other, PROMPT, (3, 23, 50), (1, 22, 1, 17, 29))[0])


# The rule notices what is wrong


def _wrong_local_rope(model: TransformerModel) -> None:
    with_wrong_rope(model, LOCAL)


def _wrong_global_rope(model: TransformerModel) -> None:
    with_wrong_rope(model, GLOBAL)


def _longer_window(model: TransformerModel) -> None:
    model.forward.layers[3].mixer.window = WINDOW + 1  # type: ignore[attr-defined]  # attention, all of them


def _windowed_global_layer(model: TransformerModel) -> None:
    model.forward.layers[5].mixer.window = WINDOW  # type: ignore[attr-defined]  # as above


def _no_post_norm(model: TransformerModel) -> None:
    model.store.get("model.layers.4.post_feedforward_layernorm.weight").fill_(1.0)


def _unscaled_embedding(model: TransformerModel) -> None:
    model.forward.embedding_scale = 1.0


@pytest.mark.parametrize(
    "spoil", [_wrong_local_rope, _wrong_global_rope, _longer_window, _windowed_global_layer, _no_post_norm, _unscaled_embedding]
)
def test_the_rule_fails_when_a_layer_is_wrong(variants: Variants, spoil: Callable[[TransformerModel], None]) -> None:
    tiny = variants["grouped"]
    with loaded(tiny.path, max_batch=len(PROMPT)) as model:
        assert judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(all_logits(model, PROMPT, (40, 30)), tiny.expected).holds


def test_a_block_out_of_the_window_matters_to_the_global_layer_alone(variants: Variants) -> None:
    tiny = variants["grouped"]
    with loaded(tiny.path, block_size=4) as model:
        for layer, noticed in ((0, False), (4, False), (5, True), (6, False)):
            seq = model.lifecycle.alloc_sequence()
            chunk_logits(model, seq, PROMPT[:60])
            first = seq.block_table[2] * 4  # tokens 8 to 11: no local query from 60 on sees them
            model.kv_cache[layer, 0, first : first + 4] = model.kv_cache[layer, 0, first : first + 4].flip(0)  # keys alone
            verdict = judge(chunk_logits(model, seq, PROMPT[60:]), tiny.expected, range(60, len(PROMPT)))
            assert verdict.holds is not noticed, (layer, verdict)
            model.lifecycle.free_sequence(seq)


# GGUF


@pytest.mark.parametrize("name", ["grouped", "one kv head", "scaled global rope"])
def test_a_float32_gguf_file_equals_transformers_on_the_safetensors(variants: Variants, tmp_path: Path, name: str) -> None:
    tiny = variants[name]
    write_gguf(tiny.model, tmp_path / "tiny.gguf")
    with loaded(tmp_path / "tiny.gguf", max_batch=48) as model:
        verdict = judge(all_logits(model, PROMPT, (40, 30)), tiny.expected)
        assert model.config.norm_offset == 0.0, "the file's norm weights hold their offset already"
    assert verdict.holds, verdict


def test_a_local_rope_base_of_the_file_s_own_is_used(tmp_path: Path) -> None:
    ropes = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("sliding_attention", 5e3), ("full_attention", 2e6))
    }
    model = make_gemma3(rope_parameters=ropes)
    write_gguf(model, tmp_path / "tiny.gguf")
    with loaded(tmp_path / "tiny.gguf", max_batch=48) as ours:
        assert sorted(config.theta for config in ours.forward.ropes) == [5e3, 2e6]
        verdict = judge(all_logits(ours, PROMPT, (40, 30)), expected_of(model, PROMPT))
    assert verdict.holds, verdict


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_0], ids=lambda kind: kind.name)
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
    # It takes query_pre_attn_scalar to be 256, as in the released models, whose heads have 256 channels.
    expected = expected_of(oracle_from_gguf(tmp_path / "tiny.gguf", query_pre_attn_scalar=16), PROMPT)
    with loaded(tmp_path / "tiny.gguf", max_batch=48) as ours:
        verdict = judge(all_logits(ours, PROMPT, (40, 30)), expected)
    assert verdict.holds, verdict


# Configs


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {**LINEAR, "full_attention": {"rope_type": "yarn", "factor": 8.0}}}, "yarn"),
        (
            {"rope_parameters": {**LINEAR, "sliding_attention": {"rope_type": "default", "attention_factor": 2.0}}},
            "attention_factor",
        ),
        ({"rope_parameters": {**LINEAR, "full_attention": "default"}}, "full_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"altup_num_inputs": 4}, "altup_num_inputs"),
        ({"num_experts": 8}, "num_experts"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
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


def test_a_config_of_before_layer_types_says_the_same_by_its_pattern(variants: Variants, tmp_path: Path) -> None:
    tiny = variants["grouped"]
    for file in tiny.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "_sliding_window_pattern"):
        config.pop(key, None)
    old = {"sliding_window_pattern": 6, "rope_theta": GLOBAL, "rope_local_base_freq": LOCAL, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps({**config, **old}))
    with loaded(tmp_path, max_batch=48) as model:
        verdict = judge(all_logits(model, PROMPT, (40, 30)), tiny.expected)
    assert verdict.holds, verdict


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping"),
        ({"rope__scaling__type": "yarn"}, "yarn"),
        ({"rope__scaling__attn_factor": 0.5}, r"gemma3\.rope\.scaling\.attn_factor"),
        ({"expert_count": 8}, r"gemma3\.expert_count"),
        ({"attention__scale": 0.5}, r"gemma3\.attention\.scale"),
    ],
)
def test_a_gguf_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(
    variants: Variants, tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    write_gguf(variants["grouped"].model, tmp_path / "tiny.gguf", Kind.F32, **metadata)
    with pytest.raises(CheckpointError, match=named), loaded(tmp_path / "tiny.gguf"):
        pass
