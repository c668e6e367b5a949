"""The Llama family: Llama 2 and 3, SmolLM2, and checkpoints saved as `LlamaForCausalLM`."""

from __future__ import annotations

from engine.families.decoder import PlainDecoder

FAMILY = PlainDecoder(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    default_max_position=2048,
    gguf_pairs_apart=False,
)
