"""SmolLM2-135M-Instruct from its GGUF file, on real text: against transformers' float32 load of the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from closeness import Expected, judge, pieces
from oracle import expected_of, oracle_from_gguf
from under_test import all_logits, loaded

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
    from dataclasses import replace

    from engine.layers.rope import RopeTable

    [(config, table)] = model.forward.ropes.items()
    assert config.theta == 100000.0
    model.forward.ropes = {config: RopeTable(replace(config, theta=10000.0), 1024, model.gpu_backend, torch.float32)}
    try:
        assert not judge(all_logits(model, ids, (len(ids),)), expected).holds
    finally:
        model.forward.ropes = {config: table}
