"""What `inspect` says of real checkpoints, against sizes counted by other means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.inspect import as_lines, inspect_model

CPU = EngineConfig(device="cpu", dtype="float32")


def test_a_gguf_file_s_sizes_are_those_the_gguf_package_counts(smollm2_gguf: Path) -> None:
    from gguf import GGUFReader

    found = inspect_model(smollm2_gguf, CPU)
    tensors = GGUFReader(smollm2_gguf).tensors
    assert found.num_parameters == sum(int(tensor.n_elements) for tensor in tensors)
    assert found.total_bytes == sum(int(tensor.n_bytes) for tensor in tensors)
    assert {part.name: part.tensors for part in found.formats} == {
        name: sum(tensor.tensor_type.name == name for tensor in tensors) for name in ("Q4_1", "Q8_0", "F32")
    }
    for parts in (found.kinds, found.formats):
        assert sum(part.bytes for part in parts) == found.total_bytes
        assert sum(part.parameters for part in parts) == found.num_parameters
    assert (found.family, found.layers, found.context_tokens, found.tied_head) == ("llama", {"attention": 30}, 8192, True)
    assert {part.name for part in found.kinds} == {"embedding", "attention", "mlp", "norm"}


def test_a_checkpoint_directory_s_parameters_are_those_transformers_counts(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = inspect_model(tiny_llama, CPU)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert found.num_parameters == model.num_parameters()
    assert found.total_bytes == 4 * found.num_parameters
    assert [part.name for part in found.formats] == ["F32"]
    assert {part.name for part in found.kinds} == {"embedding", "attention", "mlp", "norm", "head"}


def test_the_plan_is_the_flags_own(tiny_llama: Path) -> None:
    found = inspect_model(tiny_llama, EngineConfig(device="cpu", dtype="float32", num_kv_blocks=10, block_size=8, max_seq_len=64))
    plan = found.plan.figures
    assert plan is not None
    block_bytes = 2 * 2 * 16 * 4 * 4 * 8  # k and v, kv heads, head dim, bytes, layers, tokens
    assert (plan.num_kv_blocks, plan.kv_block_bytes, plan.max_seq_len) == (10, block_bytes, 64)
    assert plan.weights_bytes == found.total_bytes


def test_a_plan_that_does_not_fit_is_shown_and_the_rest_stays(tiny_llama: Path) -> None:
    found = inspect_model(tiny_llama, EngineConfig(device="cpu", num_kv_blocks=2**40))
    assert found.plan.figures is None
    assert "lower --num-kv-blocks" in str(found.plan.refused)
    assert "  refused: " in "\n".join(as_lines(found))


def test_an_unknown_architecture_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    with pytest.raises(CheckpointError, match="'OtherForCausalLM' isn't supported"):
        inspect_model(tmp_path, CPU)
