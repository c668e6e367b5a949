"""`SetForward` on a live engine: a switch in the middle of answers loses nothing, and takes effect at its ticket's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from step_spy import StepSpy, assert_quiet, until
from tiny_engine import greedy, prompt_of

from engine import Engine
from engine.commands import ProfileStep, SetForward
from engine.errors import CommandRefused
from engine.model.forward import Forward
from engine.view import ForwardView

Start = Callable[..., Engine]
PATIENCE_S = 30.0


@pytest.fixture
def served_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the forward that computed each step, in order."""
    names: list[str] = []
    compute = Forward._compute

    def spied(forward: Forward, *args: Any) -> Any:
        names.append(forward.executor.plan.name if forward.executor is not None else "legacy")
        return compute(forward, *args)

    monkeypatch.setattr(Forward, "_compute", spied)
    return names


def test_a_switch_in_the_middle_of_four_answers_loses_nothing_and_acts_at_its_ticket_s_step(
    start: Start, spy: StepSpy, served_by: list[str]
) -> None:
    prompts = [prompt_of(20 + 7 * chat, seed=chat) for chat in range(4)]
    plain = [start().generate(prompt, greedy(40)).token_ids for prompt in prompts]
    served_by.clear()
    spy.steps.clear()
    engine = start(circuit="legacy")
    spy.hold()
    handles = [engine.submit(prompt, params=greedy(40)) for prompt in prompts]
    spy.wait()
    tickets = []
    for name in ("circuit-reference", "legacy", "circuit", "legacy"):
        for _ in range(7):
            spy.step()
        ticket = engine.command(SetForward(name))
        spy.step()  # the step that was held when the command came, then the switch
        shown = ticket.result(PATIENCE_S)
        assert isinstance(shown, ForwardView)
        assert shown.name == name
        tickets.append((ticket, name))
    spy.open()
    answers = [handle.result(PATIENCE_S) for handle in handles]
    assert [len(answer.token_ids) for answer in answers] == [40] * 4
    assert [answer.finish_reason for answer in answers] == ["length"] * 4
    assert [answer.token_ids for answer in answers] == plain, "float32 circuits differ in last bits, which decide no greedy id here"
    now = "legacy"
    expected = []
    changes = {ticket.step: name for ticket, name in tickets}
    assert len(changes) == 4
    for step in range(len(served_by)):
        now = changes.get(step, now)
        expected.append(now)
    assert served_by == expected, "step n + 1 is the first that a ticket applied at step n changes"
    for ticket, _ in tickets:
        assert ticket.step is not None
        assert len(spy.steps[ticket.step].decoding) == 4, "all four were in mid-answer"
    assert_quiet(engine)


def test_the_view_shows_what_serves_and_a_refused_switch_leaves_it(start: Start) -> None:
    engine = start(circuit="circuit-reference")
    before = engine.view.forward
    assert before is not None
    assert before.name == "circuit-reference"
    assert len(before.digest) == 16
    assert before.launches_per_step
    ticket = engine.command(SetForward("tuned"))
    with pytest.raises(CommandRefused, match="there is no circuit 'tuned'"):
        ticket.result(PATIENCE_S)
    assert ticket.state == "refused"
    assert engine.view.forward == before
    first = engine.generate(prompt_of(9), greedy(5)).token_ids
    assert engine.command(SetForward("legacy")).result(PATIENCE_S) == ForwardView("legacy", "", None)
    until(engine, lambda view: view.forward is not None and view.forward.name == "legacy", "legacy in the view")
    assert engine.generate(prompt_of(9), greedy(5)).token_ids == first
    assert_quiet(engine)


def test_a_profiled_step_is_shown_by_rule_and_legacy_has_none(start: Start) -> None:
    engine = start(circuit="circuit")
    rules = {launch.rule for launch in engine.view.profile}
    assert "norm-by-length" in rules
    assert all(launch.total_us is None for launch in engine.view.profile)
    engine.command(ProfileStep()).result(PATIENCE_S)
    engine.generate(prompt_of(9), greedy(5))
    view = until(engine, lambda view: any(launch.total_us for launch in view.profile), "a profile")
    assert {launch.rule for launch in view.profile} == rules
    engine.command(SetForward("legacy")).result(PATIENCE_S)
    until(engine, lambda view: view.profile == (), "no profile")
    with pytest.raises(CommandRefused, match="legacy has no plan to profile"):
        engine.command(ProfileStep()).result(PATIENCE_S)
    assert_quiet(engine)
