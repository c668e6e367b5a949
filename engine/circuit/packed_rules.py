"""Rules of the CPU circuit: products from packed weights, and what lies between them in few dispatches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.circuit.ir import Op
from engine.circuit.rules import Launch, PlainRule, Rule, Site, Step
from kernels.attention.fused import paged_attention
from kernels.mlp.fused import gate
from kernels.norm import eager as eager_norm
from kernels.norm import fused as fused_norm
from kernels.packed_linear.embedding import packed_embedding
from kernels.packed_linear.fused import packed_linear
from kernels.rope.fused import rotate_

_TESTS = "tests/models/test_circuits.py::"
CLOSE = _TESTS + "test_the_packed_circuit_is_close_to_legacy_on_real_text"
DENSE = _TESTS + "test_the_circuit_on_dense_float32_is_legacy_but_for_the_last_bits"
IN_PLACE = _TESTS + "test_adding_in_place_has_the_same_bits"


def _embed(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    weight = site.packed.get(ops[0].tensors)
    if weight is None:
        return None
    scale = site.config.embedding_scale

    def launch(step: Step) -> None:
        # The residual stream stays in fp32 from here on, which costs one conversion a norm: rounded to bfloat16 after every
        # layer, it is what most of a bfloat16 forward's error comes from.
        rows = packed_embedding(step.batch.token_ids, weight)
        step.registers["x"] = rows if scale == 1.0 else rows * scale

    return launch, 9


def _norm(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    [op] = ops
    if op.tensors[0] not in site.tensors:
        return None
    weight, reads, writes = site.tensors[op.tensors[0]].float(), op.reads[0], op.writes[0]
    hidden, dtype = weight.shape[0], site.dtype
    scaled_weight = weight * hidden**0.5
    eps_norm = torch.tensor((hidden * site.config.rms_eps) ** 0.5)

    def launch(step: Step) -> None:
        step.registers[writes] = fused_norm.rms_norm(step.registers[reads], scaled_weight, eps_norm, dtype)

    return launch, 5


def _linear(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    op = ops[0]
    weight = site.packed.get(op.tensors[:1])
    if weight is None:
        return None
    bias, scratch, reads, writes = _bias(op, site), site.scratch, op.reads[0], op.writes[0]

    def launch(step: Step) -> None:
        out = packed_linear(step.registers[reads], weight, scratch)
        step.registers[writes] = out if bias is None else out + bias

    return launch, weight.planes + (bias is not None)


def _merged(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    """Several projections of the same rows in one product, where what follows them has no rule of its own."""
    weight = site.packed.get(tuple(op.tensors[0] for op in ops))
    if weight is None:
        return None
    bias, scratch, reads, names = _merged_bias(ops, site), site.scratch, ops[0].reads[0], [op.writes[0] for op in ops]
    sizes = [site.num_rows[op.tensors[0]] for op in ops]

    def launch(step: Step) -> None:
        out = packed_linear(step.registers[reads], weight, scratch)
        if bias is not None:
            out = out + bias
        for name, part in zip(names, torch.split(out, sizes, dim=1), strict=True):
            step.registers[name] = part.contiguous()

    return launch, weight.planes + (bias is not None)


def _bias(op: Op, site: Site) -> Tensor | None:
    return site.tensors[op.tensors[1]] if len(op.tensors) > 1 else None


def _merged_bias(ops: Sequence[Op], site: Site) -> Tensor | None:
    biases = [bias for op in ops if (bias := _bias(op, site)) is not None]
    return torch.cat(biases) if biases else None


def _qkv(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    """q, k and v in one product, rotated together, keys and values written."""
    projections, config = ops[:3], site.config
    weight = site.packed.get(tuple(op.tensors[0] for op in projections))
    layer = ops[0].layer
    assert layer is not None
    rope, dim = config.layers[layer].rope, config.head_dim
    if weight is None or rope.rotary_dim != dim:
        return None
    bias, scratch = _merged_bias(projections, site), site.scratch
    norms = [site.tensors[name] for op in ops if op.kind == "head_norm" for name in op.tensors]
    cache = site.kv_cache[site.kv_layer[layer]].transpose(0, 1)
    q_heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_eps
    rotated = q_heads + kv_heads

    def launch(step: Step) -> None:
        registers, batch = step.registers, step.batch
        qkv = packed_linear(registers["h"], weight, scratch)
        if bias is not None:
            qkv = qkv + bias
        heads = qkv.view(-1, rotated + kv_heads, dim)
        if norms:
            heads[:, :q_heads] = eager_norm.rms_norm(heads[:, :q_heads], norms[0], eps)
            heads[:, q_heads:rotated] = eager_norm.rms_norm(heads[:, q_heads:rotated], norms[1], eps)
        cos, sin = batch.rope[rope]
        rotate_(heads[:, :rotated], cos, sin)
        # Keys and values of a row lie side by side, as the cache has them one behind the other.
        cache.index_copy_(0, batch.slots, heads[:, q_heads:].view(-1, 2, kv_heads, dim))
        registers["q"] = heads[:, :q_heads]

    return launch, weight.planes + 4 + (bias is not None) + (4 if norms else 0)


def _attention(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    layer = ops[0].layer
    assert layer is not None
    kv_layer, scale, window = site.kv_layer[layer], site.config.attention_scale, site.config.layers[layer].window

    def launch(step: Step) -> None:
        step.registers["a"] = paged_attention(step.registers["q"], step.runs, kv_layer, scale, window)

    return launch, 1


def _mlp(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    """gate and up in one product, gated, then down."""
    gate_op, up_op, act, down_op = ops
    both = site.packed.get((gate_op.tensors[0], up_op.tensors[0]))
    down = site.packed.get(down_op.tensors[:1])
    if both is None or down is None:
        return None
    bias, down_bias = _merged_bias((gate_op, up_op), site), _bias(down_op, site)
    scratch, activation = site.scratch, act.note

    def launch(step: Step) -> None:
        rows = packed_linear(step.registers["h"], both, scratch)
        if bias is not None:
            rows = rows + bias
        out = packed_linear(gate(rows, activation), down, scratch)
        step.registers["y"] = out if down_bias is None else out + down_bias

    return launch, both.planes + down.planes + 2 + (bias is not None) + (down_bias is not None)


def _residual(ops: Sequence[Op], site: Site) -> tuple[Launch, int]:
    def launch(step: Step) -> None:
        step.registers["x"].add_(step.registers["y"])

    return launch, 1


def _head(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
    weight = site.packed.get(ops[0].tensors)
    if weight is None:
        return None

    def launch(step: Step) -> None:
        step.registers["logits"] = packed_linear(step.registers["hidden"], weight, None)

    return launch, weight.planes


PACKED_RULES: tuple[Rule, ...] = (
    PlainRule("packed-embed", "packed_linear.embedding", "differs", CLOSE, ("embed",), _embed),
    PlainRule("norm-by-length", "norm.fused", "differs", DENSE, ("norm",), _norm),
    PlainRule(
        "packed-qkv", "packed_linear.fused", "differs", CLOSE, ("linear", "linear", "linear", "head_norm", "rope", "kv_write"), _qkv
    ),
    PlainRule("packed-qkv", "packed_linear.fused", "differs", CLOSE, ("linear", "linear", "linear", "rope", "kv_write"), _qkv),
    PlainRule("packed-mlp", "packed_linear.fused", "differs", CLOSE, ("linear", "linear", "gate", "linear"), _mlp),
    PlainRule("packed-merged", "packed_linear.fused", "differs", CLOSE, ("linear", "linear", "linear"), _merged),
    PlainRule("packed-merged", "packed_linear.fused", "differs", CLOSE, ("linear", "linear"), _merged),
    PlainRule("packed-linear", "packed_linear.fused", "differs", CLOSE, ("linear",), _linear),
    PlainRule("pages-in-place", "attention.fused", "differs", DENSE, ("attention",), _attention),
    PlainRule("add-in-place", "torch.add_", "bit_identical", IN_PLACE, ("residual",), _residual),
    PlainRule("packed-head", "packed_linear.fused", "differs", CLOSE, ("head",), _head),
)
"""Tried in this order, before the reference rules."""
