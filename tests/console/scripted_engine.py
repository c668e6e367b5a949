"""An engine that does what the test says: it publishes recorded views and feeds token deltas into requests.

The same API as `engine.Engine` as far as the console uses it, without threads, models or time.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from engine.commands import CancelRequest, Command, Ticket
from engine.errors import EngineStopped, FootplateError
from engine.request import FinishReason, Request, RequestHandle, Stats, TokenDelta
from engine.sampling import SamplingParams
from engine.view import (
    EngineView,
    EventView,
    ForwardView,
    History,
    KvView,
    LoadProgress,
    MemoryItem,
    MemoryView,
    ModelView,
    RequestView,
    Totals,
)

MIB = 2**20


class ScriptedText:
    """A detokenizer whose token ids are positions in a list of pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return ""


class ScriptedEngine:
    """`submitted` holds what was asked; `say` and `end` answer it; `publish` sets the view."""

    def __init__(self, view: EngineView | None = None) -> None:
        self._view = view if view is not None else EngineView()
        self.started = False
        self.closed = False
        self.submitted: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.tickets: list[Ticket] = []
        self.refuse: str | None = None
        self.submit_threads: list[str] = []
        self._pieces: list[str] = []

    @property
    def view(self) -> EngineView:
        return self._view

    @property
    def chat_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=64)

    def start(self) -> None:
        self.started = True

    def close(self, timeout_s: float = 5.0) -> None:
        self.closed = True

    def publish(self, view: EngineView | None = None, **changes: Any) -> EngineView:
        """Publish `view`, or the present one with `changes`."""
        base = view if view is not None else self._view
        self._view = dataclasses.replace(base, published=self._view.published + 1, **changes)
        return self._view

    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        params: SamplingParams | None = None,
        title: str = "",
    ) -> RequestHandle:
        self.submit_threads.append(threading.current_thread().name)
        if self.refuse is not None:
            raise FootplateError(self.refuse)
        if self._view.state in ("failed", "stopped"):
            raise EngineStopped("the engine has stopped and takes no more work.")
        request = Request(tuple(range(140)), params or SamplingParams(), 0, title)
        self.submitted.append({"messages": [dict(message) for message in messages or ()], "title": title, "params": params})
        self.requests.append(request)
        return RequestHandle(request, ScriptedText(self._pieces), self._cancel)  # type: ignore[arg-type]  # duck-typed

    def _cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def command(self, command: Command) -> Ticket:
        if self._view.state in ("failed", "stopped"):
            raise EngineStopped("the engine has stopped and takes no more work.")
        assert isinstance(command, CancelRequest)
        ticket = Ticket(command)
        self.tickets.append(ticket)
        self.cancelled.append(command.request_id)
        return ticket

    def say(self, *pieces: str, request: int = -1) -> None:
        """Send one token a piece to a request."""
        first = len(self._pieces)
        self._pieces += pieces
        self.requests[request].deltas.put(TokenDelta(token_ids=tuple(range(first, first + len(pieces)))))

    def end(self, reason: FinishReason = "stop", *, error: str | None = None, cached: int = 96, request: int = -1) -> None:
        """End a request with fixed figures."""
        stats = Stats(prompt_tokens=140, cached_tokens=cached, ttft_ms=182.0, prefill_tokens_per_s=812.0, decode_tokens_per_s=41.3)
        self.requests[request].deltas.put(TokenDelta(finish_reason=reason, error=error, stats=stats))


def kv_view(num_blocks: int = 1024, *, states: bytes | None = None) -> KvView:
    """A cache with a few runs of every state."""
    if states is None:
        pattern = b"\x01" * 26 + b"\x02" * 3 + b"\x01" * 9 + b"\x03" * 10 + b"\x04" + b"\x00" * 15
        states = (pattern * (num_blocks // len(pattern) + 1))[: num_blocks * 2 // 3].ljust(num_blocks, b"\x00")
    counts = [states.count(state) for state in range(5)]
    owners = b"".join((7 if state in (1, 2) else -1).to_bytes(4, "little", signed=True) for state in states)
    touched = b"".join((18_190 if state else -1).to_bytes(4, "little", signed=True) for state in states)
    refs = bytes(0 if state == 0 else 2 if state == 2 else 1 for state in states)
    return KvView(num_blocks, 16, 45 * 1024, states, refs, owners, touched, *counts)


def recorded_view(**changes: Any) -> EngineView:
    """A view of a busy small engine, the same at every call."""
    wave: tuple[float | None, ...] = tuple(None if i % 29 > 22 else 30.0 + 12.0 * ((i * 7) % 11) / 10 for i in range(60))
    view = EngineView(
        published=1,
        monotonic_s=100.0,
        state="running",
        model=ModelView(
            "SmolLM2-135M-Instruct", "smollm2.gguf", "llama", 30, 134_515_008, 49_152, 8192, "cpu", "bfloat16", 2, "Q8_0", True
        ),
        forward=ForwardView("legacy", "a3f1c29e", 390),
        step=18_204,
        kv=kv_view(),
        memory=MemoryView(
            (
                MemoryItem("weights", 257 * MIB + 12_345),
                MemoryItem("kv cache", 45 * MIB),
                MemoryItem("workspace", 31 * MIB + 777),
                MemoryItem("python and torch", 279 * MIB + 99),
            ),
            612 * MIB + 13_221,
            24 * 1024 * MIB,
            "rss",
        ),
        requests=(
            RequestView(7, "lighthouse keeper", "decode", 140, 96, 140, 41, 256, 12, 0.0),
            RequestView(8, "a long document", "prefill", 2_310, 0, 1_024, 0, 256, 64, 3.0),
        ),
        num_running=2,
        num_waiting=0,
        step_ms=21.0,
        host_ms=1.2,
        decode_tokens_per_s=41.3,
        prefill_tokens_per_s=812.0,
        last_ttft_ms=182.0,
        totals=Totals(
            requests=12, finished=10, cancelled=1, prompt_tokens=4096, cached_tokens=1024, prefill_tokens=3072, output_tokens=999
        ),
        history=History(0.5, wave, tuple(None if i % 17 else 812.0 for i in range(60)), wave, wave, (2,) * 60, (0,) * 60),
        events=(
            EventView(0, 0.0, "load", "loaded SmolLM2-135M-Instruct in 2.1 s"),
            EventView(18_112, 0.0, "finish", "request 6 finished: 128 tok, stop"),
            EventView(18_190, 0.0, "submit", "request 8 submitted: 2,310 prompt tok"),
        ),
    )
    return dataclasses.replace(view, **changes)


def idle_view(**changes: Any) -> EngineView:
    """The same engine with nothing to do."""
    return recorded_view(state="idle", requests=(), num_running=0, **changes)


def loading_view(done: int = 120 * MIB, total: int = 257 * MIB) -> EngineView:
    """An engine half way through its weights."""
    return EngineView(state="loading", loading=LoadProgress("reading weights of SmolLM2-135M-Instruct", done, total))
