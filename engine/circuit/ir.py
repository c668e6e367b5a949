"""The forward pass written as ops: what a circuit's rules cover.

An op names what it computes, the tensors it computes with, and the registers it reads and writes. Registers, of all rows of a
batch: `x` the residual stream; `h` its normed rows; `q k v`; `gate` attention's output gate; `a` the mixer's rows before its last
projection; `g u m` the MLP's gate, up and gated rows; `y` what joins the residual; `hidden` the final normed rows that get logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.families.config import ModelConfig

OpKind = Literal[
    "embed",
    "norm",
    "linear",
    "split_gate",
    "head_norm",
    "rope",
    "kv_write",
    "attention",
    "output_gate",
    "gated_delta",
    "gate",
    "moe",
    "residual",
    "select_rows",
    "head",
]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `layer`: its decoder layer, None outside the layers. `tensors`: the weights' names in the store. `reads`,
    `writes`: registers. `note`: what else decides its numbers (an activation, a window), as text for the digest."""

    kind: OpKind
    layer: int | None
    tensors: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    note: str = ""


def model_ops(config: ModelConfig) -> tuple[Op, ...]:
    """Every op of a forward of `config`, in order."""
    ops = [Op("embed", None, ("model.embed_tokens.weight",), (), ("x",), f"scale {config.embedding_scale!r}")]
    for index in range(config.num_layers):
        ops += _layer_ops(config, index)
    ops.append(Op("select_rows", None, (), ("x",), ("hidden",)))
    ops.append(Op("norm", None, ("model.norm.weight",), ("hidden",), ("hidden",), f"eps {config.rms_eps!r}"))
    ops.append(Op("head", None, ("model.embed_tokens.weight" if config.tied_head else "lm_head.weight",), ("hidden",), ("logits",)))
    return tuple(ops)


def _layer_ops(config: ModelConfig, index: int) -> list[Op]:
    to = f"model.layers.{index}."
    layer = config.layers[index]

    def norm(name: str, reads: str, writes: str) -> Op:
        return Op("norm", index, (f"{to}{name}.weight",), (reads,), (writes,), f"eps {config.rms_eps!r}")

    def linear(name: str, reads: str, writes: str, bias: bool) -> Op:
        return Op("linear", index, (f"{to}{name}.weight", *((f"{to}{name}.bias",) if bias else ())), (reads,), (writes,))

    residual = Op("residual", index, (), ("x", "y"), ("x",))
    ops = [norm("input_layernorm", "x", "h")]
    if layer.kind == "attention":
        bias = config.attention_bias
        ops += [linear(f"self_attn.{name}_proj", "h", name, bias) for name in "qkv"]
        if config.output_gate:
            ops.append(Op("split_gate", index, (), ("q",), ("q", "gate")))
        if config.qk_norm:
            norms = (f"{to}self_attn.q_norm.weight", f"{to}self_attn.k_norm.weight")
            ops.append(Op("head_norm", index, norms, ("q", "k"), ("q", "k"), f"eps {config.rms_eps!r}"))
        ops.append(Op("rope", index, (), ("q", "k"), ("q", "k"), repr(layer.rope)))
        ops.append(Op("kv_write", index, (), ("k", "v"), ()))
        ops.append(Op("attention", index, (), ("q",), ("a",), f"scale {config.attention_scale!r} window {layer.window}"))
        if config.output_gate:
            ops.append(Op("output_gate", index, (), ("a", "gate"), ("a",)))
        ops.append(linear("self_attn.o_proj", "a", "y", config.output_bias))
    else:
        names = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "conv1d.weight")
        tensors = (*names, "A_log", "dt_bias", "norm.weight", "out_proj.weight")
        ops.append(Op("gated_delta", index, tuple(f"{to}linear_attn.{name}" for name in tensors), ("h",), ("y",)))
    if config.sandwich_norms:
        ops += [norm("post_attention_layernorm", "y", "y"), residual, norm("pre_feedforward_layernorm", "x", "h")]
    else:
        ops += [residual, norm("post_attention_layernorm", "x", "h")]
    if layer.mlp == "moe":
        ops.append(Op("moe", index, _moe_tensors(config, to), ("h",), ("y",), repr(config.moe)))
    else:
        ops.append(linear("mlp.gate_proj", "h", "g", config.mlp_bias))
        ops.append(linear("mlp.up_proj", "h", "u", config.mlp_bias))
        ops.append(Op("gate", index, (), ("g", "u"), ("m",), config.activation))
        ops.append(linear("mlp.down_proj", "m", "y", config.mlp_bias))
    if config.sandwich_norms:
        ops.append(norm("post_feedforward_layernorm", "y", "y"))
    return [*ops, residual]


def _moe_tensors(config: ModelConfig, to: str) -> tuple[str, ...]:
    names = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    if config.moe is not None and config.moe.shared_intermediate_size:
        names += [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")] + ["shared_expert_gate.weight"]
    return tuple(f"{to}mlp.{name}" for name in names)
