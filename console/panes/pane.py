"""Pane: the frame every instrument stands in, with its number and name at the left of its title and its figure at the right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Container
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from console.widgets.ink import ink_style
from console.widgets.rows import clip
from engine.view import EngineView

_ROUND = tuple("╭─╮│╰╯")
_HEAVY = tuple("┏━┓┃┗┛")


class Pane(Container):
    """A framed part of the screen. The frame of the focused pane is heavy as well as bright, for screens without colour. A flat one
    fills its place to the edges, because the tabs above it name it and show its figure.

    A subclass says what it is (`number`, `label`, `explains`), yields its widgets in `compose_body` and takes each new
    view in `show`, where it repaints what changed and nothing else.
    """

    DEFAULT_CSS = """
    Pane { height: 1fr; width: 1fr; }
    Pane > .body { margin: 1; height: 1fr; width: 1fr; layout: vertical; }
    Pane.-flat > .body { margin: 0; }
    """

    number: ClassVar[int | None] = None
    label: ClassVar[str]
    explains: ClassVar[str] = ""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._figures: tuple[str, ...] = ()
        self.is_focused = False

    def compose(self) -> ComposeResult:
        with Container(classes="body"):
            yield from self.compose_body()

    def compose_body(self) -> ComposeResult:
        """The widgets inside the frame."""
        yield from ()

    def show(self, view: EngineView, now: float) -> None:
        """Draw `view`; `now` is the console's clock in seconds."""

    @property
    def figure(self) -> str:
        """The longest title figure set."""
        return self._figures[0] if self._figures else ""

    def figure_within(self, cells: int) -> str:
        """The longest title figure that fits; "" when none does."""
        return next((text for text in self._figures if cell_len(text) <= cells), "")

    def set_figures(self, variants: Iterable[str]) -> None:
        """Set the title's figure, as variants from the longest to the shortest; the first that fits is shown."""
        figures = tuple(variants)
        if figures != self._figures:
            self._figures = figures
            self.refresh(Region(0, 0, self.size.width, 1))

    def focus_target(self) -> Widget | None:
        """The widget that gets the focus when the pane is chosen."""
        return next((widget for widget in self.query("*") if isinstance(widget, Widget) and widget.can_focus), None)

    def on_descendant_focus(self) -> None:
        self._mark_focus()

    def on_descendant_blur(self) -> None:
        self._mark_focus()

    def _mark_focus(self) -> None:
        focused = self.screen.focused
        is_focused = focused is not None and self in focused.ancestors
        if is_focused != self.is_focused:
            self.is_focused = is_focused
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        paper = self.rich_style
        if width < 4 or height < 2:
            return Strip.blank(width, paper)
        left_top, edge, right_top, side, left_bottom, right_bottom = _HEAVY if self.is_focused else _ROUND
        frame = self._frame_style()
        if self.has_class("-flat"):
            left_top = right_top = edge
        if y == 0:
            return self._title_line(width, edge, left_top, right_top)
        if y == height - 1:
            return Strip([Segment(left_bottom + edge * (width - 2) + right_bottom, frame)], width)
        return Strip([Segment(side, frame), Segment(" " * (width - 2), paper), Segment(side, frame)], width)

    def _title_line(self, width: int, edge: str, left_corner: str, right_corner: str) -> Strip:
        frame = self._frame_style()
        title = ink_style(self, "title-focus" if self.is_focused else "dim")
        room = width - len(left_corner) - len(right_corner) - 2
        name = clip(f" {self.number} {self.label} " if self.number is not None else f" {self.label} ", room)
        spare = room - cell_len(name)
        figure = self.figure_within(spare - 3)
        figure = f" {figure} " if figure else ""
        return Strip(
            [
                Segment(left_corner + edge, frame),
                Segment(name, title),
                Segment(edge * (spare - cell_len(figure)), frame),
                Segment(figure, ink_style(self, "strong")),
                Segment(edge + right_corner, frame),
            ]
        )

    def _frame_style(self) -> Style:
        return ink_style(self, "frame-focus" if self.is_focused else "frame")
