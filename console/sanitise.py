"""The one boundary where untrusted text becomes text that may reach a terminal.

Model output, prompts, names, paths, titles and error messages pass through here before they are drawn. What is
removed: terminal control sequences (CSI, OSC, DCS, APC, PM, SOS, two-character escapes, their 8-bit forms), every other
control character but newline and tab, and invisible format characters that can make text read other than it is
(bidirectional overrides, zero-width spaces, tags). Zero-width joiners and variation selector 16 stay: emoji need them.

Grammar: ECMA-48 §5.4 (control sequences) and §5.6 (control strings). Imports nothing but `re`.
"""

from __future__ import annotations

import re

MAX_CONTROL_STRING = 1024
"""Characters of an unterminated control string that are swallowed before text is taken as text again."""
MAX_CONTROL_SEQUENCE = 64
"""The same bound for the parameters of a CSI sequence."""

_SPECIAL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline; DEL; C1
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible, bidi, line separators
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"  # musical format controls, tags, supplementary variation selectors
    "\ud800-\udfff]"  # lone surrogates can't be encoded at all
)
_ESC = "\x1b"
_STRING_STARTS = "PX^_]"  # DCS, SOS, PM, APC, OSC after ESC
_C1_STRING_STARTS = "\x90\x98\x9d\x9e\x9f"
_C1_CSI = "\x9b"
_STRING_END = re.compile("[\x07\x18\x1a\x1b\x9c\n]")
_LINE_BREAKS = "\u2028\u2029"
_RUNS_OF_SPACE = re.compile(r"\s+")

_GROUND, _ESCAPE, _INTERMEDIATE, _CSI, _STRING = range(5)


class Sanitiser:
    """Strips control sequences from a stream of text, also where a sequence is split across chunks.

    An unterminated control string swallows at most `MAX_CONTROL_STRING` characters and never more than its line.
    """

    def __init__(self) -> None:
        self._state = _GROUND
        self._swallowed = 0

    def feed(self, text: str) -> str:
        """The harmless part of `text`; what a sequence begun in an earlier chunk still covers is left out."""
        if self._state == _GROUND and _SPECIAL.search(text) is None:
            return text
        kept: list[str] = []
        at = 0
        while at < len(text):
            at = self._step(text, at, kept)
        return "".join(kept)

    def finish(self) -> str:
        """ "" — nothing is ever held back; a sequence that was still open is forgotten."""
        self._state = _GROUND
        return ""

    def _step(self, text: str, at: int, kept: list[str]) -> int:
        """Consume from `text[at]`, append what may be shown to `kept`, and return the next position."""
        state = self._state
        if state == _GROUND:
            return self._ground(text, at, kept)
        if state == _ESCAPE:
            return self._escape(text[at], at)
        if state == _STRING:
            return self._control_string(text, at)
        # A CSI sequence runs over 0x20–0x3F to a final byte from 0x40; ESC and intermediates over 0x20–0x2F to one from 0x30.
        last_inner, first_final = ("?", "@") if state == _CSI else ("/", "0")
        if " " <= text[at] <= last_inner:
            return self._swallow(at)
        self._state = _GROUND
        return at + 1 if first_final <= text[at] <= "~" else at

    def _ground(self, text: str, at: int, kept: list[str]) -> int:
        found = _SPECIAL.search(text, at)
        if found is None:
            kept.append(text[at:])
            return len(text)
        kept.append(text[at : found.start()])
        char = found.group()
        self._swallowed = 0
        if char == _ESC:
            self._state = _ESCAPE
        elif char == _C1_CSI:
            self._state = _CSI
        elif char in _C1_STRING_STARTS:
            self._state = _STRING
        elif char in _LINE_BREAKS:
            kept.append("\n")
        elif "\ud800" <= char <= "\udfff":
            kept.append("\ufffd")
        return found.end()

    def _escape(self, char: str, at: int) -> int:
        self._swallowed = 0
        if char == _ESC:
            return at + 1
        if char == "[":
            self._state = _CSI
        elif char in _STRING_STARTS:
            self._state = _STRING
        elif " " <= char <= "/":
            self._state = _INTERMEDIATE
        elif "0" <= char <= "~":
            self._state = _GROUND
        else:  # not an escape after all: the ESC is dropped, the character is looked at again
            self._state = _GROUND
            return at
        return at + 1

    def _control_string(self, text: str, at: int) -> int:
        limit = at + MAX_CONTROL_STRING - self._swallowed
        found = _STRING_END.search(text, at, limit)
        if found is None:
            end = min(limit, len(text))
            self._swallowed += end - at
            if end == limit:
                self._state = _GROUND
            return end
        if found.group() == _ESC:  # ESC \ ends it as a two-character escape; any other ESC aborts it and begins anew
            self._state = _ESCAPE
            return found.end()
        self._state = _GROUND
        return found.start() if found.group() == "\n" else found.end()

    def _swallow(self, at: int) -> int:
        self._swallowed += 1
        if self._swallowed > MAX_CONTROL_SEQUENCE:
            self._state = _GROUND
        return at + 1


def sanitise(text: str) -> str:
    """`text` without control sequences and invisible format characters; newlines and tabs stay."""
    return Sanitiser().feed(text)


def one_line(text: str, max_chars: int | None = None) -> str:
    """`text` sanitised and on one line: each run of white space is one space; cut with … after `max_chars`."""
    line = _RUNS_OF_SPACE.sub(" ", sanitise(text)).strip()
    if max_chars is not None and len(line) > max_chars:
        return line[: max(0, max_chars - 1)].rstrip() + "…"
    return line
