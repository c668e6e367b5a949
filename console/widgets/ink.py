"""Inks: the named colours of what the console draws itself, taken from the theme's variables.

They are looked up when a line is drawn. As CSS component classes they would be matched again for every widget at every
change of focus, at thirty milliseconds a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from rich.style import Style
from textual.color import Color
from textual.widget import Widget


class Ink(NamedTuple):
    """A variable of the theme, and whether what is written in it is bold."""

    variable: str
    bold: bool = False


INKS = {
    "dim": Ink("dim"),
    "strong": Ink("foreground"),
    "title": Ink("primary", True),
    "key": Ink("primary", True),
    "accent": Ink("primary", True),
    "off": Ink("frame"),
    "frame": Ink("frame"),
    "frame-focus": Ink("frame-focus"),
    "title-focus": Ink("frame-focus", True),
    "good": Ink("success"),
    "warn": Ink("warning"),
    "bad": Ink("error", True),
    **{f"kv-{state}": Ink(f"kv-{state}") for state in ("free", "active", "shared", "cached", "pinned")},
    **{f"part-{number}": Ink(f"part-{number}") for number in range(1, 9)},
    **{f"series-{series}": Ink(f"series-{series}") for series in ("decode", "prefill", "step", "ttft")},
}


def ink_style(widget: Widget, name: str, paper: Style | None = None) -> Style:
    """The style of an ink on `widget`'s own paper; its plain style for "". Whoever asks for several gives the widget's
    `rich_style` as `paper`: it is made anew at every look."""
    paper = widget.rich_style if paper is None else paper
    return paper + _style(widget.app.theme_variables[INKS[name].variable], INKS[name].bold) if name else paper


@lru_cache(256)
def _style(colour: str, bold: bool) -> Style:
    return Style(color=Color.parse(colour).rich_color, bold=bold)
