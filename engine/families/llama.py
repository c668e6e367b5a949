"""The Llama family: Llama 2 and 3, SmolLM2, and checkpoints saved as `LlamaForCausalLM`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.families.base import TensorSpec, decoder_tensors
from engine.families.config import HARMLESS_KEYS, LayerConfig, ModelConfig, Reader, RopeConfig, read_rope

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.checkpoint import Checkpoint


class Llama:
    name = "llama"
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    gguf_architectures: tuple[str, ...] = ("llama",)

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        heads, hidden = reader.whole("num_attention_heads"), reader.whole("hidden_size")
        head_dim = reader.whole("head_dim", hidden // max(heads, 1))
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
            max_position=reader.whole("max_position_embeddings", 2048),
            rms_eps=reader.number("rms_norm_eps", 1e-6),
            layers=(LayerConfig(rope=rope),) * reader.layer_count("num_hidden_layers"),
            attention_scale=max(head_dim, 1) ** -0.5,
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=reader.flag("mlp_bias", False),
            tied_head=reader.flag("tie_word_embeddings", False),
        )
        reader.ignore(*HARMLESS_KEYS)
        reader.refuse_rest()
        return config

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        config = gguf_decoder_config(reader, "llama", self.name, name, checkpoint)
        reader.expect("llama.rope.dimension_count", config.head_dim)
        reader.refuse_rest("llama.")
        return config

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        return decoder_tensors(config, gguf, lambda heads: _half_split(heads, config.head_dim))

    def ignored(self, source: str) -> bool:
        return source.endswith("rotary_emb.inv_freq") or source == "rope_freqs.weight"


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
    scaling = reader.text(key("rope.scaling.type"), "none")
    if scaling not in ("none", "linear"):
        raise CheckpointError(f"{reader.where}: rope scaling {scaling!r} isn't supported (none and linear are).")
    factor = reader.number(key("rope.scaling.factor"), reader.number(key("rope.scale_linear"), 1.0))
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


FAMILY = Llama()
