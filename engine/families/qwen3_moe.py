"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts, in all layers but those that the config names (arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.families.base import TensorSpec
from engine.families.config import ModelConfig, MoeConfig, Reader
from engine.families.decoder import PlainDecoder, sparse_layers

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Qwen3Moe:
    """The family: `plain` is what it shares with Qwen3."""

    plain: PlainDecoder
    name: str = "qwen3_moe"
    architectures: tuple[str, ...] = ("Qwen3MoeForCausalLM",)
    gguf_architectures: tuple[str, ...] = ("qwen3moe",)

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        layers = reader.layer_count("num_hidden_layers")
        # "num_experts" by Qwen, "num_local_experts" where transformers 5 saved it.
        count = reader.whole("num_local_experts", reader.whole("num_experts", 128))
        moe = MoeConfig(
            num_experts=count,
            top_k=reader.whole("num_experts_per_tok", 8),
            intermediate_size=reader.whole("moe_intermediate_size", 768),
            norm_topk=reader.flag("norm_topk_prob", False),
        )
        sparse = [count > 0 and here for here in sparse_layers(reader, layers)]
        # Training's own: a loss that spreads tokens over experts.
        reader.ignore("output_router_logits", "router_aux_loss_coef")
        shared: dict[str, object] = {}
        if reader.flag("use_sliding_window", False) and reader.get("sliding_window") is not None:
            shared["layer_types"] = ["sliding_attention"] * layers  # all of them: this family knows no max_window_layers
        if reader.get("head_dim") is None:
            shared["head_dim"] = reader.whole("hidden_size") // max(reader.whole("num_attention_heads"), 1)
        return self._with_experts(self.plain.config_from_hf(reader.with_values(**shared), name), moe, sparse)

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        moe = MoeConfig(
            num_experts=reader.whole("qwen3moe.expert_count"),
            top_k=reader.whole("qwen3moe.expert_used_count"),
            intermediate_size=reader.whole("qwen3moe.expert_feed_forward_length"),
            norm_topk=reader.flag("qwen3moe.expert_weights_norm", True),  # files that don't say are of models that do it
        )
        reader.expect("qwen3moe.expert_weights_scale", 0.0, 1.0)
        reader.expect("qwen3moe.expert_gating_func", 1)  # softmax
        config = self.plain.config_from_gguf(reader, name, checkpoint)
        return self._with_experts(config, moe, [True] * config.num_layers)  # the format knows no dense layers

    def _with_experts(self, config: ModelConfig, moe: MoeConfig, sparse: list[bool]) -> ModelConfig:
        layers = tuple(replace(layer, mlp="moe" if here else "dense") for layer, here in zip(config.layers, sparse, strict=True))
        return replace(config, layers=layers, moe=moe if any(sparse) else None)

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        return self.plain.tensors(config, gguf)

    def ignored(self, source: str) -> bool:
        return self.plain.ignored(source)


FAMILY = Qwen3Moe(
    PlainDecoder(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        gguf_architectures=("qwen3moe",),
        default_max_position=32768,
        qk_norm=True,
    )
)
