"""What the headless commands write: sentences, one progress line, model text, each safe for where it goes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from engine.errors import FootplateError

REDRAW_S = 0.1


class TextSink(Protocol):
    """Where an answer's text goes."""

    def write(self, text: str) -> None:
        """Write one delta, at once."""

    def finish(self) -> None:
        """Write what was held back, and leave a terminal at the start of a line."""


def is_terminal(stream: Any) -> bool:
    """Whether `stream` is an open terminal (a closed or missing stream isn't)."""
    try:
        return bool(stream is not None and stream.isatty())
    except ValueError:
        return False


def plain(text: str) -> str:
    """`text` without anything that could drive a terminal."""
    from console.sanitise import Sanitiser

    sanitiser = Sanitiser()
    return sanitiser.feed(text) + sanitiser.finish()


def say(sentence: str) -> None:
    """Write one sentence to stderr. It may quote names and paths that others chose, so a terminal gets it sanitised."""
    write_error(f"footplate: {' '.join(sentence.split())}\n")


def write_error(text: str) -> None:
    """Write to stderr, or nowhere when it is closed; what can't be encoded is escaped."""
    if is_terminal(sys.stderr):
        text = plain(text)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()


def abandon_stdout() -> None:
    """Point stdout nowhere: after a broken pipe Python's own flush at exit would complain."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turn what a full disk or a vanished terminal raises into a sentence; a broken pipe is `main`'s to handle."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise FootplateError(f"stdout can't be written: {error.strerror or error}.") from error


class PipeText:
    """Text for a pipe or a file: verbatim UTF-8, flushed at every delta."""

    def write(self, text: str) -> None:
        if sys.stdout is None:
            raise FootplateError("stdout is closed, so there is nowhere to write; open it, or redirect it to a file.")
        with _writing():
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.buffer.flush()

    def finish(self) -> None:
        """Nothing is held back."""


class TerminalText:
    """Text for a terminal: control sequences stripped, also those split across deltas."""

    def __init__(self) -> None:
        from console.sanitise import Sanitiser

        self._sanitiser = Sanitiser()
        self._at_line_start = True

    def write(self, text: str) -> None:
        self._put(self._sanitiser.feed(text))

    def finish(self) -> None:
        self._put(self._sanitiser.finish())
        if not self._at_line_start:
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            encoding = sys.stdout.encoding or "utf-8"
            with _writing():
                sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
                sys.stdout.flush()
            self._at_line_start = text.endswith("\n")


def text_sink() -> TextSink:
    """Where an answer goes: `TerminalText` on a terminal, `PipeText` elsewhere."""
    return TerminalText() if is_terminal(sys.stdout) else PipeText()


def write_line(text: str) -> None:
    """Write one line of a report to stdout; a terminal gets it sanitised."""
    sink = text_sink()
    sink.write(text + "\n")
    sink.finish()


class ProgressLine:
    """One line on stderr that is redrawn in place, at most ten times a second. Draws nothing unless stderr is a terminal."""

    def __init__(self, *, bar: bool = False) -> None:
        self._terminal = is_terminal(sys.stderr)
        self._bar = bar
        self._drawn_s = 0.0
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def show(self, stage: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Draw how far `stage` is; the bytes too, when their total is known."""
        now = time.monotonic()
        if not self._terminal or (now - self._drawn_s < REDRAW_S and done_bytes < total_bytes):
            return
        self._drawn_s = now
        text = plain(stage)
        if total_bytes > 0:
            share = min(done_bytes / total_bytes, 1.0)
            if self._bar:
                text += f" [{'#' * int(share * 30):<30}]"
            text += f" {share:4.0%} of {total_bytes / 2**20:.1f} MiB"
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(f"\r\x1b[K{text[: columns - 1]}")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        """Wipe the line, so that what follows starts clean."""
        if self._shown:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._shown = False
