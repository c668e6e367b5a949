"""The prompt: a text area that grows with what is typed; enter sends, ^j begins a new line, a large paste is folded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from console import keys
from console.sanitise import sanitise

FOLD_CHARS = 4_000
"""A paste above this is shown as one line of text: a megabyte in a text area takes seconds to wrap at every key."""
PLACEHOLDER = "type here · enter sends · ^j new line"
_LINE_ENDS = re.compile(r"\r\n?")
_FOLDED = re.compile(r"\[pasted (\d+): [\d,]+ characters\]")


class Prompt(TextArea):
    """What the person types. `text_to_send` has folded pastes put back."""

    DEFAULT_CSS = """
    Prompt {
        height: auto; max-height: 8; min-height: 1; width: 1fr;
        border: none; padding: 0; background: transparent; scrollbar-size-vertical: 1;
        &:focus { border: none; }
    }
    """
    BINDINGS: ClassVar = keys.bindings("prompt")

    class Scrolled(Message):
        """The person wants to see other parts of the transcript: so many pages down."""

        def __init__(self, pages: int) -> None:
            super().__init__()
            self.pages = pages

    def __init__(self, offer: Callable[[str], bool], *, id: str) -> None:
        """`offer(text)` takes what is sent and says whether it did; if not, it stays."""
        super().__init__(id=id, soft_wrap=True, show_line_numbers=False, placeholder=PLACEHOLDER, highlight_cursor_line=False)
        self.cursor_blink = False
        self._offer = offer
        self._pastes: list[str] = []

    @property
    def text_to_send(self) -> str:
        """The prompt with every folded paste in its place."""

        def unfold(found: re.Match[str]) -> str:
            number = int(found[1]) - 1
            return self._pastes[number] if number < len(self._pastes) else found[0]

        return _FOLDED.sub(unfold, self.text)

    def action_send(self) -> None:
        """Send the text, once every key pressed before has been taken in: a priority binding acts before those in the queue."""
        self.call_later(self._send)

    def _send(self) -> None:
        text = self.text_to_send
        if text.strip() and self._offer(text):
            self.clear()
            self._pastes.clear()

    def action_newline(self) -> None:
        """Insert a line break."""
        self.replace("\n", *self.selection, maintain_selection_offset=False)

    def action_cursor_page_up(self) -> None:
        """Scroll the transcript instead of the prompt."""
        self.post_message(self.Scrolled(-1))

    def action_cursor_page_down(self) -> None:
        """Scroll the transcript instead of the prompt."""
        self.post_message(self.Scrolled(1))

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        text = sanitise(_LINE_ENDS.sub("\n", event.text))
        if len(text) > FOLD_CHARS:
            self._pastes.append(text)
            text = f"[pasted {len(self._pastes)}: {len(text):,} characters]"
        result = self.replace(text, *self.selection, maintain_selection_offset=False)
        self.move_cursor(result.end_location)
