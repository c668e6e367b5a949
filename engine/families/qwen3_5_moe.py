"""Qwen3.5-MoE, text: Qwen3.5 whose MLPs are mixtures of experts with a shared one."""

from __future__ import annotations

from engine.families.hybrid import Hybrid

FAMILY = Hybrid(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    experts=True,
)
