"""Rows: a few lines of coloured text of which only the changed ones are painted again.

A pane describes its lines as tuples of parts; a part is text with the name of an ink, so that the text itself is never
parsed for markup and the theme alone decides the colours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from console.widgets.ink import ink_style


class Part(NamedTuple):
    """A stretch of text in one ink; `action` is run when it is clicked. `reverse` swaps ink and paper (a cursor)."""

    text: str
    ink: str = ""
    action: str = ""
    reverse: bool = False


Row = tuple[Part, ...]
Build = Callable[[int, int], Sequence[Row]]


def row_cells(row: Row) -> int:
    """How many cells a row takes."""
    return sum(cell_len(part.text) for part in row)


def clip(text: str, cells: int) -> str:
    """`text` in at most `cells` cells; what doesn't fit is replaced by …"""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…" if cells > 0 else ""


def padded(text: str, cells: int) -> str:
    """`text` in exactly `cells` cells, to the left."""
    return set_cell_size(clip(text, cells), max(0, cells))


def wrapped(text: str, cells: int) -> list[str]:
    """`text` as lines of at most `cells` cells, broken at spaces and inside words that don't fit a line."""
    lines: list[str] = [""]
    for word in text.split(" "):
        for piece in chop_cells(word, max(2, cells)) or [""]:
            if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(piece) > cells:
                lines.append("")
            lines[-1] = f"{lines[-1]} {piece}" if lines[-1] else piece
    return lines


def flowed(parts: Sequence[Part], between: str, width: int) -> list[Row]:
    """`parts` with `between` between them, on as many rows of `width` cells as they need."""
    rows: list[list[Part]] = []
    for part in parts:
        if rows and row_cells(tuple(rows[-1])) + cell_len(between) + cell_len(part.text) <= width:
            rows[-1] += [Part(between, "dim"), part]
        else:
            rows.append([part])
    return [tuple(row) for row in rows]


def to_right(text: str, cells: int) -> str:
    """`text` in at least `cells` cells, to the right."""
    return " " * (cells - cell_len(text)) + text


def spread(left: Row, right: Row, width: int) -> Row:
    """Two rows on one line, at its ends; the left one gives way where both don't fit."""
    gap = width - row_cells(left) - row_cells(right)
    if gap >= 1:
        return (*left, Part(" " * gap), *right)
    room = width - row_cells(right) - 1
    return (*_cut(left, room), Part(" "), *right) if room > 0 else _cut(right, width)


def _cut(row: Row, cells: int) -> Row:
    kept: list[Part] = []
    for part in row:
        size = cell_len(part.text)
        if size > cells:
            if cells > 0:
                kept.append(part._replace(text=padded(part.text, cells)))
            return tuple(kept)
        kept.append(part)
        cells -= size
    return (*kept, Part(" " * cells)) if cells else tuple(kept)


@lru_cache(256)
def _click_style(action: str) -> Style:
    return Style(meta={"@click": action})


class Rows(Widget):
    """Draws the rows that `build(width, height)` returns; `redraw` compares them with those on the screen.

    `painted_rows` counts the rows painted again since the start: tests hold it to what changed.
    """

    DEFAULT_CSS = """
    Rows { height: auto; width: 1fr; }
    """

    def __init__(self, build: Build, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes, markup=False)
        self._build = build
        self._rows: tuple[Row, ...] = ()
        self._built_for = (-1, -1)
        self.painted_rows = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """What is on the screen."""
        return self._rows

    @property
    def plain(self) -> str:
        """The text on the screen, for tests and for copying."""
        return "\n".join("".join(part.text for part in row).rstrip() for row in self._rows)

    def redraw(self) -> None:
        """Build the rows anew and paint those that differ; lay out again only if their number changed and counts."""
        width, height = self.size
        rows = tuple(self._build(width, height))
        old, self._rows = self._rows, rows
        self._built_for = (width, height)
        if len(rows) != len(old):
            self.painted_rows += len(rows)
            self.refresh(layout=self.styles.is_auto_height)
            return
        changed = [y for y, row in enumerate(rows) if row != old[y]]
        if changed:
            self.painted_rows += len(changed)
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        if self._built_for != tuple(self.size):
            self.redraw()
            self.refresh()

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self._rows)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        paper = self.rich_style
        if y >= len(self._rows):
            return Strip.blank(width, paper)
        segments = []
        for part in self._rows[y]:
            style = ink_style(self, part.ink, paper)
            if part.reverse:
                style += Style(reverse=True)
            if part.action:
                style += _click_style(part.action)
            segments.append(Segment(part.text, style))
        strip = Strip(segments)
        if strip.cell_length > width > 0:
            strip = Strip([*strip.crop(0, width - 1), Segment("…", paper)])
        return strip.extend_cell_length(width, paper)
