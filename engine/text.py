"""TextStream: token ids as they arrive → the text that is certain, cut at the first stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from engine.tokenizer import Tokenizer


class TextStream:
    """Text of a growing answer. All deltas together are `tokenizer.decode(all ids)`, cut at the first stop string.

    Held back are a character whose bytes are still arriving and text that may be the beginning of a stop string. The
    first stop string is the one that is complete first, of two the longer: that doesn't depend on how the ids are
    divided over pushes, so two streams that see the same ids agree. Costs O(1) per character, however long the
    answer. One instance follows one answer and belongs to one thread.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.drops_first_space
        self._stops = _StopStrings(stop) if stop else None
        self._held = ""
        self._finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been seen; nothing comes after it."""
        return self._stops is not None and self._stops.found_length > 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids`, the next tokens, made certain; "" when nothing was, or after the end."""
        if self._finished or self.stopped:
            return ""
        data = bytearray()
        for token_id in ids:
            if token_id not in self._special_ids:
                data += self._tokenizer.token_bytes(token_id)
        if self._drops_space and data:
            self._drops_space = False
            if data[:1] == b" ":
                del data[:1]
        return self._certain(self._decoder.decode(bytes(data)))

    def finish(self) -> str:
        """What was held back, now that no more tokens come: half a character becomes U+FFFD."""
        if self._finished or self.stopped:
            return ""
        self._finished = True
        text = self._certain(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _certain(self, text: str) -> str:
        if self._stops is None:
            return text
        end = len(self._held) + self._stops.feed(text)
        text, self._held = self._held + text, ""
        if self.stopped:
            return text[: end - self._stops.found_length]
        certain = len(text) - self._stops.depth
        self._held = text[certain:]
        return text[:certain]


class _StopStrings:
    """Looks for any of several strings in a text that arrives in pieces (Aho and Corasick, CACM 18(6), 1975).

    `depth` is how many of the last characters may be the beginning of a stop string, `found_length` the length of the
    stop string that was found, 0 before.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]  # length of the longest stop string that ends in a state
        self._fallback = [0]  # the state of the longest proper suffix that is a beginning too
        for text in stop:
            state = 0
            for character in text:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(0)
                    self._fallback.append(0)
                state = self._next[state][character]
            self._found[state] = len(text)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, after in self._next[state].items():
                self._fallback[after] = self._step(self._fallback[state], character)
                self._found[after] = max(self._found[after], self._found[self._fallback[after]])
                waiting.append(after)
        self._state = 0
        self.found_length = 0

    @property
    def depth(self) -> int:
        return self._depth[self._state]

    def feed(self, text: str) -> int:
        """How many characters of `text` were read: all of them, or up to the end of the stop string that was found."""
        for read, character in enumerate(text, 1):
            self._state = self._step(self._state, character)
            if self._found[self._state]:
                self.found_length = self._found[self._state]
                return read
        return len(text)

    def _step(self, state: int, character: str) -> int:
        while True:
            after = self._next[state].get(character)
            if after is not None:
                return after
            if not state:
                return 0
            state = self._fallback[state]
