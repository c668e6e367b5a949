"""The dense Qwen3 models: Llama with an RMS norm on each head of q and k."""

from __future__ import annotations

from engine.families.decoder import PlainDecoder

FAMILY = PlainDecoder(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    default_max_position=32768,
    qk_norm=True,
)
