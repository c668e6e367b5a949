"""Pane 6: where the memory goes: parts that add up to the figure the machine itself reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult

from console.panes.pane import Pane
from console.sanitise import one_line
from console.widgets.charts import FILLS, stacked
from console.widgets.figures import apportion, byte_unit, bytes_text, percent
from console.widgets.rows import Part, Row, Rows, padded, row_cells, to_right
from engine.view import EngineView, MemoryItem, MemoryView

MEMORY_PERIOD_S = 1.0
"""Memory drifts by pages all the time; it is drawn once a second so that its digits can be read."""
_SOURCES = {"rss": "resident memory of this process", "nvml": "memory the driver reports for this card"}
_PARTS = len(FILLS)
_REST = "other"


def grouped(items: Sequence[MemoryItem]) -> list[MemoryItem]:
    """`items` with those of one kind (`weights: attention`, `weights: mlp`) put together, in order of first appearance."""
    sizes: dict[str, int] = {}
    for item in items:
        kind = item.name.split(":", 1)[0]
        sizes[kind] = sizes.get(kind, 0) + item.bytes
    return [MemoryItem(kind, size) for kind, size in sizes.items()]


def parts_of(items: Sequence[MemoryItem]) -> list[int]:
    """Which ink and fill each item has; what nobody accounts for always has the last, a grey."""
    return [_PARTS - 1 if item.name == _REST else i % (_PARTS - 1) for i, item in enumerate(items)]


class MemoryPane(Pane):
    """Draws `EngineView.memory`."""

    number: ClassVar[int | None] = 6
    label: ClassVar[str] = "memory"
    explains: ClassVar[str] = """\
Where the memory goes. The title shows the total in use, as the machine itself reports it, of what the machine has, and its \
share.

On a CPU the total is the resident memory of this process; on a card it is what the driver reports for the card. The parts \
are what the engine knows of its own allocations; what is left over is a part of its own, so that they always add up to \
the total. Where there is room, weights are listed by kind. Sizes and shares are rounded so that the columns add up too: \
a row may differ from its exact value by one in its last digit."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._memory: MemoryView | None = None
        self._next_draw = 0.0

    def compose_body(self) -> ComposeResult:
        yield Rows(self._build, id="memory-rows")

    def show(self, view: EngineView, now: float) -> None:
        memory = view.memory
        if memory is None or now < self._next_draw or memory == self._memory:
            return
        self._next_draw = now + MEMORY_PERIOD_S
        self._memory = memory
        total, capacity = bytes_text(memory.total_bytes), bytes_text(memory.capacity_bytes)
        share = percent(memory.total_bytes, memory.capacity_bytes)
        self.set_figures((f"{total} of {capacity} · {share}", f"{total} · {share}", share))
        self.query_one(Rows).redraw()

    def focus_target(self) -> Rows:
        return self.query_one(Rows)

    def on_mount(self) -> None:
        self.query_one(Rows).can_focus = True

    def _build(self, width: int, height: int) -> list[Row]:
        memory = self._memory
        if memory is None:
            return [(Part("Measured when the model has loaded.", "dim"),)]
        detailed = self.screen.has_class("-alone") or self.screen.has_class("-two-columns")
        items = list(memory.items) if detailed else grouped(memory.items)
        values = [item.bytes for item in items]
        parts = parts_of(items)
        unit, unit_bytes = byte_unit(memory.total_bytes)
        tenths = apportion(values, round(10 * memory.total_bytes / unit_bytes))
        sizes = [f"{tenth / 10:,.1f} {unit}" for tenth in tenths]
        shares = [
            f"{share} %" if share or not value else "<1 %" for share, value in zip(apportion(values, 100), values, strict=True)
        ]
        total = f"{sum(tenths) / 10:,.1f} {unit}"
        size_cells = max(len(text) for text in (total, *sizes))
        name_cells = max(6, min(max(len(item.name) for item in items) + 1, width - size_cells - 10))
        bar = zip(parts, stacked(values, width), strict=True)
        rows: list[Row] = [tuple(Part(FILLS[part] * cells, f"part-{part + 1}") for part, cells in bar if cells)]
        for item, part, size, share in zip(items, parts, sizes, shares, strict=True):
            rows.append(
                self._row(
                    FILLS[part], f"part-{part + 1}", padded(one_line(item.name), name_cells), to_right(size, size_cells), share
                )
            )
        rows.append(self._row("=", "", padded("total", name_cells), to_right(total, size_cells), "100 %"))
        source = _SOURCES[memory.source]
        if width >= row_cells(rows[-1]) + len(source) + 2:
            rows[-1] = (*rows[-1], Part(f"  {source}", "dim"))
        return rows

    def _row(self, fill: str, ink: str, name: str, size: str, share: str) -> Row:
        return (Part(f"{fill} ", ink), Part(name), Part(f" {size}", "strong"), Part(to_right(share, 7), "dim"))
