"""From a model's weights to its layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine.cache.ssm_pool import SsmPool
from engine.families.config import ModelConfig
from engine.layers.attention import Attention
from engine.layers.decoder import DecoderLayer, Mixer
from engine.layers.gated_delta import GatedDeltaNet
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMlp
from engine.layers.moe import SharedExpert, SparseMoe
from engine.layers.norm import RmsNorm
from engine.model.forward import PlainLayers
from kernels.causal_conv.eager import tap_major


def build_layers(config: ModelConfig, tensors: Mapping[str, Tensor], kv_cache: Tensor, ssm: SsmPool | None) -> list[DecoderLayer]:
    """The decoder layers, each with its share of the caches. kv_cache: `[attention layers, 2, slots, kv_heads, head_dim]`."""
    layers: list[DecoderLayer] = []
    num_attention = num_recurrent = 0
    for index, layer in enumerate(config.layers):
        weights = _LayerWeights(config, tensors, f"model.layers.{index}.")
        mixer: Mixer
        if layer.kind == "attention":
            cache = kv_cache[num_attention]
            mixer = Attention(config, layer, weights.projections(), weights.qk_norms(), cache[0], cache[1])
            num_attention += 1
        else:
            assert ssm is not None
            mixer = weights.gated_delta(ssm.h[num_recurrent], ssm.conv[num_recurrent])
            num_recurrent += 1
        layers.append(weights.decoder(mixer, layer.mlp))
    return layers


def build_plain(config: ModelConfig, tensors: Mapping[str, Tensor], kv_cache: Tensor, ssm: SsmPool | None) -> PlainLayers:
    """What `legacy` computes with, from dense tensors by name."""
    return PlainLayers(
        build_layers(config, tensors, kv_cache, ssm),
        RmsNorm(tensors["model.norm.weight"], config.rms_eps),
        tensors["model.embed_tokens.weight"],
        Linear(tensors["model.embed_tokens.weight" if config.tied_head else "lm_head.weight"]),
    )


class _LayerWeights:
    """One layer's tensors, by the names they have after its prefix."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.config = config
        self.tensors = tensors
        self.prefix = prefix

    def get(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def linear(self, name: str, bias: bool = False) -> Linear:
        return Linear(self.get(f"{name}.weight"), self.get(f"{name}.bias") if bias else None)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.get(f"{name}.weight"), self.config.rms_eps)

    def projections(self) -> tuple[Linear, Linear, Linear, Linear]:
        bias = self.config.attention_bias
        q, k, v = (self.linear(f"self_attn.{name}_proj", bias) for name in "qkv")
        return q, k, v, self.linear("self_attn.o_proj", self.config.output_bias)

    def qk_norms(self) -> tuple[RmsNorm, RmsNorm] | None:
        return (self.norm("self_attn.q_norm"), self.norm("self_attn.k_norm")) if self.config.qk_norm else None

    def gated_delta(self, h: Tensor, conv: Tensor) -> Mixer:
        delta = self.config.gated_delta
        assert delta is not None
        qkv, z, b, a, out = (
            self.linear(f"linear_attn.{name}") for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
        )
        return GatedDeltaNet(
            delta,
            (qkv, z, b, a, out),
            tap_major(self.get("linear_attn.conv1d.weight")),
            self.get("linear_attn.A_log"),
            self.get("linear_attn.dt_bias"),
            self.get("linear_attn.norm.weight"),
            self.config.rms_eps,
            h,
            conv,
        )

    def gated_mlp(self, to: str) -> GatedMlp:
        gate, up, down = (self.linear(f"{to}{name}_proj", self.config.mlp_bias) for name in ("gate", "up", "down"))
        return GatedMlp(gate, up, down, self.config.activation)

    def moe(self) -> SparseMoe:
        moe = self.config.moe
        assert moe is not None
        shared = None
        if moe.shared_intermediate_size:
            shared = SharedExpert(self.gated_mlp("mlp.shared_expert."), self.linear("mlp.shared_expert_gate"))
        experts = (self.get("mlp.experts.gate_up_proj"), self.get("mlp.experts.down_proj"))
        return SparseMoe(self.get("mlp.gate.weight"), *experts, moe.top_k, moe.norm_topk, self.config.activation, shared)

    def decoder(self, mixer: Mixer, mlp: str) -> DecoderLayer:
        feed = self.moe() if mlp == "moe" else self.gated_mlp("mlp.")
        first, second = self.norm("input_layernorm"), self.norm("post_attention_layernorm")
        if not self.config.sandwich_norms:
            return DecoderLayer(first, mixer, second, feed)
        before, after = self.norm("pre_feedforward_layernorm"), self.norm("post_feedforward_layernorm")
        return DecoderLayer(first, mixer, before, feed, second, after)
