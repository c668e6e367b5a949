"""What the engine's tests share: a tiny model, an engine on it that stays up, and a spy on its steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from step_spy import StepSpy, assert_quiet
from tiny_chat import write_tiny_chat
from tiny_engine import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine import Engine
from engine.weights.checkpoint import open_checkpoint


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepSpy]:
    """Watches every engine of the test; whatever it still holds is let through at the end."""
    spy = StepSpy(monkeypatch)
    yield spy
    spy.open()


@pytest.fixture
def start(tiny_llama: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine on the tiny model (or on `model`), the flags given; it is closed after the test."""
    engines: list[Engine] = []

    def start(model: Path = tiny_llama, **flags: Any) -> Engine:
        engine = Engine(tiny_config(model, **flags))
        engines.append(engine)
        engine.start()
        engine.wait_ready(60)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def shared_engine(tiny_llama: Path) -> Iterator[Engine]:
    """One engine for a module's tests that only ask; its books must balance at the end."""
    with Engine.load(config=tiny_config(tiny_llama)) as engine:
        yield engine
        assert_quiet(engine)


@pytest.fixture(scope="session")
def tiny_llama_with_text(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a byte-level tokenizer of its 512 ids; id 2, `</s>`, ends an answer."""
    directory = tmp_path_factory.mktemp("tiny-llama-with-text")
    shutil.copytree(tiny_llama, directory, dirs_exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=sorted(alphabet))
    words = "the driver stands on the footplate and watches the water gauge while the fireman feeds the fire " * 3
    tokenizer.train_from_iterator([words], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}))
    return directory


@pytest.fixture(scope="session")
def tiny_chat(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny random model with SmolLM2's tokenizer and its chat template, or another template; each is made once."""
    made: dict[str | None, Path] = {}

    def make(template: str | None = None) -> Path:
        if template not in made:
            path = tmp_path_factory.mktemp("tiny-chat") / "tiny.gguf"
            with open_checkpoint(smollm2_gguf) as checkpoint:
                write_tiny_chat(path, checkpoint.metadata, template)
            made[template] = path
        return made[template]

    return make
