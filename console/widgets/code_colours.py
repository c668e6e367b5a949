"""Colours of code in an answer: the theme's hues without amber and red, which are kept for what needs a person.

Apart from `answer` because it imports pygments, which costs a few hundredths of a second that the first frame hasn't got.
"""

from __future__ import annotations

from textual.content import Content
from textual.highlight import HighlightTheme, highlight

_CALMER = {
    "$text-error on $error-muted": "$text",
    "$text-error": "$text-accent",
    "$text-warning": "$you",
    " underline": "",
    "$text-secondary": "$text-primary",
}


def _calm(style: str) -> str:
    for loud, calm in _CALMER.items():
        style = style.replace(loud, calm)
    return style


class CodeColours(HighlightTheme):
    """Textual's colours of code, calmed."""

    STYLES = {token: _calm(style) for token, style in HighlightTheme.STYLES.items()}  # noqa: RUF012  # Textual reads a plain dict


def coloured(code: str, language: str) -> Content:
    """`code` with the spans of its language; plain where nobody knows the language."""
    return highlight(code, language=language, theme=CodeColours)
