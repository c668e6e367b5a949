"""Plan: which rule runs which ops, in order, and the digest that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.circuit.ir import Op
from engine.circuit.rules import Launch, Numerics, Rule, Site
from engine.errors import Unsupported


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One fused launch: its rule, what it covers, and how many kernels it dispatches for a decode step."""

    rule: str
    kernel: str
    numerics: Numerics
    proof: str
    ops: tuple[Op, ...]
    num_launches: int
    run: Launch


@dataclass(frozen=True, slots=True)
class Plan:
    """A circuit's launch list. `digest`: 16 hex digits over the rules, their numerics, and the ops, shapes and formats they were
    compiled for; the same in every process. `launches_per_step`: kernels of a decode step."""

    name: str
    digest: str
    launches: tuple[PlannedLaunch, ...]

    @property
    def launches_per_step(self) -> int:
        return sum(launch.num_launches for launch in self.launches)


def compile_plan(name: str, ops: Sequence[Op], rules: Sequence[Rule], site: Site) -> Plan:
    """The Plan that covers `ops` by the first of `rules` that can, each time. Raises `Unsupported` naming an op that
    none covers."""
    launches: list[PlannedLaunch] = []
    at = 0
    while at < len(ops):
        for rule in rules:
            lowered = rule.lower(ops[at:], site)
            if lowered is not None:
                covered = tuple(ops[at : at + lowered.num_ops])
                launches.append(
                    PlannedLaunch(rule.name, rule.kernel, rule.numerics, rule.proof, covered, lowered.num_launches, lowered.launch)
                )
                at += lowered.num_ops
                break
        else:
            op = ops[at]
            where = "the model" if op.layer is None else f"layer {op.layer}"
            held = ", ".join(op.tensors) or op.kind
            raise Unsupported(
                f"circuit {name!r} can't serve this model: it has no rule for {op.kind} of {where} as {held} is held."
            )
    return Plan(name, _digest(name, launches, site), tuple(launches))


def _digest(name: str, launches: Sequence[PlannedLaunch], site: Site) -> str:
    formats = {weight: f"packed {weights.planes}x4" for names, weights in site.packed.items() for weight in names}
    text = {
        "circuit": name,
        "device": site.device.type,
        "dtype": str(site.dtype),
        "cache": list(site.kv_cache.shape[3:]),
        "launches": [
            [launch.rule, launch.kernel, launch.numerics, launch.num_launches, [_described(op, site, formats) for op in launch.ops]]
            for launch in launches
        ],
    }
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()[:16]


def _described(op: Op, site: Site, formats: dict[str, str]) -> list[object]:
    tensors = []
    for name in op.tensors:
        dense = site.tensors.get(name) if name not in formats else None
        tensors.append([name, formats[name] if dense is None else str(dense.dtype), list(dense.shape) if dense is not None else []])
    return [op.kind, op.layer, tensors, list(op.reads), list(op.writes), op.note]
