"""Which of a checkpoint's weights a packed model holds as 4-bit tiles, which of them as one matrix, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.device import Device
from engine.families.base import TensorSpec
from engine.families.config import ModelConfig
from engine.weights.store import WeightStore
from kernels.packed_linear.packing import GROUP, PLANES, PackedWeight, missing_support, pack, packed_bytes, quanta_of

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint

# Projections of the same rows that are one product where they are of one precision.
_MERGED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
_SINGLE = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Weights that are packed as one matrix, their rows one after the other: their specs, and the stored format of each."""

    specs: tuple[TensorSpec, ...]
    formats: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    @property
    def is_projection(self) -> bool:
        """Whether many rows may be multiplied with it at once: not so of the head, which few rows of a batch reach."""
        return self.specs[0].name not in ("model.embed_tokens.weight", "lm_head.weight")

    @property
    def num_bytes(self) -> int:
        return packed_bytes(sum(spec.shape[0] for spec in self.specs), self.specs[0].shape[1], self.formats[0])

    @property
    def scratch_bytes(self) -> int:
        """What the matrix takes while many rows are multiplied with it: bfloat16, and bytes of quanta."""
        rows = -(-sum(spec.shape[0] for spec in self.specs) // 64) * 64
        return rows * self.specs[0].shape[1] * PLANES[self.formats[0]] * 5 // 2


def packable(config: ModelConfig, specs: Sequence[TensorSpec], checkpoint: Checkpoint, device: Device) -> list[PackedGroup]:
    """The weights of the checkpoint that can be held packed on that device; none where it isn't a CPU, where the model doesn't
    compute in bfloat16 (in others torch's packed product is no faster than a dense one), and none of a model with recurrent layers
    or experts, whose layers compute from dense weights."""
    if config.gated_delta is not None or config.moe is not None or checkpoint.kind != "gguf":
        return []
    if device.is_cuda or device.dtype != torch.bfloat16 or missing_support() is not None:
        return []
    by_name = {spec.name: spec for spec in specs if _can_pack(spec, checkpoint)}
    groups: list[PackedGroup] = []

    def add(names: Sequence[str]) -> None:
        found = tuple(by_name.pop(name) for name in names)
        groups.append(PackedGroup(found, tuple(checkpoint.tensors[spec.source].format for spec in found)))

    for spec in specs:
        if spec.name not in by_name:
            continue
        merged: tuple[str, ...] = next((m for m in _MERGED if spec.name.endswith(f".{m[0]}.weight")), ())
        names = [spec.name.replace(merged[0], each) for each in merged]
        if names and all(name in by_name for name in names):
            planes = {PLANES[checkpoint.tensors[by_name[name].source].format] for name in names}
            for each in [names] if len(planes) == 1 else [[name] for name in names]:
                add(each)
        else:
            add([spec.name])
    return groups


def _can_pack(spec: TensorSpec, checkpoint: Checkpoint) -> bool:
    projections = tuple(f"{name}.weight" for names in _MERGED for name in names)
    return (
        len(spec.shape) == 2
        and spec.name.endswith(projections + _SINGLE)
        and checkpoint.tensors[spec.source].format in PLANES
        and spec.shape[1] % GROUP == 0
        and spec.source_shape is None
        and not spec.offset
        and not spec.exact
    )


def read_packed(
    groups: Sequence[PackedGroup], checkpoint: Checkpoint, store: WeightStore, read: Callable[[TensorSpec], None] = lambda _: None
) -> dict[tuple[str, ...], PackedWeight]:
    """The packed weights by the names they hold, entered into `store`. `read(spec)` is called as each tensor is read."""
    packed = {}
    for group in groups:
        parts = []
        for spec, stored in zip(group.specs, group.formats, strict=True):
            raw = checkpoint.raw(spec.source)
            parts.append(quanta_of(raw if spec.arrange is None else spec.arrange(raw), stored))
            read(spec)
        weight = pack(parts, group.specs[0].shape[1])
        parameters = sum(torch.Size(spec.shape).numel() for spec in group.specs)
        label = "+".join(group.names)
        store.add(f"{label}.tiles", weight.tiles, group.specs[0].kind, "int4 tiles", parameters)
        store.add(f"{label}.scales", weight.scales_zeros, group.specs[0].kind, "int4 scales", 0)
        packed[group.names] = weight
    return packed
