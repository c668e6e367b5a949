"""Scheduling under pressure: preemption by recompute, admission when blocks are short, and a storm of cancels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from step_spy import PATIENCE_S, Step, StepSpy, assert_quiet
from tiny_engine import assert_same, greedy, prompt_of, watched

from engine import Engine, SamplingParams
from engine.request import RequestHandle

Start = Callable[..., Engine]


def regressions(spy: StepSpy, handle: RequestHandle) -> int:
    """How often a request's computed tokens fell: how often it was preempted after it had begun."""
    computed = [row.computed for row in spy.rows_of(handle.request_id)]
    return sum(after <= before for before, after in itertools.pairwise(computed))


MIXED_PARAMS = [
    watched(24),
    watched(24, temperature=1.0, seed=7),
    watched(24, temperature=0.8, top_k=20, top_p=0.9, seed=8, presence_penalty=1.0),
    watched(24, repetition_penalty=1.5, frequency_penalty=0.5),
]


@pytest.mark.parametrize("block_size", [4, 16])
def test_preemption_by_recompute_happens_and_changes_no_answer(start: Start, spy: StepSpy, block_size: int) -> None:
    prompts = [prompt_of(9 + 5 * i, i) for i in range(4)]
    roomy = start(num_kv_blocks=400 // block_size, block_size=block_size)
    expected = [
        handle.result(PATIENCE_S)
        for handle in [roomy.submit(prompt, params=params) for prompt, params in zip(prompts, MIXED_PARAMS, strict=True)]
    ]
    assert_quiet(roomy)
    assert roomy.view.totals.preemptions == 0
    tight = start(num_kv_blocks=96 // block_size, block_size=block_size)
    del spy.steps[:]
    spy.hold()
    handles = [tight.submit(prompt, params=params) for prompt, params in zip(prompts, MIXED_PARAMS, strict=True)]
    spy.wait()
    spy.open()
    for handle, alone in zip(handles, expected, strict=True):
        assert_same(handle.result(PATIENCE_S), alone)
    fell_back = [regressions(spy, handle) for handle in handles]
    assert sum(fell_back) > 0, "nobody was preempted: the pool was too large for the test"
    assert fell_back[0] == 0, "the oldest request was preempted before a newer one"
    assert_quiet(tight)
    assert tight.view.totals.preemptions >= sum(fell_back)
    assert any(event.kind == "preempt" for event in tight.view.events)


def test_a_preempted_request_sends_no_token_twice(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=12, block_size=4)
    handles = [engine.submit(prompt_of(8, seed), params=SamplingParams(max_tokens=24, logprobs=1)) for seed in range(3)]
    done = [handle.result(PATIENCE_S) for handle in handles]
    assert sum(regressions(spy, handle) for handle in handles) > 0
    for each in done:
        assert each.logprobs is not None
        assert len(each.token_ids) == 24
        assert tuple(entry.token_id for entry in each.logprobs) == each.token_ids


def test_preemption_takes_the_newest_and_lets_it_go_on_first(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=12, block_size=4, max_batch=3)
    spy.hold()
    handles = [engine.submit(prompt_of(8, seed), params=greedy(30)) for seed in range(3)]
    spy.wait()
    late = engine.submit(prompt_of(4, 9), params=greedy(2))
    spy.open()
    for handle in (*handles, late):
        handle.result(PATIENCE_S)
    assert regressions(spy, handles[0]) == 0
    assert regressions(spy, handles[2]) > 0
    began = next(index for index, step in enumerate(spy.steps) if late.request_id in step.prefilling)
    here = spy.steps[began].prefilling | spy.steps[began].decoding
    ever_after = {row.request_id for step in spy.steps[began:] for row in step.rows}
    out = {handle.request_id for handle in handles} & ever_after - here
    assert not out, "a newcomer overtook a preempted request"
    assert_quiet(engine)


def test_a_pool_for_one_serves_many_one_after_the_other(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=10, block_size=4)
    handles = [engine.submit(prompt_of(30, seed), params=greedy(10)) for seed in range(5)]
    for handle in handles:
        assert len(handle.result(PATIENCE_S).token_ids) == 10  # 30 + 10: every block there is
    assert all(len(step.rows) == 1 for step in spy.steps)
    assert_quiet(engine)


def test_a_long_prompt_waits_for_blocks_and_then_gets_them(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=12, block_size=4)
    alone = engine.generate(prompt_of(40, 5), watched(6))
    del spy.steps[:]
    spy.hold()
    first = engine.submit(prompt_of(20, 1), params=greedy(20))
    spy.wait()
    long = engine.submit(prompt_of(40, 5), params=watched(6))
    spy.open()
    assert len(first.result(PATIENCE_S).token_ids) == 20
    assert_same(long.result(PATIENCE_S), alone)
    began = next(index for index, step in enumerate(spy.steps) if long.request_id in step.prefilling)
    assert all(first.request_id not in step.decoding for step in spy.steps[began:]), "both can't have fitted"
    assert_quiet(engine)


def test_the_blocks_of_a_prompt_that_is_being_computed_are_promised_to_it(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=12, block_size=4, max_batch_tokens=8)
    spy.hold()
    first = engine.submit(prompt_of(40, 1), params=greedy(2))
    spy.wait()
    spy.step()
    second = engine.submit(prompt_of(20, 2), params=greedy(2))  # there is room for it now, but not once the first is computed
    spy.open()
    first.result(PATIENCE_S)
    second.result(PATIENCE_S)
    assert_quiet(engine)
    assert engine.view.totals.preemptions == 0
    assert all(not (first.request_id in step.prefilling and second.request_id in step.prefilling) for step in spy.steps)


def test_decode_goes_on_at_every_step_however_many_prompts_come(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch_tokens=12, num_kv_blocks=200, max_batch=6)
    spy.hold()
    answering = engine.submit(prompt_of(6), params=greedy(60))
    spy.wait()
    prompts = [engine.submit(prompt_of(50, seed), params=greedy(3)) for seed in range(1, 9)]
    spy.open()
    answering.result(PATIENCE_S)
    for handle in prompts:
        handle.result(PATIENCE_S)
    rows = [index for index, step in enumerate(spy.steps) if answering.request_id in step.decoding]
    assert rows == list(range(rows[0], rows[0] + 59)), "a step went by without the running answer's token"
    assert sum(bool(step.prefilling) for step in spy.steps[rows[0] : rows[-1]]) > 20
    assert all(sum(row.q_len for row in step.rows) <= 12 for step in spy.steps)


# A storm


@dataclass
class Storm:
    """Cancels requests when they reach a stage, and counts what really happened."""

    handles: dict[int, RequestHandle] = field(default_factory=dict)
    plans: dict[int, tuple[str, int]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    cancelled_in: dict[str, int] = field(default_factory=dict)

    def cancel(self, request_id: int, stage: str) -> None:
        del self.plans[request_id]
        self.handles[request_id].cancel()
        self.cancelled_in[stage] = self.cancelled_in.get(stage, 0) + 1

    def watch(self, step: Step) -> None:
        for request_id, (stage, countdown) in list(self.plans.items()):
            if request_id not in self.handles:
                continue  # its submit hasn't returned yet
            here = {
                "prefill": request_id in step.prefilling,
                "decode": request_id in step.decoding,
                "preempted": request_id in self.seen and request_id not in step.prefilling | step.decoding,
                "queued": request_id not in self.seen,
            }
            if here[stage]:
                if countdown:
                    self.plans[request_id] = stage, countdown - 1
                else:
                    self.cancel(request_id, stage)
        self.seen |= step.prefilling | step.decoding


@pytest.mark.parametrize("seed", [1, 2])
def test_after_a_storm_of_cancels_at_every_stage_all_blocks_are_free(start: Start, spy: StepSpy, seed: int) -> None:
    engine = start(num_kv_blocks=40, block_size=4, max_batch=6, max_batch_tokens=24)
    dice, storm = random.Random(seed), Storm()
    canary_prompt = prompt_of(33, 1000)
    canary = engine.generate(canary_prompt, watched(12))
    spy.before = storm.watch
    for i in range(100):
        params = SamplingParams(max_tokens=dice.randint(1, 40), temperature=dice.choice([0.0, 1.0]), seed=i, ignore_eos=True)
        # Some begin alike, so that blocks are shared while their holders are cancelled.
        prompt = prompt_of(dice.randint(1, 30), dice.choice([0, 1, 2, i])) + prompt_of(dice.randint(1, 40), i)
        handle = engine.submit(prompt, params=params, title=f"chat {i % 7}")
        storm.handles[handle.request_id] = handle
        if dice.random() < 0.7:
            stage = dice.choice(["queued", "prefill", "prefill", "decode", "decode", "preempted"])
            storm.plans[handle.request_id] = stage, dice.randint(0, 2) if stage != "preempted" else 0
    done = [handle.wait(PATIENCE_S) for handle in storm.handles.values()]
    spy.before = None
    assert {each.finish_reason for each in done} == {"length", "cancelled"}, [each.error for each in done if each.error]
    assert min(storm.cancelled_in.get(stage, 0) for stage in ("queued", "prefill", "decode", "preempted")) > 0, storm.cancelled_in
    checks = spy.num_checks
    assert_quiet(engine)
    assert spy.num_checks >= checks
    assert spy.num_checks > 0, "the books were never recounted"
    totals = engine.view.totals
    assert totals.requests == 101
    assert totals.cancelled == sum(each.finish_reason == "cancelled" for each in done) > 20
    assert totals.preemptions > 0
    assert_same(engine.generate(canary_prompt, watched(12)), canary)
