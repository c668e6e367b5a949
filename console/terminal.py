"""Holds the terminal while the console runs, and gives it back whatever happens.

Textual draws through a duplicate of the terminal; file descriptors 1 and 2 themselves point at the log meanwhile, so that
a native library's message lands there and not across the screen. The terminal's settings are kept and restored on the
way out, and by a watching shell where there is no way out (SIGKILL, the out-of-memory killer).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import termios
from pathlib import Path
from types import TracebackType
from typing import Any

from platformdirs import user_log_path

from engine.errors import FootplateError

LEAVE = (
    "\x1b[?2026l"  # end of a synchronised update
    "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"  # no mouse reports of any kind
    "\x1b[?1004l\x1b[?2004l\x1b[?2048l"  # no focus, paste or resize reports
    "\x1b[<u"  # pop the kitty keyboard flags while still on the alternate screen, which has a stack of its own
    "\x1b[?7h\x1b[0m"  # wrap lines, plain ink
    "\x1b[?1049l\x1b[?25h"  # the main screen, with its cursor
)
MAX_LOG_BYTES = 1 << 20
_WATCH = 'trap "" HUP INT TERM QUIT TTOU TTIN TSTP; read -r over || { printf %b "$1" >&4; stty "$2" <&5; }'
"""Reads a pipe that only the console holds open: a line means it left in order, the end of the pipe that it was killed."""


def log_path() -> Path:
    """The console's log file."""
    return user_log_path("footplate") / "console.log"


class Terminal:
    """A context: inside it `file` writes to the terminal, and nothing else does.

    Raises `FootplateError` where stdin or stdout is no terminal.
    """

    def __init__(self) -> None:
        if not (os.isatty(0) and os.isatty(1)):
            raise FootplateError("The console needs a terminal on stdin and stdout; `footplate run` answers a prompt without one.")
        self._settings: list[Any] = termios.tcgetattr(0)
        self._fd = os.dup(1)
        self.file = _Patient(self._fd)
        self._saved: dict[int, int] = {}
        self._watch: subprocess.Popen[bytes] | None = None
        self.in_use = False
        """Set by the driver while the terminal is in application mode."""

    def __enter__(self) -> Terminal:
        self._start_watch()
        self._point_at_log()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.in_use:
            self.restore()
        self._point_back()
        self._end_watch()
        self.file.close()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows; 80 × 24 where the terminal doesn't say."""
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._fd)
            return columns or 80, rows or 24
        return 80, 24

    def restore(self) -> None:
        """Leave application mode by main force: safe from a signal handler and from any thread."""
        self.in_use = False
        with contextlib.suppress(OSError):
            os.set_blocking(self._fd, False)
            os.write(self._fd, LEAVE.encode())
            os.set_blocking(self._fd, True)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, self._settings)

    def _point_at_log(self) -> None:
        log = _open_log()
        sys.stdout.flush()
        sys.stderr.flush()
        for fd in (1, 2):
            if os.isatty(fd):  # a stream that was redirected keeps going where it was sent
                self._saved[fd] = os.dup(fd)
                os.dup2(log, fd)
        os.close(log)

    def _point_back(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        while self._saved:
            fd, saved = self._saved.popitem()
            os.dup2(saved, fd)
            os.close(saved)

    def _start_watch(self) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            settings = subprocess.run(["stty", "-g"], stdin=0, capture_output=True, timeout=5, check=True).stdout.decode().strip()
            escapes = LEAVE.replace("\x1b", "\\033")
            command = ["sh", "-c", f"exec 4>&1 5<&2; {_WATCH}", "footplate-watch", escapes, settings]
            self._watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._fd, stderr=self._fd)

    def _end_watch(self) -> None:
        if self._watch is not None and self._watch.stdin is not None:
            with contextlib.suppress(OSError):
                self._watch.stdin.write(b"over\n")
                self._watch.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watch.wait(1)


class _Patient:
    """A text file over the terminal that outlives it: once the terminal is gone, what is written is dropped.

    Textual's writer thread would die of the error, and the next full queue would block the console for good.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", encoding="utf-8", errors="replace", newline="", closefd=True)
        self.gone = False

    def write(self, text: str) -> int:
        if not self.gone:
            try:
                self._file.write(text)
            except (OSError, ValueError):
                self.gone = True
        return len(text)

    def flush(self) -> None:
        if not self.gone:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self.gone = True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.close()


def _open_log() -> int:
    path = log_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".1.log"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
