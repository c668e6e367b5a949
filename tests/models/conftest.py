"""What the parity tests share: tiny Llamas on disk, each beside the transformers model it was saved from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from oracle import expected_of
from tiny_llamas import VARIANTS, VOCAB, TinyLlama, make_llama

# 40 ids: over nine blocks of 4 and over two of 16, a whole number of neither 7s nor 16s.
PROMPT = [(37 * i * i + 11 * i + 5) % VOCAB for i in range(40)]


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """The ids that every parity test of a tiny model runs on."""
    return list(PROMPT)


@pytest.fixture(scope="session")
def tiny_llama_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyLlama]:
    """The tiny Llama of a variant's name; each is made once."""
    made: dict[str, TinyLlama] = {}

    def variant(name: str) -> TinyLlama:
        if name not in made:
            model = make_llama(**VARIANTS[name])
            directory = tmp_path_factory.mktemp("tiny-llama-variant")
            model.save_pretrained(directory)
            made[name] = TinyLlama(directory, model, expected_of(model, PROMPT))
        return made[name]

    return variant
