"""Byte-level BPE (GGUF tokenizer model "gpt2"): how `tokenizer.ggml.pre` cuts text into words, and the merges inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from engine.errors import TokenizerError

# The character classes and the order of the alternatives are those of the models' own tokenizers (GPT-2, Llama 3, Qwen 2,
# DeepSeek V3), cut in sequence as llama.cpp does: each pattern splits the pieces that the one before it left, and what
# no pattern matches stays a piece. Contractions are spelled out because (?i:) would also fold U+017F to "s".
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How one kind of `tokenizer.ggml.pre` works.

    patterns: applied in sequence. whole_words: a word that is itself a token is taken without merging.
    add_bos: what holds when the file doesn't say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_CUTS: tuple[tuple[Cut, str], ...] = (
    (Cut((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (Cut((_GPT2,)), "gpt-2 phi-2 mpt olmo jais gigachat mellum trillion granite-docling exaone4"),
    (
        Cut((_LLAMA3,), whole_words=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (Cut((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (Cut((_QWEN2,)), "qwen2 stablelm2 hunyuan megrez deepseek-r1-qwen"),
    (Cut((_QWEN35,)), "qwen35"),
    (Cut((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)), "deepseek-v3 hunyuan-dense"),
    (Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
)
_BY_NAME = {name: cut for cut, names in _CUTS for name in names.split()}


def cut_of(pre: str) -> Cut:
    """The rules for a `tokenizer.ggml.pre`. Raises `TokenizerError` with its name if it isn't known."""
    try:
        return _BY_NAME[pre]
    except KeyError:
        raise TokenizerError(
            f"the model's pre-tokenizer {pre!r} (tokenizer.ggml.pre) isn't known here, so its token ids can't be made; "
            f"known are {', '.join(sorted(_BY_NAME))}."
        ) from None


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in byte-level vocabularies → the byte (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


class ByteLevelMerges:
    """Turns text into token ids by byte-level BPE.

    `ids` maps the text of every token that ordinary text may become to its id, `merges` are "left right" in order of rank.
    A byte that has no token is left out, as llama.cpp leaves it out.
    """

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], cut: Cut) -> None:
        vocabulary = dict(ids)
        self._end = max(vocabulary.values(), default=-1) + 1
        # A byte without a token still stands between its neighbours: it gets an id past the end, dropped after merging.
        for character in byte_alphabet():
            vocabulary.setdefault(character, self._end + len(vocabulary))
        pairs: list[tuple[str, str]] = []
        for merge in merges:
            left, _, right = merge[1:].partition(" ")
            left = merge[:1] + left
            if left in vocabulary and right in vocabulary and left + right in vocabulary:
                pairs.append((left, right))
        self._bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut.whole_words))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id < self._end]
