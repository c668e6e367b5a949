"""Bars and sparklines as text. No data is a gap, never zero; zero is a line at the foot."""

from __future__ import annotations

from collections.abc import Sequence

from console.widgets.figures import apportion

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"
FILLS = "█▓▒▚▞▄▀░"
"""One fill per part of a stacked bar, so that parts differ without colour too."""

Values = Sequence[float | None]


def top_of(values: Values) -> float:
    """The largest value, 0 where there is none."""
    return max((value for value in values if value is not None), default=0.0)


def sparkline(values: Values, width: int, height: int = 1) -> list[str]:
    """The last `width` values, newest at the right, as `height` lines, upper first; the largest shown fills the height."""
    shown = list(values[-width:]) if width > 0 else []
    top = top_of(shown)
    levels: list[int | None] = []
    for value in shown:
        if value is None:
            levels.append(None)
        else:
            levels.append(max(1, round(8 * height * value / top)) if top > 0 else 1)
    lines = []
    for row in reversed(range(height)):
        cells = [" " if level is None else _EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels]
        lines.append("".join(cells).rjust(max(0, width)))
    return lines


def bar(part: float, whole: float, width: int) -> str:
    """`part` of `whole` as a bar of eighths of a cell; anything above nothing shows at least one eighth."""
    if whole <= 0 or part <= 0 or width <= 0:
        return ""
    eighths = min(8 * width, max(1, round(8 * width * part / whole)))
    full, rest = divmod(eighths, 8)
    return "█" * full + (_LEFT_EIGHTHS[rest] if rest else "")


def stacked(values: Sequence[int], width: int) -> list[int]:
    """How many cells each part of a stacked bar of `width` cells gets: in proportion, and each part above zero at least one
    where there is room."""
    cells = apportion(values, width)
    for i, value in enumerate(values):
        if value > 0 and cells[i] == 0:
            widest = max(range(len(cells)), key=cells.__getitem__)
            if cells[widest] <= 1:
                break
            cells[widest] -= 1
            cells[i] = 1
    return cells
