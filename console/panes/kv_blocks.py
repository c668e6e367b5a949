"""Pane 2: the map of KV blocks, its legend, and what is known of the block under the cursor."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult

from console.panes.pane import Pane
from console.sanitise import one_line
from console.widgets.block_map import GLYPHS, BlockMap
from console.widgets.figures import NO_DATA, bytes_text, count, percent
from console.widgets.rows import Part, Row, Rows, row_cells
from engine.view import BlockState, EngineView, KvView

MAP_PERIOD_S = 0.25
"""The map is drawn at most four times a second."""


class KvPane(Pane):
    """Draws `EngineView.kv`."""

    number: ClassVar[int | None] = 2
    label: ClassVar[str] = "kv blocks"
    explains: ClassVar[str] = """\
The paged KV cache: keys and values of tokens, in blocks of equal size. The title shows the blocks in use of all blocks, \
their share, and the tokens a block holds. In use is every block that isn't free; cached ones are given up when \
room is needed.

· free     holds nothing
█ active   belongs to one running request
▓ shared   is read by several running requests
▒ cached   only the prefix cache holds it: a prompt that begins the same way will reuse it
◆ pinned   kept by order of the operator

When there are more blocks than cells, one cell stands for several neighbours, as the line under the map says. It shows \
free only if all of them are, else the state that most of them are in.

The last line is about the block under the cursor: who holds it, how many references it has, and at which step it was last \
written or read."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._view: EngineView | None = None
        self._drawn: KvView | None = None
        self._next_draw = 0.0

    def compose_body(self) -> ComposeResult:
        yield BlockMap(id="block-map")
        yield Rows(self._legend, id="kv-legend")
        yield Rows(self._detail, id="kv-detail")

    def show(self, view: EngineView, now: float) -> None:
        kv = view.kv
        if kv is None or kv is self._drawn or now < self._next_draw:
            return
        self._next_draw = now + MAP_PERIOD_S
        self._view, self._drawn = view, kv
        self.query_one(BlockMap).show(kv)
        used = kv.num_blocks - kv.num_free
        fraction = f"{count(used)} / {count(kv.num_blocks)}"
        share = percent(used, kv.num_blocks)
        self.set_figures(
            (
                f"{fraction} blocks · {share} · {kv.block_size_tokens} tok each",
                f"{fraction} · {share} · {kv.block_size_tokens} tok each",
                f"{fraction} · {share}",
                share,
            )
        )
        self._redraw_lines()

    def on_block_map_cursor_moved(self) -> None:
        self._redraw_lines()

    def _redraw_lines(self) -> None:
        for rows in self.query(Rows):
            rows.redraw()

    def _legend(self, width: int, height: int) -> list[Row]:
        kv = self._drawn
        if kv is None:
            return [(Part("The cache is laid out when the model has loaded.", "dim"),)]
        counts = {
            BlockState.ACTIVE: kv.num_active,
            BlockState.SHARED: kv.num_shared,
            BlockState.CACHED: kv.num_cached,
            BlockState.PINNED: kv.num_pinned,
            BlockState.FREE: kv.num_free,
        }
        for gap, names, free in (("  ", True, True), (" ", True, True), ("  ", True, False), ("  ", False, True)):
            parts: list[Part] = []
            for state, number in counts.items():
                name = state.name.lower()
                if free or state is not BlockState.FREE:
                    parts += [
                        Part(GLYPHS[state], f"kv-{name}"),
                        Part(f" {name}" if names else "", "dim"),
                        Part(f" {count(number)}{gap}", "strong" if number else "dim"),
                    ]
            parts[-1] = parts[-1]._replace(text=parts[-1].text.rstrip())
            if row_cells(tuple(parts)) <= width:
                break
        return [tuple(parts)]

    def _detail(self, width: int, height: int) -> list[Row]:
        kv = self._drawn
        blocks = self.query_one(BlockMap).cursor_blocks
        if kv is None or not blocks:
            return [()]
        per_cell = self.query_one(BlockMap).blocks_per_cell
        scale = f"1 cell = {per_cell} blocks · " if per_cell > 1 else ""
        if len(blocks) > 1:
            states = kv.states[blocks.start : blocks.stop]
            held = [f"{states.count(state)} {state.name.lower()}" for state in BlockState if states.count(state)]
            return [(Part(f"{scale}{count(blocks.start)}–{count(blocks.stop - 1)}: {', '.join(held)}", "dim"),)]
        return [(Part(scale + self._block_text(kv, blocks.start), "dim"),)]

    def _block_text(self, kv: KvView, block: int) -> str:
        refs = kv.refs[block]
        owner = memoryview(kv.owners).cast("i")[block]
        step = memoryview(kv.touched_steps).cast("i")[block]
        refs_text = "255 or more refs" if refs == 255 else f"{refs} ref" + ("" if refs == 1 else "s")
        parts = [f"block {count(block)}", BlockState(kv.states[block]).name.lower(), refs_text]
        if owner >= 0:
            parts.append(self._owner_text(owner))
        parts.append(f"step {count(step)}" if step >= 0 else f"step {NO_DATA}")
        parts.append(bytes_text(kv.block_bytes))
        return " · ".join(parts)

    def _owner_text(self, request_id: int) -> str:
        requests = self._view.requests if self._view is not None else ()
        title = next((one_line(request.title, 24) for request in requests if request.request_id == request_id), "")
        return f"request {request_id}" + (f" {title}" if title else "")
