"""Tokenizer: text to token ids and back, from a GGUF's metadata or a directory with a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine.errors import RequestError
from engine.gguf_vocabulary import read_gguf
from engine.hf_vocabulary import read_directory
from engine.token_matcher import TokenMatcher
from engine.vocabulary import Vocabulary


class Tokenizer:
    """Token ids of a text and the text of token ids, for one model. Immutable after construction, safe to share between threads.

    Text a person wrote goes through `encode`, in which nothing they typed can become a control token; only what a chat
    template wrote goes through `encode_rendered`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._special_ids = vocabulary.special_ids
        self._bytes: list[bytes | None] = [None] * vocabulary.size

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer a GGUF's `tokenizer.*` metadata describes; arrays are Python lists.

        Raises `TokenizerError` when keys are missing or contradict each other, or the kind isn't known.
        """
        return cls(read_gguf(metadata))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory: tokenizer.json, with tokenizer_config.json, the chat template and the
        end tokens of generation_config.json or config.json where they are there.

        Raises `TokenizerError` when there is no tokenizer.json, or it can't be read or used.
        """
        return cls(read_directory(Path(path)))

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer has; a model's output can be wider (padding)."""
        return self._vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        return self._vocabulary.eos_token_ids

    @property
    def add_bos(self) -> bool:
        """Whether a prompt begins with the BOS token unless told otherwise."""
        return self._vocabulary.add_bos

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja chat template, if it has one."""
        return self._vocabulary.chat_template

    @property
    def bos_text(self) -> str:
        """The BOS token as a template writes it, "" without one."""
        return self._vocabulary.bos_text

    @property
    def eos_text(self) -> str:
        """The EOS token as a template writes it, "" without one."""
        return self._vocabulary.eos_text

    @property
    def special_ids(self) -> frozenset[int]:
        """The control tokens: never made from a person's text, left out of decoded text."""
        return self._special_ids

    @property
    def drops_first_space(self) -> bool:
        """Whether decoding leaves out a space at the very start (SentencePiece models that put one there)."""
        return self._vocabulary.drops_first_space

    @property
    def control(self) -> TokenMatcher:
        """Finds control tokens in a text."""
        return self._vocabulary.control

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The token ids of a person's `text`: control tokens written in it stay text.

        `add_bos` overrides the model's own setting. Raises `RequestError` for text that isn't valid Unicode.
        """
        check_text(text)
        return self.encode_parts([text], add_bos=add_bos)

    def encode_rendered(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The token ids of a chat template's output: control tokens in it become their ids.

        BOS is added as in `encode`, but never to a text that begins with it. Raises `RequestError` for invalid Unicode.
        """
        check_text(text)
        return self.encode_parts(self.control.split(text), add_bos=add_bos)

    def encode_parts(self, parts: Iterable[str | int | Sequence[int]], *, add_bos: bool | None = None) -> list[int]:
        """The token ids of `parts` in order: a str is plain text, an int a control token, a sequence ids taken as they are.

        Where the model (or `add_bos`) asks for a BOS, exactly one stands at the start, whether `parts` begin with none,
        one or several.
        """
        vocabulary = self._vocabulary
        ids: list[int] = []
        fresh = True  # at the start, or right after a token that was cut out
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                fresh = True
            elif not isinstance(part, str):
                ids += part
                fresh = False
            else:
                for piece in vocabulary.added.split(part):
                    if isinstance(piece, int):
                        ids.append(piece)
                        fresh = True
                        continue
                    encoder = vocabulary.encoder if not ids or vocabulary.continued is None else vocabulary.continued
                    ids += encoder.encode(" " + piece if fresh and vocabulary.space_prefix else piece)
                    fresh = False
        bos = vocabulary.bos_token_id
        if bos is None or not (vocabulary.add_bos if add_bos is None else add_bos):
            return ids
        num_written = 0
        while num_written < len(ids) and ids[num_written] == bos:
            num_written += 1
        return ids[num_written - 1 :] if num_written else [bos, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Control tokens are left out unless `skip_special` is off; bytes that aren't UTF-8 become U+FFFD."""
        data = bytearray()
        at_start = self.drops_first_space
        for token_id in ids:
            special = token_id in self._special_ids
            if special and skip_special:
                continue
            piece = self.token_bytes(token_id)
            if at_start and piece:
                at_start = False
                if not special and piece[:1] == b" ":
                    piece = piece[1:]
            data += piece
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, b"" for an id the tokenizer doesn't have (a model's output can be wider)."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._vocabulary.bytes_of(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text, for showing: bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def check_text(text: str) -> None:
    """Raise `RequestError` unless `text` is a str that can be written as UTF-8."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be text, not {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start + 1}, "
            "which is no character; remove it."
        ) from None
