"""What a family is: how its checkpoints name things, and how a layer is put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from engine.families.config import ModelConfig, Reader

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor a model needs. `kind` is its line in the memory picture; `source` its name in the file; `arrange`
    reorders the rows of what the file holds (GGUF's llama keeps q and k in another order)."""

    name: str
    shape: tuple[int, ...]
    kind: str
    source: str
    arrange: Callable[[Tensor], Tensor] | None = None


class Family(Protocol):
    """One model family: a module-level object in a file of its own, listed in `engine.families`."""

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]

    def config_from_hf(self, reader: Reader, name: str) -> ModelConfig:
        """The ModelConfig of a config.json."""

    def config_from_gguf(self, reader: Reader, name: str, checkpoint: Checkpoint) -> ModelConfig:
        """The ModelConfig of GGUF metadata; `checkpoint` tells what tensors there are."""

    def tensors(self, config: ModelConfig, gguf: bool) -> list[TensorSpec]:
        """Every tensor the model needs, in load order, under this engine's (Hugging Face's) names."""

    def ignored(self, source: str) -> bool:
        """Whether a tensor of the file may be left unread because it changes nothing."""


def decoder_tensors(
    config: ModelConfig, gguf: bool, arrange_qk: Callable[[int], Callable[[Tensor], Tensor]] | None
) -> list[TensorSpec]:
    """The tensors of a plain pre-norm decoder, as Llama, Qwen and Gemma have them.

    arrange_qk: for a head count, what reorders the rows of q and k of a GGUF file.
    """
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    specs: list[TensorSpec] = []

    def add(name: str, gguf_name: str, shape: tuple[int, ...], kind: str, arrange: Any = None) -> None:
        specs.append(TensorSpec(name, shape, kind, gguf_name if gguf else name, arrange if gguf else None))

    add("model.embed_tokens.weight", "token_embd.weight", (config.vocab_size, hidden), "embedding")
    for i in range(config.num_layers):
        to, blk = f"model.layers.{i}.", f"blk.{i}."
        arrange_q = arrange_qk(config.num_heads) if arrange_qk else None
        arrange_k = arrange_qk(config.num_kv_heads) if arrange_qk else None
        add(to + "input_layernorm.weight", blk + "attn_norm.weight", (hidden,), "norm")
        projections = (
            ("q_proj", "attn_q", q_rows, hidden, config.attention_bias, arrange_q),
            ("k_proj", "attn_k", kv_rows, hidden, config.attention_bias, arrange_k),
            ("v_proj", "attn_v", kv_rows, hidden, config.attention_bias, None),
            ("o_proj", "attn_output", hidden, q_rows, config.output_bias, None),
        )
        for ours, theirs, rows, columns, bias, arrange in projections:
            add(f"{to}self_attn.{ours}.weight", f"{blk}{theirs}.weight", (rows, columns), "attention", arrange)
            if bias:
                add(f"{to}self_attn.{ours}.bias", f"{blk}{theirs}.bias", (rows,), "attention", arrange)
        if config.qk_norm:
            add(to + "self_attn.q_norm.weight", blk + "attn_q_norm.weight", (dim,), "norm")
            add(to + "self_attn.k_norm.weight", blk + "attn_k_norm.weight", (dim,), "norm")
        if config.sandwich_norms:
            add(to + "post_attention_layernorm.weight", blk + "post_attention_norm.weight", (hidden,), "norm")
            add(to + "pre_feedforward_layernorm.weight", blk + "ffn_norm.weight", (hidden,), "norm")
            add(to + "post_feedforward_layernorm.weight", blk + "post_ffw_norm.weight", (hidden,), "norm")
        else:
            add(to + "post_attention_layernorm.weight", blk + "ffn_norm.weight", (hidden,), "norm")
        for ours, theirs, rows, columns in (
            ("gate_proj", "ffn_gate", inter, hidden),
            ("up_proj", "ffn_up", inter, hidden),
            ("down_proj", "ffn_down", hidden, inter),
        ):
            add(f"{to}mlp.{ours}.weight", f"{blk}{theirs}.weight", (rows, columns), "mlp")
            if config.mlp_bias:
                add(f"{to}mlp.{ours}.bias", f"{blk}{theirs}.bias", (rows,), "mlp")
    add("model.norm.weight", "output_norm.weight", (hidden,), "norm")
    if not config.tied_head:
        add("lm_head.weight", "output.weight", (config.vocab_size, hidden), "head")
    return specs
