"""Reads a checkpoint directory's tokenizer.json, and the files beside it, into the parts a Tokenizer is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from engine.errors import TokenizerError
from engine.pretokenize import byte_alphabet
from engine.sentencepiece import SPACE
from engine.token_matcher import TokenMatcher
from engine.vocabulary import Vocabulary


class PipelineEncoder:
    """Ordinary text through a tokenizer.json: normaliser, added words, pre-tokenizer, model; control tokens stay text."""

    def __init__(self, pipeline: Pipeline) -> None:
        pipeline.encode_special_tokens = True  # the library's name for "special tokens written in a text are text"
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = self._pipeline.encode(text, add_special_tokens=False).ids
        return ids


def read_directory(path: Path) -> Vocabulary:
    """The vocabulary in directory `path`. Raises `TokenizerError` when tokenizer.json is missing, broken or of an unknown kind."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{path} has no tokenizer.json (the fast tokenizer's file); prompts must be token ids.")
    try:
        text = file.read_text(encoding="utf-8")
        pipeline = Pipeline.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever it can't parse
        raise TokenizerError(f"{file} can't be read as a tokenizer: {error}") from error
    config = _read_json(path / "tokenizer_config.json")
    added: dict[int, AddedToken] = pipeline.get_added_tokens_decoder()
    special = {token_id: token for token_id, token in added.items() if token.special}
    control = TokenMatcher(
        {token.content: token_id for token_id, token in special.items()},
        strips_before=frozenset(token_id for token_id, token in special.items() if token.lstrip),
        strips_after=frozenset(token_id for token_id, token in special.items() if token.rstrip),
    )
    size = max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    bos_text, eos_text = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    bos, eos = pipeline.token_to_id(bos_text), pipeline.token_to_id(eos_text)
    return Vocabulary(
        size=size,
        encoder=PipelineEncoder(pipeline),
        bytes_of=_bytes_of(pipeline, added, file),
        control=control,
        added=TokenMatcher({}),  # the pipeline finds those itself, after its normaliser
        special_ids=frozenset(special),
        bos_token_id=bos,
        eos_token_ids=_ends(path, eos, size),
        add_bos=_adds_bos(pipeline, config, bos),
        drops_first_space=_drops_first_space(_state(pipeline.decoder)),
        continued=_continued(text, pipeline),
        chat_template=_chat_template(path, config),
        bos_text=bos_text,
        eos_text=eos_text,
    )


def _read_json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def _token_text(value: object) -> str:
    if isinstance(value, Mapping):  # a serialised AddedToken
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ends(path: Path, eos: int | None, size: int) -> frozenset[int]:
    """The tokenizer's end token and those of generation_config.json, or of config.json where the first names none."""
    named: object = _read_json(path / "generation_config.json").get("eos_token_id")
    if named is None:
        config = _read_json(path / "config.json")
        inner = config.get("text_config")
        named = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    values = [eos, *(named if isinstance(named, list) else [named])]
    return frozenset(value for value in values if isinstance(value, int) and 0 <= value < size)


def _adds_bos(pipeline: Pipeline, config: Mapping[str, object], bos: int | None) -> bool:
    if bos is None:
        return False
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    ids: list[int] = pipeline.encode("a", add_special_tokens=True).ids  # what the file's post-processor does
    return ids[:1] == [bos]


def _chat_template(path: Path, config: Mapping[str, object]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{file} can't be read as UTF-8 text: {error}") from error
    template = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) and template else None


def _state(part: object) -> dict[str, object]:
    """A pipeline part's own JSON, {} for none."""
    if part is None:
        return {}
    state: dict[str, object] = json.loads(cast(bytes, part.__getstate__()))  # the form the library pickles
    return state


def _parts(state: object) -> Iterator[Mapping[str, object]]:
    """Every JSON object in `state` that has a "type"."""
    if isinstance(state, list):
        for value in state:
            yield from _parts(value)
    elif isinstance(state, dict):
        if "type" in state:
            yield state
        for value in state.values():
            yield from _parts(value)


def _drops_first_space(decoder: Mapping[str, object]) -> bool:
    for part in _parts(decoder):
        if part["type"] == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
    return False


def _bytes_of(pipeline: Pipeline, added: Mapping[int, AddedToken], file: Path) -> Callable[[int], bytes]:
    """token id → the bytes it stands for, as the pipeline's decoder would put them together."""
    kinds = {part["type"] for part in _parts(_state(pipeline.decoder))}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def of_bytes(token_id: int) -> bytes:
            text = pipeline.id_to_token(token_id) or ""
            if token_id not in added and all(character in alphabet for character in text):
                return bytes(alphabet[character] for character in text)
            return text.encode()

        return of_bytes
    if kinds & {"Metaspace", "Replace", "ByteFallback"}:
        byte_fallback = "ByteFallback" in kinds

        def of_words(token_id: int) -> bytes:
            text = pipeline.id_to_token(token_id) or ""
            if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes.fromhex(text[3:5])
            return text.replace(SPACE, " ").encode()

        return of_words
    raise TokenizerError(
        f"{file} decodes with {', '.join(sorted(map(str, kinds))) or 'nothing'}; byte-level and SentencePiece decoders can be used."
    )


def _continued(text: str, pipeline: Pipeline) -> PipelineEncoder | None:
    """The encoder for text that isn't at the start of a prompt, where the file puts a space only before the first word."""
    parts = [*_parts(_state(pipeline.pre_tokenizer)), *_parts(_state(pipeline.normalizer))]
    if not any(part["type"] == "Metaspace" and part.get("prepend_scheme") == "first" for part in parts):
        return None
    content = json.loads(text)
    for part in _parts([content.get("pre_tokenizer"), content.get("normalizer")]):
        if part["type"] == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"  # type: ignore[index]  # a dict of our own
    return PipelineEncoder(Pipeline.from_str(json.dumps(content)))
