"""Watches and holds the steps of engine threads: what each forward pass computed, and a gate in front of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.commands import FlushPrefixCache
from engine.engine import Engine
from engine.model.forward import Forward
from engine.model.lifecycle import Lifecycle
from engine.view import EngineView

PATIENCE_S = 30.0  # far longer than anything takes; only a hang reaches it


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step: whose it is, how many tokens were computed before, and how many it adds."""

    request_id: int
    computed: int
    q_len: int
    num_logits: int


@dataclass(frozen=True)
class Step:
    """One forward pass; the first `num_decode` rows decode."""

    rows: tuple[Row, ...]
    num_decode: int

    @property
    def decoding(self) -> set[int]:
        return {row.request_id for row in self.rows[: self.num_decode]}

    @property
    def prefilling(self) -> set[int]:
        return {row.request_id for row in self.rows[self.num_decode :]}


class StepSpy:
    """`steps` in the order they were computed. `hold()` closes the gate: the engine thread then waits before each forward
    pass. `wait()` returns once it waits there, `step()` lets one pass through, `open()` all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self.num_checks = 0
        self.before: Callable[[Step], None] | None = None
        self._held = False
        self._arrivals = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        run, check = Forward.run, Lifecycle.check

        def spied_run(forward: Forward, plan: Any, *args: Any, **kwargs: Any) -> Any:
            parts = tuple(Row(part.seq.owner, part.seq.num_computed_tokens, part.q_len, part.num_logits) for part in plan.rows)
            step = Step(parts, plan.num_decode)
            if self._held:
                self._arrivals.release()
                assert self._permits.acquire(timeout=PATIENCE_S), "nobody let the held step through"
            self.steps.append(step)
            if self.before is not None:
                self.before(step)
            return run(forward, plan, *args, **kwargs)

        def spied_check(lifecycle: Lifecycle) -> None:
            check(lifecycle)
            self.num_checks += 1

        monkeypatch.setattr(Forward, "run", spied_run)
        monkeypatch.setattr(Lifecycle, "check", spied_check)

    def hold(self) -> None:
        self._held = True

    def wait(self) -> None:
        assert self._arrivals.acquire(timeout=PATIENCE_S), "the engine reached no forward pass"

    def step(self) -> None:
        """Let the held pass through and wait for the next one."""
        self._permits.release()
        self.wait()

    def open(self) -> None:
        self._held = False
        self._permits.release()

    def rows_of(self, request_id: int) -> list[Row]:
        """The request's rows, step by step."""
        return [row for step in self.steps for row in step.rows if row.request_id == request_id]


def until(engine: Engine, holds: Callable[[EngineView], bool], what: str = "the view expected") -> EngineView:
    """The first view for which `holds`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        view = engine.view
        if holds(view):
            return view
        time.sleep(0.002)
    raise AssertionError(f"{what} never came; the last view was {engine.view}")


def assert_quiet(engine: Engine) -> None:
    """The quiescence oracle: nothing runs, no block is held, and after a flush all are free."""
    view = until(engine, lambda view: view.state == "idle" and not view.requests, "an idle engine")
    assert view.kv is not None
    assert (view.num_running, view.num_waiting) == (0, 0)
    assert view.kv.num_active == view.kv.num_shared == view.kv.num_pinned == 0
    assert view.kv.num_free + view.kv.num_cached == view.kv.num_blocks
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    kv = until(engine, lambda view: view.kv is not None and view.kv.num_cached == 0, "an empty cache").kv
    assert kv is not None
    assert kv.num_free == kv.num_blocks
    totals = engine.view.totals
    assert totals.requests == totals.finished + totals.cancelled + totals.failed
