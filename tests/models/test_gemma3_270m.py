"""Gemma 3 270M from its Q4_K_M file, on real text: against transformers' float32 load of the same file, by the rule in
`closeness`. The base model with the SentencePiece vocabulary of 262,144 ids; its window of 512 tokens is passed.

Not run in CI: it takes 240 MB from the package index, and 3 GB of memory for both models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from closeness import Expected, judge, pieces
from family_scenes import with_wrong_rope
from oracle import expected_of, oracle_from_gguf
from under_test import all_logits, chunk_logits, loaded

from engine.errors import CheckpointError
from engine.model.transformer import TransformerModel
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import open_checkpoint
from engine.weights.locate import pull

pytestmark = pytest.mark.soak

FIXTURES = Path(__file__).parent.parent / "fixtures"
LAST = 24  # positions that are compared, all past the window of every local layer


@pytest.fixture(scope="module")
def gemma3_gguf() -> Path:
    try:
        return pull("gemma-3-270m")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(gemma3_gguf: Path) -> Tokenizer:
    with open_checkpoint(gemma3_gguf) as checkpoint:
        return Tokenizer.from_gguf(checkpoint.metadata)


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    text = (FIXTURES / "llama_cpp" / "text_512.txt").read_text(encoding="utf-8")
    found = tokenizer.encode(text + text[::-1])[:600]
    assert len(found) == 600 and found[0] == 2, "600 ids with BOS in front"
    return found


@pytest.fixture(scope="module")
def expected(gemma3_gguf: Path, ids: list[int]) -> tuple[Expected, Expected]:
    """What transformers says of the first 64 ids, and of the last `LAST` of all 600, each with its ε over five splits."""
    oracle = oracle_from_gguf(gemma3_gguf, vocab_size=262144)
    assert oracle.config.sliding_window == 512 and oracle.config.layer_types.count("full_attention") == 3
    first = expected_of(oracle, ids[:64])
    head = oracle.lm_head
    # The head over 262,144 ids is most of the work: only the last positions get logits.
    rest = len(ids) - LAST
    oracle.lm_head = torch.nn.Sequential(_Last(LAST), head)
    splits = [(rest + LAST,), (300, rest - 300 + LAST), (513, rest - 513 + LAST), (rest, LAST), (511, rest - 511 + LAST)]
    found = torch.stack([_last_logits(oracle, ids, split) for split in splits])
    return first, Expected(found[0], float((found.amax(0) - found.amin(0)).max()))


class _Last(torch.nn.Module):
    """Passes the last positions on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, -self.count :]


@torch.inference_mode()
def _last_logits(oracle: torch.nn.Module, ids: list[int], split: tuple[int, ...]) -> torch.Tensor:
    from transformers import DynamicCache

    cache, start = DynamicCache(config=oracle.config), 0
    for size in split:
        logits = oracle(torch.tensor([ids[start : start + size]]), cache=cache, use_cache=True).logits[0]
        start += size
    return logits[-LAST:]


@pytest.fixture(scope="module")
def model(gemma3_gguf: Path) -> Iterator[TransformerModel]:
    with loaded(gemma3_gguf, threads=2, num_kv_blocks=80, max_batch=64, max_batch_tokens=640, max_seq_len=1024) as model:
        yield model


def test_its_ids_are_llama_cpp_s(tokenizer: Tokenizer) -> None:
    texts = json.loads((FIXTURES / "tokenizer" / "texts.json").read_text(encoding="utf-8"))
    recorded = json.loads((FIXTURES / "llama_cpp" / "gemma3_tokens.json").read_text(encoding="utf-8"))
    plain = recorded["plain"]
    assert len(texts) == len(plain) > 100
    wrong = [text for text, expected in zip(texts, plain, strict=True) if tokenizer.encode(text, add_bos=False) != expected]
    assert not wrong


def test_q4_k_and_q6_k_blocks_are_read_as_the_gguf_package_reads_them(gemma3_gguf: Path, model: TransformerModel) -> None:
    reader = gguf.GGUFReader(gemma3_gguf)
    kinds = set()
    for tensor in reader.tensors:
        if tensor.name in ("blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight", "blk.17.ffn_gate.weight"):
            ours = {
                "attn_q": "self_attn.q_proj",
                "attn_v": "self_attn.v_proj",
                "ffn_down": "mlp.down_proj",
                "ffn_gate": "mlp.gate_proj",
            }
            _, layer, name, _ = tensor.name.split(".")
            held = model.store.get(f"model.layers.{layer}.{ours[name]}.weight")
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(held.numpy(), theirs), tensor.name
            kinds.add(tensor.tensor_type.name)
    assert len(kinds) > 1, kinds


@pytest.mark.parametrize("size", [64, 17])
def test_every_logit_equals_transformers_float32(
    model: TransformerModel, ids: list[int], expected: tuple[Expected, Expected], size: int
) -> None:
    verdict = judge(all_logits(model, ids[:64], pieces(64, size)), expected[0])
    assert verdict.holds, verdict
    assert verdict.decided > 56


@pytest.mark.parametrize("chunks", [(576,), (512, 64), (513, 63), (300, 276)])
def test_logits_past_the_window_equal_transformers_float32(
    model: TransformerModel, ids: list[int], expected: tuple[Expected, Expected], chunks: tuple[int, ...]
) -> None:
    verdict = judge(_past_the_window(model, ids, chunks), expected[1])
    assert verdict.holds, verdict


def test_the_rule_fails_on_the_real_model_when_a_rope_or_a_window_is_wrong(
    model: TransformerModel, ids: list[int], expected: tuple[Expected, Expected]
) -> None:
    windows = [layer.mixer for layer in model.forward.layers]
    windows[0].window += 1  # type: ignore[attr-defined]  # attention, all of them
    assert not judge(_past_the_window(model, ids, (576,)), expected[1]).holds
    windows[0].window -= 1  # type: ignore[attr-defined]  # as above
    ropes = dict(model.forward.ropes)
    with_wrong_rope(model, 10000.0)
    assert not judge(all_logits(model, ids[:64], (64,)), expected[0]).holds
    model.forward.ropes = ropes
    assert judge(all_logits(model, ids[:64], (64,)), expected[0]).holds


def _past_the_window(model: TransformerModel, ids: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    """The logits of the last `LAST` positions, what comes before them computed in `chunks`."""
    seq, start = model.lifecycle.alloc_sequence(), 0
    for size in chunks:
        model.forward.prefill_chunk(ids, seq, start, size, False)
        start += size
    assert start == len(ids) - LAST
    logits = chunk_logits(model, seq, ids[start:])
    model.lifecycle.free_sequence(seq)
    return logits
