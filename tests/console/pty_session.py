"""A process on a pseudo-terminal: its raw output, the screen a person would see, and the state it leaves the terminal in."""

from __future__ import annotations

import os
import re
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import psutil
import pyte

ROOT = Path(__file__).parents[2]
MODES = {
    "mouse": (1000, 1002, 1003, 1006, 1015, 1016),
    "alternate screen": (1049,),
    "paste": (2004,),
    "focus": (1004,),
    "resize": (2048,),
}


UNKNOWN_TO_PYTE = re.compile(rb"\x1b\[[<>=][0-9;]*u|\x1b\[\?[0-9]+\$p")
"""Kitty's keyboard protocol and DECRQM."""


class Session:
    """A process on a pty, its raw output, and the screen that a terminal would show."""

    def __init__(self, arguments: list[str], home: Path, size: tuple[int, int]) -> None:
        columns, rows = size
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "COLORTERM": "",
        }
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        self.raw = b""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        # A shell in between outlives the console, as a person's does, and keeps the terminal open.
        command = '"$0" "$@"; echo "left with $?"; stty -a | tr ";" "\\n" | grep -o -E -- "-?(icanon|echo|isig)$" ; sleep 60'
        self.child = pexpect.spawn(
            "sh",
            ["-c", command, sys.executable, *arguments],
            dimensions=(rows, columns),
            env=environment,
            cwd=str(ROOT),
            timeout=30,
        )

    def read(self) -> None:
        try:
            data = self.child.read_nonblocking(65536, timeout=0.05)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return
        self.raw += data
        self._stream.feed(
            re.sub(rb"\x1b\[[<>=][0-9;]*u|\x1b\[\?[0-9]+\$p", b"", data)
        )  # pyte knows neither kitty's keys nor DECRQM

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def until(self, words: str, timeout_s: float = 30.0) -> float:
        """Read until `words` are on the screen; seconds it took."""
        start = time.monotonic()
        while words not in self.text:
            assert time.monotonic() - start < timeout_s, f"{words!r} not in\n{self.text}"
            self.read()
        return time.monotonic() - start

    @property
    def console_pid(self) -> int:
        """The console's process: the shell's child that is Python."""
        return next(child.pid for child in psutil.Process(self.child.pid).children() if "python" in child.name())

    def mode(self, number: int) -> bool:
        """Whether the private mode is set after all that was written."""
        found = re.findall(rb"\x1b\[\?" + str(number).encode() + rb"([hl])", self.raw)
        return bool(found) and found[-1] == b"h"

    def assert_restored(self) -> None:
        for what, numbers in MODES.items():
            for number in numbers:
                assert not self.mode(number), f"{what}: mode {number} is still set"
        assert self.mode(25), "the cursor is hidden"
        assert b"\x1b[<u" in self.raw, "the keyboard protocol wasn't popped"
        assert termios.tcgetattr(self.child.child_fd)[3] & termios.ICANON, "the terminal is still raw"
        assert termios.tcgetattr(self.child.child_fd)[3] & termios.ECHO, "the terminal doesn't echo"


@contextmanager
def session(arguments: list[str], home: Path, size: tuple[int, int] = (120, 40)) -> Iterator[Session]:
    running = Session(arguments, home, size)
    try:
        yield running
    finally:
        for process in psutil.Process(running.child.pid).children(recursive=True):
            process.kill()
        running.child.close(force=True)
