"""What a rule is, what it may look at, and the reference rules: one launch for each op, by the eager kernels.

Each rule states its numerics against `legacy`: `reference` (it defines the numbers: legacy's own kernels, legacy's own bits),
`bit_identical` (a test proves it), or `differs` (a test bounds by how much). `proof` names that test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Batch
from engine.circuit.ir import Op, OpKind
from engine.families.config import ModelConfig, RopeConfig
from engine.layers.decoder import DecoderLayer
from engine.layers.rope import RopeTable
from kernels.attention.eager import paged_attention, write_kv
from kernels.attention.fused import PageRuns
from kernels.linear.eager import linear
from kernels.mlp.eager import gate
from kernels.norm.eager import rms_norm
from kernels.packed_linear.fused import Scratch
from kernels.packed_linear.packing import PackedWeight
from kernels.rope.eager import rotate

Numerics = Literal["reference", "bit_identical", "differs"]


class Step:
    """What the launches of one step share: its batch, the registers, and the pages of its sequences."""

    __slots__ = ("batch", "registers", "runs")

    def __init__(self, batch: Batch, runs: PageRuns) -> None:
        self.batch = batch
        self.runs = runs
        self.registers: dict[str, Tensor] = {}


Launch = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class Site:
    """What a circuit is compiled for: the model and what it holds. `tensors`: dense weights by name; `packed`: packed ones by the
    names of the weights whose rows they hold, in order; `layers`: the plain layers where their weights are dense, else empty;
    `kv_cache`: `[attention layers, 2, slots, kv_heads, head_dim]`; `num_rows`: rows of each packed weight; `kv_layer`: an attention
    layer's number in the cache."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    packed: Mapping[tuple[str, ...], PackedWeight]
    scratch: Scratch
    layers: Sequence[DecoderLayer]
    kv_cache: Tensor
    ropes: Mapping[RopeConfig, RopeTable]
    num_rows: Mapping[str, int] = field(default_factory=dict)
    kv_layer: Mapping[int, int] = field(default_factory=dict)

    def dense(self, op: Op) -> bool:
        """Whether all weights of the op are held dense."""
        return all(name in self.tensors for name in op.tensors)


@dataclass(frozen=True, slots=True)
class Lowered:
    """One fused launch: how many ops from the current one on it covers, what runs it, and how many kernels that dispatches for a
    decode step."""

    num_ops: int
    launch: Launch
    num_launches: int


class Rule(Protocol):
    """A way to run one op or several that follow each other."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> str:
        """The module under `kernels/` that computes it."""

    @property
    def numerics(self) -> Numerics: ...

    @property
    def proof(self) -> str:
        """The test that proves the numerics, as `file::test`."""

    def lower(self, ops: Sequence[Op], site: Site) -> Lowered | None:
        """The launch that covers the first of `ops`, or None where this rule can't."""


@dataclass(frozen=True, slots=True)
class PlainRule:
    """A rule made of a function."""

    name: str
    kernel: str
    numerics: Numerics
    proof: str
    kinds: tuple[OpKind, ...]
    make: Callable[[Sequence[Op], Site], tuple[Launch, int] | None]

    def lower(self, ops: Sequence[Op], site: Site) -> Lowered | None:
        if tuple(op.kind for op in ops[: len(self.kinds)]) != self.kinds:
            return None
        made = self.make(ops[: len(self.kinds)], site)
        return None if made is None else Lowered(len(self.kinds), *made)


REFERENCE_PROOF = "tests/models/test_circuits.py::test_the_reference_circuit_has_legacy_s_bits"


def _reference(kind: OpKind, kernel: str, launches: int) -> Callable[[Callable[[Op, Site], Launch]], PlainRule]:
    def rule(make: Callable[[Op, Site], Launch]) -> PlainRule:
        def lower(ops: Sequence[Op], site: Site) -> tuple[Launch, int] | None:
            return (make(ops[0], site), launches) if site.dense(ops[0]) else None

        return PlainRule(kind.replace("_", "-"), kernel, "reference", REFERENCE_PROOF, (kind,), lower)

    return rule


@_reference("embed", "embedding", 1)
def embed(op: Op, site: Site) -> Launch:
    weight = site.tensors[op.tensors[0]]
    # Rounded to the model's dtype first, as Gemma's own code does.
    scale = None if site.config.embedding_scale == 1.0 else torch.tensor(site.config.embedding_scale, dtype=site.dtype)

    def launch(step: Step) -> None:
        rows = functional.embedding(step.batch.token_ids, weight)
        step.registers["x"] = rows if scale is None else rows * scale

    return launch


@_reference("norm", "norm.eager", 1)
def norm(op: Op, site: Site) -> Launch:
    weight, eps, reads, writes = site.tensors[op.tensors[0]], site.config.rms_eps, op.reads[0], op.writes[0]

    def launch(step: Step) -> None:
        step.registers[writes] = rms_norm(step.registers[reads], weight, eps)

    return launch


@_reference("linear", "linear.eager", 1)
def linear_rule(op: Op, site: Site) -> Launch:
    weight, reads, writes = site.tensors[op.tensors[0]], op.reads[0], op.writes[0]
    bias = site.tensors[op.tensors[1]] if len(op.tensors) > 1 else None

    def launch(step: Step) -> None:
        step.registers[writes] = linear(step.registers[reads], weight, bias)

    return launch


@_reference("split_gate", "attention.eager", 0)
def split_gate(op: Op, site: Site) -> Launch:
    head_dim = site.config.head_dim

    def launch(step: Step) -> None:
        registers = step.registers
        # Each head's rows hold its query, then its gate.
        q, gate_rows = registers["q"].view(registers["q"].shape[0], -1, 2 * head_dim).chunk(2, dim=-1)
        registers["q"], registers["gate"] = q.reshape(q.shape[0], -1), gate_rows

    return launch


@_reference("head_norm", "norm.eager", 2)
def head_norm(op: Op, site: Site) -> Launch:
    q_weight, k_weight = (site.tensors[name] for name in op.tensors)
    eps, head_dim = site.config.rms_eps, site.config.head_dim

    def launch(step: Step) -> None:
        for name, weight in (("q", q_weight), ("k", k_weight)):
            rows = step.registers[name]
            step.registers[name] = rms_norm(rows.view(rows.shape[0], -1, head_dim), weight, eps)

    return launch


@_reference("rope", "rope.eager", 6)
def rope(op: Op, site: Site) -> Launch:
    assert op.layer is not None
    config, head_dim = site.config.layers[op.layer].rope, site.config.head_dim

    def launch(step: Step) -> None:
        cos, sin = step.batch.rope[config]
        for name in ("q", "k"):
            rows = step.registers[name]
            step.registers[name] = rotate(rows.view(rows.shape[0], -1, head_dim), cos, sin)

    return launch


@_reference("kv_write", "attention.eager", 2)
def kv_write(op: Op, site: Site) -> Launch:
    assert op.layer is not None
    k_cache, v_cache = site.kv_cache[site.kv_layer[op.layer]]
    head_dim = site.config.head_dim

    def launch(step: Step) -> None:
        k, v = step.registers["k"], step.registers["v"]
        write_kv(k, v.view(v.shape[0], -1, head_dim), k_cache, v_cache, step.batch.slots)

    return launch


@_reference("attention", "attention.eager", 3)
def attention(op: Op, site: Site) -> Launch:
    assert op.layer is not None
    k_cache, v_cache = site.kv_cache[site.kv_layer[op.layer]]
    scale, window = site.config.attention_scale, site.config.layers[op.layer].window

    def launch(step: Step) -> None:
        out = paged_attention(step.registers["q"], k_cache, v_cache, step.batch.attention, scale, window)
        step.registers["a"] = out.reshape(out.shape[0], -1)

    return launch


@_reference("output_gate", "attention.eager", 2)
def output_gate(op: Op, site: Site) -> Launch:
    def launch(step: Step) -> None:
        registers = step.registers
        gate_rows = registers["gate"]
        out = registers["a"].view(gate_rows.shape) * gate_rows.sigmoid()
        registers["a"] = out.reshape(out.shape[0], -1)

    return launch


@_reference("gated_delta", "gated_delta.eager", 30)
def gated_delta(op: Op, site: Site) -> Launch:
    assert op.layer is not None
    mixer = site.layers[op.layer].mixer

    def launch(step: Step) -> None:
        step.registers["y"] = mixer(step.registers["h"], step.batch)

    return launch


@_reference("gate", "mlp.eager", 2)
def gate_rule(op: Op, site: Site) -> Launch:
    activation = op.note

    def launch(step: Step) -> None:
        step.registers["m"] = gate(step.registers["g"], step.registers["u"], activation)

    return launch


@_reference("moe", "moe.eager", 30)
def moe(op: Op, site: Site) -> Launch:
    assert op.layer is not None
    mlp = site.layers[op.layer].mlp

    def launch(step: Step) -> None:
        step.registers["y"] = mlp(step.registers["h"])

    return launch


@_reference("residual", "torch.add", 1)
def residual(op: Op, site: Site) -> Launch:
    def launch(step: Step) -> None:
        step.registers["x"] = step.registers["x"] + step.registers["y"]

    return launch


@_reference("select_rows", "torch.index_select", 1)
def select_rows(op: Op, site: Site) -> Launch:
    def launch(step: Step) -> None:
        step.registers["hidden"] = step.registers["x"].index_select(0, step.batch.logit_rows)

    return launch


@_reference("head", "linear.eager", 1)
def head(op: Op, site: Site) -> Launch:
    weight = site.tensors[op.tensors[0]]

    def launch(step: Step) -> None:
        step.registers["logits"] = linear(step.registers["hidden"], weight)

    return launch


REFERENCE_RULES: tuple[Rule, ...] = (
    embed,
    norm,
    linear_rule,
    split_gate,
    head_norm,
    rope,
    kv_write,
    attention,
    output_gate,
    gated_delta,
    gate_rule,
    moe,
    residual,
    select_rows,
    head,
)
