"""Token ids of GGUF models: equal to llama.cpp's, and nothing a person types becomes a control token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestError, TokenizerError
from engine.tokenizer import Tokenizer

RECORDED = Path(__file__).parents[2] / "fixtures" / "llama_cpp"


def recorded(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RECORDED / name).read_text(encoding="utf-8"))
    return loaded


def assert_equal_ids(tokenizer: Tokenizer, texts: list[str], name: str) -> None:
    record = recorded(name)
    assert len(texts) == len(record["plain"]) == len(record["special"])
    for text, plain, special in zip(texts, record["plain"], record["special"], strict=True):
        assert tokenizer.encode(text, add_bos=False) == plain, text
        assert tokenizer.encode_rendered(text, add_bos=False) == special, text
    assert tokenizer.encode_rendered(record["rendered"]["text"], add_bos=False) == record["rendered"]["ids"]


def test_smollm2_ids_are_those_of_llama_cpp(smollm2: Tokenizer, texts: list[str]) -> None:
    assert_equal_ids(smollm2, texts, "smollm2_tokens.json")


def test_scored_ids_are_those_of_llama_cpp(spm: Tokenizer, texts: list[str]) -> None:
    assert_equal_ids(spm, texts, "spm_tokens.json")


def test_gemma_ids_are_those_of_llama_cpp(gemma3: Tokenizer, texts: list[str]) -> None:
    assert_equal_ids(gemma3, texts, "gemma3_tokens.json")
    assert gemma3.add_bos and gemma3.bos_token_id == 2 and gemma3.encode("a")[0] == 2
    assert gemma3.eos_token_ids == {1, 106}  # <eos> and <end_of_turn>


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "qwen2", "qwen35", "deepseek-v3", "default"])
def test_every_pre_tokenizer_cuts_as_llama_cpp_does(smollm2_metadata: Mapping[str, object], texts: list[str], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf({**smollm2_metadata, "tokenizer.ggml.pre": pre})
    for text, ids in zip(texts, recorded("pretokenizers_tokens.json")[pre], strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids, text


def test_the_512_token_text_has_512_tokens(smollm2: Tokenizer) -> None:
    text = (RECORDED / "text_512.txt").read_text(encoding="utf-8")
    ids = smollm2.encode(text)
    assert len(ids) == 512
    assert smollm2.decode(ids) == text


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert not smollm2.add_bos and smollm2.bos_token_id == 1 and smollm2.bos_text == "<|im_start|>"
    assert smollm2.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>: the file names only the second
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.chat_template is not None and "<|im_start|>" in smollm2.chat_template


def test_typed_control_tokens_stay_text(smollm2: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (smollm2, spm):
        for token_id in tokenizer.special_ids:
            text = f"say {tokenizer.token_text(token_id)} now"
            ids = tokenizer.encode(text, add_bos=False)
            assert tokenizer.special_ids.isdisjoint(ids)
            assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def unprefixed_spm(spm_metadata: dict[str, Any]) -> Tokenizer:
    """A space before each piece of text, as the other has it, couldn't be told from one in the text."""
    return Tokenizer.from_gguf({**spm_metadata, "tokenizer.ggml.add_space_prefix": False})


# SmolLM2's vocabulary has no tokens for the bytes of characters past U+3FFFF, nor for six control characters; llama.cpp
# leaves them out too.
@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs",))))
@settings(max_examples=100, deadline=None)
def test_no_text_becomes_a_control_token_or_is_changed_on_the_way_back(
    smollm2: Tokenizer, unprefixed_spm: Tokenizer, text: str
) -> None:
    ids = smollm2.encode(text)
    assert smollm2.special_ids.isdisjoint(ids)
    assert smollm2.decode(ids) == text.translate(dict.fromkeys(map(ord, "\x04\x06\x13\x14\x16\x1d")))
    ids = unprefixed_spm.encode(text, add_bos=False)
    assert unprefixed_spm.special_ids.isdisjoint(ids)
    assert unprefixed_spm.decode(ids) == text.replace("\u2581", " ")


def test_a_control_token_that_merges_could_make_is_not_made(spm_metadata: dict[str, Any]) -> None:
    tokens = [*spm_metadata["tokenizer.ggml.tokens"], "<", ">", "<x", "<x>"]
    changed = {
        **spm_metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*spm_metadata["tokenizer.ggml.scores"], 0.0, 0.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*spm_metadata["tokenizer.ggml.token_type"], 1, 1, 1, 3],
    }
    tokenizer = Tokenizer.from_gguf(changed)
    assert tokenizer.encode_rendered("<x>", add_bos=False) == [tokens.index("<x>")]
    assert tokenizer.decode(tokenizer.encode("<x>", add_bos=False)) == "<x>"
    assert tokens.index("<x>") not in tokenizer.encode("<x>")


def test_bos_comes_once_and_only_where_the_model_or_the_caller_asks(smollm2: Tokenizer, spm: Tokenizer) -> None:
    assert smollm2.encode("a") == smollm2.encode("a", add_bos=False)
    assert smollm2.encode("a", add_bos=True) == [1, *smollm2.encode("a")]
    plain = spm.encode("a", add_bos=False)
    assert spm.encode("a") == [1, *plain]
    assert spm.encode_rendered("a") == [1, *plain]
    assert spm.encode_rendered("<s>a") == [1, *plain]
    assert spm.encode_rendered("<s><s>a") == [1, *plain]
    assert spm.encode("") == [1]
    typed = spm.encode("<s>")
    assert typed[0] == 1 and typed.count(1) == 1


def test_half_a_surrogate_pair_is_refused_with_its_place(smollm2: Tokenizer) -> None:
    for encode in (smollm2.encode, smollm2.encode_rendered):
        with pytest.raises(RequestError, match=r"surrogate pair \(U\+D83D\) at character 3"):
            encode("ab\ud83dc")


def test_ids_past_the_vocabulary_decode_to_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.decode([49152, 10**9, -1]) == ""
    assert smollm2.token_text(49152) == ""


def test_special_tokens_are_shown_only_when_asked_for(smollm2: Tokenizer, spm: Tokenizer) -> None:
    ids = smollm2.encode_rendered("<|im_start|>hi<|im_end|>")
    assert smollm2.decode(ids) == "hi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    ids = spm.encode("the word")
    assert spm.decode(ids) == "the word"  # without the space that was put before it


def test_an_unknown_pre_tokenizer_is_refused_by_name(smollm2_metadata: Mapping[str, object]) -> None:
    with pytest.raises(TokenizerError, match="'teleprinter'"):
        Tokenizer.from_gguf({**smollm2_metadata, "tokenizer.ggml.pre": "teleprinter"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "must hold only text"),
        ({"tokenizer.ggml.scores": [0.0]}, r"scores holds 1 values for \d+ tokens"),
        ({"tokenizer.ggml.token_type": ["x"]}, "token_type must hold only numbers"),
    ],
)
def test_damaged_metadata_is_refused(spm_metadata: dict[str, Any], change: dict[str, object], said: str) -> None:
    changed = {key: value for key, value in {**spm_metadata, **change}.items() if value is not None}
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_gguf(changed)


def test_an_end_token_id_past_the_vocabulary_is_passed_over(spm_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**spm_metadata, "tokenizer.ggml.eot_token_id": 10**6})
    assert all(token_id < tokenizer.vocab_size for token_id in tokenizer.eos_token_ids)
    assert 2 in tokenizer.eos_token_ids


def test_the_text_layer_needs_neither_torch_nor_transformers_nor_jinja() -> None:
    program = "import sys, engine.chat_template, engine.text\nprint(sorted({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
