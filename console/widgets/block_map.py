"""BlockMap: every KV block as a glyph in a colour, repainted row by row and only where a block changed."""

from __future__ import annotations

import math
import re
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from console import keys
from console.widgets.ink import ink_style
from engine.view import BlockState, KvView

GLYPHS = {
    BlockState.FREE: "·",
    BlockState.ACTIVE: "█",
    BlockState.SHARED: "▓",
    BlockState.CACHED: "▒",
    BlockState.PINNED: "◆",
}
CURSOR = "+"
"""Written on the colour of the state it stands on."""
NO_BLOCK = 5
"""Cell code behind the last block; the codes below it are `BlockState`."""

_CELL_GLYPHS = str.maketrans({**{chr(state): glyph for state, glyph in GLYPHS.items()}, chr(NO_BLOCK): " "})
_RUNS = re.compile(rb"(.)\1*", re.DOTALL)
_INKS = ("kv-free", "kv-active", "kv-shared", "kv-cached", "kv-pinned", "")
"""The ink of each cell code."""
_TIES = (BlockState.PINNED, BlockState.SHARED, BlockState.ACTIVE, BlockState.CACHED)
"""Which state a cell of several blocks shows when two are equally frequent: the rarer kind first."""


def cell_states(states: bytes, group: int) -> bytes:
    """One `BlockState` a cell of `group` blocks: free only if all of them are, else the most frequent state that isn't."""
    if group == 1:
        return states
    cells = bytearray()
    for start in range(0, len(states), group):
        blocks = states[start : start + group]
        counts = [blocks.count(state) for state in _TIES]
        most = max(counts)
        cells.append(_TIES[counts.index(most)] if most else BlockState.FREE)
    return bytes(cells)


class BlockMap(Widget, can_focus=True):
    """The map. One cell is one block where they fit, else the smallest group of neighbours that fits (`blocks_per_cell`).

    `painted_rows` counts rows painted again; tests hold it to what changed.
    """

    DEFAULT_CSS = """
    BlockMap { height: 1fr; width: 1fr; min-height: 1; }
    """
    BINDINGS: ClassVar = keys.bindings("map")

    class CursorMoved(Message):
        """The cursor stands on other blocks than before."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._states = b""
        self._rows: list[bytes] = []
        self._cursor = 0
        self.blocks_per_cell = 1
        self.painted_rows = 0

    @property
    def cursor_blocks(self) -> range:
        """The blocks under the cursor; empty before there is a cache."""
        first = self._cursor * self.blocks_per_cell
        return range(first, min(first + self.blocks_per_cell, len(self._states)))

    def show(self, kv: KvView) -> None:
        """Draw the states of `kv`; only rows with a block whose state changed are built and painted again."""
        states = kv.states
        if states == self._states:
            return
        old, self._states = self._states, states
        if len(states) != len(old):
            self._lay_out()
            return
        row_blocks = self.size.width * self.blocks_per_cell
        changed = []
        for y in range(len(self._rows)):
            start = y * row_blocks
            if states[start : start + row_blocks] != old[start : start + row_blocks]:
                row = self._row(y)
                if row != self._rows[y]:
                    self._rows[y] = row
                    changed.append(y)
        self._paint(changed)

    def on_resize(self, event: events.Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        width, height = self.size
        num_blocks, cells = len(self._states), width * height
        if not cells or not num_blocks:
            self._rows = []
            self.refresh()
            return
        under = self.cursor_blocks.start
        self.blocks_per_cell = max(1, math.ceil(num_blocks / cells))
        self._cursor = min(under, num_blocks - 1) // self.blocks_per_cell
        num_rows = math.ceil(math.ceil(num_blocks / self.blocks_per_cell) / width)
        self._rows = [self._row(y) for y in range(num_rows)]
        self.painted_rows += num_rows
        self.refresh()
        self.post_message(self.CursorMoved())

    def _row(self, y: int) -> bytes:
        row_blocks = self.size.width * self.blocks_per_cell
        cells = cell_states(self._states[y * row_blocks : (y + 1) * row_blocks], self.blocks_per_cell)
        return cells.ljust(self.size.width, bytes((NO_BLOCK,)))

    def _paint(self, rows: list[int]) -> None:
        rows = [y for y in rows if 0 <= y < len(self._rows)]
        if rows:
            self.painted_rows += len(rows)
            self.refresh(*(Region(0, y, self.size.width, 1) for y in rows))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        paper = self.rich_style
        styles = [ink_style(self, ink, paper) for ink in _INKS]
        segments = [
            Segment(run.group().decode("latin-1").translate(_CELL_GLYPHS), styles[run.group()[0]])
            for run in _RUNS.finditer(self._rows[y])
        ]
        strip = Strip(segments, width)
        cursor_y, x = divmod(self._cursor, width) if width else (0, 0)
        if self.has_focus and cursor_y == y:
            cursor = Segment(CURSOR, styles[self._rows[y][x]] + Style(reverse=True))
            strip = Strip([*strip.crop(0, x), cursor, *strip.crop(x + 1, width)], width)
        return strip

    def on_focus(self) -> None:
        self._paint([self._cursor // max(1, self.size.width)])

    def on_blur(self) -> None:
        self._paint([self._cursor // max(1, self.size.width)])

    def on_click(self, event: events.Click) -> None:
        self._move_to(event.y * self.size.width + event.x)

    def action_move_cursor(self, columns: int, rows: int) -> None:
        """Move the cursor by cells; it stays where that would leave the map."""
        self._move_to(self._cursor + columns + rows * self.size.width)

    def action_cursor_to_end(self, last: bool) -> None:
        """Move the cursor to the first or the last block."""
        self._move_to(math.ceil(len(self._states) / self.blocks_per_cell) - 1 if last else 0)

    def _move_to(self, cell: int) -> None:
        if not 0 <= cell < math.ceil(len(self._states) / self.blocks_per_cell) or cell == self._cursor:
            return
        width = max(1, self.size.width)
        rows = sorted({self._cursor // width, cell // width})
        self._cursor = cell
        self._paint(rows)
        self.post_message(self.CursorMoved())

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, math.ceil(len(self._states) / max(1, width)))
