"""The boundary: no control sequence passes, whole or in pieces, and no text is lost for good."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.sanitise import MAX_CONTROL_STRING, Sanitiser, one_line, sanitise

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIC8K\x07",
    "title": "\x1b]0;owned\x1b\\",
    "clear": "\x1b[2J",
    "colour": "\x1b[38;2;1;2;3m",
    "cursor": "\x1b[10;10H",
    "private mode": "\x1b[?1049h",
    "device control": "\x1bP+q544e\x1b\\",
    "application command": "\x1b_Ga=T;AAAA\x1b\\",
    "privacy message": "\x1b^secret\x1b\\",
    "start of string": "\x1bXabc\x1b\\",
    "charset": "\x1b(0",
    "reset": "\x1bc",
    "eight-bit csi": "\x9b31m",
    "eight-bit osc": "\x9d0;owned\x9c",
    "eight-bit dcs": "\x90q\x9c",
    "hyperlink": "\x1b]8;;file:///etc/passwd\x1b\\",
    "csi with a string inside": "\x1b[31\x1b]0;x\x07",
}
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b\u200e\u200f\u061c\ufeff\U000e0000-\U000e0fff\ud800-\udfff]"
)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_control_sequence_is_removed_and_the_text_around_it_stays(attack: str) -> None:
    assert sanitise(f"before{attack}after") == "beforeafter"


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_sequence_split_at_any_point_is_removed(attack: str) -> None:
    text = f"before{attack}after"
    for cut in range(len(text) + 1):
        sanitiser = Sanitiser()
        assert sanitiser.feed(text[:cut]) + sanitiser.feed(text[cut:]) + sanitiser.finish() == "beforeafter"


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_sequence_that_comes_one_character_at_a_time_is_removed(attack: str) -> None:
    sanitiser = Sanitiser()
    assert "".join(sanitiser.feed(char) for char in f"before{attack}after") == "beforeafter"


@given(st.lists(st.text(alphabet=st.characters() | st.sampled_from("\x1b[]P_^X;\x07\x9b\x9d\x9c0m\n\\"), max_size=30), max_size=8))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_in_whatever_chunks_nothing_forbidden_leaves(chunks: list[str]) -> None:
    sanitiser = Sanitiser()
    streamed = "".join(sanitiser.feed(chunk) for chunk in chunks)
    assert FORBIDDEN.search(streamed) is None
    assert streamed == sanitise("".join(chunks))


def test_an_unterminated_string_ends_with_its_line() -> None:
    assert sanitise("a\x1b]0;never ends\nthe next line") == "a\nthe next line"


def test_an_unterminated_string_on_one_endless_line_is_bounded() -> None:
    text = "x" * (MAX_CONTROL_STRING + 500) + "end"
    sanitiser = Sanitiser()
    shown = "".join(sanitiser.feed(part) for part in ("\x1b]", text))
    assert shown.endswith("end")
    assert len(shown) == 503


def test_an_endless_csi_is_bounded() -> None:
    assert sanitise("\x1b[" + "1;" * 500 + "text").endswith("text")


def test_ordinary_text_passes_unchanged() -> None:
    text = "Zeilen\nund\tTabs, [/] [00] [b + x, 日本語, العربية, हिन्दी, ❤️ 👨‍👩‍👧 🏳️‍🌈 e\u0301"
    assert sanitise(text) is text


def test_line_separators_become_line_breaks_that_every_part_of_the_console_counts_alike() -> None:
    assert sanitise("a\u2028b\u2029c\r\nd\x0be").splitlines() == ["a", "b", "c", "de"]


def test_a_lone_surrogate_can_be_written_afterwards() -> None:
    assert sanitise("\ud83d").encode() == "\ufffd".encode()


def test_one_line_has_one_line() -> None:
    assert one_line(" a\n\tb\x1b[1m  c ") == "a b c"
    assert one_line("lighthouse keeper", 8) == "lightho…"


def test_the_boundary_imports_neither_textual_nor_rich() -> None:
    code = "import sys, console.sanitise; sys.exit(any(name.split('.')[0] in ('textual', 'rich') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
