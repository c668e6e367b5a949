"""The lines around the panes: the header, the tabs of a small screen, and the bar of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from textual.screen import Screen

from console import keys
from console.sanitise import one_line
from console.widgets.figures import count, dtype_text
from console.widgets.rows import Part, Row, Rows, row_cells, spread
from engine.view import EngineView

NAMED_FROM_CELLS = 90
"""The width from which the header has room for the program's own name."""
_STATES = {
    "loading": ("◌", "accent"),
    "idle": ("○", "dim"),
    "running": ("●", "good"),
    "stopped": ("■", "warn"),
    "failed": ("✖", "bad"),
}


class HeaderBar(Rows):
    """What runs: model, device, circuit; and how it is: state and step."""

    def __init__(self, *, id: str) -> None:
        super().__init__(self._lines, id=id)
        self._view: EngineView | None = None

    def show(self, view: EngineView) -> None:
        """Draw `view`."""
        if view is not self._view:
            self._view = view
            self.redraw()

    def _lines(self, width: int, height: int) -> list[Row]:
        view = self._view
        if view is None:
            return [(Part(" footplate", "title"),)]
        glyph, ink = _STATES[view.state]
        right: Row = (Part(f"{glyph} {view.state}", ink), Part(f"  step {count(view.step)} ", "dim"))
        left: list[Part] = [Part(" footplate  ", "title")] if width >= NAMED_FROM_CELLS or view.model is None else [Part(" ")]
        if view.model is not None:
            left += [
                Part(one_line(view.model.name, 48), "strong"),
                Part(f" · {one_line(view.model.device, 24)} {dtype_text(one_line(view.model.dtype, 12))}", "dim"),
            ]
        if view.forward is not None:
            name = one_line(view.forward.name, 24)
            name = name if name.startswith("circuit") else f"circuit {name}"
            left += [Part(f" · {name} {one_line(view.forward.digest, 64)[:4]}", "dim")]
        return [spread(tuple(left), right, width)]


class Tab(NamedTuple):
    """A pane as a tab; `figure` writes the pane's title figure into so many cells."""

    pane_id: str
    title: str
    selected: bool
    figure: Callable[[int], str]


class TabBar(Rows):
    """The panes as tabs, where only one fits, and at the right the figure of the one that is shown."""

    def __init__(self, tabs: Callable[[], Sequence[Tab]], *, id: str) -> None:
        super().__init__(self._lines, id=id)
        self._list = tabs

    def _lines(self, width: int, height: int) -> list[Row]:
        parts: list[Part] = []
        figure: Callable[[int], str] = lambda cells: ""  # noqa: E731
        for tab in self._list():
            mark, ink = ("▸", "accent") if tab.selected else (" ", "dim")
            parts.append(Part(f"{mark}{tab.title} ", ink, f"screen.focus_pane('{tab.pane_id}')"))
            if tab.selected:
                figure = tab.figure
        row = tuple(parts)
        return [
            spread(
                row,
                (
                    Part(
                        figure(width - row_cells(row) - 2) + " ",
                    ),
                ),
                width,
            )
        ]


class KeyBar(Rows):
    """The keys that act now; those that can't act are greyed. A click acts as the key.

    Where not all fit, those in `keys.DISPENSABLE` go first, in its order.
    """

    def __init__(self, unavailable: Callable[[str], str | None], *, id: str) -> None:
        super().__init__(self._lines, id=id)
        self._unavailable = unavailable

    def _lines(self, width: int, height: int) -> list[Row]:
        entries: dict[str, Row] = {}
        for binding_id, key, action in active_keys(self.screen):
            label = keys.BY_ID[binding_id].label
            if label:
                off = self._unavailable(binding_id) is not None
                entries[binding_id] = (
                    Part(keys.key_text(key), "off" if off else "key", action),
                    Part(f" {label}", "off" if off else "dim", action),
                    Part("  "),
                )
        for binding_id in keys.DISPENSABLE:
            if sum(map(row_cells, entries.values())) - 1 <= width:  # a space before, no gap after
                break
            entries.pop(binding_id, None)
        return [(Part(" "), *(part for row in entries.values() for part in row))[:-1]]


def active_keys(screen: Screen[Any]) -> list[tuple[str, str, str]]:
    """The binding id, first key and action of every binding of ours that acts now, in the order of `keys.KEYS`."""
    found: dict[str, tuple[str, str, str]] = {}
    for key, active in screen.active_bindings.items():
        binding = active.binding
        if binding.id in keys.BY_ID and binding.id not in found:
            namespace = "app" if active.node is screen.app else "screen" if active.node is screen else "focused"
            found[binding.id] = (binding.id, key, f"{namespace}.{binding.action}")
    return sorted(found.values(), key=lambda entry: keys.ORDER[entry[0]])
