"""Operator commands (frozen), and the ticket each one gets. When a command may run is its class's `when`."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.errors import CommandRefused, EngineStopped

When = Literal["boundary", "slot", "drained"]
TicketState = Literal["queued", "draining", "applied", "refused", "cancelled"]
TERMINAL: frozenset[TicketState] = frozenset({"applied", "refused", "cancelled"})


@dataclass(frozen=True, slots=True)
class Command:
    """What an operator asks for. `when`: "boundary" runs at the next step boundary, "slot" at a boundary where the
    slot it writes is idle, "drained" at a quiescent point (no forward in flight, the last step committed)."""

    when: ClassVar[When] = "boundary"

    def describe(self) -> str:
        """A short line for the ticket list, such as `cancel request 7`."""
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class CancelRequest(Command):
    """End a request wherever it is (queued, prefill, decode); its finish reason becomes "cancelled"."""

    request_id: int

    def describe(self) -> str:
        return f"cancel request {self.request_id}"


@dataclass(frozen=True, slots=True)
class FlushPrefixCache(Command):
    """Free every KV block that only the prefix cache holds; `result()` is how many blocks became free."""

    def describe(self) -> str:
        return "flush the prefix cache"


@dataclass(frozen=True, slots=True)
class SetForward(Command):
    """Compute with another circuit ("legacy", "circuit-reference", "circuit") from the step after the ticket's on. Refused, with
    the reason, where it can't serve the model; `result()` is the ForwardView of what serves then."""

    when: ClassVar[When] = "drained"

    name: str

    def describe(self) -> str:
        return f"serve with {self.name}"


@dataclass(frozen=True, slots=True)
class ProfileStep(Command):
    """Time each launch of the next step; the view's `profile` shows the sums by rule. Refused where legacy serves."""

    def describe(self) -> str:
        return "profile one step"


@dataclass(frozen=True, slots=True)
class Refused:
    """An inbox message: a request was refused at submit, for this reason. It is counted and shown, nothing else."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wake:
    """An inbox message that only wakes the engine thread."""


@dataclass(frozen=True, slots=True)
class SaveState(Command):
    """Write what the prefix cache holds of these tokens (a chat's prompt and answer) to a file, KV and recurrent state;
    `result()` is how many tokens were saved."""

    token_ids: tuple[int, ...]
    path: str

    def describe(self) -> str:
        return f"save the state of {len(self.token_ids)} tokens to {self.path}"


@dataclass(frozen=True, slots=True)
class LoadState(Command):
    """Read a saved state into the prefix cache, so that a prompt that begins like it needn't be computed; `result()` is
    how many tokens were loaded."""

    path: str

    def describe(self) -> str:
        return f"load the state in {self.path}"


class Ticket:
    """The life of one command: queued → draining → applied at `step` | refused with `reason` | cancelled.

    Thread-safe. The engine thread moves it; any thread may read `state, reason, step` or wait in `result`.
    """

    _ids = itertools.count(1)

    def __init__(self, command: Command) -> None:
        self.ticket_id = next(Ticket._ids)
        self.command = command
        self.state: TicketState = "queued"
        self.reason: str | None = None
        self.step: int | None = None
        self._value: object = None
        self._stopped = False
        self._done = threading.Event()

    def result(self, timeout: float | None = None) -> object:
        """What the command returned, once applied. Raises `CommandRefused` with the reason when it was refused or
        cancelled, `EngineStopped` when the engine stopped first, `TimeoutError` after `timeout` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.command.describe()}: still {self.state} after {timeout} s.")
        if self.state == "applied":
            return self._value
        error = EngineStopped if self._stopped else CommandRefused
        raise error(f"{self.command.describe()}: {self.reason or self.state}")

    def settle(
        self, state: TicketState, step: int, *, reason: str | None = None, value: object = None, stopped: bool = False
    ) -> None:
        """Move to a terminal state, once; the engine thread's call."""
        if self._done.is_set():
            return
        self.step, self.reason, self._value, self._stopped = step, reason, value, stopped
        self.state = state
        self._done.set()
