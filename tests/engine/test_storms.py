"""Two hundred requests, cancelled wherever they happen to be: the pools' books are recounted after every step, every block count
in the view adds up, and when nothing runs nothing is held."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from step_spy import PATIENCE_S, Step, StepSpy, assert_quiet
from tiny_engine import VOCAB, assert_same, prompt_of, watched

from engine import Engine, SamplingParams
from engine.model.forward import Forward
from engine.request import RequestHandle
from engine.view import BlockState

Start = Callable[..., Engine]
STAGES = ("queued", "prefill", "decode", "preempted")


@pytest.fixture
def recounts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were free at each forward pass; the books are recounted after every one of them."""
    run, seen = Forward.run, []

    def checked(forward: Forward, *args: Any) -> Any:
        forward.lifecycle.check()
        logits = run(forward, *args)
        forward.lifecycle.check()
        view = forward.lifecycle.blocks.view()
        counts = Counter(view.states)
        assert counts == +Counter(
            {
                BlockState.FREE: view.num_free,
                BlockState.ACTIVE: view.num_active,
                BlockState.SHARED: view.num_shared,
                BlockState.CACHED: view.num_cached,
            }
        )
        seen.append(view.num_free)
        return logits

    monkeypatch.setattr(Forward, "run", checked)
    return seen


class Canceller:
    """Cancels each request of `plans` at a stage, after some steps in it, and counts at which stage it did."""

    def __init__(self, engine: Engine, dice: random.Random) -> None:
        self.engine, self.dice = engine, dice
        self.handles: dict[int, RequestHandle] = {}
        self.plans: dict[int, tuple[str, int]] = {}
        self.seen: set[int] = set()
        self.done_at: Counter[str] = Counter()

    def submit(self, prompt: list[int], params: SamplingParams, title: str, num_samples: int) -> None:
        for handle in self.engine.sample(num_samples, prompt, params=params, title=title):
            self.handles[handle.request_id] = handle
            if self.dice.random() < 0.6:
                self.plans[handle.request_id] = self.dice.choice(STAGES), self.dice.randint(0, 3)

    def watch(self, step: Step) -> None:
        here = step.prefilling | step.decoding
        for request_id, (stage, steps) in list(self.plans.items()):
            now = (
                "prefill" if request_id in step.prefilling
                else "decode" if request_id in step.decoding
                else "preempted" if request_id in self.seen
                else "queued"
            )  # fmt: skip
            if now != stage:
                continue
            if steps and stage != "preempted":
                self.plans[request_id] = stage, steps - 1
                continue
            del self.plans[request_id]
            self.handles[request_id].cancel()
            self.done_at[stage] += 1
        self.seen |= here


@pytest.mark.parametrize("block_size", [4, 16])
def test_after_two_hundred_requests_with_cancels_at_every_stage_nothing_is_held(
    start: Start, recounts: list[int], spy: StepSpy, block_size: int
) -> None:
    engine = start(num_kv_blocks=192 // block_size, block_size=block_size, max_batch=6, max_batch_tokens=24)
    dice = random.Random(block_size)
    canary = engine.generate(prompt_of(37, 1000), watched(12))
    canceller = Canceller(engine, dice)
    spy.before = canceller.watch
    systems = [prompt_of(dice.randint(5, 40), 500 + n) for n in range(3)]
    while len(canceller.handles) < 200:
        prompt = dice.choice([[], *systems]) + [dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 40))]
        params = SamplingParams(
            max_tokens=dice.randint(1, 40), temperature=dice.choice([0.0, 1.0]), seed=len(canceller.handles), ignore_eos=True
        )
        canceller.submit(prompt, params, f"chat {dice.randrange(9)}", dice.choice([1, 1, 1, 3]))
        if len(canceller.handles) % 50 < 3:  # now and then the queue is let run down a little
            dice.choice(list(canceller.handles.values())).wait(PATIENCE_S)
    done = [handle.wait(PATIENCE_S) for handle in canceller.handles.values()]
    spy.before = None
    assert {each.finish_reason for each in done} == {"length", "cancelled"}, [each.error for each in done if each.error]
    assert all(canceller.done_at[stage] > 0 for stage in STAGES), canceller.done_at
    assert len(recounts) > 300
    assert min(recounts) <= 2, "blocks never ran short"
    assert_quiet(engine)
    totals = engine.view.totals
    assert totals.preemptions > 0
    assert totals.cached_tokens > 0
    assert totals.cancelled == sum(each.finish_reason == "cancelled" for each in done)
    assert_same(engine.generate(prompt_of(37, 1000), watched(12)), canary)
    assert_quiet(engine)


def test_a_flush_in_the_middle_of_a_storm_takes_nothing_that_is_in_use(start: Start, recounts: list[int], spy: StepSpy) -> None:
    from engine.commands import FlushPrefixCache

    engine = start(num_kv_blocks=64, block_size=4, max_batch=6, max_batch_tokens=24)
    prompts = [prompt_of(20, 1) + prompt_of(10, seed) for seed in range(12)]
    alone = []
    for prompt in prompts:
        alone.append(engine.generate(prompt, watched(20)))
        engine.command(FlushPrefixCache()).result(PATIENCE_S)
    tickets = []
    spy.before = lambda step: tickets.append(engine.command(FlushPrefixCache())) if len(spy.steps) % 3 == 0 else None
    handles = [engine.submit(prompt, params=watched(20)) for prompt in prompts]
    for handle, expected in zip(handles, alone, strict=True):
        assert_same(handle.result(PATIENCE_S), expected)
    spy.before = None
    freed = [ticket.result(PATIENCE_S) for ticket in tickets]
    assert len(freed) > 5 and any(freed)
    assert_quiet(engine)
