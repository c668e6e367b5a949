"""The dense Qwen2 and Qwen2.5 models: Llama with a bias on q, k and v."""

from __future__ import annotations

from engine.families.decoder import PlainDecoder

FAMILY = PlainDecoder(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    default_max_position=32768,
    qkv_bias=True,
)
