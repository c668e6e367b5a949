"""Llama against transformers on tiny random checkpoints, by the rule in `closeness`; and against itself, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from closeness import judge, pieces
from gguf import GGMLQuantizationType as Kind
from oracle import expected_of, oracle_logits
from tiny_llamas import LLAMA3, VARIANTS, VOCAB, TinyLlama, make_llama, rounded_to, write_gguf
from under_test import all_logits, chunk_logits, loaded

from engine.errors import CheckpointError
from engine.layers.rope import RopeTable
from engine.model.base import PrefillSlice
from engine.model.transformer import TransformerModel

Variants = Callable[[str], TinyLlama]
each_variant = pytest.mark.parametrize("name", VARIANTS)
each_block_size = pytest.mark.parametrize("block_size", [4, 16])
three_kinds = pytest.mark.parametrize("name", ["grouped", "multi-head, tied", "one kv head, wide heads"])


# Against transformers


@each_variant
def test_prefill_in_one_pass_equals_transformers(tiny_llama_variant: Variants, prompt: list[int], name: str) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path) as model:
        everywhere = judge(all_logits(model, prompt, (len(prompt),)), tiny.expected)
        seq = model.lifecycle.alloc_sequence()
        last = judge(model.forward.prefill(prompt, seq), tiny.expected, [-1])
        model.lifecycle.free_sequence(seq)
    assert everywhere.holds, everywhere
    assert last.holds, last
    assert everywhere.decided > 0.9 * len(prompt), "hardly any greedy id was compared: the checkpoint's logits are too flat"


@each_variant
@each_block_size
def test_prefill_in_two_chunks_equals_transformers_at_every_split(
    tiny_llama_variant: Variants, prompt: list[int], name: str, block_size: int
) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, block_size=block_size) as model:
        for split in range(1, len(prompt)):
            seq = model.lifecycle.alloc_sequence()
            first = model.forward.prefill_chunk(prompt, seq, 0, split, False)
            last = model.forward.prefill_chunk(prompt, seq, split, len(prompt) - split, True)
            assert first is None, "a chunk that isn't the last returned logits"
            assert last is not None
            verdict = judge(last, tiny.expected, [-1])
            assert verdict.holds, (split, verdict)
            assert len(seq.block_table) == -(-len(prompt) // block_size)
            model.lifecycle.free_sequence(seq)


@each_variant
@each_block_size
@pytest.mark.parametrize("size", [1, 3, 16, 17])
def test_every_position_equals_transformers_in_chunks_of_any_size(
    tiny_llama_variant: Variants, prompt: list[int], name: str, block_size: int, size: int
) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, block_size=block_size) as model:
        verdict = judge(all_logits(model, prompt, pieces(len(prompt), size)), tiny.expected)
    assert verdict.holds, verdict


@each_variant
def test_step_decode_equals_transformers(tiny_llama_variant: Variants, prompt: list[int], name: str) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, block_size=4) as model:
        seq = model.lifecycle.alloc_sequence()
        rows = [model.forward.prefill(prompt[:5], seq).clone()]
        rows += [model.forward.decode(token, seq).clone() for token in prompt[5:]]
        model.lifecycle.free_sequence(seq)
    verdict = judge(torch.cat(rows), tiny.expected, range(4, len(prompt)))
    assert verdict.holds, verdict


@three_kinds
def test_a_prompt_in_two_phases_equals_transformers(tiny_llama_variant: Variants, prompt: list[int], name: str) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, max_batch_tokens=64) as model:
        for size in (1, 11, 39, 40, 1000):
            seq = model.lifecycle.alloc_sequence()
            verdict = judge(model.forward.prefill_twophase(prompt, seq, size), tiny.expected, [-1])
            assert verdict.holds, (size, verdict)
            model.lifecycle.free_sequence(seq)


@three_kinds
@each_block_size
def test_decoding_several_sequences_at_once_equals_transformers(
    tiny_llama_variant: Variants, prompt: list[int], name: str, block_size: int
) -> None:
    tiny = tiny_llama_variant(name)
    lengths = [1, 4, 15, 16, 17, 30]  # shorter and longer than a block, so that the rows are padded differently
    with loaded(tiny.path, block_size=block_size) as model:
        seqs = [model.lifecycle.alloc_sequence() for _ in lengths]
        for seq, length in zip(seqs, lengths, strict=True):
            model.forward.prefill(prompt[:length], seq)
        for _ in range(8):
            at = [seq.num_tokens for seq in seqs]
            logits = model.forward.decode_batch([prompt[i] for i in at], seqs)
            assert model.logits.argmax_batch(logits, len(at)) == logits.argmax(-1).tolist()
            verdict = judge(logits, tiny.expected, at)
            assert verdict.holds, (at, verdict)
        for seq in seqs:
            model.lifecycle.free_sequence(seq)


@three_kinds
@each_block_size
def test_a_chunk_beside_decodes_equals_transformers_in_all_rows(
    tiny_llama_variant: Variants, prompt: list[int], name: str, block_size: int
) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, block_size=block_size) as model:
        decoding = [model.lifecycle.alloc_sequence() for _ in range(3)]
        for seq, length in zip(decoding, (3, 16, 25), strict=True):
            model.forward.prefill(prompt[:length], seq)
        joining = model.lifecycle.alloc_sequence()
        start = 0
        for size in (1, 12, 8, 19):
            at = [seq.num_tokens for seq in decoding]
            ids = [prompt[i] for i in at]
            last = start + size == len(prompt)
            result = model.forward.mixed_forward(ids, decoding, prompt, joining, start, size, last)
            assert result.decode_logits is not None
            verdict = judge(result.decode_logits, tiny.expected, at)
            assert verdict.holds, (start, verdict)
            if last:
                assert result.prefill_logits is not None
                verdict = judge(result.prefill_logits, tiny.expected, [-1])
                assert verdict.holds, verdict
                # The finishing row lies behind the decode rows in the arena, and overwrote none of them.
                assert result.prefill_logits.data_ptr() == model.logits.logits_buffer[3:].data_ptr()
            else:
                assert result.prefill_logits is None
            start += size
        assert start == len(prompt)
        for seq in (*decoding, joining):
            model.lifecycle.free_sequence(seq)


@three_kinds
def test_several_chunks_beside_decodes_equal_transformers_in_all_rows(
    tiny_llama_variant: Variants, prompt: list[int], name: str
) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, block_size=4) as model:
        a, b, first, second, third = (model.lifecycle.alloc_sequence() for _ in range(5))
        model.forward.prefill(prompt[:7], a)
        model.forward.prefill(prompt[:20], b)
        model.forward.prefill_chunk(prompt, second, 0, 9, False)
        result = model.forward.mixed_forward_batch(
            [prompt[7], prompt[20]],
            [a, b],
            [
                PrefillSlice(prompt[:13], first, 0, 13, True),
                PrefillSlice(prompt, second, 9, 20, False),
                PrefillSlice(prompt[:1], third, 0, 1, True),
            ],
        )
        assert result.decode_logits is not None
        one, none, another = result.prefill_logits
        assert none is None
        assert one is not None and another is not None
        verdict = judge(torch.cat([result.decode_logits, one, another]), tiny.expected, [7, 20, 12, 0])
        assert verdict.holds, verdict
        alone = model.forward.mixed_forward_batch([], [], [PrefillSlice(prompt, second, 29, 11, True)])
        assert alone.decode_logits is None
        assert alone.prefill_logits[0] is not None
        verdict = judge(alone.prefill_logits[0], tiny.expected, [-1])
        assert verdict.holds, verdict
        for seq in (a, b, first, second, third):
            model.lifecycle.free_sequence(seq)


@three_kinds
def test_a_row_base_keeps_the_decode_rows_of_the_same_step(tiny_llama_variant: Variants, prompt: list[int], name: str) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, block_size=4) as model:
        decoding = [model.lifecycle.alloc_sequence() for _ in range(2)]
        finishing = [model.lifecycle.alloc_sequence() for _ in range(3)]
        for seq in decoding:
            model.forward.prefill(prompt[:10], seq)
        decoded = model.forward.decode_batch([prompt[10], prompt[10]], decoding)
        kept = decoded.clone()
        slices = [
            PrefillSlice(prompt, finishing[0], 0, 40, True),
            PrefillSlice(prompt, finishing[1], 0, 8, False),
            PrefillSlice(prompt[:21], finishing[2], 0, 21, True),
        ]
        one, none, another = model.forward.prefill_batch_chunk_rows(slices, None, 2)
        assert torch.equal(decoded, kept), "the prefill overwrote logits of the decode rows"
        assert none is None
        assert one is not None and another is not None
        assert one.data_ptr() == model.logits.logits_buffer[2:].data_ptr()
        verdict = judge(torch.cat([decoded, one, another]), tiny.expected, [10, 10, 39, 20])
        assert verdict.holds, verdict
        # Without a row base the same call starts at row 0: that is what it protects from.
        [over] = model.forward.prefill_batch_chunk([PrefillSlice(prompt[:9], finishing[1], 8, 1, True)])
        assert over is not None
        assert over.data_ptr() == decoded.data_ptr()
        assert not torch.equal(decoded, kept)
        for seq in (*decoding, *finishing):
            model.lifecycle.free_sequence(seq)


def test_a_sharded_checkpoint_equals_one_file_bit_for_bit(tiny_llama_variant: Variants, prompt: list[int], tmp_path: Path) -> None:
    tiny = tiny_llama_variant("grouped")
    tiny.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with loaded(tiny.path) as whole, loaded(tmp_path) as sharded:
        assert torch.equal(all_logits(whole, prompt, (23, 17)), all_logits(sharded, prompt, (23, 17)))


def test_bfloat16_is_no_further_off_than_transformers_bfloat16(tiny_llama_variant: Variants, prompt: list[int]) -> None:
    for name in VARIANTS:
        tiny = tiny_llama_variant(name)
        theirs = oracle_logits(_in_bfloat16(tiny), prompt, (len(prompt),)).float()
        their_error = float((theirs - tiny.expected.logits).abs().max())
        with loaded(tiny.path, dtype="bfloat16") as model:
            ours = all_logits(model, prompt, (17, 23))
            assert ours.dtype == torch.bfloat16
            assert not model.logits.decode_logits_fp32
        our_error = float((ours.float() - tiny.expected.logits).abs().max())
        assert 1e-4 < our_error <= 1.5 * their_error, (name, our_error, their_error)


def _in_bfloat16(tiny: TinyLlama) -> Any:
    copy = type(tiny.model)(tiny.model.config)
    copy.load_state_dict(tiny.model.state_dict())
    return copy.to(torch.bfloat16).eval()


# Against ourselves


@each_block_size
def test_the_same_splits_and_batch_give_the_same_bits(tiny_llama_variant: Variants, prompt: list[int], block_size: int) -> None:
    path = tiny_llama_variant("grouped").path

    def scene(model: TransformerModel) -> torch.Tensor:
        seqs = [model.lifecycle.alloc_sequence() for _ in range(3)]
        out = [chunk_logits(model, seqs[0], prompt[:19]), chunk_logits(model, seqs[1], prompt[:6])]
        for token in prompt[19:24]:
            out.append(model.forward.decode_batch([token, token], seqs[:2]).clone())
        mixed = model.forward.mixed_forward([5, 6], seqs[:2], prompt, seqs[2], 0, 40, True)
        assert mixed.decode_logits is not None
        assert mixed.prefill_logits is not None
        out += [mixed.decode_logits.clone(), mixed.prefill_logits.clone()]
        for seq in seqs:
            model.lifecycle.free_sequence(seq)
        return torch.cat(out)

    with loaded(path, block_size=block_size) as one, loaded(path, block_size=block_size) as other:
        fresh = scene(one)
        assert torch.equal(fresh, scene(other))
        # Again in the same pool, where other sequences have left other blocks first in line and their keys in all of them.
        tables = [model_seq_tables(other, prompt) for _ in range(3)]
        assert tables[0] != tables[1] != tables[2]
        assert torch.equal(fresh, scene(other))


def model_seq_tables(model: TransformerModel, prompt: list[int]) -> list[int]:
    """The block table that a prompt gets now; its blocks are free again, and full of its keys and values."""
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(prompt[::-1], seq)
    table = list(seq.block_table)
    model.lifecycle.free_sequence(seq)
    return table


# The rule notices what is wrong


def _wrong_rope_base(model: TransformerModel) -> None:
    for config, table in list(model.forward.ropes.items()):
        wrong = replace(config, theta=config.theta * 1.01)
        model.forward.ropes[config] = RopeTable(wrong, table.cos.shape[0], table.cos.device, table.cos.dtype)


def _swapped_kv_heads(model: TransformerModel) -> None:
    weight = model.store.get("model.layers.1.self_attn.v_proj.weight")
    weight.copy_(weight.view(2, -1, weight.shape[1]).flip(0).reshape(weight.shape))


def _wrong_norm_epsilon(model: TransformerModel) -> None:
    model.forward.layers[0].input_norm.eps *= 10


def _unpermuted_queries(model: TransformerModel) -> None:
    weight = model.store.get("model.layers.0.self_attn.q_proj.weight")
    weight.copy_(weight.view(4, 2, 8, -1).transpose(1, 2).reshape(weight.shape))


@pytest.mark.parametrize("spoil", [_wrong_rope_base, _swapped_kv_heads, _wrong_norm_epsilon, _unpermuted_queries])
def test_the_rule_fails_when_a_layer_is_wrong(
    tiny_llama_variant: Variants, prompt: list[int], spoil: Callable[[TransformerModel], None]
) -> None:
    tiny = tiny_llama_variant("grouped")
    with loaded(tiny.path) as model:
        assert judge(all_logits(model, prompt, (23, 17)), tiny.expected).holds
        with torch.inference_mode():
            spoil(model)
        assert not judge(all_logits(model, prompt, (23, 17)), tiny.expected).holds


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_the_rule_fails_when_one_block_of_the_cache_is_overwritten(
    tiny_llama_variant: Variants, prompt: list[int], part: int
) -> None:
    tiny = tiny_llama_variant("grouped")
    with loaded(tiny.path, block_size=4) as model:
        for spoilt in (False, True):
            seq = model.lifecycle.alloc_sequence()
            chunk_logits(model, seq, prompt[:23])
            if spoilt:
                first = seq.block_table[2] * 4
                model.kv_cache[1, part, first : first + 4] = model.kv_cache[1, part, first : first + 4].flip(0)
            verdict = judge(chunk_logits(model, seq, prompt[23:]), tiny.expected, range(23, 40))
            assert verdict.holds is not spoilt, verdict
            model.lifecycle.free_sequence(seq)


# GGUF


def _gguf_variant(name: str) -> dict[str, Any]:
    """The variant as a GGUF file can say it: llama.cpp's llama has no biases in its MLP."""
    return {**VARIANTS[name], "mlp_bias": False}


@each_variant
def test_a_float32_gguf_file_equals_the_safetensors_it_was_made_of(prompt: list[int], tmp_path: Path, name: str) -> None:
    model = make_llama(**_gguf_variant(name))
    model.save_pretrained(tmp_path / "safetensors")
    write_gguf(model, tmp_path / "tiny.gguf", Kind.F32)
    with loaded(tmp_path / "safetensors") as one, loaded(tmp_path / "tiny.gguf") as other:
        ours, theirs = all_logits(other, prompt, (23, 17)), all_logits(one, prompt, (23, 17))
    if name == "llama3 rope":
        # The file holds rounded divisors where config.json holds the formula: equal by the rule, not to the bit.
        verdict = judge(ours, expected_of(model, prompt))
        assert verdict.holds, verdict
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_a_rounded_or_quantised_gguf_file_equals_transformers_on_the_dequantised_weights(
    prompt: list[int], tmp_path: Path, kind: Kind
) -> None:
    original = make_llama(attention_bias=True)
    write_gguf(original, tmp_path / "tiny.gguf", kind)
    rounded = rounded_to(original, kind)
    expected = expected_of(rounded, prompt)
    with loaded(tmp_path / "tiny.gguf") as model:
        ours = all_logits(model, prompt, (23, 17))
    verdict = judge(ours, expected)
    assert verdict.holds, verdict
    assert not judge(ours, expected_of(original, prompt)).holds, "the rounding changed nothing: the file wasn't what was read"


def test_a_gguf_file_without_a_rope_scaling_type_scales_linearly_and_one_that_says_none_does_not(
    prompt: list[int], tmp_path: Path
) -> None:
    # As llama.cpp reads them: "linear" is the default type, "none" wins over a factor, and a factor of 0 is none.
    plain, linear = make_llama(), make_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    for metadata, expected in (
        ({"llama.rope.scaling.factor": 4.0}, linear),
        ({"llama.rope.scale_linear": 4.0}, linear),
        ({"llama.rope.scaling.factor": 0.0}, plain),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, plain),
    ):
        write_gguf(plain, tmp_path / "tiny.gguf", Kind.F32, metadata)
        with loaded(tmp_path / "tiny.gguf") as model:
            verdict = judge(all_logits(model, prompt, (23, 17)), expected_of(expected, prompt))
        assert verdict.holds, (metadata, verdict)


def test_biases_of_the_mlp_in_a_gguf_file_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(make_llama(mlp_bias=True), tmp_path / "tiny.gguf", Kind.F32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate\.bias isn't understood"), loaded(tmp_path / "tiny.gguf"):
        pass


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("rope_parameters", {**LLAMA3, "rope_type": "yarn"}),
        ("rope_parameters", {**LLAMA3, "attention_factor": 0.5}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("attention_multiplier", 0.5),
        ("logits_scaling", 2.0),
    ],
)
def test_a_config_key_that_changes_the_maths_and_is_not_understood_is_refused_by_name(
    tiny_llama_variant: Variants, tmp_path: Path, key: str, value: object
) -> None:
    for file in tiny_llama_variant("grouped").path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    named = next(iter(set(value) - set(LLAMA3)), "yarn") if isinstance(value, dict) and key == "rope_parameters" else key
    with pytest.raises(CheckpointError, match=named), loaded(tmp_path):
        pass


def test_quantised_blocks_are_read_as_the_gguf_package_reads_them(tmp_path: Path) -> None:
    original = make_llama()
    write_gguf(original, tmp_path / "tiny.gguf", Kind.Q4_1)
    stored = gguf.quantize(original.model.layers[2].mlp.up_proj.weight.detach().numpy(), Kind.Q4_1)
    with loaded(tmp_path / "tiny.gguf") as model:
        held = model.store.get("model.layers.2.mlp.up_proj.weight")
        assert torch.equal(held, torch.from_numpy(gguf.dequantize(stored, Kind.Q4_1)))
        assert model.vocab_size == VOCAB
