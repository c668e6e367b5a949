"""SentencePiece-style BPE over scored tokens (GGUF tokenizer model "llama"), with the merge order of llama.cpp."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

_MAX_CACHED_CHUNKS = 65536
_MAX_CACHED_LENGTH = 64  # characters
SPACE = "\u2581"


class ScoredMerges:
    """Turns text into token ids by merging the neighbours whose joined text has the highest score.

    Of equal scores the leftmost pair is merged first; a character that is no token becomes its UTF-8 byte tokens
    `<0xNN>`. The rule is SentencePiece's BPE (Kudo and Richardson, arXiv 1808.06226) as llama.cpp runs it: any
    neighbours whose text is a token may merge, however that token came about.

    `ids` maps the text of every token that ordinary text may become to its id, `scores[id]` is a token's score,
    `byte_ids[b]` the token of byte b (-1: the vocabulary has none, and the byte is left out).
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int]) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._pairs = {text[i : i + 2] for text in ids for i in range(len(text) - 1)}
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, whose spaces are turned into U+2581 first."""
        out: list[int] = []
        for chunk in self._chunks(text.replace(" ", SPACE)):
            ids = self._cache.get(chunk)
            if ids is None:
                ids = tuple(self._merge(chunk))
                if len(chunk) <= _MAX_CACHED_LENGTH:
                    if len(self._cache) >= _MAX_CACHED_CHUNKS:
                        self._cache.clear()
                    self._cache[chunk] = ids
            out += ids
        return out

    def _chunks(self, text: str) -> Iterator[str]:
        # No token holds the two characters on either side of a cut, so no merge can ever cross it: the chunks are
        # independent, short (about a word each) and worth remembering.
        start = 0
        pairs = self._pairs
        for cut in range(1, len(text)):
            if text[cut - 1 : cut + 1] not in pairs:
                yield text[start:cut]
                start = cut
        if start < len(text):
            yield text[start:]

    def _merge(self, chunk: str) -> Iterator[int]:
        symbols = list(chunk)  # "" once merged into the symbol on its left
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        heap: list[tuple[float, int, int, int]] = []  # (-score, left, right, joined length)

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            joined = symbols[left] + symbols[right]
            token_id = self._ids.get(joined)
            if token_id is not None:
                heapq.heappush(heap, (-self._scores[token_id], left, right, len(joined)))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while heap:
            _, left, right, length = heapq.heappop(heap)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
                continue  # one side has been merged since this pair was offered
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        for symbol in symbols:
            if not symbol:
                continue
            token_id = self._ids.get(symbol)
            if token_id is not None:
                yield token_id
            else:
                yield from (self._byte_ids[byte] for byte in symbol.encode() if self._byte_ids[byte] >= 0)
