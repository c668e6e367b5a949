"""An engine's life: what importing it costs, loading, closing at any moment, and two of them in one process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from step_spy import PATIENCE_S, StepSpy, assert_quiet, until
from tiny_engine import assert_same, prompt_of, tiny_config, watched

from engine import Engine, EngineConfig, SamplingParams
from engine.commands import FlushPrefixCache
from engine.errors import CheckpointError, EngineStopped, FootplateError
from engine.weights.checkpoint import Checkpoint

Start = Callable[..., Engine]


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "footplate-engine"]


# Imports


@pytest.mark.parametrize(
    "statement",
    [
        "import engine",
        "from engine import Engine, EngineConfig, SamplingParams",
        "from engine import Command, Completion, EngineView, FootplateError, RequestHandle, Ticket",
        "import engine.view, engine.commands, engine.errors, engine.config, engine.request, engine.sampling",
        "from engine import Engine; Engine().close()",
    ],
)
def test_the_public_names_are_imported_without_torch(statement: str) -> None:
    heavy = "torch", "transformers", "textual", "numpy", "tokenizers"
    code = f"import sys; {statement}; found = [n for n in {heavy!r} if n in sys.modules]; sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import engine

    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = engine.Motor  # type: ignore[attr-defined]  # that is what is tested
    assert all(getattr(engine, name) for name in engine.__all__)


# Loading


def test_load_progress_is_seen_and_counts_up_to_the_weights(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_config(tiny_llama))
    seen = []
    read = Checkpoint.read

    def slow_read(checkpoint: Checkpoint, *args: object) -> object:
        seen.append(engine.view)
        time.sleep(0.06)  # longer than the least time between two views of a load
        return read(checkpoint, *args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Checkpoint, "read", slow_read)
    assert (engine.view.state, engine.view.loading.stage if engine.view.loading else "") == ("loading", "starting")
    engine.start()
    with pytest.raises(EngineStopped, match="still loading"):
        engine.submit([5])
    with pytest.raises(TimeoutError, match=r"not loaded after 0\.01 s"):
        engine.wait_ready(0.01)
    engine.wait_ready(PATIENCE_S)
    done = [view.loading.done_bytes for view in seen if view.loading is not None and view.loading.total_bytes]
    assert done == sorted(done)
    assert len(set(done)) > 10
    total = seen[-1].loading
    assert total is not None
    assert total.total_bytes == (tiny_llama / "model.safetensors").stat().st_size - _header_bytes(tiny_llama)
    assert engine.view.loading is None
    assert engine.view.state == "idle"
    engine.close()


def _header_bytes(directory: Path) -> int:
    with (directory / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_what_ends_a_load_is_raised_and_shown(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file"):
        Engine.load(tmp_path / "no.gguf", EngineConfig(device="cpu"))
    engine = Engine(EngineConfig(model=str(tmp_path / "no.gguf"), device="cpu"))
    engine.start()
    with pytest.raises(CheckpointError):
        engine.wait_ready(PATIENCE_S)
    view = until(engine, lambda view: view.state == "failed")
    assert "there is no such file" in str(view.error)
    with pytest.raises(EngineStopped, match="there is no such file"):
        engine.submit([5])
    engine.close()
    assert not engine_threads()


def test_an_engine_that_does_not_fit_is_refused_with_the_figures(tiny_llama: Path) -> None:
    with pytest.raises(FootplateError, match=r"needs .* MiB .* lower --num-kv-blocks"):
        Engine.load(config=tiny_config(tiny_llama, num_kv_blocks=2**34))


def test_an_engine_is_started_once(start: Start) -> None:
    engine = start()
    with pytest.raises(EngineStopped, match="started before"):
        engine.start()
    assert len(engine_threads()) == 1


# Closing


def test_closing_while_loading_ends_the_load_soon_and_says_so(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = Checkpoint.read, []

    def slow_read(checkpoint: Checkpoint, *args: object) -> object:
        reads.append(args)
        time.sleep(0.05)
        return read(checkpoint, *args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Checkpoint, "read", slow_read)
    engine = Engine(tiny_config(tiny_llama))
    engine.start()
    ticket = engine.command(FlushPrefixCache())
    deadline = time.monotonic() + PATIENCE_S
    while len(reads) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 1.0
    assert len(reads) < 8, "the load went on"
    assert engine.view.state == "stopped"
    assert engine.view.error is None
    with pytest.raises(EngineStopped, match="closed before its model was loaded"):
        engine.wait_ready(1)
    with pytest.raises(EngineStopped):
        ticket.result(1)
    assert not engine_threads()


def test_closing_in_mid_answer_is_quick_and_ends_every_request_as_cancelled(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=2, num_kv_blocks=200)
    spy.hold()
    running = [engine.submit(prompt_of(20, i), params=SamplingParams(max_tokens=800)) for i in range(2)]
    spy.wait()
    for _ in range(4):
        spy.step()
    queued = [engine.submit(prompt_of(20, i), params=SamplingParams(max_tokens=800)) for i in range(3)]
    spy.step()
    unseen = engine.submit(prompt_of(20, 9), params=SamplingParams(max_tokens=800))  # still in the inbox when the engine stops
    begin = time.monotonic()
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine._stop.is_set():
        time.sleep(0.001)
    spy.open()
    closer.join(PATIENCE_S)
    assert time.monotonic() - begin < 2.0
    for handle in (*running, *queued, unseen):
        done = handle.wait(1)
        assert (done.finish_reason, done.error) == ("cancelled", None)
    assert all(0 < len(handle.token_ids) < 800 for handle in running)
    assert engine.view.state == "stopped"
    assert engine.view.requests == ()
    assert not engine_threads()


def test_closing_twice_or_from_many_threads_is_closing_once(start: Start) -> None:
    engine = start()
    threads = [threading.Thread(target=engine.close) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    published = engine.view.published
    engine.close()
    assert engine.view.state == "stopped"
    assert engine.view.published == published
    with pytest.raises(EngineStopped, match="the engine was closed"):
        engine.submit([5])
    ticket = engine.command(FlushPrefixCache())
    assert ticket.state == "cancelled"
    with pytest.raises(EngineStopped, match="the engine was closed"):
        ticket.result(0)


def test_an_engine_that_never_started_can_be_closed_and_answers_its_tickets() -> None:
    engine = Engine()
    ticket = engine.command(FlushPrefixCache())
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped):
        ticket.result(1)
    with pytest.raises(EngineStopped):
        engine.submit([5])
    assert engine.view.state == "stopped"


def test_a_with_block_closes_the_engine_after_an_error_too(tiny_llama: Path) -> None:
    with pytest.raises(KeyError), Engine.load(config=tiny_config(tiny_llama)) as engine:
        raise KeyError("a person's own")
    assert engine.view.state == "stopped"
    assert not engine_threads()


def test_closing_frees_the_model(tiny_llama: Path) -> None:
    import gc
    import weakref

    from engine.model.transformer import TransformerModel

    gc.collect()
    with Engine.load(config=tiny_config(tiny_llama)) as engine:
        engine.generate(prompt_of(10), SamplingParams(max_tokens=2))
        [model] = [found for found in gc.get_objects() if type(found) is TransformerModel and hasattr(found, "kv_cache")]
        held = [weakref.ref(model.kv_cache), weakref.ref(model.store.get("model.embed_tokens.weight")), weakref.ref(model)]
        del model
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


# Two at once


def test_two_engines_in_one_process_answer_as_each_does_alone(start: Start, tiny_llama_with_text: Path) -> None:
    prompt, params = prompt_of(30), watched(40)
    one = start()
    alone = one.generate(prompt, params)
    other = start(tiny_llama_with_text, block_size=4, num_kv_blocks=100)
    handles = [engine.submit(prompt, params=params) for engine in (one, other) for _ in range(3)]
    for handle in handles:
        assert_same(handle.result(PATIENCE_S), alone)
    assert len(engine_threads()) == 2
    one.close()
    assert_same(other.generate(prompt, params), alone)
    assert_quiet(other)


def test_an_engine_of_a_random_shape_runs_on_token_ids() -> None:
    from engine.families import shapes

    tiny = shapes._dense("llama", "tiny-shape", 32, 64, 4, 2, 8, 128, 256, 2, 10000.0)
    shapes.SHAPES["tiny-shape"] = tiny
    try:
        with Engine.from_shape("tiny-shape", EngineConfig(device="cpu", dtype="float32", threads=1, num_kv_blocks=8)) as engine:
            assert engine.view.model is not None
            assert engine.view.model.weight_format == "random"
            assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=5)).token_ids) == 5
            assert_quiet(engine)
    finally:
        del shapes.SHAPES["tiny-shape"]
    with pytest.raises(FootplateError, match="'no-such' is unknown; choose one of"):
        Engine.from_shape("no-such", EngineConfig(device="cpu"))
