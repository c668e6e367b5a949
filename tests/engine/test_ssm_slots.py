"""Slots of recurrent state change hands: nothing of their last owner is seen, none is lost, and why a prompt missed is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_engine import poison_before_every_pass
from step_spy import PATIENCE_S, Step, StepSpy, assert_quiet, until
from tiny_engine import assert_same, greedy, prompt_of, tiny_config, watched

from engine import Completion, Engine, SamplingParams
from engine.cache.ssm_layout import SsmShape, SsmSizes
from engine.cache.ssm_pool import SsmPool
from engine.commands import FlushPrefixCache
from engine.errors import BatchRefused, InvariantBroken
from engine.request import RequestHandle
from engine.view import EngineView

Start = Callable[..., Engine]


@pytest.fixture
def start(tiny_hybrid: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(**flags: Any) -> Engine:
        engine = Engine(tiny_config(tiny_hybrid, **flags))
        engines.append(engine)
        engine.start()
        engine.wait_ready(60)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(tiny_hybrid: Path) -> Iterator[Callable[[list[int], int], Completion]]:
    """The answer of an engine that does nothing else and caches nothing; worked out once for each prompt."""
    known: dict[tuple[tuple[int, ...], int], Completion] = {}
    with Engine.load(config=tiny_config(tiny_hybrid, num_kv_blocks=100, ssm_cache_slots=0)) as engine:

        def answer(prompt: list[int], max_tokens: int) -> Completion:
            key = tuple(prompt), max_tokens
            if key not in known:
                known[key] = engine.generate(prompt, watched(max_tokens))
            return known[key]

        yield answer


def assert_slots_free(engine: Engine) -> None:
    """The quiescence oracle, recurrent state included: no live slot is held, and after a flush no snapshot."""
    assert_quiet(engine)
    view = until(engine, lambda view: view.ssm is not None and view.ssm.num_snapshots == 0, "an empty snapshot pool")
    assert view.ssm is not None
    assert view.ssm.num_live == 0


# The pool itself


def pool_of(max_live: int = 3, draft_rows: int = 2, num_snapshots: int = 4) -> SsmPool:
    return SsmPool(SsmShape(2, 1, 2, 2, 4, 3), SsmSizes(max_live, draft_rows, num_snapshots), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("draft_rows", [0, 1, 5])
def test_no_two_slots_of_the_pool_are_the_same(draft_rows: int) -> None:
    pool = pool_of(draft_rows=draft_rows)
    slots = [slot for live in range(3) for slot in pool.slots_of(live)]
    slots += [slot for _ in range(4) if (slot := pool.alloc_snapshot()) is not None]
    assert sorted(slots) == list(range(pool.sizes.num_slots)) == list(range(pool.h.shape[1]))
    for live in range(3):
        rows = [pool.draft_slot(live, row) for row in range(draft_rows)] + ([pool.checkpoint_slot(live)] if draft_rows else [])
        assert pool.slots_of(live) == [live, pool.ring_slot(live, 0), pool.ring_slot(live, 1), *rows]


def test_a_live_slot_is_zeroed_whatever_it_held() -> None:
    pool = pool_of()
    pool.h.fill_(torch.nan)
    pool.conv.fill_(torch.nan)
    slot = pool.alloc_live()
    assert float(pool.h[:, slot].abs().sum()) == float(pool.conv[:, slot].abs().sum()) == 0.0
    assert pool.h[:, [each for each in range(pool.sizes.num_slots) if each != slot]].isnan().all()


def test_a_copy_moves_every_layer_and_nothing_else() -> None:
    pool = pool_of()
    pool.h.copy_(torch.arange(pool.h.numel()).view(pool.h.shape))
    pool.conv.copy_(torch.arange(pool.conv.numel()).view(pool.conv.shape))
    h, conv = pool.h.clone(), pool.conv.clone()
    pool.copy(1, 7)
    h[:, 7], conv[:, 7] = h[:, 1].clone(), conv[:, 1].clone()
    assert torch.equal(pool.h, h)
    assert torch.equal(pool.conv, conv)


def test_slots_given_back_twice_or_never_taken_are_noticed() -> None:
    pool = pool_of()
    live, snapshot = pool.alloc_live(), pool.alloc_snapshot()
    assert snapshot is not None
    pool.check([live], [snapshot])
    for held in ([], [live, 1], [live, live]):
        with pytest.raises(InvariantBroken, match="live recurrent-state slots"):
            pool.check(held, [snapshot])
    with pytest.raises(InvariantBroken, match="snapshot recurrent-state slots"):
        pool.check([live], [])
    pool.free_live(live)
    pool.free_snapshot(snapshot)
    pool.check([], [])
    for wrong in (live, -1, 3, 99):
        with pytest.raises(InvariantBroken, match="isn't a live slot that is taken"):
            pool.free_live(wrong)
    for wrong in (snapshot, 0, 99):
        with pytest.raises(InvariantBroken, match="isn't a snapshot that is taken"):
            pool.free_snapshot(wrong)
    with pytest.raises(InvariantBroken, match="isn't free"):
        pool.claim_live(pool.alloc_live())


def test_an_exhausted_pool_refuses_with_the_flag_to_raise() -> None:
    pool = pool_of(max_live=1, num_snapshots=1)
    pool.alloc_live()
    with pytest.raises(BatchRefused, match="all 1 recurrent-state slots are taken; raise --max-batch"):
        pool.alloc_live()
    pool.alloc_snapshot()
    assert pool.alloc_snapshot() is None
    assert pool.occupancy() == (1, 1)


def test_the_view_counts_the_pool(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=3, ssm_cache_slots=5, ssm_draft_rows=2)
    engine.generate(prompt_of(40, 1), greedy(2))
    spy.hold()
    for seed in (1, 2):
        engine.submit(prompt_of(40, seed), params=greedy(30))
    spy.wait()
    spy.step()
    spy.step()
    ssm = until(engine, lambda view: view.ssm is not None and view.ssm.num_live == 2 and view.num_running == 2).ssm
    spy.open()
    assert ssm is not None
    assert (ssm.max_live, ssm.ring_entries, ssm.draft_rows, ssm.max_snapshots) == (3, 2, 2, 5)
    assert (ssm.num_hits, ssm.num_lookups) == (1, 3)
    assert ssm.num_snapshots >= 1
    # Two layers: heads 4 × keys 16 × values 16 in fp32, and 3 taps × 128 channels.
    assert ssm.slot_bytes == 2 * (4 * 16 * 16 * 4 + 3 * 128 * 4)


# Poison


def test_whatever_was_freed_and_filled_with_nan_is_never_seen(
    start: Start, alone: Any, spy: StepSpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = poison_before_every_pass(monkeypatch)
    engine = start(max_batch=4, ssm_cache_slots=3, ssm_draft_rows=2, num_kv_blocks=40, ssm_checkpoint_interval=32)
    dice = random.Random(7)
    prompts = [prompt_of(length, length) for length in (3, 17, 33, 70, 100)] + [prompt_of(70, 70) + prompt_of(20, 1)]
    for _ in range(3):
        order = dice.sample(prompts, len(prompts))
        asked = [(prompt, engine.submit(prompt, params=watched(20))) for prompt in order]
        for prompt, handle in asked:
            assert_same(handle.result(PATIENCE_S), alone(prompt, 20))
    assert len(passes) == len(spy.steps) > 50
    assert engine.view.totals.cached_tokens > 0
    assert_slots_free(engine)


def test_after_many_aborts_short_prompts_answer_as_on_a_fresh_engine(
    start: Start, alone: Any, spy: StepSpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_before_every_pass(monkeypatch)
    engine = start(max_batch=4, ssm_cache_slots=4)
    for round_ in range(4):
        spy.hold()
        doomed = [engine.submit(prompt_of(90, 100 * round_ + i), params=greedy(200)) for i in range(7)]
        spy.wait()
        for _ in range(round_ + 1):
            spy.step()
        for handle in doomed:
            handle.cancel()
        spy.open()
        assert {handle.wait(PATIENCE_S).finish_reason for handle in doomed} == {"cancelled"}
    for length in (1, 2, 3, 5, 16):
        assert_same(engine.generate(prompt_of(length, 5), watched(12)), alone(prompt_of(length, 5), 12))
    assert engine.view.totals.cancelled == 28
    assert_slots_free(engine)


def test_an_abort_in_the_queue_leaks_no_slot(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=2)
    for _ in range(5):
        spy.hold()
        handles = [engine.submit(prompt_of(20, i), params=greedy(8)) for i in range(6)]
        spy.wait()
        spy.step()
        spy.step()  # a view is published after the step in which the last of them came
        view = until(engine, lambda view: view.num_running == 2 and view.num_waiting == 4)
        assert view.ssm is not None and view.ssm.num_live == 2
        for handle in handles[2:]:
            handle.cancel()
        spy.open()
        assert [handle.wait(PATIENCE_S).finish_reason for handle in handles] == ["length"] * 2 + ["cancelled"] * 4
    assert_slots_free(engine)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_few_snapshots_or_none_change_no_answer(start: Start, alone: Any, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    poison_before_every_pass(monkeypatch)
    engine = start(ssm_cache_slots=slots, ssm_checkpoint_interval=32)
    prompts = [prompt_of(40, 1), prompt_of(40, 1) + prompt_of(50, 2), prompt_of(40, 1) + prompt_of(50, 3), prompt_of(30, 4)]
    hits = 0
    for _ in range(2):
        for handle in [engine.submit(prompt, params=watched(20)) for prompt in prompts]:
            done = handle.result(PATIENCE_S)
            assert_same(done, alone(list(done.prompt_token_ids), 20))
        turn = [*prompts[1], *engine.generate(prompts[1], watched(20)).token_ids, 7]
        done = engine.generate(turn, watched(5))
        assert_same(done, alone(turn, 5))
        hits += done.stats.cached_tokens
    assert (hits > 0) == (slots > 0)
    assert_quiet(engine)


def test_a_long_prefill_beside_decodes_caches_what_it_may(start: Start, alone: Any, spy: StepSpy) -> None:
    engine = start(max_batch_tokens=24, num_kv_blocks=100, ssm_checkpoint_interval=32)
    long = prompt_of(200, 9)
    spy.hold()
    answering = [engine.submit(prompt_of(12 + i, i), params=watched(60)) for i in range(3)]
    spy.wait()
    for _ in range(4):
        spy.step()
    first = engine.submit(long, params=watched(8))
    spy.open()
    assert_same(first.result(PATIENCE_S), alone(long, 8))
    mixed = [step for step in spy.steps if first.request_id in step.prefilling and step.num_decode]
    assert len(mixed) > 5, "the prompt wasn't prefilled beside decodes"
    again = engine.generate(long, watched(8))
    assert again.stats.cached_tokens == 192
    assert_same(again, alone(long, 8))
    longer = engine.generate([*long, *first.token_ids, *prompt_of(30, 3)], watched(8))
    assert longer.stats.cached_tokens == 192
    assert_same(longer, alone([*long, *first.token_ids, *prompt_of(30, 3)], 8))
    for i, handle in enumerate(answering):
        assert_same(handle.result(PATIENCE_S), alone(prompt_of(12 + i, i), 60))
    assert_slots_free(engine)


# Why a prompt missed


def note_of(engine: Engine, spy: StepSpy, prompt: list[int]) -> tuple[int, int, str]:
    """(tokens the KV blocks match, tokens that are used, the note) of a prompt while it is computed."""
    spy.hold()
    handle = engine.submit(prompt, params=greedy(8))
    spy.wait()

    def shown(view: EngineView) -> bool:
        return any(request.request_id == handle.request_id and request.state == "decode" for request in view.requests)

    spy.step()
    engine.command(FlushPrefixCache())  # has a view published after the step that follows it
    spy.step()
    spy.step()
    view = until(engine, shown)
    spy.open()
    [request] = [request for request in view.requests if request.request_id == handle.request_id]
    assert handle.result(PATIENCE_S).stats.cached_tokens == request.cached_tokens
    return request.kv_matched_tokens, request.cached_tokens, request.cache_note


def test_a_miss_is_shown_with_its_cause(start: Start, spy: StepSpy) -> None:
    shown = []
    ids = prompt_of(60, 1)
    for before, prompt in (
        ([], prompt_of(10, 1)),
        ([], ids),
        ([ids], [*ids[:37], *prompt_of(9, 2)]),
        ([ids], [*ids, *prompt_of(3, 3)]),
        ([ids, prompt_of(40, 4), prompt_of(40, 5)], [*ids, *prompt_of(3, 3)]),
    ):
        engine = start(ssm_cache_slots=2)
        for earlier in before:
            engine.generate(earlier, greedy(1))
        shown.append(note_of(engine, spy, prompt))
        engine.close()
    assert shown == [
        (0, 0, "a prompt of 10 tokens holds no whole block of 16 before its last token"),
        (0, 0, "nothing cached begins like this prompt"),
        (32, 0, "the KV blocks match 32 tokens, but the last state snapshot on their way is at 0"),
        (48, 48, "all whole blocks were cached; 15 tokens after the last of them are computed"),
        (48, 0, "the KV blocks match 48 tokens, but the last state snapshot on their way is at 0"),
    ]


def test_an_evicted_block_is_named_as_the_cause(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=8, ssm_cache_slots=4)
    ids = prompt_of(60, 1)
    engine.generate(ids, greedy(1))
    engine.generate(prompt_of(100, 2), greedy(1))
    matched, cached, note = note_of(engine, spy, [*ids, 3])
    assert matched % 16 == 0 and matched < 48
    assert note in (f"the block after token {matched} was evicted", "the block after token 0 was evicted")
    assert cached == 0


# A storm


@pytest.mark.parametrize("spill", [False, True])
def test_after_a_storm_of_cancels_every_slot_is_free(
    start: Start, spy: StepSpy, alone: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spill: bool
) -> None:
    poison_before_every_pass(monkeypatch)
    engine = start(
        num_kv_blocks=40,
        block_size=4,
        max_batch=5,
        max_batch_tokens=24,
        ssm_cache_slots=3,
        ssm_checkpoint_interval=8,
        spill_dir=str(tmp_path) if spill else None,
    )
    dice = random.Random(3)
    handles: dict[int, RequestHandle] = {}
    doomed: dict[int, str] = {}
    seen: set[int] = set()
    cancelled_in: set[str] = set()

    def watch(step: Step) -> None:
        here = step.prefilling | step.decoding
        for request_id, stage in list(doomed.items()):
            if request_id not in handles:
                continue  # its submit hasn't returned yet
            at = {
                "queued": request_id not in seen | here,
                "prefill": request_id in step.prefilling,
                "decode": request_id in step.decoding,
                "preempted": request_id in seen - here,
            }
            if at[stage] and dice.random() < 0.5:
                del doomed[request_id]
                handles[request_id].cancel()
                cancelled_in.add(stage)
        seen.update(here)

    spy.before = watch
    for i in range(70):
        prompt = prompt_of(dice.randint(1, 30), dice.choice([0, 1, i])) + prompt_of(dice.randint(1, 40), i)
        handle = engine.submit(prompt, params=SamplingParams(max_tokens=dice.randint(1, 40), logprobs=1), title=f"chat {i % 5}")
        handles[handle.request_id] = handle
        if dice.random() < 0.6:
            doomed[handle.request_id] = dice.choice(["queued", "prefill", "decode", "preempted"])
    done = [handle.wait(PATIENCE_S) for handle in handles.values()]
    spy.before = None
    assert {each.finish_reason for each in done} == {"length", "cancelled"}, [each.error for each in done if each.error]
    assert cancelled_in == {"queued", "prefill", "decode", "preempted"}
    assert_slots_free(engine)
    assert spy.num_checks > 0, "the books were never recounted"
    assert engine.view.totals.preemptions > 0
    assert not list(tmp_path.glob("*/*.state"))
    for each in [each for each in done if each.finish_reason == "length"][:6]:
        assert_same(each, alone(list(each.prompt_token_ids), len(each.token_ids)))
