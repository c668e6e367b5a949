"""Preemption of a hybrid model's requests, in mid-prefill and in mid-answer, by recompute and with --spill-dir."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hybrid_engine import poison_before_every_pass
from step_spy import PATIENCE_S, Row, StepSpy, assert_quiet
from tiny_engine import assert_same, greedy, prompt_of, tiny_config, watched

from engine import Completion, Engine
from engine.cache.spill import Spill
from engine.scheduler import Job, Scheduler

Start = Callable[..., Engine]


@pytest.fixture
def start(tiny_hybrid: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start(**flags: Any) -> Engine:
        engine = Engine(tiny_config(tiny_hybrid, **({"block_size": 4, "ssm_cache_slots": 8} | flags)))
        engines.append(engine)
        engine.start()
        engine.wait_ready(60)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(tiny_hybrid: Path) -> Iterator[Callable[[list[int], int], Completion]]:
    """The answer of an engine that does nothing else, caches nothing and has room."""
    with Engine.load(config=tiny_config(tiny_hybrid, block_size=4, num_kv_blocks=200, ssm_cache_slots=0)) as engine:
        yield lambda prompt, max_tokens: engine.generate(prompt, watched(max_tokens))


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """Every preemption, as (request id, "prefill" or "decode", tokens computed)."""
    found: list[tuple[int, str, int]] = []
    preempt = Scheduler._preempt

    def watched_preempt(scheduler: Scheduler, job: Job) -> None:
        assert job.seq is not None
        if job.seq.num_computed_tokens:
            found.append((job.request.request_id, job.state, job.seq.num_computed_tokens))
        preempt(scheduler, job)

    monkeypatch.setattr(Scheduler, "_preempt", watched_preempt)
    return found


def computed_once(rows: list[Row]) -> bool:
    """Whether every token was computed exactly once, in order."""
    return all(after.computed == before.computed + before.q_len for before, after in itertools.pairwise(rows))


MID_PREFILL = {"num_kv_blocks": 14, "max_batch": 2, "max_batch_tokens": 3, "ssm_cache_slots": 2}
MID_DECODE = {"num_kv_blocks": 16, "max_batch": 3}


def together(engine: Engine, spy: StepSpy, jobs: list[tuple[list[int], int]]) -> list[tuple[list[int], int, Any]]:
    """Submit all while the engine is held in another request's pass, so that they are admitted in one step."""
    spy.hold()
    first = engine.submit([5], params=greedy(1))
    spy.wait()
    out = [(prompt, count, engine.submit(prompt, params=watched(count))) for prompt, count in jobs]
    spy.open()
    first.result(PATIENCE_S)
    return out


def mid_prefill(engine: Engine, spy: StepSpy) -> list[tuple[list[int], int, Any]]:
    """An answer grows into the blocks that a prompt of many chunks still needs."""
    return together(engine, spy, [(prompt_of(8, 1), 30), (prompt_of(40, 2), 6)])


def mid_decode(engine: Engine, spy: StepSpy) -> list[tuple[list[int], int, Any]]:
    """Three answers that together outgrow the pool."""
    return together(engine, spy, [(prompt_of(10 + seed, seed), 22) for seed in range(3)])


SCENES = [("prefill", MID_PREFILL, mid_prefill), ("decode", MID_DECODE, mid_decode)]
each_scene = pytest.mark.parametrize(("stage", "flags", "scene"), SCENES, ids=["mid-prefill", "mid-decode"])


@each_scene
def test_preemption_by_recompute_changes_no_answer(
    start: Start,
    spy: StepSpy,
    alone: Any,
    preempted: list[tuple[int, str, int]],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    flags: dict[str, Any],
    scene: Any,
) -> None:
    passes = poison_before_every_pass(monkeypatch)
    engine = start(**flags)
    requests = scene(engine, spy)
    for prompt, count, handle in requests:
        assert_same(handle.result(PATIENCE_S), alone(prompt, count))
    assert stage in {where for _, where, _ in preempted}, "nobody was preempted there"
    assert not all(computed_once(spy.rows_of(handle.request_id)) for _, _, handle in requests), "nothing was computed again"
    assert len(passes) >= len(spy.steps) > 0
    assert_quiet(engine)
    assert engine.view.totals.preemptions > 0


@each_scene
def test_a_spilled_state_is_brought_back_and_nothing_is_computed_twice(
    start: Start,
    spy: StepSpy,
    alone: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stage: str,
    flags: dict[str, Any],
    scene: Any,
    preempted: list[tuple[int, str, int]],
) -> None:
    poison_before_every_pass(monkeypatch)
    engine = start(**flags, spill_dir=str(tmp_path))
    requests = scene(engine, spy)
    for prompt, count, handle in requests:
        assert_same(handle.result(PATIENCE_S), alone(prompt, count))
    assert_quiet(engine)
    assert stage in {where for _, where, _ in preempted}, "nobody was preempted there"
    for prompt, count, handle in requests:
        rows = spy.rows_of(handle.request_id)
        assert computed_once(rows), "a token was computed again"
        assert sum(row.q_len for row in rows) == len(prompt) + count - 1
    assert not list(tmp_path.glob("*/*.state")), "a spilled state was left on disk"
    engine.close()
    assert not list(tmp_path.iterdir())


def test_a_spilled_state_is_read_back_when_there_is_room_and_not_before(
    start: Start, spy: StepSpy, preempted: list[tuple[int, str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at: list[int] = []
    from_disk = Spill._from_disk

    def watched_read(spill: Spill, entry: Any) -> None:
        read_at.append(len(spy.steps))
        from_disk(spill, entry)

    monkeypatch.setattr(Spill, "_from_disk", watched_read)
    engine = start(**MID_PREFILL, spill_dir=str(tmp_path))
    [(_, _, answering), (_, _, prompted)] = mid_prefill(engine, spy)
    answering.result(PATIENCE_S)
    prompted.result(PATIENCE_S)
    assert {request for request, _, _ in preempted} == {prompted.request_id}
    last = max(i for i, step in enumerate(spy.steps) if answering.request_id in step.decoding)
    assert read_at, "the state never went to disk"
    assert min(read_at) > last, "the state was back in memory long before there was room for it"
    assert computed_once(spy.rows_of(prompted.request_id))


@pytest.mark.parametrize(("step_tokens", "at"), [(3, "at"), (2, "before")])
def test_a_prompt_that_was_spilled_leaves_its_snapshot_all_the_same(
    start: Start, spy: StepSpy, preempted: list[tuple[int, str, int]], tmp_path: Path, step_tokens: int, at: str
) -> None:
    """It is cut at the snapshot's own boundary, token 36, or before it."""
    engine = start(**{**MID_PREFILL, "ssm_cache_slots": 8, "max_batch_tokens": step_tokens}, spill_dir=str(tmp_path))
    [_, (prompt, _, handle)] = mid_prefill(engine, spy)
    handle.result(PATIENCE_S)
    [(request_id, stage, computed)] = preempted
    assert (request_id, stage) == (handle.request_id, "prefill")
    assert computed == 36 if at == "at" else 16 < computed < 36
    assert computed_once(spy.rows_of(handle.request_id))
    assert engine.generate([*prompt[:39], 7], greedy(1)).stats.cached_tokens == 36


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "full"])
def test_what_the_disk_loses_is_computed_again(
    start: Start, spy: StepSpy, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    done: list[str] = []
    to_disk, put = Spill._to_disk, Spill.put

    def damaged(spill: Spill, entry: Any) -> None:
        path = spill._path(entry)
        if damage == "full":
            path.symlink_to("/dev/full")
        to_disk(spill, entry)
        if damage == "remove":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        elif damage == "flip":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        done.append(entry.where)

    def slow_put(spill: Spill, *args: Any) -> int:
        key = put(spill, *args)
        for _ in range(2000):
            if done:
                break
            time.sleep(0.001)
        return key

    monkeypatch.setattr(Spill, "_to_disk", damaged)
    monkeypatch.setattr(Spill, "put", slow_put)
    engine = start(**MID_DECODE, spill_dir=str(tmp_path))
    requests = mid_decode(engine, spy)
    for prompt, count, handle in requests:
        assert_same(handle.result(PATIENCE_S), alone(prompt, count))
    assert done, "nothing was spilled"
    again = [not computed_once(spy.rows_of(handle.request_id)) for _, _, handle in requests]
    if damage == "full":
        assert done[0] == "memory"
        assert not any(again), "a state that stayed in memory was computed again"
    else:
        assert done[0] == "disk"
        assert any(again), "the lost state was used"
    assert_quiet(engine)


def test_a_preempted_request_can_be_cancelled_and_leaves_no_file(start: Start, spy: StepSpy, tmp_path: Path) -> None:
    engine = start(**MID_PREFILL, spill_dir=str(tmp_path))
    [(_, _, first), (_, _, second)] = mid_prefill(engine, spy)
    seen: list[int] = []

    def watch(step: Any) -> None:
        if second.request_id in step.prefilling:
            seen.append(step.num_decode)
        elif seen:
            second.cancel()

    spy.before = watch
    assert second.wait(PATIENCE_S).finish_reason == "cancelled"
    assert len(first.result(PATIENCE_S).token_ids) == 30
    assert_quiet(engine)
    assert engine.view.totals.preemptions > 0
    for _ in range(2000):
        if not list(tmp_path.glob("*/*.state")):
            break
        time.sleep(0.001)
    assert not list(tmp_path.glob("*/*.state"))
