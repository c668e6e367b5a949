"""Qwen3.5, text: Gated DeltaNet and gated attention layers with dense MLPs."""

from __future__ import annotations

from engine.families.hybrid import Hybrid

FAMILY = Hybrid(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
)
