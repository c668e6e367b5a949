"""Tokenizers of the text tests: the real small model's, a recorded SentencePiece one, and two built on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline

from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import open_checkpoint
from engine.weights.locate import NAMED_MODELS, models_directory

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Prose, code, digits, emoji, many scripts, control characters, whitespace of all shapes, typed control tokens."""
    loaded: list[str] = json.loads((FIXTURES / "tokenizer" / "texts.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_gguf: Path) -> Mapping[str, object]:
    with open_checkpoint(smollm2_gguf) as checkpoint:
        return checkpoint.metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def spm_metadata() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FIXTURES / "llama_cpp" / "spm_metadata.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="session")
def spm(spm_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata)


@pytest.fixture(scope="session")
def gemma3() -> Tokenizer:
    path = models_directory() / NAMED_MODELS["gemma-3-270m"].file_name
    if not path.is_file():
        pytest.skip("gemma-3-270m (234 MB) isn't in the model cache; `footplate pull gemma-3-270m` puts it there")
    with open_checkpoint(path) as checkpoint:
        return Tokenizer.from_gguf(checkpoint.metadata)


def _write(directory: Path, pipeline: Pipeline, **files: object) -> Path:
    pipeline.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def byte_level_pipeline() -> Pipeline:
    """A byte-level BPE trained on nothing but its alphabet and a few merges, with control tokens and one added word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    words = [*alphabet, *("".join(merge) for merge in merges)]
    pipeline = Pipeline(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")])
    pipeline.add_tokens([AddedToken("<think>", special=False)])
    pipeline.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", pipeline.token_to_id("<s>"))])
    return pipeline


@pytest.fixture
def byte_level_directory(tmp_path: Path) -> Path:
    return _write(
        tmp_path,
        byte_level_pipeline(),
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}},
    )


@pytest.fixture
def metaspace_directory(tmp_path: Path) -> Path:
    """Llama-2-like: byte fallback, a space before the first word only, that space dropped by the decoder."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    pipeline = Pipeline(
        models.BPE(
            vocab={word: n for n, word in enumerate(words)},
            merges=[("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    pipeline.normalizer = normalizers.Sequence([])
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return _write(tmp_path, pipeline, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
