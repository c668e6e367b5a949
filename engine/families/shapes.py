"""Real shapes for `footplate bench --shape`: a config to be filled with random weights."""

from __future__ import annotations

from engine.errors import FootplateError
from engine.families.config import GatedDeltaConfig, LayerConfig, ModelConfig, RopeConfig


def _dense(
    family: str, name: str, hidden: int, inter: int, heads: int, kv_heads: int, dim: int, vocab: int, context: int,
    layers: int, theta: float, *, eps: float = 1e-6, tied: bool = False, qk_norm: bool = False,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        family=family,
        name=name,
        hidden_size=hidden,
        intermediate_size=inter,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=vocab,
        max_position=context,
        rms_eps=eps,
        layers=(LayerConfig(rope=RopeConfig(theta=theta, rotary_dim=dim)),) * layers,
        attention_scale=dim**-0.5,
        tied_head=tied,
        qk_norm=qk_norm,
    )


def _hybrid(
    name: str, hidden: int, inter: int, heads: int, kv_heads: int, layers: int, v_heads: int, *, tied: bool
) -> ModelConfig:  # fmt: skip
    rope = RopeConfig(theta=1e7, rotary_dim=64)
    kinds = (LayerConfig("gated_delta", rope=rope),) * 3 + (LayerConfig("attention", rope=rope),)
    return ModelConfig(
        family="qwen3_5",
        name=name,
        hidden_size=hidden,
        intermediate_size=inter,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=256,
        vocab_size=248320,
        max_position=262144,
        rms_eps=1e-6,
        layers=kinds * (layers // 4),
        attention_scale=256**-0.5,
        qk_norm=True,
        norm_offset=1.0,
        tied_head=tied,
        output_gate=True,
        gated_delta=GatedDeltaConfig(num_k_heads=16, num_v_heads=v_heads, key_dim=128, value_dim=128, conv_kernel=4),
    )


# Sizes from the config.json of HuggingFaceTB/SmolLM2-135M-Instruct, Qwen/Qwen3-0.6B, Qwen/Qwen3-8B, Qwen/Qwen3.5-0.8B
# and Qwen/Qwen3.5-9B (text part).
SHAPES = {
    config.name: config
    for config in (
        _dense("llama", "smollm2-135m", 576, 1536, 9, 3, 64, 49152, 8192, 30, 100000.0, eps=1e-5, tied=True),
        _dense("qwen3", "qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936, 40960, 28, 1e6, tied=True, qk_norm=True),
        _dense("qwen3", "qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 40960, 36, 1e6, qk_norm=True),
        _hybrid("qwen3.5-0.8b", 1024, 3584, 8, 2, 24, 16, tied=True),
        _hybrid("qwen3.5-9b", 4096, 12288, 16, 4, 32, 32, tied=False),
    )
}


def shape_named(name: str) -> ModelConfig:
    """The ModelConfig of a shape. Raises `FootplateError` listing the names for one it doesn't know."""
    if name not in SHAPES:
        raise FootplateError(f"--shape {name!r} is unknown; choose one of {', '.join(SHAPES)}.")
    return SHAPES[name]
