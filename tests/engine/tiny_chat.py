"""A tiny random model with SmolLM2's own tokenizer and chat template: everything of a chat but sensible answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, INTER = 32, 2, 4, 2, 48


def write_tiny_chat(path: Path, metadata: Mapping[str, Any], template: str | None = None) -> None:
    """A GGUF file of random weights with the tokenizer of `metadata`, and `template` instead of its chat template."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for key, value in {
        "llama.context_length": 1024,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INTER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.vocab_size": len(tokens),
    }.items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            writer.add_chat_template(template or value)
        elif key.startswith("tokenizer."):
            add: Any = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)]
            add(key, value)

    def add_matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", (rng.standard_normal((rows, columns)) * 0.15).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32))

    kv = KV_HEADS * HIDDEN // HEADS
    add_matrix("token_embd", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INTER, HIDDEN),
            ("ffn_up", INTER, HIDDEN),
            ("ffn_down", HIDDEN, INTER),
        ):
            add_matrix(blk + name, rows, columns)
        add_norm(blk + "attn_norm")
        add_norm(blk + "ffn_norm")
    add_norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
