"""The console on a real terminal: what it leaves behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import psutil
import pyte
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTED = [str(Path(__file__).with_name("scripted_run.py"))]
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


def answering(running: Session) -> None:
    """Ask, and wait until an answer is under way."""
    running.until("type here")
    running.child.send("count\r")
    running.until("word5")


def test_quitting_in_mid_answer_leaves_at_once_and_restores_the_terminal(tmp_path: Path) -> None:
    with session(SCRIPTED, tmp_path) as running:
        answering(running)
        assert running.mode(1049) and running.mode(1003)
        running.child.send("\x11")
        assert running.until("left with 0") < 1.5  # one second, and a slow test machine
        running.assert_restored()
        assert b"owned" not in running.raw


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores_the_terminal(tmp_path: Path, number: signal.Signals) -> None:
    with session(SCRIPTED, tmp_path) as running:
        answering(running)
        os.kill(running.console_pid, number)
        running.until(f"left with {128 + number}")
        running.assert_restored()


def test_a_kill_that_nobody_can_catch_still_restores_the_terminal(tmp_path: Path) -> None:
    with session(SCRIPTED, tmp_path) as running:
        answering(running)
        os.kill(running.console_pid, signal.SIGKILL)
        running.until("left with 137")
        for _ in range(40):
            running.read()
        running.assert_restored()


def test_an_engine_that_does_not_end_does_not_hold_up_quitting(tmp_path: Path) -> None:
    with session([*SCRIPTED, "stuck"], tmp_path) as running:
        answering(running)
        running.child.send("\x11")
        assert running.until("left with 0") < 2.5
        running.assert_restored()


def test_a_fault_of_the_console_itself_restores_the_terminal_and_names_the_log(tmp_path: Path) -> None:
    with session([*SCRIPTED, "crash"], tmp_path) as running:
        running.until("type here")
        running.child.send("count\r")
        running.until("left with 1")
        running.assert_restored()
        assert "the console met an error of its own" in " ".join(running.text.split())
        assert "Traceback" in (tmp_path / "footplate" / "log" / "console.log").read_text()


def test_what_is_written_to_stderr_lands_in_the_log_and_not_on_the_screen(tmp_path: Path) -> None:
    code = (
        f"import sys, os; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import scripted_run\n"
        "class Noisy(scripted_run.TalkingEngine):\n"
        "    def start(self):\n"
        "        super().start(); os.write(2, b'native noise\\n'); os.write(1, b'native noise\\n'); print('python noise')\n"
        "sys.exit(scripted_run.run_on(Noisy('answering')))\n"
    )
    with session(["-c", code], tmp_path) as running:
        answering(running)
        assert "noise" not in running.text
        running.child.send("\x11")
        running.until("left with 0")
        assert (tmp_path / "footplate" / "log" / "console.log").read_text().count("native noise") == 2


def test_a_paste_without_brackets_is_not_sent_line_by_line(tmp_path: Path) -> None:
    with session(SCRIPTED, tmp_path) as running:
        running.until("type here")
        running.child.send("first line of a paste\rsecond line of it\rthird line\r")
        running.until("third line")
        assert "answering" not in running.text
        running.child.send("\x11")
        running.until("left with 0")


def test_keys_of_a_real_terminal_make_new_lines_and_send(tmp_path: Path) -> None:
    with session(SCRIPTED, tmp_path) as running:
        running.until("type here")
        for keys in ("a", "\n", "b", "\x1b[13;2u", "c", "\x1b\r", "d"):  # ^j, shift+enter in kitty's protocol, alt+enter
            running.child.send(keys)
            time.sleep(0.15)
        running.until("┃  d")
        assert all(f"┃{mark} {letter}" in running.text for mark, letter in zip(">   ", "abcd", strict=True))
        running.child.send("\r")
        running.until("answering")
