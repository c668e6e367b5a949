"""Several samples of one prompt: it is computed once, its blocks are shared, and each sample is what it would be alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cache_oracle import recompute, record
from step_spy import PATIENCE_S, StepSpy, assert_quiet, until
from tiny_engine import assert_same, greedy, prompt_of, tiny_config, watched

from engine import Engine, SamplingParams
from engine.commands import FlushPrefixCache
from engine.errors import RequestError
from engine.view import BlockState

Start = Callable[..., Engine]


def flush(engine: Engine) -> None:
    engine.command(FlushPrefixCache()).result(PATIENCE_S)


@pytest.fixture(autouse=True)
def every_step_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view after each step, not ten a second: what a test looks for may last one step."""
    monkeypatch.setattr("engine.loop.PUBLISH_S", 0.0)


@pytest.mark.parametrize("num_samples", [2, 4, 7])
def test_the_prompt_of_n_samples_is_computed_once(start: Start, spy: StepSpy, num_samples: int) -> None:
    engine = start(block_size=8, max_batch_tokens=32)
    prompt = prompt_of(65, 1)
    handles = engine.sample(num_samples, prompt, params=SamplingParams(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True))
    done = [handle.result(PATIENCE_S) for handle in handles]
    prefilled = sum(row.q_len for step in spy.steps for row in step.rows if row.computed + row.q_len <= len(prompt))
    assert prefilled == len(prompt) + (num_samples - 1), "the others compute the prompt's last token, for its logits"
    assert [each.stats.cached_tokens for each in done] == [0] + [64] * (num_samples - 1)
    assert until(engine, lambda view: view.state == "idle").totals.prefill_tokens == prefilled
    assert len({each.token_ids for each in done}) == num_samples, "two samples are the same"
    assert_quiet(engine)


def test_the_samples_share_the_prompt_s_blocks_while_they_run(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=8, max_batch_tokens=64)
    spy.hold()
    handles = engine.sample(4, prompt_of(41, 2), params=SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True))
    spy.wait()
    for _ in range(4):
        spy.step()
    view = until(engine, lambda view: view.num_running == 4 and all(r.state == "decode" for r in view.requests))
    assert view.kv is not None
    shared = [view.kv.refs[block] for block, state in enumerate(view.kv.states) if state == BlockState.SHARED]
    assert shared == [4] * 5, "five whole blocks of the prompt, each held by four"
    assert view.kv.num_active == 4, "each has one of its own, for the prompt's last token and its answer"
    spy.open()
    assert all(len(handle.result(PATIENCE_S).token_ids) == 20 for handle in handles)
    kv = until(engine, lambda view: view.state == "idle").kv
    assert kv is not None
    assert kv.num_shared == kv.num_active == 0
    assert_quiet(engine)


def test_each_sample_is_what_a_request_with_its_seed_gets_alone(start: Start) -> None:
    engine = start(block_size=8)
    prompt, params = prompt_of(40, 3), watched(12, temperature=0.9, top_k=40, seed=11, ignore_eos=True)
    together = [handle.result(PATIENCE_S) for handle in engine.sample(3, prompt, params=params)]
    for index, sample in enumerate(together):
        flush(engine)
        assert_same(engine.generate(prompt, watched(12, temperature=0.9, top_k=40, seed=11 + index, ignore_eos=True)), sample)


def test_the_samples_logits_are_those_of_a_run_that_shares_nothing(
    start: Start, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record(monkeypatch)
    engine = start(block_size=8, max_batch_tokens=16)
    handles = engine.sample(4, prompt_of(65, 5), params=SamplingParams(max_tokens=9, temperature=1.0, seed=2, ignore_eos=True))
    for handle in handles:
        handle.result(PATIENCE_S)
    engine.close()
    assert max(len(each.parts) for each in passes) == 4
    config = tiny_config(tiny_llama, block_size=8, max_batch_tokens=16, num_kv_blocks=128)
    assert recompute(config, list(passes), lambda part: [16] * 4) == 3 * 64


def test_greedy_samples_are_all_the_same_and_cancelling_one_leaves_the_others(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=8, max_batch_tokens=64)
    alone = engine.generate(prompt_of(41, 6), watched(16))
    flush(engine)
    spy.hold()
    handles = engine.sample(4, prompt_of(41, 6), params=watched(16))
    spy.wait()
    for _ in range(5):
        spy.step()
    handles[0].cancel()  # the one that computed the prompt
    spy.open()
    done = [handle.result(PATIENCE_S) for handle in handles]
    assert [each.finish_reason for each in done] == ["cancelled", "length", "length", "length"]
    for each in done[1:]:
        assert_same(each, alone)
    assert_quiet(engine)


def test_samples_of_a_pool_too_small_for_all_take_turns_and_leave_every_count_right(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=14, block_size=4, max_batch=6)
    prompt = prompt_of(21, 7)
    for _ in range(2):
        handles = engine.sample(6, prompt, params=SamplingParams(max_tokens=14, temperature=1.0, seed=3, ignore_eos=True))
        done = [handle.result(PATIENCE_S) for handle in handles]
        assert all(len(each.token_ids) == 14 for each in done)
    assert engine.view.totals.preemptions > 0, "the pool was large enough for all"
    assert_quiet(engine)
    roomy = start(num_kv_blocks=200, block_size=4, max_batch=6)
    again = [
        handle.result(PATIENCE_S)
        for handle in roomy.sample(6, prompt, params=SamplingParams(max_tokens=14, temperature=1.0, seed=3, ignore_eos=True))
    ]
    assert [each.token_ids for each in again] == [each.token_ids for each in done]


@pytest.mark.parametrize("num_samples", [0, -1, True, 2.0, "2", None])
def test_a_number_of_samples_that_is_none_is_refused_before_any_is_queued(start: Start, num_samples: object) -> None:
    engine = start()
    with pytest.raises(RequestError, match="number of samples must be a whole number"):
        engine.sample(num_samples, prompt_of(5))  # type: ignore[arg-type]  # what a script may pass
    with pytest.raises(RequestError, match="isn't in the vocabulary"):
        engine.sample(3, [5, 9999])
    assert len(engine.generate(prompt_of(5), greedy(1)).token_ids) == 1
    assert engine.view.totals.requests <= 1
