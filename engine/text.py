"""TextStream: token ids as they arrive → the text that is certain."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.tokenizer import Tokenizer


class TextStream:
    """Text of a growing answer. The concatenation of all deltas is `tokenizer.decode(all ids)`.

    A character whose bytes are still arriving is held back. One instance follows one answer and belongs to one thread.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokenizer.drops_first_space
        self.stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids`, the next tokens, made certain; "" when nothing was."""
        data = bytearray()
        for token_id in ids:
            if token_id not in self._tokenizer.special_ids:
                data += self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            if data[:1] == b" ":
                del data[:1]
        return self._decoder.decode(bytes(data))

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        return self._decoder.decode(b"", final=True)
