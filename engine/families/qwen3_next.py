"""Qwen3-Next: Gated DeltaNet and gated attention layers, mixtures of experts with a shared one."""

from __future__ import annotations

from engine.families.hybrid import Hybrid

FAMILY = Hybrid(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    fused=True,
    experts=True,
    norm_topk=True,
)
