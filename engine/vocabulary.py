"""Vocabulary: what a Tokenizer is made of, read from a GGUF or from a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.token_matcher import TokenMatcher


class TextEncoder(Protocol):
    """Turns ordinary text, in which nothing is special any more, into token ids."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer is made of, wherever it was read from.

    bytes_of: token id → the bytes it stands for. control: the tokens that only a template may write. added: words
    that are tokens wherever they are written, cut out before `encoder` sees the text. special_ids: left out of decoded
    text. space_prefix: text at the start and after a cut-out token is tokenised with a space before it. drops_first_space:
    decoding drops the space at the very start. continued: the encoder for text that isn't at the start, where that differs.
    """

    size: int
    encoder: TextEncoder
    bytes_of: Callable[[int], bytes]
    control: TokenMatcher
    added: TokenMatcher
    special_ids: frozenset[int]
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    space_prefix: bool = False
    drops_first_space: bool = False
    continued: TextEncoder | None = None
    chat_template: str | None = None
    bos_text: str = ""
    eos_text: str = ""
