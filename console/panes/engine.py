"""Pane 7: what the engine does: rates and times as figures and charts, its queue, and every unfinished request."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult

from console import keys
from console.panes.pane import Pane
from console.sanitise import one_line
from console.widgets.charts import Values, sparkline, top_of
from console.widgets.figures import NO_DATA, count, milliseconds, percent, rate
from console.widgets.rows import Part, Row, Rows, padded, spread, to_right
from engine.view import EngineView, RequestView

_NAME_CELLS = 8
_FIGURE_CELLS = 11
_PEAK_CELLS = 12
_FIXED_ROWS = 4
_STATE_INKS = {"queued": "dim", "prefill": "series-prefill", "decode": "series-decode", "preempted": "warn"}


class RequestRows(Rows, can_focus=True):
    """The rows of the engine pane; up and down select a request."""

    BINDINGS = keys.bindings("engine")

    def action_select(self, by: int) -> None:
        """Move the selection by so many requests."""
        pane = next(node for node in self.ancestors if isinstance(node, EnginePane))
        pane.select_by(by)


class EnginePane(Pane):
    """Draws rates, times, the queue and the requests of a view."""

    number: ClassVar[int | None] = 7
    label: ClassVar[str] = "engine"
    explains: ClassVar[str] = """\
What the engine does. The title shows the requests that run and wait, the last step's time, and the part of it that the \
host took.

decode    tokens per second written, all requests together
prefill   prompt tokens per second read; tokens taken from the cache aren't counted
step      time of one step: every running request advances by one token in it, or by a chunk of its prompt
ttft      time to first token of the request that got its first token last

A chart covers the interval named under it, newest at the right; its largest value, written at its end, fills the height. \
A gap is an interval in which nothing of the kind ran.

The requests below are the unfinished ones: prompt tokens computed of all (with those that came from the cache), tokens \
written of the most allowed, and KV blocks held. x cancels the selected one."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._view: EngineView | None = None
        self._selected: int | None = None

    def compose_body(self) -> ComposeResult:
        yield RequestRows(self._build, id="engine-rows")

    def show(self, view: EngineView, now: float) -> None:
        if view is self._view:
            return
        self._view = view
        queue = f"run {view.num_running} wait {view.num_waiting}"
        step = f"step {milliseconds(view.step_ms)}"
        host = f" · host {milliseconds(view.host_ms)}" if view.host_ms is not None else ""
        self.set_figures((f"{queue} · {step}{host}", f"{queue} · {step}", queue))
        self.query_one(RequestRows).redraw()

    @property
    def selected_request(self) -> RequestView | None:
        """The request under the cursor; the newest where none was chosen."""
        requests = self._view.requests if self._view is not None else ()
        return next((request for request in requests if request.request_id == self._selected), requests[-1] if requests else None)

    def select_by(self, by: int) -> None:
        """Move the selection among the unfinished requests."""
        requests = self._view.requests if self._view is not None else ()
        selected = self.selected_request
        if selected is None:
            return
        at = max(0, min(len(requests) - 1, requests.index(selected) + by))
        self._selected = requests[at].request_id
        self.query_one(RequestRows).redraw()

    def _build(self, width: int, height: int) -> list[Row]:
        view = self._view
        if view is None or view.model is None:
            return [(Part("No figures before the model has loaded.", "dim"),)]
        history = view.history
        requests = view.requests
        spare = height - _FIXED_ROWS - max(1, len(requests))
        chart_rows = max(1, min(4, spare // 4))
        charts: tuple[tuple[str, Callable[[float | None], str], float | None, Values, str], ...] = (
            ("decode", rate, view.decode_tokens_per_s, history.decode_tokens_per_s, "series-decode"),
            ("prefill", rate, view.prefill_tokens_per_s, history.prefill_tokens_per_s, "series-prefill"),
            ("step", milliseconds, view.step_ms, history.step_ms, "series-step"),
            ("ttft", milliseconds, view.last_ttft_ms, history.ttft_ms, "series-ttft"),
        )
        chart_cells = max(0, width - _NAME_CELLS - _FIGURE_CELLS - _PEAK_CELLS - 2)
        rows: list[Row] = []
        for name, write, now, values, ink in charts:
            rows += self._chart(name, write, now, values, ink, chart_cells, chart_rows)
        rows.append(self._interval(chart_cells, history.interval_s, len(history.step_ms)))
        rows += self._served(width)
        rows.append(())
        if not requests:
            rows.append((Part("no request is running or waiting", "dim"),))
        room = max(1, height - len(rows))
        selected = self.selected_request
        first = max(0, requests.index(selected) - room + 1) if selected is not None else 0
        rows += [self._request(request, width, request is selected) for request in requests[first : first + room]]
        return rows[:height] if height > 0 else rows

    def _chart(
        self,
        name: str,
        write: Callable[[float | None], str],
        now: float | None,
        values: Values,
        ink: str,
        cells: int,
        num_rows: int,
    ) -> list[Row]:
        top = top_of(values[-cells:] if cells else ())
        rows: list[Row] = []
        for y, line in enumerate(sparkline(values, cells, num_rows)):
            head: Row = (Part(" " * (_NAME_CELLS + _FIGURE_CELLS)),)
            if y == num_rows - 1:
                head = (Part(padded(name, _NAME_CELLS), "dim"), Part(to_right(write(now), _FIGURE_CELLS), "strong"))
            tail = (Part(f" {write(top)}", "dim"),) if y == 0 and top > 0 else ()
            rows.append((*head, Part("  "), Part(line, ink), *tail))
        return rows

    def _interval(self, cells: int, interval_s: float, length: int) -> Row:
        seconds = min(cells, length) * interval_s
        if seconds < 1:
            return ()
        left = Part(padded("", _NAME_CELLS) + to_right("now", _FIGURE_CELLS) + "  ", "dim")
        return (left, Part(to_right(f"last {seconds:.0f} s", cells) + " peak", "dim"))

    def _served(self, width: int) -> list[Row]:
        assert self._view is not None
        totals = self._view.totals
        ends = (
            ("finished", totals.finished, True),
            ("cancelled", totals.cancelled, False),
            ("failed", totals.failed, False),
            ("refused", totals.refused, False),
            ("preempted", totals.preemptions, False),
        )
        served = " · ".join(f"{count(number)} {name}" for name, number, always in ends if number or always)
        cached = f"{count(totals.cached_tokens)} of {count(totals.prompt_tokens)} prompt tok · "
        share = percent(totals.cached_tokens, totals.prompt_tokens)
        return [
            (Part(padded("served", _NAME_CELLS), "dim"), Part("   " + served)),
            (Part(padded("cached", _NAME_CELLS), "dim"), Part("   " + (cached + share if totals.prompt_tokens else NO_DATA))),
        ]

    def _request(self, request: RequestView, width: int, selected: bool) -> Row:
        done = f"{count(request.computed_tokens)}/{count(request.prompt_tokens)}"
        cached = f" ({count(request.cached_tokens)} cached)" if request.cached_tokens else ""
        written = f"{count(request.output_tokens)}/{count(request.max_tokens)} tok"
        figures = f"{done}{cached}" if request.state in ("queued", "prefill") else written
        right = (
            Part(padded(request.state, 10), _STATE_INKS[request.state]),
            Part(to_right(figures, 14), "strong"),
            Part(to_right(f"{count(request.num_blocks)} blk", 9), "dim"),
        )
        left = (
            Part("▸ " if selected else "  ", "accent"),
            Part(f"#{request.request_id} ", "dim"),
            Part(one_line(request.title, 60) or "untitled"),
        )
        return spread(left, right, width)
