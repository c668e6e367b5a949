"""Tokenizers read from a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Pipeline

from engine.errors import TokenizerError
from engine.tokenizer import Tokenizer


def test_ordinary_text_gets_the_ids_of_the_library(byte_level_directory: Path) -> None:
    pipeline = Pipeline.from_file(str(byte_level_directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(byte_level_directory)
    for text in ("hello world", " hello\n\n é\U0001f44d\x00 <think>hm", ""):
        assert tokenizer.encode(text) == pipeline.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == pipeline.get_vocab_size()


def test_typed_control_tokens_stay_text_and_added_words_are_found(byte_level_directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level_directory)
    ids = tokenizer.encode("<s></s><|im_end|><think>", add_bos=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.token_text(ids[-1]) == "<think>"
    assert tokenizer.decode(ids) == "<s></s><|im_end|><think>"


def test_rendered_text_gets_the_ids_of_the_library_with_one_bos(byte_level_directory: Path) -> None:
    pipeline = Pipeline.from_file(str(byte_level_directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(byte_level_directory)
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.encode_rendered(text) == pipeline.encode(text).ids
    assert tokenizer.encode_rendered("<s>" + text) == pipeline.encode(text).ids
    assert tokenizer.encode_rendered("<s>" + text, add_bos=False) == pipeline.encode(text).ids


def test_bos_and_end_tokens_come_from_the_files(byte_level_directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level_directory)
    bos, eos, end = (tokenizer.control.tokens[text] for text in ("<s>", "</s>", "<|im_end|>"))
    assert tokenizer.bos_token_id == bos and tokenizer.add_bos  # config says nothing: the post-processor adds it
    assert tokenizer.eos_token_ids == {eos}
    (byte_level_directory / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": end}}))
    assert Tokenizer.from_directory(byte_level_directory).eos_token_ids == {eos, end}
    (byte_level_directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    assert Tokenizer.from_directory(byte_level_directory).eos_token_ids == {eos}
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    (byte_level_directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert not Tokenizer.from_directory(byte_level_directory).add_bos


def test_the_chat_template_is_found_wherever_it_is_kept(byte_level_directory: Path) -> None:
    config = byte_level_directory / "tokenizer_config.json"
    assert Tokenizer.from_directory(byte_level_directory).chat_template is None
    config.write_text(json.dumps({"chat_template": "in config"}))
    assert Tokenizer.from_directory(byte_level_directory).chat_template == "in config"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.from_directory(byte_level_directory).chat_template == "the default"
    (byte_level_directory / "chat_template.jinja").write_text("in its own file")
    assert Tokenizer.from_directory(byte_level_directory).chat_template == "in its own file"


def test_a_space_is_put_before_the_first_word_only(metaspace_directory: Path) -> None:
    pipeline = Pipeline.from_file(str(metaspace_directory / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(metaspace_directory)
    for text in ("hi hi", "hi</s>hi", "</s>hi", "  hi"):
        assert tokenizer.encode_rendered(text, add_bos=False) == pipeline.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode("hi é")
    assert ids[0] == 1 and tokenizer.token_text(ids[1]) == " hi"
    assert tokenizer.decode(ids) == pipeline.decode(ids) == "hi é"


def test_a_directory_without_tokenizer_json_takes_token_ids_only(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json .*; prompts must be token ids\."):
        Tokenizer.from_directory(tmp_path)


def test_broken_files_are_named(byte_level_directory: Path) -> None:
    (byte_level_directory / "tokenizer_config.json").write_text("[1")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json can't be read as JSON"):
        Tokenizer.from_directory(byte_level_directory)
    (byte_level_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json can't be read as a tokenizer"):
        Tokenizer.from_directory(byte_level_directory)


def test_a_decoder_of_another_kind_is_refused(byte_level_directory: Path) -> None:
    file = byte_level_directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    file.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="decodes with WordPiece"):
        Tokenizer.from_directory(byte_level_directory)
