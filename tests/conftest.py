"""What every test shares: two threads, no hub, the real small model, and a tiny random one."""

from __future__ import annotations

import os
from pathlib import Path

# Before any library reads them: no test may reach the hub by accident, and tokenizers' threads don't fork well.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As the engine does before it imports torch: a busy core elsewhere must not stall every parallel loop.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

import pytest
import torch

from engine.config import DEFAULT_MODEL
from engine.weights.locate import locate

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's GGUF file, fetched into the cache if it isn't there."""
    return locate(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama checkpoint directory, float32, without a tokenizer, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.06,  # the default 0.02 leaves logits so flat that rounding decides the argmax
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    directory = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3.5 checkpoint directory of 512 ids: two recurrent layers, one attention layer between them."""
    from tiny_hybrids import make_qwen3_5

    kinds = ["linear_attention", "full_attention", "linear_attention"]
    model = make_qwen3_5(vocab_size=512, num_hidden_layers=3, layer_types=kinds)
    directory = tmp_path_factory.mktemp("tiny-hybrid")
    model.save_pretrained(directory)
    return directory
