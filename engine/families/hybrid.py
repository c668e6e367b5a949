"""Hybrid decoders of the Qwen line: Gated DeltaNet layers with a gated attention layer every few of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError
from engine.families.base import TensorSpec
from engine.families.config import HARMLESS_KEYS, GatedDeltaConfig, LayerConfig, ModelConfig, MoeConfig, Reader, read_rope
from engine.families.decoder import SpecList, sparse_layers

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A family of this line.

    fused: the file holds a Gated DeltaNet layer's projections in two matrices, grouped by key head. experts: MLPs are mixtures of
    experts with a shared one; norm_topk: what the config means where it doesn't say whether expert weights are divided by
    their sum (None: they always are).
    """

    name: str
    architectures: tuple[str, ...]
    fused: bool = False
    experts: bool = False
    norm_topk: bool | None = None
    gguf_architectures: tuple[str, ...] = ()

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        text = reader.get("text_config")
        if not isinstance(text, dict):
            return self._text_config(reader, name, "model.")
        # A checkpoint with vision keeps its text model one level down.
        inner = Reader(text, f"{reader.where} (text_config)")
        tied = reader.flag("tie_word_embeddings", bool(text.get("tie_word_embeddings", False)))
        return self._text_config(inner.with_values(tie_word_embeddings=tied), name, "model.language_model.")

    def _text_config(self, reader: Reader, name: str, source_prefix: str) -> ModelConfig:
        if not self.experts:
            return hybrid_config(reader, self.name, name, source_prefix=source_prefix)
        layers = reader.layer_count("num_hidden_layers")
        sparse = sparse_layers(reader, layers) if self.norm_topk is not None else [True] * layers
        moe = MoeConfig(
            num_experts=reader.whole("num_experts"),
            top_k=reader.whole("num_experts_per_tok"),
            intermediate_size=reader.whole("moe_intermediate_size"),
            norm_topk=True if self.norm_topk is None else reader.flag("norm_topk_prob", self.norm_topk),
            shared_intermediate_size=reader.whole("shared_expert_intermediate_size"),
        )
        # Training's own: a loss that spreads tokens over experts.
        reader.ignore("output_router_logits", "router_aux_loss_coef")
        # A family without dense layers has no width for them.
        width = reader.whole("intermediate_size", moe.intermediate_size)
        config = hybrid_config(
            reader.with_values(intermediate_size=width),
            self.name,
            name,
            source_prefix=source_prefix,
            moe=moe if any(sparse) else None,
        )
        kinds = zip(config.layers, sparse, strict=True)
        return replace(config, layers=tuple(replace(layer, mlp="moe" if here else "dense") for layer, here in kinds))

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        raise CheckpointError(f"{reader.where}: GGUF files of this family aren't supported; use its safetensors.")

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        specs = SpecList(config, gguf, config.source_prefix)
        specs.add("model.embed_tokens.weight", "", (config.vocab_size, config.hidden_size), "embedding")
        for i, layer in enumerate(config.layers):
            to = f"model.layers.{i}."
            specs.norm(to + "input_layernorm", "", config.hidden_size)
            if layer.kind == "attention":
                specs.attention(to, "")
            else:
                gated_delta_tensors(specs, to, fused=self.fused)
            specs.norm(to + "post_attention_layernorm", "", config.hidden_size)
            if layer.mlp == "moe":
                specs.moe(to, "")
            else:
                specs.mlp(to, "")
        specs.end()
        return specs.specs

    def ignored(self, source: str) -> bool:
        """Layers that draft tokens and the vision tower are no part of the text model's own forward."""
        return source.startswith(("mtp.", "model.visual.")) or source.endswith("rotary_emb.inv_freq")


def hybrid_config(reader: Reader, family: str, name: str, **more: Any) -> ModelConfig:
    """The ModelConfig of a text config of this line; `more` are fields the family adds. Refuses the rest by name."""
    heads = reader.whole("num_attention_heads")
    head_dim = reader.whole("head_dim", 256)
    reader = reader.with_values(**{key: _without_mrope(reader.get(key)) for key in ("rope_parameters", "rope_scaling")})
    table = reader.get("rope_parameters")
    partial = reader.number("partial_rotary_factor", table.get("partial_rotary_factor", 0.25) if isinstance(table, dict) else 0.25)
    rope = read_rope(reader, int(head_dim * partial), 10000.0)
    reader.expect("hidden_act", "silu")
    reader.expect("quantization_config")
    reader.expect("attn_output_gate", True)
    reader.expect("mamba_ssm_dtype", "float32")
    bias = reader.flag("attention_bias", False)
    kinds = _layer_kinds(reader)
    config = ModelConfig(
        family=family,
        name=name,
        hidden_size=reader.whole("hidden_size"),
        intermediate_size=reader.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=reader.whole("num_key_value_heads"),
        head_dim=head_dim,
        vocab_size=reader.whole("vocab_size"),
        max_position=reader.whole("max_position_embeddings", 32768),
        rms_eps=reader.number("rms_norm_eps", 1e-6),
        layers=tuple(LayerConfig(kind="attention" if kind == "full_attention" else "gated_delta", rope=rope) for kind in kinds),
        attention_scale=max(head_dim, 1) ** -0.5,
        attention_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        tied_head=reader.flag("tie_word_embeddings", False),
        output_gate=True,
        gated_delta=GatedDeltaConfig(
            num_k_heads=reader.whole("linear_num_key_heads", 16),
            num_v_heads=reader.whole("linear_num_value_heads", 32),
            key_dim=reader.whole("linear_key_head_dim", 128),
            value_dim=reader.whole("linear_value_head_dim", 128),
            conv_kernel=reader.whole("linear_conv_kernel_dim", 4),
        ),
        **more,
    )
    # The extra layers that draft tokens (mtp_*) aren't part of the model's own forward.
    reader.ignore(*HARMLESS_KEYS, "full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    reader.refuse_rest()
    return config


def _without_mrope(table: object) -> object:
    """A rope table without the keys of multi-axis rope, which gives text the same angles on every axis."""
    if not isinstance(table, dict):
        return table
    return {name: value for name, value in table.items() if name not in ("mrope_section", "mrope_interleaved")}


def _layer_kinds(reader: Reader) -> list[str]:
    layers = reader.layer_count("num_hidden_layers")
    kinds = reader.get("layer_types")
    if kinds is None:
        every = max(reader.whole("full_attention_interval", 4), 1)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise CheckpointError(
            f"{reader.where}: layer_types must name linear_attention or full_attention for each of the {layers} layers."
        )
    return kinds


def gated_delta_tensors(specs: SpecList, to: str, *, fused: bool) -> None:
    """Add one Gated DeltaNet layer. fused: the file holds q, k, v, z in one matrix and b, a in another, grouped by key head
    (Qwen3-Next); here they are kept apart, q, k and v one after the other."""
    delta, hidden = specs.config.gated_delta, specs.config.hidden_size
    assert delta is not None
    ratio = delta.num_v_heads // delta.num_k_heads
    key, value = delta.key_dim, delta.value_dim
    group = 2 * key + 2 * ratio * value
    values = delta.num_v_heads * value

    def take(*parts: tuple[int, int], rows: int) -> dict[str, Any]:
        """What picks, of every key head's group of `rows` rows, the parts [from, to), and puts equal parts together."""

        def arrange(weight: Tensor) -> Tensor:
            from torch import cat

            grouped = weight.view(delta.num_k_heads, rows, weight.shape[1])
            return cat([grouped[:, first:last].reshape(-1, weight.shape[1]) for first, last in parts])

        return {"arrange": arrange, "source_shape": (delta.num_k_heads * rows, hidden)}

    def add(name: str, source: str, shape: tuple[int, ...], **more: Any) -> None:
        specs.add_from(f"{to}linear_attn.{name}", f"{to}linear_attn.{source}", shape, "gated_delta", **more)

    if fused:
        at = (key, 2 * key, 2 * key + ratio * value)
        qkv = take((0, at[0]), (at[0], at[1]), (at[1], at[2]), rows=group)
        add("in_proj_qkv.weight", "in_proj_qkvz.weight", (delta.conv_channels, hidden), **qkv)
        add("in_proj_z.weight", "in_proj_qkvz.weight", (values, hidden), **take((at[2], group), rows=group))
        add("in_proj_b.weight", "in_proj_ba.weight", (delta.num_v_heads, hidden), **take((0, ratio), rows=2 * ratio))
        add("in_proj_a.weight", "in_proj_ba.weight", (delta.num_v_heads, hidden), **take((ratio, 2 * ratio), rows=2 * ratio))
    else:
        for name, rows in (("qkv", delta.conv_channels), ("z", values), ("b", delta.num_v_heads), ("a", delta.num_v_heads)):
            add(f"in_proj_{name}.weight", f"in_proj_{name}.weight", (rows, hidden))
    add("conv1d.weight", "conv1d.weight", (delta.conv_channels, 1, delta.conv_kernel))
    add("A_log", "A_log", (delta.num_v_heads,), exact=True)
    add("dt_bias", "dt_bias", (delta.num_v_heads,), exact=True)
    add("norm.weight", "norm.weight", (value,))
    add("out_proj.weight", "out_proj.weight", (hidden, values))
