"""Owns the engine for the app: starts it, submits off the UI loop, follows answers, closes it.

The UI loop never waits here. What may block (rendering a chat template) runs on a short daemon thread, a plain
one: a Textual thread worker would hold up quitting. Its outcome comes back through a queue that the app's timer drains.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from engine.commands import CancelRequest, Command, Ticket
from engine.errors import FootplateError
from engine.request import Completion, RequestHandle
from engine.sampling import SamplingParams
from engine.view import EngineView

SWITCH_INTERVAL_S = 1e-5
"""How long a thread may keep the GIL once another wants it; the default of 5 ms makes a decode step wait for a repaint."""
LOST_AFTER_S = 0.5
"""How long after the engine's end an answer may still receive its last words before it is given up."""

log = logging.getLogger(__name__)
Message = Mapping[str, object]
AnswerState = Literal["waiting", "running", "done", "failed"]


class EngineLike(Protocol):
    """What the console needs of `engine.Engine`."""

    @property
    def view(self) -> EngineView: ...
    @property
    def chat_params(self) -> SamplingParams: ...
    def start(self) -> None: ...
    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        params: SamplingParams | None = None,
        title: str = "",
    ) -> RequestHandle: ...
    def command(self, command: Command) -> Ticket: ...
    def close(self, timeout_s: float = ...) -> object: ...


class Answer:
    """One answer from the keypress to its end: waiting (for the model, or for the template) → running → done | failed."""

    def __init__(self, messages: Sequence[Message], title: str) -> None:
        self.messages = messages
        self.title = title
        self.state: AnswerState = "waiting"
        self.handle: RequestHandle | None = None
        self.completion: Completion | None = None
        self.error: str | None = None
        self.stop_asked = False
        self._fresh: list[str] = []
        self._lost_at: float | None = None

    @property
    def ended(self) -> bool:
        """Whether no more text will come."""
        return self.state in ("done", "failed")

    def fail(self, reason: str) -> None:
        """End as failed, with a sentence for the person."""
        self.state, self.error = "failed", reason

    def take(self) -> str:
        """The raw text that came since the last call."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def drain(self) -> None:
        """Move what the engine sent into this answer, and settle its state when the request has ended."""
        if self.state != "running" or self.handle is None:
            return
        if text := self.handle.poll():
            self._fresh.append(text)
        if self.handle.done:
            self.completion = self.handle.wait(0)
            if self.completion.finish_reason == "error":
                self.fail(self.completion.error or "The request failed and the engine gave no reason.")
            else:
                self.state = "done"

    def check_lost(self, now: float) -> bool:
        """Whether an answer of a stopped engine has been silent for `LOST_AFTER_S`."""
        if self._lost_at is None:
            self._lost_at = now + LOST_AFTER_S
        return now >= self._lost_at


class Bridge:
    """The console's side of the engine. All methods are for the UI thread, and none of them blocks but `close`."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._waiting: list[Answer] = []
        self._live: list[Answer] = []
        self._outcomes: queue.SimpleQueue[tuple[Answer, RequestHandle | str]] = queue.SimpleQueue()
        self.tickets: list[Ticket] = []
        self._started = False

    @property
    def view(self) -> EngineView:
        """The engine's latest picture."""
        return self._engine.view

    def start(self) -> None:
        """Start the engine thread; its progress shows in the view."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._started = True
        self._engine.start()

    def ask(self, messages: Sequence[Message], title: str) -> Answer:
        """The answer to `messages`; it waits while the model loads, and fails with a sentence when it is refused."""
        answer = Answer(messages, title)
        self._waiting.append(answer)
        self._send_waiting()
        return answer

    def stop(self, answer: Answer) -> None:
        """End an answer wherever it is; one that was never submitted ends at once."""
        answer.stop_asked = True
        if answer in self._waiting:
            self._waiting.remove(answer)
            answer.fail("Stopped before it was sent.")
        elif answer.handle is not None and not answer.ended:
            self._cancel(answer.handle)

    def cancel(self, request_id: int) -> Ticket | str:
        """The ticket of a cancellation, or the sentence why there is none."""
        try:
            ticket = self._engine.command(CancelRequest(request_id))
        except FootplateError as error:
            return str(error)
        self.tickets.append(ticket)
        del self.tickets[:-50]
        return ticket

    def tick(self, now: float) -> None:
        """Take in what other threads brought; called by the app's one timer."""
        while True:
            try:
                answer, outcome = self._outcomes.get_nowait()
            except queue.Empty:
                break
            if isinstance(outcome, str):
                answer.fail(outcome)
                continue
            answer.handle, answer.state = outcome, "running"
            self._live.append(answer)
            if answer.stop_asked:
                self._cancel(outcome)
        self._send_waiting()
        for answer in self._live:
            answer.drain()
        self._live = [answer for answer in self._live if not answer.ended]
        view = self.view
        if view.state in ("failed", "stopped"):
            for answer in self._live:
                if answer.check_lost(now):
                    answer.fail(f"The engine stopped before the answer ended: {view.error or 'it was shut down'}")

    def close(self, timeout_s: float) -> None:
        """End the engine; waits at most `timeout_s` for its thread."""
        if self._started:
            self._engine.close(timeout_s)

    def _send_waiting(self) -> None:
        state = self.view.state
        if state == "loading" or not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if state == "failed":
                answer.fail(f"The engine has stopped: {self.view.error or 'no reason was given.'}")
            else:
                threading.Thread(target=self._submit, args=(answer,), name="footplate-submit", daemon=True).start()

    def _submit(self, answer: Answer) -> None:
        outcome: RequestHandle | str
        try:
            outcome = self._engine.submit(messages=answer.messages, params=self._engine.chat_params, title=answer.title)
        except FootplateError as error:
            outcome = str(error)
        except Exception as error:  # a defect must end as a sentence in the chat, not as a silent thread
            log.exception("submit failed")
            outcome = f"The request could not be submitted: {type(error).__name__}: {error}"
        self._outcomes.put((answer, outcome))

    def _cancel(self, handle: RequestHandle) -> None:
        try:
            handle.cancel()
        except FootplateError as error:
            log.warning("cancel: %s", error)
