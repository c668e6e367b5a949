"""Pane 6: where the memory goes: parts that add up to the figure the machine itself reports."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult

from console.panes.pane import Pane
from console.sanitise import one_line
from console.widgets.charts import FILLS, stacked
from console.widgets.figures import apportion, byte_unit, bytes_text, percent
from console.widgets.rows import Part, Row, Rows, padded, to_right
from engine.view import EngineView, MemoryView

MEMORY_PERIOD_S = 1.0
"""Memory drifts by pages all the time; it is drawn once a second so that its digits can be read."""
_SOURCES = {"rss": "resident memory of this process", "nvml": "memory the driver reports for this card"}
_PARTS = len(FILLS)


class MemoryPane(Pane):
    """Draws `EngineView.memory`."""

    number: ClassVar[int | None] = 6
    label: ClassVar[str] = "memory"
    explains: ClassVar[str] = """\
Where the memory goes. The title shows the total in use, as the machine itself reports it, of what the machine has, and its \
share.

On a CPU the total is the resident memory of this process; on a card it is what the driver reports for the card. The parts \
are what the engine knows of its own allocations; what is left over is a part of its own, so that they always add up to \
the total. Sizes and shares are rounded so that the columns add up too: a row may differ from its exact value by one in \
its last digit."""

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
        values = [item.bytes for item in memory.items]
        bar = tuple(
            Part(FILLS[i % _PARTS] * cells, f"part-{i % _PARTS + 1}") for i, cells in enumerate(stacked(values, width)) if cells
        )
        unit, unit_bytes = byte_unit(memory.total_bytes)
        tenths = apportion(values, round(10 * memory.total_bytes / unit_bytes))
        shares = apportion(values, 100)
        sizes = [f"{tenth / 10:,.1f} {unit}" for tenth in tenths]
        total = f"{sum(tenths) / 10:,.1f} {unit}"
        size_cells = max(len(text) for text in (total, *sizes))
        name_cells = max(6, min(18, width - size_cells - 10))
        rows: list[Row] = [bar] if memory.total_bytes else []
        for i, item in enumerate(memory.items):
            ink = f"part-{i % _PARTS + 1}"
            rows.append(
                (
                    Part(FILLS[i % _PARTS] + " ", ink),
                    Part(padded(one_line(item.name), name_cells)),
                    Part(" " + to_right(sizes[i], size_cells), "strong"),
                    Part(to_right(f"{shares[i]} %", 7), "dim"),
                )
            )
        rows.append(
            (
                Part("= "),
                Part(padded("total", name_cells)),
                Part(" " + to_right(total, size_cells), "strong"),
                Part(to_right("100 %", 7), "dim"),
                *((Part("  " + _SOURCES[memory.source], "dim"),) if width > 2 + name_cells + size_cells + 8 + 34 else ()),
            )
        )
        return rows
