"""Prefix reuse through an engine. The cache oracle: a hit, then a flush and the same request again, computed in the same splits
and batch; both must have the same tokens and the same log-probabilities, bit for bit. With one token a step every split is the
same, whatever came from the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cache_oracle import recompute, record
from step_spy import PATIENCE_S, StepSpy, assert_quiet, until
from tiny_engine import VOCAB, assert_same, greedy, prompt_of, tiny_config, watched

from engine import Completion, Engine, SamplingParams
from engine.cache.prefix import PrefixTree
from engine.commands import FlushPrefixCache
from engine.view import BlockState

Start = Callable[..., Engine]
ONE_BY_ONE = {"max_batch": 1, "max_batch_tokens": 1}


@pytest.fixture(autouse=True)
def every_step_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view after each step, not ten a second: what a test looks for may last one step."""
    monkeypatch.setattr("engine.loop.PUBLISH_S", 0.0)


def flush(engine: Engine) -> int:
    freed = engine.command(FlushPrefixCache()).result(PATIENCE_S)
    assert isinstance(freed, int)
    return freed


def again_without_the_cache(engine: Engine, warm: Completion, params: SamplingParams) -> None:
    """The oracle: the same prompt after a flush gives the same bits."""
    flush(engine)
    cold = engine.generate(warm.prompt_token_ids, params)
    assert cold.stats.cached_tokens == 0
    assert cold.token_ids == warm.token_ids
    assert cold.logprobs == warm.logprobs


def around_boundaries(block_size: int, *blocks: int) -> list[int]:
    return [n * block_size + offset for n in blocks for offset in (-1, 0, 1)]


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_second_turn_reuses_the_prompt_and_the_answer(start: Start, block_size: int) -> None:
    engine = start(block_size=block_size, **ONE_BY_ONE)
    params = watched(12, logprobs=20)
    for length in around_boundaries(block_size, 2, 3):
        first = engine.generate(prompt_of(length, length), watched(10))
        turn = [*first.prompt_token_ids, *first.token_ids, *prompt_of(7, 99)]
        warm = engine.generate(turn, params)
        # The answer's last token was sampled and never computed.
        assert warm.stats.cached_tokens == (length + 9) // block_size * block_size > 0
        again_without_the_cache(engine, warm, params)
        flush(engine)
    assert_quiet(engine)


@pytest.mark.parametrize(("block_size", "blocks"), [(4, (1, 3, 9)), (16, (1, 2))])
def test_an_edit_at_each_offset_around_a_block_boundary_reuses_what_comes_before_it(
    start: Start, block_size: int, blocks: tuple[int, ...]
) -> None:
    engine = start(block_size=block_size, **ONE_BY_ONE)
    params, prompt = watched(6, logprobs=20), prompt_of(44, 1)
    for offset in around_boundaries(block_size, *blocks):
        before = engine.generate(prompt, params)
        edited = [*prompt]
        edited[offset] = (edited[offset] + 1 - 3) % (VOCAB - 3) + 3
        warm = engine.generate(edited, params)
        assert warm.stats.cached_tokens == offset // block_size * block_size
        again_without_the_cache(engine, warm, params)
        # The edit took nothing from what it left: going back to the old text finds nothing now, and says the same as before.
        assert engine.generate(prompt, params).logprobs == before.logprobs
        flush(engine)


@pytest.mark.parametrize(("block_size", "blocks"), [(4, (1, 4, 11)), (16, (1, 2))])
def test_a_rewind_to_each_offset_around_a_block_boundary_reuses_whole_blocks_before_it(
    start: Start, block_size: int, blocks: tuple[int, ...]
) -> None:
    engine = start(block_size=block_size, **ONE_BY_ONE)
    params = watched(6, logprobs=20)
    for offset in around_boundaries(block_size, *blocks):
        whole = engine.generate(prompt_of(44, 2), watched(8))
        history = [*whole.prompt_token_ids, *whole.token_ids]
        warm = engine.generate(history[:offset], params)
        assert warm.stats.cached_tokens == (offset - 1) // block_size * block_size, "one token is left for the logits"
        again_without_the_cache(engine, warm, params)
        flush(engine)


def test_the_same_prompt_again_is_computed_from_its_last_block_on(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=4, max_batch_tokens=8, max_batch=2)
    for length in (12, 13, 15, 16, 17):
        engine.generate(prompt_of(length, length), greedy(1))
        del spy.steps[:]
        again = engine.generate(prompt_of(length, length), greedy(1))
        assert again.stats.cached_tokens == (length - 1) // 4 * 4
        computed = [(row.computed, row.q_len) for step in spy.steps for row in step.rows]
        assert computed == [(again.stats.cached_tokens, length - again.stats.cached_tokens)]


def test_chunks_that_come_from_the_cache_have_the_bits_of_ones_that_do_not(
    start: Start, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here steps hold chunks of 16 tokens: the recorded passes are computed again on a model that has no prefix cache.
    passes = record(monkeypatch)
    engine = start(block_size=8, max_batch_tokens=16, max_batch=4)
    handles = [engine.submit(prompt_of(64, 3) + prompt_of(20, seed), params=greedy(1)) for seed in (3, 4, 5)]
    done = [handle.result(PATIENCE_S) for handle in handles]
    assert [each.stats.cached_tokens for each in done] == [0, 64, 64]
    engine.close()
    found = list(passes)
    num_cached = recompute(
        tiny_config(tiny_llama, block_size=8, max_batch_tokens=16, max_batch=4, num_kv_blocks=128), found, lambda part: [16] * 4
    )
    assert num_cached == 128


def test_the_oracle_notices_a_block_with_other_contents(start: Start, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = record(monkeypatch)
    match, swapped = PrefixTree.match, []

    def wrong_match(tree: PrefixTree, *args: object) -> object:
        from dataclasses import replace

        found = match(tree, *args)  # type: ignore[arg-type]  # passed on as they came
        if len(found.blocks) > 2:
            swapped.append(found.blocks)
            found = replace(found, blocks=(found.blocks[1], found.blocks[0], *found.blocks[2:]))
        return found

    monkeypatch.setattr(PrefixTree, "match", wrong_match)
    engine = start(block_size=8, max_batch_tokens=16)
    for seed in (3, 4):
        engine.generate(prompt_of(64, 3) + prompt_of(20, seed), greedy(1))
    engine.close()
    found = list(passes)
    assert swapped
    config = tiny_config(tiny_llama, block_size=8, max_batch_tokens=16, num_kv_blocks=128)
    with pytest.raises(AssertionError, match="other logits"):
        recompute(config, found, lambda part: [16] * 4)


# Two at once


def test_a_second_chat_waits_for_the_system_prompt_of_the_first_and_hits(
    start: Start, spy: StepSpy, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = record(monkeypatch)
    engine = start(block_size=8, max_batch_tokens=16, max_batch=4)
    system = prompt_of(96, 5)
    spy.hold()
    first = engine.submit(system + prompt_of(20, 1), params=greedy(10), title="a")
    second = engine.submit(system + prompt_of(20, 2), params=greedy(10), title="b")
    spy.wait()
    spy.step()
    spy.step()
    states = {request.title: (request.state, request.num_blocks) for request in until(engine, lambda v: v.step >= 2).requests}
    assert states == {"a": ("prefill", 4), "b": ("queued", 0)}, "both compute the same system prompt"
    spy.open()
    done = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert [each.stats.cached_tokens for each in done] == [0, 96]
    began = next(row for row in spy.rows_of(second.request_id))
    assert began.computed == 96
    assert sum(row.q_len for row in spy.rows_of(second.request_id)) == 20 + 9
    finished = next(index for index, step in enumerate(spy.steps) if first.request_id in step.decoding)
    joined = next(index for index, step in enumerate(spy.steps) if second.request_id in step.prefilling)
    assert joined <= finished, "it waited for more than the system prompt"
    assert_quiet(engine)
    engine.close()
    config = tiny_config(tiny_llama, block_size=8, max_batch_tokens=16, max_batch=4, num_kv_blocks=128)
    assert recompute(config, list(passes), lambda part: [16] * 6) == 96


def test_blocks_of_two_running_chats_are_shown_as_shared_and_then_as_cached(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=8, max_batch_tokens=64, max_batch=4)
    system = prompt_of(48, 6)
    engine.generate(system, greedy(1))
    kv = until(engine, lambda view: view.state == "idle").kv
    assert kv is not None
    assert (kv.num_cached, kv.num_shared, kv.num_active) == (6, 0, 0)
    spy.hold()
    handles = [engine.submit(system + prompt_of(10, seed), params=greedy(30)) for seed in (1, 2)]
    spy.wait()
    spy.step()
    spy.step()
    kv = until(engine, lambda view: view.num_running == 2 and view.step >= 2).kv
    assert kv is not None
    assert (kv.num_shared, kv.num_active, kv.num_cached) == (6, 4, 0)
    shared = [block for block, state in enumerate(kv.states) if state == BlockState.SHARED]
    assert [kv.refs[block] for block in shared] == [2] * 6
    assert kv.num_free == kv.num_blocks - 10
    handles[0].cancel()
    spy.step()
    spy.step()
    kv = until(engine, lambda view: view.num_running == 1).kv
    assert kv is not None
    assert (kv.num_shared, kv.num_active) == (0, 8)
    spy.open()
    handles[1].result(PATIENCE_S)
    kv = until(engine, lambda view: view.state == "idle").kv
    assert kv is not None
    assert kv.num_active == kv.num_shared == 0
    assert flush(engine) == kv.num_cached
    assert_quiet(engine)


def test_a_request_that_waits_for_another_s_prefix_goes_on_when_that_is_cancelled(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=8, max_batch_tokens=16, max_batch=4)
    alone = engine.generate(prompt_of(96, 5) + prompt_of(9, 2), watched(6))
    flush(engine)
    spy.hold()
    first = engine.submit(prompt_of(96, 5) + prompt_of(9, 1), params=greedy(10))
    second = engine.submit(prompt_of(96, 5) + prompt_of(9, 2), params=watched(6))
    spy.wait()
    spy.step()
    spy.step()
    first.cancel()
    spy.open()
    assert first.result(PATIENCE_S).finish_reason == "cancelled"
    done = second.result(PATIENCE_S)
    assert_same(done, alone)
    assert 32 <= done.stats.cached_tokens <= 48, "what the first had computed was lost"
    assert_quiet(engine)


# Why not more


def test_the_view_names_the_cause_of_each_miss_while_the_request_runs(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=8, num_kv_blocks=24, max_batch=2)

    def note_of(prompt: list[int]) -> tuple[int, str]:
        spy.hold()
        handle = engine.submit(prompt, params=greedy(4))
        spy.wait()
        spy.step()
        view = until(engine, lambda view: any(r.request_id == handle.request_id and r.cache_note for r in view.requests))
        [request] = [request for request in view.requests if request.request_id == handle.request_id]
        spy.open()
        assert handle.result(PATIENCE_S).stats.cached_tokens == request.cached_tokens
        return request.cached_tokens, request.cache_note

    cold = prompt_of(40, 1)
    assert note_of(cold) == (0, "nothing cached begins like this prompt")
    assert note_of(prompt_of(8, 9)) == (0, "a prompt of 8 tokens holds no whole block of 8 before its last token")
    assert note_of(cold[:20] + prompt_of(20, 2)) == (16, "nothing cached continues the prompt after token 16")
    assert note_of(cold) == (32, "all whole blocks were cached; 8 tokens after the last of them are computed")
    assert flush(engine) > 0
    assert note_of(cold) == (0, "the block after token 0 was evicted")
    # One that needs nearly all blocks evicts the end of the prefix, which nothing continues, before its beginning.
    engine.generate(prompt_of(170, 3), greedy(1))
    cached, note = note_of(cold)
    assert 0 < cached < 32
    assert note == f"the block after token {cached} was evicted"


def test_the_least_recently_used_prefix_is_evicted_first(start: Start) -> None:
    engine = start(block_size=8, num_kv_blocks=24, max_batch=1)
    prompts = {name: prompt_of(49, seed) for seed, name in enumerate("abc")}  # six blocks each, and a seventh while it runs
    for name in "abc":
        engine.generate(prompts[name], greedy(1))
    assert engine.generate(prompts["a"], greedy(1)).stats.cached_tokens == 48  # now b is the oldest
    engine.generate(prompt_of(97, 9), greedy(1))  # 13 blocks: 6 are free, b gives its 6 and c the last of its own
    assert engine.generate(prompts["a"], greedy(1)).stats.cached_tokens == 48
    assert engine.generate(prompts["c"], greedy(1)).stats.cached_tokens == 40
    assert engine.generate(prompts["b"], greedy(1)).stats.cached_tokens == 0
    assert_quiet(engine)


def test_blocks_in_use_are_not_evicted_however_short_blocks_are(start: Start, spy: StepSpy) -> None:
    engine = start(block_size=4, num_kv_blocks=24, max_batch=4)
    alone = engine.generate(prompt_of(40, 1), watched(20))
    spy.hold()
    running = engine.submit(prompt_of(40, 1), params=watched(20))
    spy.wait()
    others = [engine.submit(prompt_of(30, seed), params=greedy(4)) for seed in (2, 3, 4)]
    spy.open()
    done = running.result(PATIENCE_S)
    for other in others:
        assert len(other.result(PATIENCE_S).token_ids) == 4
    assert done.stats.cached_tokens == 36
    assert_same(done, alone)
    assert_quiet(engine)


def test_requests_ended_by_an_error_leave_nothing_cached(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from engine.layers.decoder import DecoderLayer

    engine = start(block_size=4, max_batch_tokens=16)
    healthy = engine.generate(prompt_of(20, 1), greedy(1))
    assert healthy.finish_reason == "length"
    call, spoil = DecoderLayer.__call__, [True]

    def spoiling(layer: DecoderLayer, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return call(layer, x * float("nan") if spoil[0] else x, *rest)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(DecoderLayer, "__call__", spoiling)
    for seed in (2, 3):
        assert engine.submit(prompt_of(60, seed), params=greedy(5)).wait(PATIENCE_S).finish_reason == "error"
    spoil[0] = False
    kv = until(engine, lambda view: view.state == "idle").kv
    assert kv is not None
    assert kv.num_cached == 5, "blocks of NaN are left, or the healthy ones were dropped too"
    assert engine.generate(prompt_of(60, 2), greedy(1)).stats.cached_tokens == 0
    assert engine.generate(prompt_of(20, 1), greedy(1)).stats.cached_tokens == 16
    assert_quiet(engine)
