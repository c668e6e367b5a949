"""TokenMatcher: the longest token first, everywhere; and whether text could become part of one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.token_matcher import TokenMatcher

TOKENS = st.sets(st.text(alphabet="ab<>", min_size=1, max_size=4), max_size=8)
TEXT = st.text(alphabet="ab<>c", max_size=30)


def cut_one_by_one(text: str, ids: dict[str, int]) -> list[str | int]:
    """The rule at its plainest."""
    pieces: list[str | int] = [text]
    for token in sorted(ids, key=lambda token: (-len(token), ids[token])):
        cut: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                cut.append(piece)
                continue
            before, found, after = piece.partition(token)
            while found:
                cut += [before, ids[token]]
                before, found, after = after.partition(token)
            cut.append(before)
        pieces = cut
    return [piece for piece in pieces if piece != ""]


@given(TOKENS, TEXT)
def test_cuts_the_longest_token_first(tokens: set[str], text: str) -> None:
    ids = {token: n for n, token in enumerate(sorted(tokens))}
    assert TokenMatcher(ids).split(text) == cut_one_by_one(text, ids)


@given(TOKENS, TEXT, TEXT, TEXT)
def test_knows_what_text_around_could_make_a_token_of(tokens: set[str], before: str, text: str, after: str) -> None:
    matcher = TokenMatcher({token: n for n, token in enumerate(sorted(tokens))})
    if not text or matcher.present(text) or matcher.present(before) or matcher.present(after):
        return
    around = before + text + after
    for token in tokens:
        at = around.find(token)
        if at < 0 or at >= len(before + text) or at + len(token) <= len(before):
            continue  # not there, or without a character of `text`
        if at < len(before):
            assert matcher.may_end_in(text)
        if at + len(token) > len(before + text):
            assert matcher.may_begin_in(text)


def test_swallows_the_whitespace_a_token_claims() -> None:
    matcher = TokenMatcher({"<l>": 1, "<r>": 2}, strips_before=frozenset({1}), strips_after=frozenset({2}))
    assert matcher.split("a <l> b <r>\n c <r>  ") == ["a", 1, " b ", 2, "c ", 2]
