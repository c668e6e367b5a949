"""The console on a real terminal: what it leaves behind however it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from pty_session import Session, session

SCRIPTED = [str(Path(__file__).with_name("scripted_run.py"))]


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
