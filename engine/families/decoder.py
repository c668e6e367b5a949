"""The plain pre-norm decoder that Llama and Qwen share: configs, tensor names, and one class that a family file fills in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError
from engine.families.base import TensorPart, TensorSpec
from engine.families.config import HARMLESS_KEYS, LayerConfig, ModelConfig, Reader, RopeConfig, read_rope

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """A family whose checkpoints differ from Llama's in a few options only.

    qkv_bias: q, k and v always have a bias and o never (Qwen2); else `attention_bias` of the config says so for all four.
    qk_norm: RMS norm of every head's q and k. gguf_pairs_apart: whether GGUF files of it hold q and k in Hugging Face's row
    order (llama.cpp's converter reorders only llama's).
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    default_max_position: int
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_pairs_apart: bool = True

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        heads, hidden = reader.whole("num_attention_heads"), reader.whole("hidden_size")
        head_dim = reader.whole("head_dim", 128 if self.qk_norm else hidden // max(heads, 1))
        rope = read_rope(reader, head_dim, 10000.0)
        reader.expect("hidden_act", "silu")
        reader.expect("quantization_config")
        bias = reader.flag("attention_bias", False)
        config = ModelConfig(
            family=self.name,
            name=name,
            hidden_size=hidden,
            intermediate_size=reader.whole("intermediate_size"),
            num_heads=heads,
            num_kv_heads=reader.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_size=reader.whole("vocab_size"),
            max_position=reader.whole("max_position_embeddings", self.default_max_position),
            rms_eps=reader.number("rms_norm_eps", 1e-6),
            layers=tuple(LayerConfig(window=window, rope=rope) for window in read_windows(reader)),
            attention_scale=max(head_dim, 1) ** -0.5,
            attention_bias=self.qkv_bias or bias,
            output_bias=bias and not self.qkv_bias,
            mlp_bias=reader.flag("mlp_bias", False),
            qk_norm=self.qk_norm,
            tied_head=reader.flag("tie_word_embeddings", False),
        )
        reader.ignore(*HARMLESS_KEYS)
        reader.refuse_rest()
        return config

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        arch = self.gguf_architectures[0]
        config = gguf_decoder_config(reader, arch, self.name, name, checkpoint)
        if not self.gguf_pairs_apart:
            # The row order below is the whole head's: a partly rotated head would need another.
            reader.expect(f"{arch}.rope.dimension_count", config.head_dim)
        reader.refuse_rest(f"{arch}.")
        return config

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        arrange = None if self.gguf_pairs_apart else lambda heads: _half_split(heads, config.head_dim)
        return decoder_tensors(config, gguf, arrange)

    def ignored(self, source: str) -> bool:
        return source.endswith("rotary_emb.inv_freq") or source == "rope_freqs.weight"


def read_windows(reader: Reader) -> list[int | None]:
    """Each layer's sliding window in tokens, None for full attention: from `layer_types` where they are listed, else from
    `use_sliding_window`, which gives one to the layers from `max_window_layers` on."""
    layers = reader.layer_count("num_hidden_layers")
    types, window = reader.get("layer_types"), reader.get("sliding_window")
    used = reader.flag("use_sliding_window", types is not None)
    if types is None:
        first = reader.whole("max_window_layers", layers) if used else layers
        types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(0, layers - first)
    if not isinstance(types, list) or len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"{reader.where}: layer_types must name full_attention or sliding_attention for each of {layers} layers."
        )
    if "sliding_attention" in types and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise CheckpointError(f"{reader.where}: sliding_window must be a whole number of tokens, not {window!r}.")
    return [window if kind == "sliding_attention" else None for kind in types]


def sparse_layers(reader: Reader, layers: int) -> list[bool]:
    """Which layers' MLPs are mixtures of experts: every `decoder_sparse_step`-th but those in `mlp_only_layers`."""
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise CheckpointError(f"{reader.where}: mlp_only_layers must list layer numbers, not {str(dense)[:60]!r}.")
    step = reader.whole("decoder_sparse_step", 1)
    if step < 1:
        raise CheckpointError(f"{reader.where}: decoder_sparse_step is {step}; it must be at least 1.")
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def _half_split(heads: int, head_dim: int) -> Callable[[Tensor], Tensor]:
    """llama.cpp stores llama's q and k with the two channels of a rotated pair side by side; this puts the halves apart
    again, as Hugging Face has them (the inverse of its converter's permutation). Rows move whole: raw blocks may be moved too."""

    def arrange(rows: Tensor) -> Tensor:
        rest = rows.shape[1:]
        return rows.reshape(heads, head_dim // 2, 2, *rest).transpose(1, 2).reshape(heads * head_dim, *rest)

    return arrange


def gguf_decoder_config(reader: Reader, arch: str, family: str, name: str, checkpoint: Checkpoint) -> ModelConfig:
    """The ModelConfig of a plain decoder's GGUF metadata under the prefix `arch`."""
    import torch

    shapes = {info.name: info.shape for info in checkpoint.tensors.values()}
    key = f"{arch}.".__add__
    hidden, heads = reader.whole(key("embedding_length")), reader.whole(key("attention.head_count"))
    head_dim = reader.whole(key("attention.key_length"), hidden // max(heads, 1))
    reader.expect(key("attention.value_length"), head_dim)
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{reader.where}: token_embd.weight is missing; the file holds no whole model.")
    vocab_size = reader.whole(key("vocab_size"), embedding[0])
    rotary = reader.whole(key("rope.dimension_count"), head_dim)
    theta = reader.number(key("rope.freq_base"), 10000.0)
    scaling = reader.text(key("rope.scaling.type"), "linear")
    if scaling not in ("none", "linear"):
        raise CheckpointError(f"{reader.where}: rope scaling {scaling!r} isn't supported (none and linear are).")
    factor = reader.number(key("rope.scaling.factor"), reader.number(key("rope.scale_linear"), 1.0))
    if scaling == "none" or factor == 0.0:
        factor = 1.0  # as llama.cpp: "none" wins over a factor, and 0 means that there is none
    rope = RopeConfig(theta, rotary, "linear" if factor != 1.0 else "default", factor)
    if "rope_freqs.weight" in checkpoint.tensors:
        # Llama 3.1's stretching, worked out by the converter: one divisor for each rotated pair.
        rope = replace(rope, freq_factors=tuple(checkpoint.read("rope_freqs.weight", torch.float32).flatten().tolist()))
    reader.ignore(key("rope.scaling.original_context_length"), key("rope.scaling.finetuned"))
    return ModelConfig(
        family=family,
        name=name,
        hidden_size=hidden,
        intermediate_size=reader.whole(key("feed_forward_length")),
        num_heads=heads,
        num_kv_heads=reader.whole(key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=reader.whole(key("context_length")),
        rms_eps=reader.number(key("attention.layer_norm_rms_epsilon")),
        layers=(LayerConfig(rope=rope),) * reader.layer_count(key("block_count")),
        attention_scale=max(head_dim, 1) ** -0.5,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        tied_head="output.weight" not in shapes,
    )


def decoder_tensors(
    config: ModelConfig, gguf: bool, arrange_qk: Callable[[int], Callable[[Tensor], Tensor]] | None
) -> list[TensorSpec]:
    """The tensors of a plain pre-norm decoder, as Llama, Qwen and Gemma have them.

    arrange_qk: for a head count, what reorders the rows of q and k of a GGUF file.
    """
    specs = SpecList(config, gguf)
    specs.add("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, config.hidden_size), "embedding")
    for i in range(config.num_layers):
        to, blk = f"model.layers.{i}.", f"blk.{i}."
        specs.norm(to + "input_layernorm", blk + "attn_norm", config.hidden_size)
        specs.attention(to, blk, arrange_qk)
        if config.sandwich_norms:
            specs.norm(to + "post_attention_layernorm", blk + "post_attention_norm", config.hidden_size)
            specs.norm(to + "pre_feedforward_layernorm", blk + "ffn_norm", config.hidden_size)
            specs.norm(to + "post_feedforward_layernorm", blk + "post_ffw_norm", config.hidden_size)
        else:
            specs.norm(to + "post_attention_layernorm", blk + "ffn_norm", config.hidden_size)
        if config.layers[i].mlp == "moe":
            specs.moe(to, blk)
        else:
            specs.mlp(to, blk)
    specs.end()
    return specs.specs


class SpecList:
    """Builds a family's list of tensors; `prefix` replaces "model." in the file's own names."""

    def __init__(self, config: ModelConfig, gguf: bool, prefix: str = "model.") -> None:
        self.config = config
        self.gguf = gguf
        self.prefix = prefix
        self.specs: list[TensorSpec] = []

    def add(self, name: str, gguf_name: str, shape: tuple[int, ...], kind: str, **more: Any) -> None:
        """Add one tensor under its name here and in GGUF files; `more` are TensorSpec's other fields."""
        self.specs.append(TensorSpec(name, shape, kind, gguf_name if self.gguf else self.own(name), **more))

    def own(self, name: str) -> str:
        """The file's own name of a tensor, files of our names being meant."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def add_from(self, name: str, source: str, shape: tuple[int, ...], kind: str, **more: Any) -> None:
        """Add one tensor that the file has under another of our names; such files are never GGUF."""
        self.specs.append(TensorSpec(name, shape, kind, self.own(source), **more))

    def norm(self, name: str, gguf_name: str, size: int) -> None:
        """Add a norm's weight, with the family's offset."""
        self.add(f"{name}.weight", f"{gguf_name}.weight", (size,), "norm", offset=self.config.norm_offset)

    def attention(self, to: str, blk: str, arrange_qk: Callable[[int], Callable[[Tensor], Tensor]] | None = None) -> None:
        """Add one layer's attention."""
        config = self.config
        hidden, dim = config.hidden_size, config.head_dim
        q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
        arrange_q = arrange_qk(config.num_heads) if arrange_qk and self.gguf else None
        arrange_k = arrange_qk(config.num_kv_heads) if arrange_qk and self.gguf else None
        projections = (
            ("q_proj", "attn_q", q_rows * (2 if config.output_gate else 1), hidden, config.attention_bias, arrange_q),
            ("k_proj", "attn_k", kv_rows, hidden, config.attention_bias, arrange_k),
            ("v_proj", "attn_v", kv_rows, hidden, config.attention_bias, None),
            ("o_proj", "attn_output", hidden, q_rows, config.output_bias, None),
        )
        for ours, theirs, rows, columns, bias, arrange in projections:
            self.add(f"{to}self_attn.{ours}.weight", f"{blk}{theirs}.weight", (rows, columns), "attention", arrange=arrange)
            if bias:
                self.add(f"{to}self_attn.{ours}.bias", f"{blk}{theirs}.bias", (rows,), "attention", arrange=arrange)
        if config.qk_norm:
            self.norm(to + "self_attn.q_norm", blk + "attn_q_norm", dim)
            self.norm(to + "self_attn.k_norm", blk + "attn_k_norm", dim)

    def moe(self, to: str, blk: str) -> None:
        """Add one layer's mixture of experts. Files hold the experts in one tensor, or gates and ups apart (GGUF), or each expert
        apart (Hugging Face, where `save_pretrained` of a fused model writes them so, too)."""
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        count, inter = moe.num_experts, moe.intermediate_size
        experts = f"{to}mlp.experts."
        halves = (("gate", slice(0, inter)), ("up", slice(inter, 2 * inter)))
        downs: tuple[TensorPart, ...] = ()
        if self.gguf:
            ups = tuple(TensorPart(f"{blk}ffn_{n}_exps.weight", (count, inter, hidden), (slice(None), at)) for n, at in halves)
        else:
            each = [(e, self.own(f"{experts}{e}.")) for e in range(count)]
            ups = tuple(TensorPart(f"{own}{n}_proj.weight", (inter, hidden), (e, at)) for e, own in each for n, at in halves)
            downs = tuple(TensorPart(f"{own}down_proj.weight", (hidden, inter), (e,)) for e, own in each)
        self.add(f"{to}mlp.gate.weight", f"{blk}ffn_gate_inp.weight", (count, hidden), "moe")
        self.add(f"{experts}gate_up_proj", f"{blk}ffn_gate_up_exps.weight", (count, 2 * inter, hidden), "moe", parts=ups)
        self.add(f"{experts}down_proj", f"{blk}ffn_down_exps.weight", (count, hidden, inter), "moe", parts=downs)
        if moe.shared_intermediate_size:
            self.gated_mlp(f"{to}mlp.shared_expert.", f"{blk}ffn_{{}}_shexp", moe.shared_intermediate_size)
            self.add(f"{to}mlp.shared_expert_gate.weight", f"{blk}ffn_gate_inp_shexp.weight", (1, hidden), "mlp")

    def mlp(self, to: str, blk: str) -> None:
        """Add one layer's dense MLP."""
        self.gated_mlp(f"{to}mlp.", f"{blk}ffn_{{}}", self.config.intermediate_size)

    def gated_mlp(self, to: str, gguf_name: str, inter: int) -> None:
        """Add the three projections of a gated MLP of width `inter`; gguf_name: with {} for gate, up and down."""
        hidden = self.config.hidden_size
        for name, rows, columns in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
            theirs = gguf_name.format(name)
            self.add(f"{to}{name}_proj.weight", f"{theirs}.weight", (rows, columns), "mlp")
            if self.config.mlp_bias:
                self.add(f"{to}{name}_proj.bias", f"{theirs}.bias", (rows,), "mlp")

    def end(self) -> None:
        """Add the final norm and the head."""
        self.norm("model.norm", "output_norm", self.config.hidden_size)
        if not self.config.tied_head:
            self.add("lm_head.weight", "output.weight", (self.config.vocab_size, self.config.hidden_size), "head")
