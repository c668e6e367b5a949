"""Who gets the next step: answers before prompts, short prompts beside long ones, and every chat its turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from step_spy import PATIENCE_S, StepSpy, assert_quiet
from tiny_engine import assert_same, greedy, prompt_of, watched

from engine import Engine
from engine.commands import FlushPrefixCache

Start = Callable[..., Engine]


@pytest.mark.parametrize("max_batch_tokens", [8, 24])
def test_a_long_prompt_takes_no_step_from_four_answering_chats(start: Start, spy: StepSpy, max_batch_tokens: int) -> None:
    engine = start(max_batch=6, max_batch_tokens=max_batch_tokens, num_kv_blocks=80, block_size=8)
    prompts = [prompt_of(7, seed) for seed in range(4)]
    alone = [engine.generate(prompt, watched(90)) for prompt in prompts]
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    del spy.steps[:]
    spy.hold()
    chats = [engine.submit(prompt, params=watched(90), title=f"chat {n}") for n, prompt in enumerate(prompts)]
    spy.wait()
    while len(spy.steps) < 8 or len(spy.steps[-1].decoding) < 4:
        spy.step()
    joined = len(spy.steps)
    long = engine.submit(prompt_of(240, 9), params=greedy(2), title="long")
    spy.open()
    long.result(PATIENCE_S)
    done = [chat.result(PATIENCE_S) for chat in chats]
    ids = {chat.request_id for chat in chats}
    beside = [step for step in spy.steps[joined:] if long.request_id in step.prefilling]
    assert len(beside) == -(-240 // (max_batch_tokens - 4)), "the prompt didn't get all that the answers left"
    assert all(ids <= step.decoding for step in beside), "an answer missed a step while the prompt was computed"
    assert all(sum(row.q_len for row in step.rows) <= max_batch_tokens for step in spy.steps)
    for found, expected in zip(done, alone, strict=True):
        assert_same(found, expected)
    assert_quiet(engine)


def test_a_short_prompt_beside_a_long_one_gets_its_first_token_early(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=4, max_batch_tokens=32, num_kv_blocks=80, block_size=8)
    spy.hold()
    long = engine.submit(prompt_of(400, 1), params=greedy(2), title="long")
    spy.wait()
    spy.step()
    short = engine.submit(prompt_of(14, 2), params=greedy(2), title="short")
    spy.open()
    for handle in (long, short):
        handle.result(PATIENCE_S)
    first = next(i for i, step in enumerate(spy.steps) if any(r.request_id == short.request_id and r.num_logits for r in step.rows))
    end = next(i for i, step in enumerate(spy.steps) if any(r.request_id == long.request_id and r.num_logits for r in step.rows))
    assert first <= 3 < end - 5, (first, end)
    # The long one goes on beside it all the same.
    assert all(long.request_id in step.prefilling for step in spy.steps[1:end])


def test_short_prompts_that_keep_coming_don_t_stop_a_long_one(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=4, max_batch_tokens=16, num_kv_blocks=80, block_size=8)
    spy.hold()
    long = engine.submit(prompt_of(160, 1), params=greedy(1), title="long")
    spy.wait()
    others = [engine.submit(prompt_of(30, seed), params=greedy(1), title=f"other {seed}") for seed in range(2, 22)]
    spy.open()
    for handle in (long, *others):
        handle.result(PATIENCE_S)
    began = next(i for i, step in enumerate(spy.steps) if long.request_id in step.prefilling)
    end = max(i for i, step in enumerate(spy.steps) if long.request_id in step.prefilling)
    assert all(long.request_id in step.prefilling for step in spy.steps[began:end]), "it stood still"
    assert end < len(spy.steps) - 1, "it came last of all"


def test_a_chat_with_thirty_queued_requests_doesn_t_shut_another_out(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=2, num_kv_blocks=40)
    spy.hold()
    many = [engine.submit(prompt_of(6, seed), params=greedy(5), title="many") for seed in range(30)]
    spy.wait()
    other = [engine.submit(prompt_of(6, 100 + n), params=greedy(5), title="other") for n in range(2)]
    spy.open()
    for handle in (*many, *other):
        handle.result(PATIENCE_S)
    order = list(dict.fromkeys(row.request_id for step in spy.steps for row in step.rows))
    assert order.index(other[0].request_id) <= 3, "it waited for the whole queue of another chat"
    assert order.index(other[1].request_id) <= 6
    # Within one chat: first come, first served.
    mine = [request_id for request_id in order if request_id in {handle.request_id for handle in many}]
    assert mine == [handle.request_id for handle in many]
    assert_quiet(engine)


def test_two_chats_with_many_requests_each_take_turns(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=3, num_kv_blocks=40)
    spy.hold()
    held = engine.submit(prompt_of(6), params=greedy(60), title="held")  # so that all the others are there when one can start
    spy.wait()
    first = [engine.submit(prompt_of(6, seed), params=greedy(4), title="a") for seed in range(1, 9)]
    second = [engine.submit(prompt_of(6, 50 + seed), params=greedy(4), title="b") for seed in range(8)]
    spy.open()
    for handle in (held, *first, *second):
        handle.result(PATIENCE_S)
    title = {handle.request_id: name for name, handles in (("a", first), ("b", second)) for handle in handles}
    order = [title[i] for i in dict.fromkeys(row.request_id for step in spy.steps for row in step.rows) if i in title]
    assert order[::2] == ["a"] * 8 and order[1::2] == ["b"] * 8


def test_what_waits_for_blocks_is_not_overtaken_for_ever(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=4, num_kv_blocks=16, block_size=4)
    spy.hold()
    running = engine.submit(prompt_of(8, 0), params=greedy(30), title="running")
    spy.wait()
    large = engine.submit(prompt_of(50, 1), params=greedy(2), title="large")
    small = [engine.submit(prompt_of(6, seed), params=greedy(2), title=f"small {seed}") for seed in range(2, 14)]
    spy.open()
    for handle in (running, large, *small):
        handle.result(PATIENCE_S)
    order = list(dict.fromkeys(row.request_id for step in spy.steps for row in step.rows))
    assert order.index(large.request_id) == 1, "small requests that came later took the blocks it waited for"
    assert_quiet(engine)
