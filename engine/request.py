"""Request (what a person asked), the handle it is followed by, and the Completion it ends as."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.errors import RequestError
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural-log probability of one chosen token and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one request. Rates are tokens per second; None where nothing was measured (one token: no decode rate)."""

    prompt_tokens: int
    cached_tokens: int = 0
    ttft_ms: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request came to. `token_ids` excludes the end token (the model's own or a stop id)."""

    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of a request, from the engine thread to its handle; never dropped. With `finish_reason` the last one."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: Stats | None = None


@dataclass(slots=True)
class Request:
    """What a person asked. Owned by the scheduler once submitted; `deltas` is the way back."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    title: str = ""
    request_id: int = field(default_factory=itertools.count(1).__next__)
    submitted_s: float = field(default_factory=time.monotonic)
    deltas: queue.SimpleQueue[TokenDelta] = field(default_factory=queue.SimpleQueue)


class RequestHandle:
    """Follows one request. Iterate it for text deltas, `poll()` it without blocking, or wait for `result()`.

    Text is made on the reader's thread from the token ids the engine sends. One reader at a time.
    """

    def __init__(self, request: Request, text: TextStream | None, cancel: Callable[[int], object], note: str | None = None) -> None:
        self.note = note  # what was done to the prompt on the way, as a sentence; None when nothing was
        self._request = request
        self._text = text
        self._cancel = cancel
        self._lock = threading.RLock()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._parts: list[str] = []
        self._end: TokenDelta | None = None

    @property
    def request_id(self) -> int:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._request.prompt_token_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated ids received so far, the end token left out."""
        return tuple(self._token_ids)

    @property
    def done(self) -> bool:
        """Whether the last delta was read."""
        return self._end is not None

    def cancel(self) -> None:
        """Ask the engine to end this request; it ends with finish reason "cancelled" unless it ended first."""
        self._cancel(self.request_id)

    def poll(self) -> str:
        """The text that has arrived since the last read; never blocks. "" when nothing new is there."""
        with self._lock:
            parts: list[str] = []
            while self._end is None:
                try:
                    parts.append(self._take(self._request.deltas.get_nowait()))
                except queue.Empty:
                    break
            return "".join(parts)

    def __iter__(self) -> Iterator[str]:
        """Text deltas until the request ends. Raises `RequestError` if an error ended it."""
        while self._end is None:
            with self._lock:
                text = self._take(self._request.deltas.get())
            if text:
                yield text
        if self._end.finish_reason == "error":
            raise RequestError(self._end.error or "the request failed.")

    def result(self, timeout: float | None = None) -> Completion:
        """The Completion, once the request ended. Raises `RequestError` if an error ended it, `TimeoutError` after
        `timeout` seconds."""
        completion = self.wait(timeout)
        if completion.finish_reason == "error":
            raise RequestError(completion.error or "the request failed.")
        return completion

    def wait(self, timeout: float | None = None) -> Completion:
        """As `result`, but an error is returned as a Completion with finish reason "error"."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._end is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"request {self.request_id} had not ended after {timeout} s.")
                try:
                    self._take(self._request.deltas.get(timeout=left))
                except queue.Empty:
                    continue
            end = self._end
            return Completion(
                text="".join(self._parts),
                prompt_token_ids=self._request.prompt_token_ids,
                token_ids=tuple(self._token_ids),
                finish_reason=end.finish_reason or "error",
                stats=end.stats or Stats(prompt_tokens=len(self._request.prompt_token_ids)),
                logprobs=tuple(self._logprobs) if self._request.params.logprobs is not None else None,
                error=end.error,
            )

    def _take(self, delta: TokenDelta) -> str:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        text = self._text.push(delta.token_ids) if self._text is not None else ""
        if delta.finish_reason is not None:
            if self._text is not None:
                text += self._text.finish()
            self._end = delta
        if text:
            self._parts.append(text)
        return text
