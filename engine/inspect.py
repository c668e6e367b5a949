"""What `footplate inspect` shows: a checkpoint's architecture and sizes, from its headers; no tensor is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import MemoryPlanError

if TYPE_CHECKING:
    from engine.families import ModelConfig, TensorSpec
    from engine.families.config import LayerConfig
    from engine.memory_plan import MemoryPlan
    from engine.weights.checkpoint import Checkpoint

UNUSED = "unused"
"""The kind of a tensor that lies in the file and isn't needed."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that belong together: how many, their elements, and their bytes as stored in the file."""

    name: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class InspectedPlan:
    """The memory plan that the engine's flags lead to on this machine; `refused` says why it doesn't fit, if it doesn't;
    `circuit` would serve."""

    device: str
    dtype: str
    block_size_tokens: int
    figures: MemoryPlan | None
    refused: str | None = None
    circuit: str = "legacy"


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint as its headers describe it. `layers` maps a layer's kind to how many there are; `kinds` and
    `formats` cover the same tensors, by what they are for and by how they are stored."""

    name: str
    source: str
    kind: str
    family: str
    layers: dict[str, int]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    tied_head: bool
    num_parameters: int
    total_bytes: int
    kinds: tuple[Part, ...]
    formats: tuple[Part, ...]
    unreadable_formats: tuple[str, ...]
    plan: InspectedPlan


def inspect_model(path: Path, config: EngineConfig) -> Inspection:
    """The Inspection of the checkpoint at `path`, with the memory plan that `config` leads to on this machine.

    Raises `CheckpointError` for a checkpoint that can't be understood.
    """
    from engine.families import identify, match_tensors
    from engine.weights.checkpoint import open_checkpoint
    from engine.weights.formats import FORMATS

    with open_checkpoint(path) as checkpoint:
        family, model = identify(checkpoint)
        specs = match_tensors(family, model, checkpoint)
        kind_of = {part.source: spec.kind for spec in specs for part in spec.parts}
        infos = list(checkpoint.tensors.values())
        needed = [info for info in infos if info.name in kind_of]
        return Inspection(
            name=model.name,
            source=str(path),
            kind=checkpoint.kind,
            family=model.family,
            layers=_layers(model),
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            context_tokens=model.max_position,
            tied_head=model.tied_head,
            num_parameters=sum(prod(info.shape) for info in needed),
            total_bytes=sum(info.nbytes for info in infos),
            kinds=_parts((kind_of.get(info.name, UNUSED), prod(info.shape), info.nbytes) for info in infos),
            formats=_parts((info.format, prod(info.shape), info.nbytes) for info in infos),
            unreadable_formats=tuple(sorted({info.format for info in needed} - set(FORMATS))),
            plan=_plan(model, specs, checkpoint, config),
        )


def _plan(model: ModelConfig, specs: list[TensorSpec], checkpoint: Checkpoint, config: EngineConfig) -> InspectedPlan:
    from engine.device import choose_device
    from engine.model.circuit import chosen
    from engine.model.transformer import packed_at_load, planned

    device = choose_device(config)
    packed = packed_at_load(model, config, specs, checkpoint, device)
    named = (str(device.torch_device), device.dtype_name, config.block_size)
    circuit = chosen(config.circuit, bool(packed))
    try:
        plan = planned(model, config, specs, packed, device)
    except MemoryPlanError as error:  # worth knowing before a load; what the model is stays worth showing
        return InspectedPlan(*named, None, str(error), circuit)
    return InspectedPlan(*named, plan, circuit=circuit)


def _layers(model: ModelConfig) -> dict[str, int]:
    return dict(Counter(_described(layer, model) for layer in model.layers))


def _described(layer: LayerConfig, model: ModelConfig) -> str:
    window = "" if layer.window is None else f", window {layer.window}"
    experts = f" with {model.moe.top_k} of {model.moe.num_experts} experts" if layer.mlp == "moe" and model.moe else ""
    return layer.kind + window + experts


def _parts(rows: Iterable[tuple[str, int, int]]) -> tuple[Part, ...]:
    """Rows of (name, parameters, bytes) summed by name, the largest first."""
    sums: dict[str, list[int]] = {}
    for name, parameters, nbytes in rows:
        total = sums.setdefault(name, [0, 0, 0])
        for index, amount in enumerate((1, parameters, nbytes)):
            total[index] += amount
    parts = [Part(name, *total) for name, total in sums.items()]
    return tuple(sorted(parts, key=lambda part: (-part.bytes, part.name)))


def as_json(inspection: Inspection) -> dict[str, object]:
    """The Inspection as JSON-ready data, the plan with its total."""
    fields = asdict(inspection)
    if inspection.plan.figures is not None:
        fields["plan"]["figures"]["total_bytes"] = inspection.plan.figures.total_bytes
    return fields


def as_lines(inspection: Inspection) -> list[str]:
    """The Inspection as lines for a person."""
    found = inspection
    layers = ", ".join(f"{count} × {kind}" for kind, count in found.layers.items())
    lines = [
        f"{found.name}  ({found.family}, {found.kind})",
        f"  file        {found.source}",
        f"  layers      {sum(found.layers.values())}: {layers}",
        f"  heads       {found.num_heads} query, {found.num_kv_heads} key/value, {found.head_dim} wide",
        f"  widths      hidden {found.hidden_size:,}, mlp {found.intermediate_size:,}, vocabulary {found.vocab_size:,}"
        + (" (head tied to the embedding)" if found.tied_head else ""),
        f"  context     {found.context_tokens:,} tokens",
        f"  parameters  {found.num_parameters:,}",
        f"  weights     {mib(found.total_bytes)} in the file",
    ]
    lines += ["", "by kind", *_table(found.kinds), "", "by format", *_table(found.formats)]
    if found.unreadable_formats:
        lines += ["", f"can't be loaded yet: footplate doesn't read {', '.join(found.unreadable_formats)}."]
    return [*lines, "", *_plan_lines(found.plan)]


def _plan_lines(plan: InspectedPlan) -> list[str]:
    head = f"memory plan ({plan.device}, {plan.dtype}, forward {plan.circuit})"
    if plan.figures is None:
        return [head, f"  refused: {plan.refused}"]
    figures = plan.figures
    blocks = f"{figures.num_kv_blocks:,} blocks of {plan.block_size_tokens} tokens, {figures.kv_block_bytes / 1024:,.1f} KiB each"
    state = [f"  ssm state   {mib(figures.ssm_bytes):>12}"] if figures.ssm_bytes else []
    return [
        f"{head}: contexts up to {figures.max_seq_len:,} tokens",
        f"  weights     {mib(figures.weights_bytes):>12}",
        f"  kv cache    {mib(figures.kv_bytes):>12}  {blocks}",
        *state,
        f"  workspace   {mib(figures.workspace_bytes):>12}",
        f"  in all      {mib(figures.total_bytes):>12}  of {mib(figures.available_bytes)} available",
    ]


def _table(parts: Iterable[Part]) -> list[str]:
    return [
        f"  {part.name:<11} {part.tensors:>4} tensors {part.parameters:>15,} parameters {mib(part.bytes):>14}" for part in parts
    ]


def mib(nbytes: int) -> str:
    """`nbytes` in MiB, or GiB from 1 GiB on."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
