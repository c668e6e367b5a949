"""What goes wrong inside: an error in a forward pass ends its requests and no others; a broken invariant ends the engine in
view of everybody who waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from step_spy import PATIENCE_S, StepSpy, assert_quiet, until
from tiny_engine import assert_same, greedy, prompt_of, watched

from engine import Engine
from engine.commands import CancelRequest, FlushPrefixCache
from engine.errors import CommandRefused, EngineStopped, InvariantBroken, RequestError
from engine.layers.decoder import DecoderLayer
from engine.model.lifecycle import Lifecycle
from engine.scheduler import Scheduler

Start = Callable[..., Engine]


class Fault:
    """Raises `error` in a layer, once, the next time the layer computes after `arm()`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.fired = 0
        self._armed = False
        call = DecoderLayer.__call__

        def faulty(layer: DecoderLayer, x: torch.Tensor, *rest: object) -> torch.Tensor:
            if self._armed:
                self._armed = False
                self.fired += 1
                raise error
            return call(layer, x, *rest)  # type: ignore[arg-type]  # passed on as it came

        monkeypatch.setattr(DecoderLayer, "__call__", faulty)

    def arm(self) -> None:
        self._armed = True


def test_an_error_in_a_forward_pass_ends_its_requests_in_a_sentence_and_the_next_one_works(
    start: Start, spy: StepSpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, RuntimeError("boom in the layer"))
    engine = start(max_batch=2)
    alone = engine.generate(prompt_of(20, 3), watched(6))
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    spy.hold()
    struck = [engine.submit(prompt_of(20, seed), params=greedy(30)) for seed in (1, 2)]
    spy.wait()
    spy.step()
    spy.step()
    waiting = engine.submit(prompt_of(20, 3), params=watched(6))
    fault.arm()
    spy.open()
    for handle in struck:
        done = handle.wait(PATIENCE_S)
        assert done.finish_reason == "error"
        assert done.error == "the forward pass failed: RuntimeError: boom in the layer"
        with pytest.raises(RequestError, match="boom in the layer"):
            handle.result()
        with pytest.raises(RequestError, match="boom in the layer"):
            list(handle)
    assert_same(waiting.result(PATIENCE_S), alone)
    assert fault.fired == 1
    assert_same(engine.generate(prompt_of(20, 3), watched(6)), alone)
    assert_quiet(engine)
    assert engine.view.totals.failed == 2
    assert "boom in the layer" in " ".join(event.text for event in engine.view.events if event.kind == "error")


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_an_error_in_any_chunk_of_a_prompt_leaves_nothing_wrong_in_the_cache(
    start: Start, spy: StepSpy, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    fault = Fault(monkeypatch, ValueError("struck"))
    engine = start(max_batch_tokens=16, block_size=4, max_batch=4)
    prompt = prompt_of(60)
    alone = engine.generate(prompt, watched(10))
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    del spy.steps[:]
    spy.before = lambda _: fault.arm() if len(spy.steps) == chunk else None
    with pytest.raises(RequestError, match="ValueError: struck"):
        engine.generate(prompt, greedy(10))
    assert len(spy.steps) == chunk
    assert_same(engine.generate(prompt, watched(10)), alone)
    assert_quiet(engine)


def test_a_forward_pass_that_yields_nan_ends_its_request_and_spoils_no_other(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(block_size=4)
    prompt = prompt_of(30)
    alone = engine.generate(prompt, watched(10))
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    call, spoil = DecoderLayer.__call__, [True]

    def spoiling(layer: DecoderLayer, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return call(layer, x * float("nan") if spoil[0] else x, *rest)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(DecoderLayer, "__call__", spoiling)
    with pytest.raises(RequestError, match=r"logits weren't finite"):
        engine.generate(prompt, greedy(10))
    spoil[0] = False
    # The prompt's blocks hold NaN: had they stayed in the prefix cache, or leaked into another's attention, this would show it.
    assert_same(engine.generate(prompt, watched(10)), alone)
    assert engine.generate(prompt_of(61, 5), greedy(3)).finish_reason == "length"
    assert_quiet(engine)


def test_one_row_s_nan_ends_that_request_alone(start: Start, spy: StepSpy, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.sampler import Sampler

    engine = start()
    alone = engine.generate(prompt_of(20, 1), watched(8))
    sample, spoil = Sampler.sample, []

    def spoiling(sampler: Sampler, logits: torch.Tensor, rows: list[object]) -> object:
        for index, row in enumerate(rows):
            if row in spoil and len(row.output_token_ids) == 3:  # type: ignore[attr-defined]  # a RowState
                logits[index, 100] = float("nan")
        return sample(sampler, logits, rows)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Sampler, "sample", spoiling)
    spy.hold()
    healthy = engine.submit(prompt_of(20, 1), params=watched(8))
    struck = engine.submit(prompt_of(20, 2), params=greedy(8))
    spy.wait()
    spoil.extend(_row_states_of(struck.request_id))
    spy.open()
    done = struck.wait(PATIENCE_S)
    assert done.finish_reason == "error"
    assert "weren't finite" in str(done.error)
    assert len(done.token_ids) == 3
    assert_same(healthy.result(PATIENCE_S), alone)
    assert_quiet(engine)


def _row_states_of(request_id: int) -> list[object]:
    """The sampler's state of a request, wherever its job is: jobs aren't reachable from outside the engine thread."""
    import gc

    from engine.scheduler import Job

    return [job.sampling for job in gc.get_objects() if type(job) is Job and job.request.request_id == request_id]


# The engine's own failure


def fail_in(monkeypatch: pytest.MonkeyPatch, where: str) -> Callable[[], None]:
    """Makes the engine's plan or its recount break an invariant, once the returned function was called."""
    armed = []
    if where == "plan":
        plan = Scheduler.plan

        def failing_plan(scheduler: Scheduler) -> object:
            if armed:
                raise InvariantBroken("KV block 3: 2 refs in the books, 1 holders.")
            return plan(scheduler)

        monkeypatch.setattr(Scheduler, "plan", failing_plan)
    else:
        check = Lifecycle.check

        def failing_check(lifecycle: Lifecycle) -> None:
            if armed:
                raise InvariantBroken("KV block 3: 2 refs in the books, 1 holders.")
            check(lifecycle)

        monkeypatch.setattr(Lifecycle, "check", failing_check)
    return lambda: armed.append(True)


def test_a_broken_invariant_becomes_a_state_and_every_waiting_reader_gets_an_error(
    start: Start, spy: StepSpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike = fail_in(monkeypatch, "plan")
    engine = start(max_batch=1)
    spy.hold()
    running = engine.submit(prompt_of(10), params=greedy(20))
    spy.wait()
    spy.step()
    queued = engine.submit(prompt_of(11), params=greedy(20))
    ticket = engine.command(CancelRequest(10**9))
    strike()
    spy.open()
    reason = "KV block 3: 2 refs in the books, 1 holders."
    for handle in (running, queued):
        done = handle.wait(PATIENCE_S)
        assert done.finish_reason == "error"
        assert reason in str(done.error)
    with pytest.raises(CommandRefused):  # drained before the step that failed
        ticket.result(PATIENCE_S)
    view = until(engine, lambda view: view.state == "failed", "the failure")
    assert view.error == reason
    assert (view.requests, view.num_running, view.num_waiting) == ((), 0, 0)
    with pytest.raises(EngineStopped, match="the engine stopped: KV block 3"):
        engine.submit(prompt_of(5))
    with pytest.raises(EngineStopped, match="the engine stopped: KV block 3"):
        engine.generate(prompt_of(5))
    late = engine.command(FlushPrefixCache())
    assert late.state == "cancelled"
    with pytest.raises(EngineStopped, match="KV block 3"):
        late.result(0)
    engine.close()
    assert engine.view.state == "failed", "closing hides what happened"


def test_the_books_are_recounted_when_the_engine_becomes_idle_and_a_difference_stops_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike = fail_in(monkeypatch, "check")
    engine = start()
    assert engine.generate(prompt_of(10), greedy(3)).finish_reason == "length"
    assert until(engine, lambda view: view.state == "idle").error is None
    strike()
    assert len(engine.generate(prompt_of(10), greedy(3)).token_ids) == 3, "the answer itself was right"
    view = until(engine, lambda view: view.state == "failed", "the failure")
    assert "2 refs in the books" in str(view.error)


def test_an_error_that_is_no_sentence_of_ours_names_its_kind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(Scheduler, "plan", lambda _: 1 / 0)
    handle = engine.submit(prompt_of(5), params=greedy(3))
    assert handle.wait(PATIENCE_S).finish_reason == "error"
    assert until(engine, lambda view: view.state == "failed").error == "ZeroDivisionError: division by zero"
