"""The view: frozen, free of tensors, JSON-ready, published often enough and not too often, and its figures add up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from step_spy import PATIENCE_S, StepSpy, assert_quiet, until
from tiny_engine import greedy, prompt_of

from engine import Engine, EngineView
from engine.commands import FlushPrefixCache
from engine.view import BlockState, as_json

Start = Callable[..., Engine]


def parts_of(value: object) -> Iterator[object]:
    """Everything within a view."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts_of(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from parts_of(item)


def busy_view(engine: Engine, spy: StepSpy) -> EngineView:
    """A view with running, waiting and finished requests, tickets and events in it."""
    engine.generate(prompt_of(40, 1), greedy(4))
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    spy.hold()
    for seed in range(4):
        engine.submit(prompt_of(20 + seed, seed), params=greedy(50), title=f"chat {seed}")
    spy.wait()
    time.sleep(0.11)
    spy.step()
    time.sleep(0.11)
    spy.step()
    return engine.view


def test_a_view_is_frozen_through_and_through_and_holds_plain_data_alone(start: Start, spy: StepSpy) -> None:
    view = busy_view(start(max_batch=2), spy)
    assert view.state == "running"
    found = list(parts_of(view))
    assert len(found) > 150
    for part in found:
        if dataclasses.is_dataclass(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, dataclasses.fields(part)[0].name, None)
        else:
            assert part is None or type(part) in (int, float, str, bool, bytes, tuple), type(part)


def test_a_view_as_json_reads_back_with_lists_for_bytes(start: Start, spy: StepSpy) -> None:
    view = busy_view(start(max_batch=2), spy)
    read = json.loads(json.dumps(as_json(view), allow_nan=False))
    assert view.kv is not None
    assert read["kv"]["states"] == list(view.kv.states)
    assert len(read["kv"]["owners"]) == len(read["kv"]["touched_steps"]) == len(read["kv"]["states"]) == view.kv.num_blocks
    assert set(read["kv"]["owners"]) == {-1, *(request["request_id"] for request in read["requests"] if request["num_blocks"])}
    assert read["requests"][0]["title"] == "chat 0"
    assert read["model"]["family"] == "llama"
    assert json.dumps(as_json(EngineView()))


def test_a_recorded_view_needs_no_torch() -> None:
    code = "import sys; from engine.view import EngineView, as_json; as_json(EngineView()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_figures_of_a_busy_engine_add_up(start: Start, spy: StepSpy) -> None:
    view = busy_view(start(max_batch=2, block_size=4), spy)
    kv, memory = view.kv, view.memory
    assert kv is not None
    assert memory is not None
    assert kv.num_free + kv.num_active + kv.num_shared + kv.num_cached + kv.num_pinned == kv.num_blocks == 64
    counts = [kv.num_free, kv.num_active, kv.num_shared, kv.num_cached, kv.num_pinned]
    assert [kv.states.count(state) for state in BlockState] == counts
    assert sum(item.bytes for item in memory.items) == memory.total_bytes <= memory.capacity_bytes
    assert memory.source == "rss"
    assert {"kv blocks", "workspace", "other", "weights: attention"} <= {item.name for item in memory.items}
    assert (view.num_running, view.num_waiting) == (2, 2)
    assert [request.state for request in view.requests] == ["decode", "decode", "queued", "queued"]
    running = view.requests[:2]
    assert sum(request.num_blocks for request in running) >= kv.num_active + kv.num_shared
    for request in running:
        assert request.prompt_tokens <= request.computed_tokens <= request.num_blocks * 4
        assert request.output_tokens >= 1
        assert request.max_tokens == 50
        assert request.waited_ms >= 0
    assert [request.computed_tokens for request in view.requests[2:]] == [0, 0]
    totals = view.totals
    assert (totals.requests, totals.finished) == (5, 1)
    assert totals.requests == totals.finished + totals.cancelled + totals.failed + len(view.requests)
    assert totals.prompt_tokens == 40 + 20 + 21 + 22 + 23
    assert totals.prefill_tokens == 40 + 20 + 21
    assert totals.output_tokens == 4 + sum(request.output_tokens for request in view.requests)


def test_the_totals_of_an_idle_engine_are_the_sums_over_its_requests(start: Start) -> None:
    engine = start(block_size=4)
    prompts = [prompt_of(10 + i, i % 3) for i in range(6)]  # three pairs that begin alike
    done = [engine.generate(prompt, greedy(5)) for prompt in prompts]
    assert_quiet(engine)
    totals = engine.view.totals
    assert totals.requests == totals.finished == 6
    assert totals.prompt_tokens == sum(map(len, prompts))
    assert totals.cached_tokens == sum(each.stats.cached_tokens for each in done) > 0
    assert totals.prefill_tokens == totals.prompt_tokens - totals.cached_tokens
    assert totals.output_tokens == 30


def test_views_count_up_and_come_ten_times_a_second_at_most_while_nothing_else_changes(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=100)
    seen: dict[int, float] = {}

    def watch(_: object) -> None:
        seen.setdefault(engine.view.published, engine.view.monotonic_s)
        time.sleep(0.002)

    spy.before = watch
    engine.generate(prompt_of(10), greedy(300))
    numbers, times = list(seen), list(seen.values())
    assert numbers == sorted(numbers)
    assert times == sorted(times)
    # But for the first two: the submit's own, and the one before it.
    gaps = [after - before for before, after in itertools.pairwise(times[2:])]
    assert len(gaps) >= 4
    assert min(gaps) >= 0.099
    assert len(spy.steps) > 2 * len(gaps)


def test_a_view_says_idle_soon_after_the_last_answer(start: Start) -> None:
    engine = start()
    engine.generate(prompt_of(10), greedy(3))
    # At once, not with the next interval of the rings: nothing else would publish before it.
    view = until(engine, lambda view: view.state == "idle" and view.totals.finished == 1)
    assert view.requests == ()
    assert len(view.history.step_ms) <= 1


def test_the_model_s_picture_is_what_was_loaded(start: Start) -> None:
    engine = start(max_seq_len=100)
    model, forward = engine.view.model, engine.view.forward
    assert model is not None
    assert forward is not None
    assert (model.family, model.num_layers, model.vocab_size, model.max_seq_len) == ("llama", 4, 512, 100)
    assert (model.device, model.dtype, model.threads, model.weight_format) == ("cpu", "float32", 1, "F32")
    assert model.has_chat_template is False
    assert model.source == engine.config.model
    assert forward.name == "legacy"


def test_rates_and_history_fill_while_it_works_and_say_no_data_when_nothing_ran(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=100)
    spy.before = lambda _: time.sleep(0.002)
    engine.generate(prompt_of(20), greedy(250))
    view = until(engine, lambda view: view.state == "idle" and len(view.history.step_ms) >= 2)
    assert view.step_ms is not None and view.step_ms >= 2
    assert view.host_ms is not None and 0 <= view.host_ms < view.step_ms
    assert view.last_ttft_ms is not None and view.last_ttft_ms > 0
    history = view.history
    lengths = {len(ring) for ring in dataclasses.astuple(history)[1:]}
    assert len(lengths) == 1, "the rings don't keep step"
    rates = [rate for rate in history.decode_tokens_per_s if rate is not None]
    assert rates
    assert all(0 < rate < 500 for rate in rates), rates  # at least 2 ms a step
    quiet = until(engine, lambda view: view.history.decode_tokens_per_s[-1:] == (None,))
    assert quiet.history.step_ms[-1] is None
    assert quiet.decode_tokens_per_s is None
    assert quiet.history.num_running[-1] == 0
