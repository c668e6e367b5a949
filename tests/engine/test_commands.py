"""Operator commands and their tickets: applied, refused with the reason, or cancelled, and never left open."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
from step_spy import PATIENCE_S, StepSpy, assert_quiet, until
from tiny_engine import greedy, prompt_of

from engine import Command, Engine, Ticket
from engine.commands import TERMINAL, CancelRequest, FlushPrefixCache
from engine.errors import CommandRefused, EngineStopped

Start = Callable[..., Engine]


def test_an_applied_command_s_ticket_has_its_step_and_its_value(start: Start) -> None:
    engine = start(block_size=4)
    engine.generate(prompt_of(20), greedy(5))
    ticket = engine.command(FlushPrefixCache())
    freed = ticket.result(PATIENCE_S)
    assert freed == 6  # 24 computed tokens in blocks of 4
    assert (ticket.state, ticket.reason, ticket.step) == ("applied", None, 5)
    assert engine.command(FlushPrefixCache()).result(PATIENCE_S) == 0
    assert engine.generate(prompt_of(20), greedy(5)).stats.cached_tokens == 0, "the flush left something"


def test_a_refused_command_s_ticket_says_why_and_nothing_changed(start: Start) -> None:
    engine = start()
    ticket = engine.command(CancelRequest(10**9))
    with pytest.raises(CommandRefused, match=r"^cancel request 1000000000: request 1000000000 isn't running or waiting"):
        ticket.result(PATIENCE_S)
    assert ticket.state == "refused"
    assert ticket.reason is not None
    assert len(engine.generate(prompt_of(5), greedy(2)).token_ids) == 2


def test_a_command_nobody_knows_is_refused(start: Start) -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Dance(Command):
        pass

    ticket = start().command(Dance())
    with pytest.raises(CommandRefused, match="doesn't know the command Dance"):
        ticket.result(PATIENCE_S)


def test_a_command_runs_at_the_next_step_boundary_and_not_within_a_step(start: Start, spy: StepSpy) -> None:
    engine = start()
    spy.hold()
    handle = engine.submit(prompt_of(5), params=greedy(20))
    spy.wait()
    spy.step()
    ticket = engine.command(CancelRequest(handle.request_id))
    with pytest.raises(TimeoutError, match=r"still queued after 0\.05 s"):
        ticket.result(0.05)
    assert ticket.step is None
    spy.open()
    assert ticket.result(PATIENCE_S) is None
    assert ticket.step == 2
    assert handle.result(PATIENCE_S).finish_reason == "cancelled"
    assert len(spy.steps) == 2


def test_a_ticket_s_change_is_in_the_view_at_once_with_its_text(start: Start) -> None:
    engine = start()
    tickets = [engine.command(FlushPrefixCache()), engine.command(CancelRequest(123456789))]
    view = until(engine, lambda view: len(view.tickets) == 2)
    assert [(t.ticket_id, t.text, t.state) for t in view.tickets] == [
        (tickets[0].ticket_id, "flush the prefix cache", "applied"),
        (tickets[1].ticket_id, "cancel request 123456789", "refused"),
    ]
    assert "isn't running or waiting" in str(view.tickets[1].reason)
    assert [event.kind for event in view.events] == ["ticket", "ticket"]


def test_a_ticket_s_change_is_published_within_a_step_while_answers_run(start: Start, spy: StepSpy) -> None:
    engine = start()
    sent: list[Ticket] = []
    late: list[int] = []

    def watch(_: object) -> None:
        at = len(spy.steps)
        if at % 10 == 5:
            sent.append(engine.command(CancelRequest(10**9)))  # drained after this step, published after the next
        elif at % 10 == 7 and [t.ticket_id for t in engine.view.tickets[-1:]] != [sent[-1].ticket_id]:
            late.append(at)

    spy.before = watch
    engine.generate(prompt_of(5), greedy(60))
    assert len(sent) == 6
    assert not late, "a ticket's change waited for the next view"
    assert len(until(engine, lambda view: len(view.tickets) == 6).tickets) == 6


def test_the_view_keeps_the_newest_64_tickets(start: Start) -> None:
    engine = start()
    tickets = [engine.command(FlushPrefixCache()) for _ in range(80)]
    for ticket in tickets:
        ticket.result(PATIENCE_S)
    view = until(engine, lambda view: bool(view.tickets) and view.tickets[-1].ticket_id == tickets[-1].ticket_id)
    assert [t.ticket_id for t in view.tickets] == [ticket.ticket_id for ticket in tickets[-64:]]


def test_tickets_of_a_closing_engine_are_cancelled(start: Start, spy: StepSpy) -> None:
    engine = start()
    spy.hold()
    engine.submit(prompt_of(5), params=greedy(20))
    spy.wait()
    waiting = [engine.command(FlushPrefixCache()) for _ in range(3)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine._stop.is_set():
        pass
    spy.open()
    closer.join(PATIENCE_S)
    for ticket in waiting:
        with pytest.raises(EngineStopped, match="the engine was closed"):
            ticket.result(1)
        assert ticket.state == "cancelled"


def test_many_threads_commands_are_each_answered_once(start: Start) -> None:
    engine = start()
    results: list[object] = []

    def send() -> None:
        for _ in range(20):
            results.append(engine.command(FlushPrefixCache()).result(PATIENCE_S))

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [0] * 100
    assert_quiet(engine)


def test_a_ticket_is_settled_once_and_commands_are_frozen() -> None:
    ticket = Ticket(CancelRequest(3))
    ticket.settle("applied", 7, value="first")
    ticket.settle("refused", 8, reason="second")
    assert (ticket.state, ticket.step, ticket.reason, ticket.result(0)) == ("applied", 7, None, "first")
    assert ticket.state in TERMINAL
    assert Ticket(FlushPrefixCache()).ticket_id > ticket.ticket_id
    with pytest.raises(dataclasses.FrozenInstanceError):
        ticket.command.request_id = 4  # type: ignore[attr-defined]  # that is what is tested
    assert CancelRequest(3) == ticket.command
