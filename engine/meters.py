"""Meters: what the loop measures of itself, and the view's rings of history."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.view import EventView, History, Totals

RING = 240
INTERVAL_S = 0.5
MAX_EVENTS = 200


@dataclass(slots=True)
class _Interval:
    """What happened since the last entry of the rings."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    worst_step_ms: float | None = None
    worst_ttft_ms: float | None = None


class Meters:
    """Step times and token counts, as rates over `INTERVAL_S` and as totals. Owned by the engine thread."""

    def __init__(self, now: float) -> None:
        self.totals: dict[str, int] = dict.fromkeys(Totals.__slots__, 0)
        self.step_ms: float | None = None
        self.host_ms: float | None = None
        self.last_ttft_ms: float | None = None
        self.decode_tokens_per_s: float | None = None
        self.prefill_tokens_per_s: float | None = None
        self._events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._interval = _Interval()
        self._closed_at = now
        self._rings: dict[str, deque[float | None]] = {
            name: deque(maxlen=RING)
            for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "step_ms", "ttft_ms", "num_running", "num_waiting")
        }

    def step(self, seconds: float, forward_s: float, decode_tokens: int, prefill_tokens: int) -> None:
        """Note a step: its whole time, the part spent in the forward and sampling, and its tokens by kind. A mixed step's
        time counts for both kinds."""
        interval = self._interval
        self.step_ms, self.host_ms = seconds * 1e3, max(0.0, seconds - forward_s) * 1e3
        interval.worst_step_ms = max(interval.worst_step_ms or 0.0, self.step_ms)
        interval.decode_tokens += decode_tokens
        interval.prefill_tokens += prefill_tokens
        interval.decode_s += seconds if decode_tokens else 0.0
        interval.prefill_s += seconds if prefill_tokens else 0.0
        self.totals["prefill_tokens"] += prefill_tokens

    def first_token(self, ttft_ms: float) -> None:
        """Note a request's time to first token."""
        self.last_ttft_ms = ttft_ms
        self._interval.worst_ttft_ms = max(self._interval.worst_ttft_ms or 0.0, ttft_ms)

    def event(self, step: int, wall_time: float, kind: str, text: str) -> None:
        """Add a line to the event log."""
        self._events.append(EventView(step, wall_time, kind, text))

    def close_interval(self, now: float, num_running: int, num_waiting: int) -> bool:
        """Move the rings on if an interval has passed; whether it had."""
        if now - self._closed_at < INTERVAL_S:
            return False
        interval, rings = self._interval, self._rings
        self.decode_tokens_per_s = interval.decode_tokens / interval.decode_s if interval.decode_tokens else None
        self.prefill_tokens_per_s = interval.prefill_tokens / interval.prefill_s if interval.prefill_tokens else None
        for name, value in (
            ("decode_tokens_per_s", self.decode_tokens_per_s),
            ("prefill_tokens_per_s", self.prefill_tokens_per_s),
            ("step_ms", interval.worst_step_ms),
            ("ttft_ms", interval.worst_ttft_ms),
            ("num_running", num_running),
            ("num_waiting", num_waiting),
        ):
            rings[name].append(value)
        self._interval = _Interval()
        self._closed_at = now
        return True

    def history(self) -> History:
        """The rings, newest last."""
        rings = self._rings
        return History(
            interval_s=INTERVAL_S,
            decode_tokens_per_s=tuple(rings["decode_tokens_per_s"]),
            prefill_tokens_per_s=tuple(rings["prefill_tokens_per_s"]),
            step_ms=tuple(rings["step_ms"]),
            ttft_ms=tuple(rings["ttft_ms"]),
            num_running=tuple(int(value or 0) for value in rings["num_running"]),
            num_waiting=tuple(int(value or 0) for value in rings["num_waiting"]),
        )

    def events(self) -> tuple[EventView, ...]:
        """The event log, newest last."""
        return tuple(self._events)
