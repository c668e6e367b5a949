"""The events strip: what the engine did, newest first, and above it the operator's own orders until they are settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult

from console.panes.pane import Pane
from console.sanitise import one_line
from console.widgets.figures import count
from console.widgets.rows import Part, Row, Rows, to_right
from engine.commands import TERMINAL, Ticket
from engine.view import EngineView, EventView

SETTLED_STAYS_S = 5.0
"""How long a settled order stays above the events."""
_KIND_INKS = {"error": "bad", "failed": "bad", "stopped": "bad", "refused": "warn", "warning": "warn", "preempt": "warn"}
_TICKET_INKS = {"queued": "accent", "draining": "accent", "applied": "good", "refused": "warn", "cancelled": "dim"}


class EventsPane(Pane):
    """Draws `EngineView.events` and the console's own tickets."""

    label: ClassVar[str] = "events"

    def __init__(self, tickets: Callable[[], Sequence[Ticket]], *, id: str) -> None:
        super().__init__(id=id)
        self._tickets = tickets
        self._events: tuple[EventView, ...] = ()
        self._settled_at: dict[int, float] = {}
        self._now = 0.0

    def compose_body(self) -> ComposeResult:
        yield Rows(self._build, id="event-rows")

    def show(self, view: EngineView, now: float) -> None:
        self._events = view.events
        self._now = now
        self.redraw()

    def redraw(self) -> None:
        """Draw the tickets as they stand now; an order shows at the keypress, not at the next view."""
        self.query_one(Rows).redraw()

    def _build(self, width: int, height: int) -> list[Row]:
        rows = [self._ticket(ticket) for ticket in reversed(self._tickets()) if self._is_shown(ticket)]
        rows += [self._event(event) for event in reversed(self._events[-max(1, height) :])]
        return (rows or [(Part("nothing has happened yet", "dim"),)])[: max(1, height)]

    def _is_shown(self, ticket: Ticket) -> bool:
        if ticket.state not in TERMINAL:
            return True
        return self._now < self._settled_at.setdefault(ticket.ticket_id, self._now) + SETTLED_STAYS_S

    def _ticket(self, ticket: Ticket) -> Row:
        state = ticket.state + (f" at step {count(ticket.step)}" if ticket.state == "applied" and ticket.step is not None else "")
        reason = f": {one_line(ticket.reason)}" if ticket.reason and ticket.state != "applied" else ""
        return (
            Part(to_right("order", 8), "dim"),
            Part(f"  {one_line(ticket.command.describe())}  "),
            Part(state + reason, _TICKET_INKS[ticket.state]),
        )

    def _event(self, event: EventView) -> Row:
        step = to_right(count(event.step), 8)
        return (
            Part(step if cell_len(step) <= 12 else step[-12:], "dim"),
            Part("  " + one_line(event.text), _KIND_INKS.get(event.kind, "")),
        )
