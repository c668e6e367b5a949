"""Pastes are told from typing before keys are parsed, bracketed or not, wherever the reads are cut."""

from __future__ import annotations

import time

import pytest
from textual._xterm_parser import XTermParser
from textual.events import Key

from console.driver import BURST_CHARS, InputSplitter, with_modified_enter

LINES = "a line of the pasted text\r" * 40


def split_at(text: str, *sizes: int, gap_s: float = 0.001) -> list[tuple[str, str]]:
    """The pieces of `text` read in chunks of the given sizes."""
    splitter, pieces, at, now = InputSplitter(), [], 0, 10.0
    for size in (*sizes, len(text)):
        pieces += splitter.feed(text[at : at + size], now)
        at, now = at + size, now + gap_s
    return pieces


def test_typing_is_keys() -> None:
    splitter = InputSplitter()
    assert splitter.feed("h", 1.0) == [("keys", "h")]
    assert splitter.feed("\r", 1.001) == [("keys", "\r")]
    assert splitter.feed("\x1b[A\x1b[A", 1.2) == [("keys", "\x1b[A\x1b[A")]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 100, 10_000])
def test_a_bracketed_paste_is_one_paste_in_whatever_reads(size: int) -> None:
    text = f"ab\x1b[200~{LINES}\x1b[201~cd"
    pieces = split_at(text, *[size] * (len(text) // size))
    assert [body for kind, body in pieces if kind == "paste"] == [LINES]
    assert "".join(body for kind, body in pieces if kind == "keys") == "abcd"


def test_a_lone_escape_is_a_key_once_nothing_follows() -> None:
    splitter = InputSplitter()
    assert splitter.feed("\x1b", 1.0) == []
    assert splitter.holds_back
    assert splitter.idle() == [("keys", "\x1b")]
    assert not splitter.holds_back
    assert splitter.feed("\x1b", 1.0) + splitter.feed("[A", 1.001) == [("keys", "\x1b[A")]


def test_a_paste_without_brackets_is_a_paste_to_its_last_line() -> None:
    pieces = split_at(LINES + "the end\r", 100, 700, 300)
    assert {kind for kind, _ in pieces} == {"paste"}
    assert "".join(body for _, body in pieces) == LINES + "the end\r"


def test_one_line_and_enter_is_sent() -> None:
    assert split_at("a prompt that a script typed at once\r") == [("paste", "a prompt that a script typed at once"), ("keys", "\r")]
    assert split_at("a prompt that a script typed at once\r", 36) == [
        ("paste", "a prompt that a script typed at once"),
        ("keys", "\r"),
    ]


def test_keys_typed_after_a_burst_are_keys_again() -> None:
    splitter = InputSplitter()
    assert splitter.feed("x" * BURST_CHARS, 1.0)[0][0] == "paste"
    assert splitter.feed("y", 1.2) == [("keys", "y")]


def test_a_megabyte_without_brackets_is_split_in_no_time() -> None:
    splitter = InputSplitter()
    start = time.perf_counter()
    for at in range(0, 1_000_000, 4096):
        assert splitter.feed("word " * 819, at / 1e6)[0][0] == "paste"
    assert time.perf_counter() - start < 0.2


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ("\n", "ctrl+j"),
        ("\r", "enter"),
        ("\x1b[13;2u", "shift+enter"),
        ("\x1b[27;2;13~", "shift+enter"),
        ("\x1b\r", "alt+enter"),
        ("\x1b[27;5;13~", "ctrl+enter"),
    ],
)
def test_every_spelling_of_enter_is_understood(sent: str, key: str) -> None:
    events = [event for event in XTermParser(False).feed(with_modified_enter(sent)) if isinstance(event, Key)]
    assert [event.key for event in events] == [key]
