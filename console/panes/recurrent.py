"""Pane 3: the recurrent state of a hybrid model: its slots, its snapshots, and how far each prompt could resume."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult

from console.panes.pane import Pane
from console.sanitise import one_line
from console.widgets.figures import NO_DATA, bytes_text, count, percent
from console.widgets.rows import Part, Row, Rows, clip, padded, spread, wrapped
from engine.view import EngineView, RequestView, SsmView

_NAME_CELLS = 10
_BAR_CELLS = (7, 12)
"""A bar's cells in a pane narrower than `_WIDE`, and in others."""
_WIDE = 70


class RecurrentPane(Pane):
    """Draws `EngineView.ssm` and, of each unfinished request, the tokens its KV blocks matched and those a snapshot made usable."""

    number: ClassVar[int | None] = 3
    label: ClassVar[str] = "recurrent state"
    explains: ClassVar[str] = """\
The recurrent state of a hybrid model. It is advanced in place and can't be cut back, so a prompt whose beginning is cached \
resumes only where a snapshot of the state was taken: the KV blocks may match further.

live      one slot for each running request, of those there are
ring      states at the last two block boundaries of each running request; the newest becomes a snapshot when its turn ends
draft     states after the rows of a verify, for running requests
snap      snapshots that cached prefixes carry, of the slots for them

hits      prompts that resumed at a snapshot, of all prompts

Below, each unfinished request: how many tokens of its prompt the KV blocks matched, how many of them a snapshot made usable, \
and why it wasn't more."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._ssm: SsmView | None = None
        self._requests: tuple[RequestView, ...] = ()

    def compose_body(self) -> ComposeResult:
        yield Rows(self._build, id="recurrent-rows")

    def show(self, view: EngineView, now: float) -> None:
        if view.ssm == self._ssm and view.requests == self._requests:
            return
        self._ssm, self._requests = view.ssm, view.requests
        ssm = view.ssm
        if ssm is None:
            self.set_figures(())
        else:
            live, snap = f"live {ssm.num_live}/{ssm.max_live}", f"snap {ssm.num_snapshots}/{ssm.max_snapshots}"
            ring = f"ring {ssm.ring_entries * ssm.num_live}"
            draft = f"draft {ssm.draft_rows * ssm.num_live}/{ssm.draft_rows * ssm.max_live}"
            share = percent(ssm.num_snapshots, ssm.max_snapshots)
            full = f"{live} · {draft} · {ring} · {snap} · {share}"
            self.set_figures((full, f"{live} · {ring} · {snap} · {share}", f"{live} · {snap} · {share}", snap))
        self.query_one(Rows).redraw()

    def _build(self, width: int, height: int) -> list[Row]:
        ssm = self._ssm
        if ssm is None:
            return [(Part("this model has no recurrent layers", "dim"),)]
        rows = [self._slots(ssm, width), self._sizes(ssm, width)]
        room = max(1, height - len(rows)) if height > 0 else len(self._requests) * 2
        for request in self._requests:
            rows += self._request(request, width)
        if not self._requests:
            rows.append((Part("no request is running or waiting", "dim"),))
        return rows[: len(rows[:2]) + room]

    def _slots(self, ssm: SsmView, width: int) -> Row:
        """Live slots and snapshot slots, a cell each where they fit."""
        parts: list[Part] = []
        cells = max(0, width - 18)
        live = ("live", ssm.num_live, ssm.max_live, "kv-active")
        for name, used, total, ink in (live, ("snap", ssm.num_snapshots, ssm.max_snapshots, "kv-cached")):
            shown = min(total, cells // 2)
            filled = -(-used * shown // total) if total else 0
            parts += [
                Part(f"{name} ", "dim"),
                Part("▉" * filled, ink),
                Part("·" * (shown - filled), "dim"),
                Part("  "),
            ]
        return tuple(parts)

    def _sizes(self, ssm: SsmView, width: int) -> Row:
        hits = f"hits {ssm.num_hits}/{ssm.num_lookups}" if ssm.num_lookups else f"hits {NO_DATA}"
        share = f" · {percent(ssm.num_hits, ssm.num_lookups)}" if ssm.num_lookups else ""
        held = bytes_text(ssm.num_snapshots * ssm.slot_bytes)
        sizes = f"{held} in snapshots · {bytes_text(ssm.slot_bytes)} a slot"
        return spread((Part(hits + share, "strong"),), (Part(sizes, "dim"),), width)

    def _request(self, request: RequestView, width: int) -> list[Row]:
        name = padded(one_line(request.title, 60) or f"#{request.request_id}", _NAME_CELLS)
        whole, bar = max(request.prompt_tokens, 1), _BAR_CELLS[width >= _WIDE]
        row: Row = (
            Part(name + " "),
            Part("kv ", "dim"),
            *_bar(request.kv_matched_tokens, whole, bar, "kv-cached"),
            Part(f" {count(request.kv_matched_tokens):>6}  ", "strong"),
            Part("usable ", "dim"),
            *_bar(request.cached_tokens, whole, bar, "kv-active"),
            Part(f" {count(request.cached_tokens):>6}", "strong"),
        )
        if not request.cache_note:
            return [row]
        note = clip(one_line(request.cache_note, 200), 2 * width - 4)
        return [row, *((Part("  " + line, "dim"),) for line in wrapped(note, max(4, width - 2)))]


def _bar(value: int, whole: int, cells: int, ink: str) -> tuple[Part, Part]:
    filled = -(-min(value, whole) * cells // whole)
    return Part("▇" * filled, ink), Part("·" * (cells - filled), "dim")
