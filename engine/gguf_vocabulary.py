"""Reads a GGUF's `tokenizer.*` metadata into the parts a Tokenizer is made of; ids come out as llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from engine.errors import TokenizerError
from engine.pretokenize import ByteLevelMerges, byte_alphabet, cut_of
from engine.sentencepiece import SPACE, ScoredMerges
from engine.token_matcher import TokenMatcher
from engine.vocabulary import TextEncoder, Vocabulary


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF specification numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end an answer, whatever the file names as eos (a chat model's file often names only one of two).
END_TOKENS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "<end_of_utterance>"),
        "<｜end▁of▁sentence｜>",
    }
)
# llama.cpp takes tokens of these names for control tokens even if the file calls them words (Gemma's `</s>`, an HTML tag).
# We do so for what a template may write and a person may not, but such a word still is text when a model says it.
_ALWAYS_CONTROL = END_TOKENS | {
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<|file_sep|>"),
}


def read_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in `metadata`. Raises `TokenizerError` when something is missing, contradictory or of an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise TokenizerError("the model file has no tokenizer (tokenizer.ggml.model is missing); prompts must be token ids.")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"the model's tokenizer is of kind {kind!r} (tokenizer.ggml.model); 'gpt2' and 'llama' can be read.")
    texts = _strings(metadata, "tokens")
    size = len(texts)
    types = _numbers(metadata, "token_type", size, default=int(TokenType.NORMAL))

    control: dict[str, int] = {}
    added: dict[str, int] = {}
    ordinary: dict[str, int] = {}
    special_ids: set[int] = set()
    for token_id, text in enumerate(texts):
        token_type = types[token_id]
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            control.setdefault(text, token_id)
            special_ids.add(token_id)
            continue
        ordinary.setdefault(text, token_id)
        if text in _ALWAYS_CONTROL:
            control.setdefault(text, token_id)
        elif token_type == TokenType.USER_DEFINED:
            added.setdefault(text, token_id)

    scored = kind == "llama"
    encoder: TextEncoder
    if scored:
        scores = [float(score) for score in _numbers(metadata, "scores", size, default=0)]
        byte_ids = [ordinary.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        encoder = ScoredMerges(ordinary, scores, byte_ids)
        add_bos = True
    else:
        cut = cut_of(str(metadata.get("tokenizer.ggml.pre") or "default"))
        encoder = ByteLevelMerges(ordinary, _strings(metadata, "merges"), cut)
        add_bos = cut.add_bos
    alphabet = byte_alphabet()

    def bytes_of(token_id: int) -> bytes:
        text, token_type = texts[token_id], types[token_id]
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            return text.encode()
        if token_type == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if scored:
            return text.replace(SPACE, " ").encode()
        if all(character in alphabet for character in text):
            return bytes(alphabet[character] for character in text)
        return text.encode()

    bos = _token_id(metadata, "bos_token_id", size)
    eos = _token_id(metadata, "eos_token_id", size)
    ends = {eos, _token_id(metadata, "eot_token_id", size), _token_id(metadata, "eom_token_id", size)}
    ends |= {control[text] for text in END_TOKENS & control.keys()} & special_ids
    if {"<|return|>", "<|call|>"} <= control.keys():
        ends.discard(control.get("<|end|>"))  # of the harmony format, where it ends a message within an answer
    space_prefix = scored and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        size=size,
        encoder=encoder,
        bytes_of=bytes_of,
        control=TokenMatcher(control),
        added=TokenMatcher(added),
        special_ids=frozenset(special_ids),
        bos_token_id=bos,
        eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and bos is not None,
        space_prefix=space_prefix,
        drops_first_space=space_prefix,
        chat_template=template if isinstance(template, str) and template else None,
        bos_text="" if bos is None else texts[bos],
        eos_text="" if eos is None else texts[eos],
    )


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, (list, tuple)) or not value:
        raise TokenizerError(f"tokenizer.ggml.{name} is missing or empty in the model file; convert the model again.")
    if not all(isinstance(text, str) for text in value):
        raise TokenizerError(f"tokenizer.ggml.{name} must hold only text; convert the model again.")
    return list(value)


def _numbers(metadata: Mapping[str, object], name: str, size: int, *, default: int) -> list[int | float]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return [default] * size
    if not isinstance(value, (list, tuple)) or not all(isinstance(number, (int, float)) for number in value):
        raise TokenizerError(f"tokenizer.ggml.{name} must hold only numbers; convert the model again.")
    if len(value) < size:
        raise TokenizerError(f"tokenizer.ggml.{name} holds {len(value)} values for {size} tokens; convert the model again.")
    return list(value)


def _token_id(metadata: Mapping[str, object], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    # An id past the vocabulary is what some converters write for "none"; llama.cpp passes over it too.
    return value if isinstance(value, int) and 0 <= value < size else None
