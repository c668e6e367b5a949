"""Llama on a CUDA GPU: parity with the CPU's float32 oracle, SmolLM2 in bfloat16, streams and events, memory that comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from closeness import judge, pieces
from recorded import agreement, recorded_distributions
from tiny_llamas import VARIANTS, TinyLlama
from under_test import all_logits, chunks_of, loaded

from engine import Engine, EngineConfig, SamplingParams
from engine.config import DEFAULT_MODEL
from engine.errors import CheckpointError
from engine.model.base import ModelStreams
from engine.model.streams import streams_for
from engine.weights.locate import locate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

Variants = Callable[[str], TinyLlama]
SLEEP_CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The default model's file; skips where it is neither cached nor to be had."""
    try:
        return locate(DEFAULT_MODEL)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture
def streams() -> ModelStreams:
    return streams_for(torch.device("cuda", torch.cuda.current_device()))


# Parity


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [40, 17, 1])
def test_float32_on_a_gpu_equals_transformers_on_a_cpu(
    tiny_llama_variant: Variants, prompt: list[int], name: str, size: int
) -> None:
    tiny = tiny_llama_variant(name)
    with loaded(tiny.path, device="cuda") as model:
        assert model.kv_cache.is_cuda
        verdict = judge(all_logits(model, prompt, pieces(len(prompt), size)), tiny.expected)
    assert verdict.holds, verdict


def test_decode_beside_prefill_on_a_gpu_equals_transformers_on_a_cpu(tiny_llama_variant: Variants, prompt: list[int]) -> None:
    tiny = tiny_llama_variant("grouped")
    with loaded(tiny.path, device="cuda", block_size=4) as model:
        decoding = [model.lifecycle.alloc_sequence() for _ in range(3)]
        for seq, length in zip(decoding, (3, 16, 25), strict=True):
            model.forward.prefill(prompt[:length], seq)
        joining = model.lifecycle.alloc_sequence()
        result = model.forward.mixed_forward([prompt[n] for n in (3, 16, 25)], decoding, prompt, joining, 0, 40, True)
        assert result.decode_logits is not None
        assert result.prefill_logits is not None
        verdict = judge(torch.cat([result.decode_logits, result.prefill_logits]), tiny.expected, [3, 16, 25, -1])
        assert verdict.holds, verdict
        for seq in (*decoding, joining):
            model.lifecycle.free_sequence(seq)


def test_an_engine_on_a_gpu_answers_as_one_on_a_cpu(tiny_llama_variant: Variants, prompt: list[int]) -> None:
    path = str(tiny_llama_variant("grouped").path)
    params = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5),
    ]
    answers = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(model=path, device=device, dtype="float32", num_kv_blocks=64, threads=1)
        with Engine.load(config=config) as engine:
            handles = [engine.submit(prompt, params=each) for each in params]
            answers.append([handle.result(60).token_ids for handle in handles])
            view = engine.view
            assert view.memory is not None
            assert view.memory.source == ("rss" if device == "cpu" else "nvml")
            assert sum(item.bytes for item in view.memory.items) == view.memory.total_bytes
    assert answers[0] == answers[1]


def test_smollm2_in_bfloat16_on_a_gpu_agrees_with_llama_cpp(smollm2: Path) -> None:
    recorded = recorded_distributions()
    with loaded(smollm2, device="cuda", dtype="bfloat16", num_kv_blocks=40, max_batch=128, max_seq_len=1024) as model:
        found = agreement((logits.cpu() for logits in chunks_of(model, recorded["ids"].tolist(), 128)), recorded)
    assert 0 < found.kl <= 0.005, found
    assert found.top1 >= 0.95, found


def test_smollm2_answers_through_an_engine_in_bfloat16_on_a_gpu(smollm2: Path) -> None:
    with Engine.load(smollm2, EngineConfig(device="cuda", dtype="bfloat16")) as engine:
        done = engine.submit(
            messages=[{"role": "user", "content": "What is the capital of France?"}], params=SamplingParams(max_tokens=40)
        ).result(120)
    assert "Paris" in done.text


# Memory


def test_teardown_on_a_gpu_gives_the_memory_back(tiny_llama_variant: Variants) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    with loaded(tiny_llama_variant("grouped").path, device="cuda", num_kv_blocks=4000) as model:
        held = sum(item.bytes for item in model.memory_items())
        assert torch.cuda.memory_allocated() - before > 0.9 * model.kv_cache.nbytes
        assert held > model.kv_cache.nbytes
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# Streams and events


@pytest.fixture
def busy(streams: ModelStreams) -> Iterator[torch.cuda.Stream]:
    """A stream of its own that is busy for a while; the device is idle again after the test."""
    stream = streams.create_stream()
    assert stream is not None
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    yield stream
    torch.cuda.synchronize()


def test_an_event_completes_when_its_stream_has_got_there(streams: ModelStreams, busy: torch.cuda.Stream) -> None:
    event = streams.create_event()
    streams.record_event(event, busy)
    assert not streams.event_query(event), "the query waited, or the event was recorded on another stream"
    streams.event_synchronize(event)
    assert streams.event_query(event)
    streams.destroy_event(event)


def test_a_stream_that_waits_for_an_event_comes_after_it_and_the_host_goes_on(
    streams: ModelStreams, busy: torch.cuda.Stream
) -> None:
    cell = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()  # the zero is there
    with torch.cuda.stream(busy):
        torch.cuda._sleep(SLEEP_CYCLES)
        cell.fill_(7.0)
    event, other = streams.create_event(), streams.create_stream()
    assert other is not None
    streams.record_event(event, busy)
    streams.stream_wait_event(other, event)
    assert not streams.event_query(event), "the host waited"
    with torch.cuda.stream(other):
        copy = cell.clone()
    streams.synchronize(other)
    assert float(copy) == 7.0
    assert streams.event_query(event)


def test_synchronising_a_stream_waits_for_that_stream(streams: ModelStreams, busy: torch.cuda.Stream) -> None:
    event = streams.create_event()
    streams.record_event(event, busy)
    streams.synchronize()  # the default stream has nothing to do
    assert not streams.event_query(event)
    streams.synchronize(busy)
    assert streams.event_query(event)


def test_an_event_on_no_stream_is_on_the_default_one(streams: ModelStreams) -> None:
    torch.cuda.synchronize()
    default = streams.default_stream
    assert default is not None
    assert default == torch.cuda.default_stream()
    with torch.cuda.stream(default):
        torch.cuda._sleep(SLEEP_CYCLES)
    event = streams.create_event()
    streams.record_event(event)
    assert not streams.event_query(event)
    streams.synchronize()
    assert streams.event_query(event)
    # What was never recorded has completed.
    assert streams.event_query(streams.create_event())
    assert streams.event_query(None)
