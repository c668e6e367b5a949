"""Finds the tokens that are cut out of a text before it is tokenised: control tokens and a model's added words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(slots=True)
class _Branch:
    prefix: str  # what every token below begins with
    token: bool  # whether `prefix` is itself a token
    branches: list[_Branch] = field(default_factory=list)


class TokenMatcher:
    """Cuts a text at given tokens: of all that occur the longest is cut out first, everywhere (llama.cpp's order).

    `ids` maps token texts to ids. `strips_before` and `strips_after` are ids that swallow the whitespace on that side
    (`lstrip` and `rstrip` in tokenizer.json).
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        strips_before: frozenset[int] = frozenset(),
        strips_after: frozenset[int] = frozenset(),
    ) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._before = strips_before
        self._after = strips_after
        self._roots = _branches(sorted(self._ids))

    @property
    def tokens(self) -> Mapping[str, int]:
        """The texts that are cut out → their ids."""
        return self._ids

    def present(self, text: str) -> list[str]:
        """The tokens that occur in `text`, longest (in UTF-8 bytes) first. Overlaps are all named."""
        found = list(self._present(text))
        return sorted(found, key=lambda token: (-len(token.encode(errors="surrogatepass")), self._ids[token]))

    def split(self, text: str) -> list[str | int]:
        """`text` as pieces in order: a str is plain text (never empty), an int the id of a token that was cut out."""
        pieces: list[str | int] = [text] if text else []
        for token in self.present(text):
            token_id = self._ids[token]
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                parts = piece.split(token)
                last = len(parts) - 1
                for n, part in enumerate(parts):
                    if n < last and token_id in self._before:
                        part = part.rstrip()
                    if n > 0 and token_id in self._after:
                        part = part.lstrip()
                    if part:
                        cut.append(part)
                    if n < last:
                        cut.append(token_id)
            pieces = cut
        return pieces

    def may_end_in(self, text: str) -> bool:
        """Whether a token could end at the start of `text`, or hold all of it, with other text written around it."""
        return any(text[:length] in self._tails for length in range(1, min(len(text), self._longest) + 1)) or self._inside(text)

    def may_begin_in(self, text: str) -> bool:
        """Whether a token could begin at the end of `text`, or hold all of it, with other text written around it."""
        return any(text[-length:] in self._heads for length in range(1, min(len(text), self._longest) + 1)) or self._inside(text)

    def _inside(self, text: str) -> bool:
        return 0 < len(text) < self._longest and text in self._joined

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(token[start:] for token in self._ids for start in range(1, len(token)))

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(token[:end] for token in self._ids for end in range(1, len(token)))

    @cached_property
    def _joined(self) -> str:
        return "\uffff".join(self._ids)

    def _present(self, text: str) -> Iterator[str]:
        # Thousands of `<unused…>` share a beginning: one search rules them all out.
        stack = list(self._roots)
        while stack:
            branch = stack.pop()
            if branch.prefix in text:
                if branch.token:
                    yield branch.prefix
                stack += branch.branches


def _branches(tokens: list[str], known: int = 0) -> list[_Branch]:
    """The sorted `tokens`, which share their first `known` characters, as branches that part at the next one."""
    branches: list[_Branch] = []
    start = 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and tokens[end][known] == tokens[start][known]:
            continue
        group = tokens[start:end]
        length = known + 1
        while length < len(group[0]) and group[0][: length + 1] == group[-1][: length + 1]:
            length += 1  # sorted: what the first and the last share, all share
        prefix = group[0][:length]
        branch = _Branch(prefix, token=group[0] == prefix)
        branches.append(branch)
        rest = group[1:] if branch.token else group
        if rest:
            branch.branches = _branches(rest, len(prefix))
        start = end
    return branches
