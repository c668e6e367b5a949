"""Qwen3-MoE against transformers on tiny random checkpoints, by the rule in `closeness`: every layout of the experts, GGUF, and
faults on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from closeness import Expected, judge, pieces
from gguf import GGMLQuantizationType as Kind
from oracle import expected_of, oracle_logits
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from under_test import all_logits, loaded

from engine.errors import CheckpointError
from engine.families import identify
from engine.layers.moe import SparseMoe
from engine.model.transformer import TransformerModel
from engine.weights.checkpoint import open_checkpoint

VOCAB, EXPERTS, INTERMEDIATE = 256, 8, 32
PROMPT = [(37 * i * i + 11 * i + 5) % VOCAB for i in range(40)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "all sparse": {},
    "weights as they are": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "one expert each": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all experts": {"num_experts_per_tok": EXPERTS},
    "a dense layer": {"mlp_only_layers": [1]},
    "every second": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "windows": {"use_sliding_window": True, "sliding_window": 12},
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@dataclass(frozen=True)
class Tiny:
    """A checkpoint directory, the model it was saved from, and what that says of the prompt."""

    path: Path
    model: Qwen3MoeForCausalLM
    expected: Expected


def make(seed: int = 24, **changes: Any) -> Qwen3MoeForCausalLM:
    """A random model in float32; norm weights and biases are random too, routers large enough that experts are chosen clearly."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **changes})).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.1)
            elif name.endswith("mlp.gate.weight") or ".experts." in name:
                parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """The tiny checkpoint of a variant's name; each is made once."""
    made: dict[str, Tiny] = {}

    def variant(name: str) -> Tiny:
        if name not in made:
            model = make(**VARIANTS[name])
            directory = tmp_path_factory.mktemp("tiny-moe")
            model.save_pretrained(directory)
            made[name] = Tiny(directory, model, expected_of(model, PROMPT))
        return made[name]

    return variant


# Against transformers


@each_variant
def test_prefill_in_one_pass_equals_transformers(tiny: Callable[[str], Tiny], name: str) -> None:
    checkpoint = tiny(name)
    with loaded(checkpoint.path) as model:
        sparse = [isinstance(layer.mlp, SparseMoe) for layer in model.forward.layers]
        verdict = judge(all_logits(model, PROMPT, (len(PROMPT),)), checkpoint.expected)
    assert verdict.holds, verdict
    assert verdict.decided > 0.9 * len(PROMPT), "hardly any greedy id was compared: the checkpoint's logits are too flat"
    theirs = [hasattr(layer.mlp, "experts") for layer in checkpoint.model.model.layers]
    assert sparse == theirs and any(sparse)


@each_variant
def test_prefill_in_two_chunks_equals_transformers_at_every_split(tiny: Callable[[str], Tiny], name: str) -> None:
    checkpoint = tiny(name)
    with loaded(checkpoint.path, block_size=4) as model:
        for split in range(1, len(PROMPT)):
            seq = model.lifecycle.alloc_sequence()
            assert model.forward.prefill_chunk(PROMPT, seq, 0, split, False) is None
            last = model.forward.prefill_chunk(PROMPT, seq, split, len(PROMPT) - split, True)
            assert last is not None
            verdict = judge(last, checkpoint.expected, [-1])
            assert verdict.holds, (split, verdict)
            model.lifecycle.free_sequence(seq)


@each_variant
@pytest.mark.parametrize("size", [1, 7, 16])
def test_every_position_equals_transformers_in_chunks_of_any_size(tiny: Callable[[str], Tiny], name: str, size: int) -> None:
    checkpoint = tiny(name)
    with loaded(checkpoint.path) as model:
        verdict = judge(all_logits(model, PROMPT, pieces(len(PROMPT), size)), checkpoint.expected)
    assert verdict.holds, verdict


@each_variant
def test_decoding_several_sequences_beside_a_chunk_equals_transformers(tiny: Callable[[str], Tiny], name: str) -> None:
    checkpoint = tiny(name)
    with loaded(checkpoint.path) as model:
        seqs = [model.lifecycle.alloc_sequence() for _ in range(4)]
        for seq, length in zip(seqs, (1, 9, 16, 30), strict=True):
            model.forward.prefill(PROMPT[:length], seq)
        joining = model.lifecycle.alloc_sequence()
        for start in range(0, 40, 10):
            at = [seq.num_tokens for seq in seqs]
            result = model.forward.mixed_forward([PROMPT[i] for i in at], seqs, PROMPT, joining, start, 10, start == 30)
            assert result.decode_logits is not None
            verdict = judge(result.decode_logits, checkpoint.expected, at)
            assert verdict.holds, (start, verdict)
        assert result.prefill_logits is not None
        verdict = judge(result.prefill_logits, checkpoint.expected, [-1])
        assert verdict.holds, verdict
        for seq in (*seqs, joining):
            model.lifecycle.free_sequence(seq)


def test_bfloat16_is_no_further_off_than_transformers_bfloat16(tiny: Callable[[str], Tiny]) -> None:
    # All experts used: with fewer, a choice that rounding turns would decide the comparison.
    checkpoint = tiny("all experts")
    low = Qwen3MoeForCausalLM(checkpoint.model.config)
    low.load_state_dict(checkpoint.model.state_dict())
    theirs = oracle_logits(low.to(torch.bfloat16).eval(), PROMPT, (len(PROMPT),)).float()
    their_error = float((theirs - checkpoint.expected.logits).abs().max())
    with loaded(checkpoint.path, dtype="bfloat16") as model:
        ours = all_logits(model, PROMPT, (17, 23))
    assert ours.dtype == torch.bfloat16
    our_error = float((ours.float() - checkpoint.expected.logits).abs().max())
    assert 1e-4 < our_error <= 1.5 * their_error, (our_error, their_error)


def test_the_same_splits_give_the_same_bits(tiny: Callable[[str], Tiny]) -> None:
    path = tiny("all sparse").path
    with loaded(path) as one, loaded(path, block_size=4) as other:
        first = all_logits(one, PROMPT, (23, 17))
        assert torch.equal(all_logits(one, PROMPT, (23, 17)), first)
        assert torch.equal(all_logits(other, PROMPT, (23, 17)), first)


# Layouts


@each_variant
def test_experts_in_one_tensor_equal_experts_apart_bit_for_bit(tiny: Callable[[str], Tiny], tmp_path: Path, name: str) -> None:
    checkpoint = tiny(name)
    (tmp_path / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())
    tensors = {key: value.contiguous() for key, value in checkpoint.model.state_dict().items()}
    if checkpoint.model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as fused, open_checkpoint(checkpoint.path) as apart:
        assert any(key.endswith("mlp.experts.gate_up_proj") for key in fused.tensors)
        assert any(key.endswith("mlp.experts.7.gate_proj.weight") for key in apart.tensors)
    with loaded(tmp_path) as model, loaded(checkpoint.path) as other:
        assert torch.equal(all_logits(model, PROMPT, (23, 17)), all_logits(other, PROMPT, (23, 17)))


def test_experts_over_many_shards_equal_one_file_bit_for_bit(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    checkpoint = tiny("all sparse")
    checkpoint.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with loaded(tmp_path) as model, loaded(checkpoint.path) as other:
        assert torch.equal(all_logits(model, PROMPT, (23, 17)), all_logits(other, PROMPT, (23, 17)))


def test_a_missing_or_misshapen_expert_is_named(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    source = tiny("all sparse").path
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with open_checkpoint(source) as checkpoint:
        tensors = {name: checkpoint.read(name, torch.float32) for name in checkpoint.tensors}
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    for broken, said in ((tensors[name][:-1].clone(), "has shape"), (None, "is missing")):
        save_file(
            {key: value for key, value in {**tensors, name: broken}.items() if value is not None}, tmp_path / "model.safetensors"
        )
        with pytest.raises(CheckpointError, match=rf"experts\.5\.up_proj\.weight {said}"), loaded(tmp_path):
            pass


# The config


def test_qwens_own_spelling_of_the_config_means_the_same(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    # As in Qwen/Qwen3-30B-A3B's config.json, from before transformers 5.
    source = tiny("all sparse").path
    config = json.loads((source / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"num_experts": config.pop("num_local_experts"), "rope_theta": theta, "rope_scaling": None, "max_window_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with open_checkpoint(tmp_path) as one, open_checkpoint(source) as other:
        ours, theirs = identify(one)[1], identify(other)[1]
    assert ours.moe == theirs.moe and ours.layers == theirs.layers
    with loaded(tmp_path) as model:
        assert judge(all_logits(model, PROMPT, (40,)), tiny("all sparse").expected).holds


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_act", "gelu", "hidden_act"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
        ("shared_expert_intermediate_size", 64, "shared_expert_intermediate_size"),
        ("routed_scaling_factor", 2.5, "routed_scaling_factor"),
        ("n_group", 4, "n_group"),
        ("mlp_only_layers", "all", "mlp_only_layers"),
        ("decoder_sparse_step", 0, "decoder_sparse_step"),
        ("num_experts_per_tok", 9, "mixture of experts"),
        ("num_experts_per_tok", 0, "mixture of experts"),
        ("moe_intermediate_size", 0, "mixture of experts"),
        ("num_local_experts", 1 << 40, "mixture of experts"),
    ],
)
def test_a_config_that_asks_for_other_maths_or_makes_no_sense_is_refused_by_name(
    tiny: Callable[[str], Tiny], tmp_path: Path, key: str, value: object, said: str
) -> None:
    source = tiny("all sparse").path
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=said), loaded(tmp_path):
        pass


# The rule notices what is wrong


def _mixture(model: TransformerModel) -> SparseMoe:
    mlp = model.forward.layers[1].mlp
    assert isinstance(mlp, SparseMoe)
    return mlp


def _unnormalised(model: TransformerModel) -> None:
    _mixture(model).norm_topk = False


def _one_expert_less(model: TransformerModel) -> None:
    _mixture(model).top_k -= 1


def _swapped_experts(model: TransformerModel) -> None:
    _mixture(model).down.copy_(_mixture(model).down.flip(0))


def _gates_for_ups(model: TransformerModel) -> None:
    _mixture(model).gate_up.copy_(_mixture(model).gate_up.roll(INTERMEDIATE, 1))


def _one_element_of_one_expert(model: TransformerModel) -> None:
    _mixture(model).gate_up[3, 5, 7] += 0.1


@pytest.mark.parametrize("spoil", [_unnormalised, _one_expert_less, _swapped_experts, _gates_for_ups, _one_element_of_one_expert])
def test_the_rule_fails_when_a_mixture_is_wrong(tiny: Callable[[str], Tiny], spoil: Callable[[TransformerModel], None]) -> None:
    checkpoint = tiny("all sparse")
    with loaded(checkpoint.path) as model:
        assert judge(all_logits(model, PROMPT, (23, 17)), checkpoint.expected).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(all_logits(model, PROMPT, (23, 17)), checkpoint.expected).holds


# GGUF


def write_gguf(
    model: Qwen3MoeForCausalLM, path: Path, kind: Kind = Kind.F32, fused: bool = False, metadata: Mapping[str, Any] | None = None
) -> None:
    """The model as llama.cpp's converter writes it, its matrices stored as `kind`, norms and routers in F32; `fused` as with
    --fuse-gate-up-exps. metadata: keys to add or to replace."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3moe")
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    for key, value in {**keys, **(metadata or {})}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)]
        add(f"qwen3moe.{key}", value)

    def add_tensor(name: str, tensor: Tensor) -> None:
        data = tensor.detach().contiguous().numpy()
        if data.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, data.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            block = f"blk.{name.split('.')[2]}."
            if fused:
                add_tensor(f"{block}ffn_gate_up_exps.weight", tensor)
            else:
                add_tensor(f"{block}ffn_gate_exps.weight", tensor[:, :INTERMEDIATE])
                add_tensor(f"{block}ffn_up_exps.weight", tensor[:, INTERMEDIATE:])
        elif name.endswith("experts.down_proj"):
            add_tensor(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", tensor)
        else:
            stem, suffix = name.rsplit(".", 1)
            add_tensor(f"{names.get_name(stem)}.{suffix}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded_to(model: Qwen3MoeForCausalLM, kind: Kind) -> Qwen3MoeForCausalLM:
    """A copy of the model, its matrices but the routers as `kind` can represent them."""
    copy = Qwen3MoeForCausalLM(model.config).to(torch.float32).eval()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            if parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):
                stored = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(stored, kind).astype(np.float32)))
    return copy


@pytest.mark.parametrize("fused", [False, True])
def test_a_float32_gguf_file_equals_the_safetensors_it_was_made_of(
    tiny: Callable[[str], Tiny], tmp_path: Path, fused: bool
) -> None:
    checkpoint = tiny("all sparse")
    write_gguf(checkpoint.model, tmp_path / "tiny.gguf", fused=fused)
    with loaded(tmp_path / "tiny.gguf") as model, loaded(checkpoint.path) as other:
        assert torch.equal(all_logits(model, PROMPT, (23, 17)), all_logits(other, PROMPT, (23, 17)))


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_a_rounded_or_quantised_gguf_file_equals_transformers_on_the_dequantised_weights(
    tiny: Callable[[str], Tiny], tmp_path: Path, kind: Kind
) -> None:
    original = tiny("all sparse").model
    write_gguf(original, tmp_path / "tiny.gguf", kind)
    with loaded(tmp_path / "tiny.gguf") as model:
        ours = all_logits(model, PROMPT, (23, 17))
    verdict = judge(ours, expected_of(rounded_to(original, kind), PROMPT))
    assert verdict.holds, verdict
    assert not judge(ours, tiny("all sparse").expected).holds, "the rounding changed nothing: the file wasn't what was read"


def test_a_gguf_file_says_whether_weights_are_normalised(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    plain = make(norm_topk_prob=False)
    write_gguf(plain, tmp_path / "tiny.gguf", metadata={"expert_weights_norm": False})
    with loaded(tmp_path / "tiny.gguf") as model:
        verdict = judge(all_logits(model, PROMPT, (23, 17)), expected_of(plain, PROMPT))
    assert verdict.holds, verdict


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_gating_func", 2), ("expert_weights_scale", 2.5), ("expert_shared_count", 1), ("expert_group_count", 4)],
)
def test_a_gguf_key_that_asks_for_other_maths_is_refused_by_name(
    tiny: Callable[[str], Tiny], tmp_path: Path, key: str, value: object
) -> None:
    write_gguf(tiny("all sparse").model, tmp_path / "tiny.gguf", metadata={key: value})
    with pytest.raises(CheckpointError, match=key), loaded(tmp_path / "tiny.gguf"):
        pass
