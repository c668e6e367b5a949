"""SmolLM2-135M-Instruct from its GGUF file, on real text: against transformers' float32 load of the same file, by the rule in
`closeness`; and against llama.cpp's recorded distributions.

They were recorded with llama-cpp-python 0.3.36 by tests/fixtures/llama_cpp/record_logits.py: the 512 ids of text_512.txt (no BOS)
in one batch on a CPU, KV cache in float32, and for every position the 64 most likely next tokens, their log-probabilities, and that
of all others together. llama.cpp multiplies the quantised weights with activations quantised to 8 bits, so that it can't be met by
rounding alone: KL(llama.cpp ‖ ours) ≤ 0.005 nats and teacher-forced top-1 agreement ≥ 97 % are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import Expected, judge, pieces
from oracle import expected_of, oracle_from_gguf
from recorded import RECORDED, agreement, recorded_distributions
from under_test import all_logits, chunks_of, loaded

from engine.layers.rope import RopeTable
from engine.model.transformer import TransformerModel
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import open_checkpoint

TEXT = """The footplate is the floor of a steam locomotive's cab. The driver and the fireman stand on it: one hand on the
regulator, an eye on the water gauge. At 14:35 the 9F, number 92220, left with 11 coaches (412 t) and a clear signal.

def boiler_pressure(psi: float) -> float:
    return psi * 6.894757
"""


@pytest.fixture(scope="module")
def ids(smollm2_gguf: Path) -> list[int]:
    """Between 64 and 110 tokens of prose, figures and code."""
    with open_checkpoint(smollm2_gguf) as checkpoint:
        found = Tokenizer.from_gguf(checkpoint.metadata).encode(TEXT)
    assert 64 <= len(found) <= 110
    return found


@pytest.fixture(scope="module")
def expected(smollm2_gguf: Path, ids: list[int]) -> Expected:
    """What transformers says, and its ε over five splits; the model itself is let go again."""
    count = len(ids)
    splits = ((count,), pieces(count, -(-count // 2)), pieces(count, 29), pieces(count, 16), (count - 1, 1))
    return expected_of(oracle_from_gguf(smollm2_gguf), ids, splits)


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Iterator[TransformerModel]:
    with loaded(smollm2_gguf, num_kv_blocks=40, max_batch=128, max_seq_len=1024) as model:
        yield model


@pytest.mark.parametrize("chunks", ["whole", "thirds"])
def test_every_logit_equals_transformers_float32(model: TransformerModel, ids: list[int], expected: Expected, chunks: str) -> None:
    split = (len(ids),) if chunks == "whole" else pieces(len(ids), -(-len(ids) // 3))
    verdict = judge(all_logits(model, ids, split), expected)
    assert verdict.holds, verdict
    assert verdict.decided > 0.9 * len(ids)


def test_decoding_beside_a_prefill_equals_transformers_float32(model: TransformerModel, ids: list[int], expected: Expected) -> None:
    decoding, joining = model.lifecycle.alloc_sequence(), model.lifecycle.alloc_sequence()
    model.forward.prefill(ids[:50], decoding)
    result = model.forward.mixed_forward([ids[50]], [decoding], ids, joining, 0, len(ids), True)
    assert result.decode_logits is not None
    assert result.prefill_logits is not None
    verdict = judge(torch.cat([result.decode_logits, result.prefill_logits]), expected, [50, -1])
    assert verdict.holds, verdict
    for seq in (decoding, joining):
        model.lifecycle.free_sequence(seq)


def test_the_rule_fails_on_the_real_model_when_the_rope_base_is_the_usual_one(
    smollm2_gguf: Path, model: TransformerModel, ids: list[int], expected: Expected
) -> None:
    [(config, table)] = model.forward.ropes.items()
    assert config.theta == 100000.0
    model.forward.ropes = {config: RopeTable(replace(config, theta=10000.0), 1024, model.gpu_backend, torch.float32)}
    try:
        assert not judge(all_logits(model, ids, (len(ids),)), expected).holds
    finally:
        model.forward.ropes = {config: table}


# Against llama.cpp


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    """What llama.cpp says after each of the text's 512 ids."""
    return recorded_distributions()


def test_the_text_s_ids_are_llama_cpp_s(smollm2_gguf: Path, recorded: dict[str, np.ndarray]) -> None:
    with open_checkpoint(smollm2_gguf) as checkpoint:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    text = (RECORDED / "text_512.txt").read_text(encoding="utf-8")
    assert tokenizer.encode(text, add_bos=False) == recorded["ids"].tolist()


def test_float32_agrees_with_llama_cpp_which_quantises_activations(
    model: TransformerModel, recorded: dict[str, np.ndarray]
) -> None:
    found = agreement(chunks_of(model, recorded["ids"].tolist(), 128), recorded)
    assert 0 < found.kl <= 0.005, found
    assert found.top1 >= 0.97, found


def test_bfloat16_is_nearly_as_close_to_llama_cpp(smollm2_gguf: Path, recorded: dict[str, np.ndarray]) -> None:
    with loaded(smollm2_gguf, dtype="bfloat16", num_kv_blocks=40, max_batch=128, max_seq_len=1024) as model:
        found = agreement(chunks_of(model, recorded["ids"].tolist(), 128), recorded)
    assert 0 < found.kl <= 0.005, found  # 0.0033 and 96.5 % when this was written, where float32 had 0.0024 and 97.5 %
    assert found.top1 >= 0.95, found
