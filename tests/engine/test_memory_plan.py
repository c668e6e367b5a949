"""The memory plan: figures worked out before anything is loaded, and refusals that name the flag to change."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tiny_engine import tiny_config

from engine import EngineConfig
from engine.device import choose_device
from engine.errors import FootplateError, MemoryPlanError
from engine.families.shapes import shape_named
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model.transformer import load_model
from engine.weights.checkpoint import Checkpoint, open_checkpoint

MODEL = shape_named("smollm2-135m")
ELEMENTS = 134_515_008
GIB = 2**30


def plan(available: int = 64 * GIB, itemsize: int = 2, on_gpu: bool = False, **flags: object) -> MemoryPlan:
    config = EngineConfig(model="m", **flags)  # type: ignore[arg-type]  # flags of several types
    return plan_memory(MODEL, config, weights_elements=ELEMENTS, itemsize=itemsize, available_bytes=available, on_gpu=on_gpu)


def test_the_parts_are_their_formulas() -> None:
    found = plan(num_kv_blocks=100, block_size=16)
    block_bytes = 2 * 3 * 64 * 2 * 30 * 16  # k and v, kv heads, head dim, bytes, layers, tokens
    assert found.kv_block_bytes == block_bytes
    assert found.kv_bytes == 101 * block_bytes  # one more, always zero, for padding
    assert found.weights_bytes == 2 * ELEMENTS
    assert found.ssm_bytes == 0
    assert found.max_seq_len == 8192
    assert found.workspace_bytes > 16 * 49152 * 2  # the logits arena alone
    assert found.total_bytes == found.weights_bytes + found.kv_bytes + found.workspace_bytes
    assert plan(num_kv_blocks=100, itemsize=4).weights_bytes == 4 * ELEMENTS


def test_a_cpu_s_pool_holds_two_contexts_at_most_and_a_quarter_of_what_is_left() -> None:
    roomy = plan()
    assert roomy.num_kv_blocks == 2 * 8192 // 16
    assert plan(max_seq_len=1000).num_kv_blocks == -(-2 * 1000 // 16)
    tight = plan(available=GIB)
    left = GIB - tight.weights_bytes - tight.workspace_bytes
    assert tight.kv_bytes <= left / 4 < tight.kv_bytes + tight.kv_block_bytes
    assert tight.total_bytes <= GIB


def test_a_gpu_s_pool_takes_nearly_all_that_is_left_up_to_two_full_batches() -> None:
    found = plan(available=4 * GIB, on_gpu=True)
    left = 4 * GIB - found.weights_bytes - found.workspace_bytes
    assert 0.899 * left < found.kv_bytes <= 0.9 * left
    assert found.total_bytes <= 4 * GIB
    assert plan(available=80 * GIB, on_gpu=True, max_batch=4).num_kv_blocks == 2 * 4 * 8192 // 16


def test_a_larger_step_or_context_plans_a_larger_workspace() -> None:
    base = plan(num_kv_blocks=10).workspace_bytes
    for flags in ({"max_batch_tokens": 4096}, {"max_batch": 256}):
        assert plan(num_kv_blocks=10, **flags).workspace_bytes > base, flags
    assert plan(num_kv_blocks=10, max_seq_len=512).workspace_bytes < base


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_does_not_fit_is_refused_with_its_figures_and_advice_that_helps(itemsize: int, on_gpu: bool) -> None:
    with pytest.raises(MemoryPlanError) as refusal:
        plan(available=GIB, itemsize=itemsize, on_gpu=on_gpu, num_kv_blocks=10**6, max_seq_len=2048)
    text = str(refusal.value)
    assert f"{itemsize * ELEMENTS / 2**20:,.0f} MiB for weights" in text
    assert "for 1000000 KV blocks" in text
    assert "1,024 MiB are available" in text
    advised = re.search(r"lower --num-kv-blocks to (\d+) or less", text)
    assert advised is not None
    blocks = int(advised[1])
    fitting = plan(available=GIB, itemsize=itemsize, on_gpu=on_gpu, num_kv_blocks=blocks, max_seq_len=2048)
    assert fitting.total_bytes <= GIB < fitting.total_bytes + fitting.kv_block_bytes
    with pytest.raises(MemoryPlanError):
        plan(available=GIB, itemsize=itemsize, on_gpu=on_gpu, num_kv_blocks=blocks + 1, max_seq_len=2048)


def test_weights_that_do_not_fit_advise_what_could_help() -> None:
    with pytest.raises(MemoryPlanError, match="use --dtype bfloat16"):
        plan(available=2**28, itemsize=4)
    with pytest.raises(MemoryPlanError, match="choose a smaller model"):
        plan(available=2**28, itemsize=2)


def test_a_context_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match=r"--max-seq-len 8193 is over what smollm2-135m was made for, 8192 tokens"):
        plan(max_seq_len=8193)
    assert plan(max_seq_len=8192).max_seq_len == 8192


def test_a_plan_is_made_before_the_first_tensor_is_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_read(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "read", no_read)
    config = tiny_config(tiny_llama, num_kv_blocks=10**9)
    with open_checkpoint(tiny_llama) as checkpoint, pytest.raises(MemoryPlanError):
        load_model(checkpoint, config, choose_device(config))


def test_a_model_takes_what_its_plan_says(tiny_llama: Path) -> None:
    config = tiny_config(tiny_llama)
    with open_checkpoint(tiny_llama) as checkpoint, load_model(checkpoint, config, choose_device(config)) as model:
        assert model.kv_cache.nbytes == model.plan.kv_bytes
        assert model.store.bytes_total == model.plan.weights_bytes
        workspace = next(item.bytes for item in model.memory_items() if item.name == "workspace")
        assert workspace <= model.plan.workspace_bytes + 3 * 1024 * 16 * 4 * 4  # rope tables and block tables besides


# EngineConfig


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *[(name, value) for name in ("threads", "num_kv_blocks", "max_seq_len") for value in (0, -1, 1.5, True, "4")],
        *[(name, value) for name in ("block_size", "max_batch", "max_batch_tokens") for value in (0, -1, 1.5, True, "4", None)],
        ("device", "tpu"),
        ("dtype", "float16"),
        ("model", ""),
    ],
)
def test_a_flag_that_can_t_work_is_refused_by_its_name(flag: str, value: object) -> None:
    with pytest.raises(FootplateError, match=f"^--{flag.replace('_', '-')}"):
        EngineConfig(**{flag: value})  # type: ignore[arg-type]  # what a script may pass


def test_a_step_must_hold_one_token_of_every_running_sequence() -> None:
    with pytest.raises(FootplateError, match="--max-batch-tokens 8 is below --max-batch 16"):
        EngineConfig(max_batch_tokens=8)
    assert EngineConfig(max_batch=8, max_batch_tokens=8).max_batch == 8


def test_a_config_is_frozen_and_can_be_replaced() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_batch = 3  # type: ignore[misc]  # that is what is tested
    assert dataclasses.replace(config, max_batch=3).max_batch == 3


def test_auto_dtype_is_bfloat16_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    native, plain = torch.bfloat16, torch.float32
    for found, dtype in (({"avx512_bf16": True}, native), ({"amx_bf16": True}, native), ({"avx2": True}, plain)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert choose_device(EngineConfig(device="cpu")).dtype == dtype
    assert choose_device(EngineConfig(device="cpu", dtype="float32", threads=3)).threads == 3
    assert choose_device(EngineConfig(device="cpu")).threads >= 1


def test_cuda_that_is_not_there_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FootplateError, match="--device cuda: PyTorch sees no CUDA GPU here"):
        choose_device(EngineConfig(device="cuda"))
    assert choose_device(EngineConfig(device="auto")).torch_device.type == "cpu"
