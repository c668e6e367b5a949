"""Textual's driver on our terminal: writes to the duplicate, tells pastes from typing, and ends when the terminal goes.

A paste is recognised here, before keys are parsed, also where the terminal doesn't bracket it: a megabyte as a million
key events freezes any interface, and every line break in it would send a half-finished prompt.
"""

from __future__ import annotations

import codecs
import os
import re
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any, Literal, cast

from textual import events
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

from console.terminal import Terminal

if TYPE_CHECKING:
    from textual.app import App

PASTE_START, PASTE_END = "\x1b[200~", "\x1b[201~"
BURST_CHARS = 32
"""So many characters without an escape in one read were not typed."""
BURST_GAP_S = 0.05
"""How soon after a burst the next read still belongs to it."""
MARKER_GAP_S = 0.01
"""How long a lone escape is held back in case the rest of a paste's marker follows."""
READ_BYTES = 64 * 1024

_OTHER_KEYS_ENTER = re.compile(r"\x1b\[27;(\d+);13~")
"""xterm's modifyOtherKeys."""

Piece = tuple[Literal["keys", "paste"], str]


class InputSplitter:
    """Splits what the terminal sends into keys and pastes, both bracketed and not, wherever the reads are cut."""

    def __init__(self) -> None:
        self._pasted: list[str] | None = None
        self._carry = ""
        self._burst_until = 0.0
        self._burst_has_lines = False

    def feed(self, text: str, now: float) -> list[Piece]:
        """The pieces that `text`, read at `now`, completes. A bracketed paste comes out once its end was read."""
        text, self._carry = self._carry + text, ""
        pieces: list[Piece] = []
        while text:
            marker = PASTE_START if self._pasted is None else PASTE_END
            before, found, text = text.partition(marker)
            if not found:
                held = _held_back(before, marker)
                before, self._carry = before[: len(before) - held], before[len(before) - held :]
            if self._pasted is None:
                if before:
                    pieces += self._unbracketed(before, now)
                if found:
                    self._pasted = []
            else:
                self._pasted.append(before)
                if found:
                    pieces.append(("paste", "".join(self._pasted)))
                    self._pasted = None
        return pieces

    @property
    def holds_back(self) -> bool:
        """Whether something was held back that may be a key: a lone escape, which may also begin a paste."""
        return bool(self._carry) and self._pasted is None

    def idle(self) -> list[Piece]:
        """What was held back, once nothing followed for `MARKER_GAP_S`: it was a key."""
        if not self.holds_back:
            return []
        keys, self._carry = self._carry, ""
        return [("keys", keys)]

    def _unbracketed(self, keys: str, now: float) -> list[Piece]:
        continued = now < self._burst_until
        if "\x1b" in keys or not (len(keys) >= BURST_CHARS or continued):
            return [("keys", keys)]
        self._burst_until = now + BURST_GAP_S
        text = keys.rstrip("\r")
        self._burst_has_lines = (continued and self._burst_has_lines) or "\r" in text or "\n" in text
        if self._burst_has_lines or text == keys:
            return [("paste", keys)]
        # One line and then enter: a script, or a slow line, that typed a prompt to be sent.
        enter: list[Piece] = [("keys", keys[len(text) :])]
        return [("paste", text), *enter] if text else enter


def with_modified_enter(keys: str) -> str:
    """`keys` with every spelling of shift, alt or ctrl and enter in the one that Textual's parser knows (kitty's)."""
    return _OTHER_KEYS_ENTER.sub("\x1b[13;\\1u", keys).replace("\x1b\r", "\x1b[13;3u")


def _held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((size for size in range(len(marker) - 1, 0, -1) if text.endswith(marker[:size])), 0)


class ConsoleDriver(LinuxDriver):
    """The driver of an app that has a `terminal`."""

    def __init__(self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._terminal = cast(Terminal, app.terminal)  # type: ignore[attr-defined]  # only ConsoleApp uses this driver
        self._file = cast(Any, self._terminal.file)
        self.fileno = 0

    def _get_terminal_size(self) -> tuple[int, int]:
        return self._terminal.size

    def start_application_mode(self) -> None:
        self._terminal.in_use = True
        super().start_application_mode()  # type: ignore[no-untyped-call]  # Textual's

    def stop_application_mode(self) -> None:
        super().stop_application_mode()
        self.write("\x1b[?1016l")  # Textual asks for mouse reports in pixels and doesn't take that back
        self._terminal.in_use = False

    def run_input_thread(self) -> None:
        parser = XTermParser(self._debug)
        splitter = InputSplitter()
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        with selectors.DefaultSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                pieces: list[Piece] = []
                if selector.select(MARKER_GAP_S if splitter.holds_back else 0.1):
                    try:
                        data = os.read(self.fileno, READ_BYTES)
                    except OSError:
                        data = b""
                    if not data:  # the terminal was closed; without this the loop would spin on it
                        os.kill(os.getpid(), signal.SIGHUP)
                        return
                    pieces = splitter.feed(decode(data), time.monotonic())
                else:
                    pieces = splitter.idle()
                for kind, text in pieces:
                    if kind == "paste":
                        self.process_message(events.Paste(text))
                    else:
                        for message in parser.feed(with_modified_enter(text)):
                            self.process_message(message)
                for message in parser.tick():
                    self.process_message(message)
