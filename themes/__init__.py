"""Colour themes, one file each."""

from __future__ import annotations

from themes.dark import DARK
from themes.light import LIGHT

THEMES = (DARK, LIGHT)
__all__ = ["DARK", "LIGHT", "THEMES"]
