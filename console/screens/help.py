"""The help of one pane: what its figures mean, and every key that acts there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from console import keys


class HelpScreen(ModalScreen[None]):
    """Shown over the main screen; esc, F1 or q close it."""

    BINDINGS: ClassVar = keys.bindings("help")
    AUTO_FOCUS = "VerticalScroll"

    def __init__(self, title: str, explains: str, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title = title
        self._explains = explains
        self._rows = rows

    def compose(self) -> ComposeResult:
        key_cells = max((len(key) for key, _ in self._rows), default=0)
        table = "\n".join(f"{key:<{key_cells}}  {what}" for key, what in self._rows)
        with VerticalScroll(id="help"):
            yield Static(Content(self._title), classes="help-title", markup=False)
            yield Static(Content(self._explains), classes="help-text", markup=False)
            yield Static(Content("Keys here"), classes="help-title", markup=False)
            yield Static(Content(table), classes="help-text", markup=False)
            yield Static(
                Content("Single letters and digits act when the prompt hasn't the focus: esc leaves it."),
                classes="help-note",
                markup=False,
            )
