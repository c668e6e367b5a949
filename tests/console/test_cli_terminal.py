"""The command line on a real terminal: progress, sanitised text, Ctrl-C."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pexpect
import pytest

from console import cli_output

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--threads", "1", "--num-kv-blocks", "64", "--max-seq-len", "512"]


def spawn(*arguments: str) -> pexpect.spawn[str]:
    """The command line in a pseudo-terminal of its own."""
    return pexpect.spawn(
        sys.executable, ["-m", "console.cli", *arguments], cwd=str(ROOT), encoding="utf-8", timeout=60, dimensions=(24, 80)
    )


def test_ctrl_c_in_mid_answer_ends_at_once_with_130(smollm2_gguf: Path) -> None:
    child = spawn("run", "Write a long story about a locomotive.", "--max-tokens", "480", *SMALL)
    child.expect(r"\r\x1b\[K[^\n]*%")  # loading draws its line on a terminal …
    child.expect(r"\r\x1b\[K[A-Z]")  # … and is wiped before the answer starts
    pressed = time.monotonic()
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert time.monotonic() - pressed < 3
    assert child.exitstatus == 130
    assert "Traceback" not in child.before
    assert "footplate: interrupted." in child.before


def test_ctrl_c_while_loading_ends_with_130(smollm2_gguf: Path) -> None:
    child = spawn("run", "Hello", *SMALL)
    child.expect(r"\r\x1b\[K")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in child.before


class Screen:
    """A stream that says it is a terminal, and keeps what is written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_text_for_a_terminal_is_sanitised_across_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    sink = cli_output.text_sink()
    for delta in ("safe \x1b", "]0;stolen ti", "tle\x07text \x1b[", "31mred", "\x1b]52;c;never ended"):
        sink.write(delta)
    sink.finish()
    assert screen.text == "safe text red\n"


def test_text_for_a_pipe_is_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\r\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    sink = cli_output.text_sink()
    for delta in ("\x1b]0;ti", "tle\x07", "é\n🚂"):
        sink.write(delta)
    sink.finish()
    assert pipe.buffer.getvalue() == "\x1b]0;title\x07é\n🚂".encode()  # type: ignore[attr-defined]


def test_sentences_on_a_terminal_are_sanitised_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    cli_output.say("model 'a\x1b[2J\nb' is unknown.")
    assert screen.text == "footplate: model 'a b' is unknown.\n"


def test_a_pull_on_a_terminal_draws_a_bar_that_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(cli_output.os, "get_terminal_size", lambda _fd: type("Size", (), {"columns": 70})())
    monkeypatch.setattr(Screen, "fileno", lambda _self: 2, raising=False)
    with cli_output.ProgressLine(bar=True) as line:
        line.show("fetching a-model-of-some-length", 50 * 2**20, 100 * 2**20)
        line.show("fetching a-model-of-some-length", 51 * 2**20, 100 * 2**20)  # too soon to draw
    drawn, wiped = screen.text.split("\r\x1b[K")[1:]
    assert drawn == "fetching a-model-of-some-length [###############               ]  50% "[:69]
    assert wiped == ""


def test_progress_draws_nothing_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(Screen, "isatty", lambda _self: False)
    monkeypatch.setattr(sys, "stderr", screen)
    with cli_output.ProgressLine(bar=True) as line:
        line.show("loading", 1, 2)
    assert screen.text == ""
