"""The registry of model families, and the way from a checkpoint to its family and ModelConfig."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, RequestError
from engine.families.base import Family, TensorSpec
from engine.families.config import ModelConfig, Reader
from engine.families.gemma3 import FAMILY as GEMMA3
from engine.families.llama import FAMILY as LLAMA
from engine.families.qwen2 import FAMILY as QWEN2
from engine.families.qwen3 import FAMILY as QWEN3
from engine.families.qwen3_5 import FAMILY as QWEN3_5
from engine.families.qwen3_5_moe import FAMILY as QWEN3_5_MOE
from engine.families.qwen3_moe import FAMILY as QWEN3_MOE
from engine.families.qwen3_next import FAMILY as QWEN3_NEXT
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA3, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
CHAT_MAX_TOKENS = 2048
__all__ = [
    "FAMILIES",
    "Family",
    "ModelConfig",
    "TensorSpec",
    "chat_defaults",
    "end_token_ids",
    "family_named",
    "identify",
    "match_tensors",
]


def family_named(name: str) -> Family:
    """The family a ModelConfig names."""
    return next(family for family in FAMILIES if family.name == name)


def identify(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    """The family and ModelConfig of an opened checkpoint, from its headers alone. Raises `CheckpointError` naming an
    architecture or a key that isn't understood."""
    where = checkpoint.path.name
    gguf = checkpoint.kind == "gguf"
    reader = Reader(checkpoint.metadata, where if gguf else f"{where}/config.json")
    if gguf:
        arch = reader.text("general.architecture", "")
        found = [family for family in FAMILIES if arch in family.gguf_architectures]
        # The file is what a person chose and knows; `general.name` is often the name of a training run.
        name = checkpoint.path.stem
    else:
        listed = reader.get("architectures")
        arch = str(listed[0]) if isinstance(listed, list) and listed else ""
        found = [family for family in FAMILIES if arch in family.architectures]
        name = checkpoint.path.resolve().name
    if not found:
        known = sorted(a for f in FAMILIES for a in (f.gguf_architectures if gguf else f.architectures))
        raise CheckpointError(f"{where}: the architecture {arch!r} isn't supported; these are: {', '.join(known)}.")
    family = found[0]
    config = family.config_from_gguf(reader, name, checkpoint) if gguf else family.config_from_hf(reader, name)
    config.check(where)
    return family, config


def match_tensors(family: Family, config: ModelConfig, checkpoint: Checkpoint) -> list[TensorSpec]:
    """The tensors to load, their `parts` being what to read of this checkpoint, each checked to be there in the right shape;
    nothing is read. Raises `CheckpointError` naming the first that is missing, misshapen, or not understood."""
    where = checkpoint.path.name
    specs = [replace(spec, parts=spec.parts_in(checkpoint.tensors)) for spec in family.tensors(config, checkpoint.kind == "gguf")]
    parts = [part for spec in specs for part in spec.parts]
    for part in parts:
        info = checkpoint.tensors.get(part.source)
        if info is None:
            raise CheckpointError(f"{where}: tensor {part.source} is missing; the checkpoint is incomplete.")
        if info.shape != part.shape:
            raise CheckpointError(
                f"{where}: tensor {part.source} has shape {list(info.shape)}; the config asks for {list(part.shape)}."
            )
    needed = {part.source for part in parts}
    for name in checkpoint.tensors:
        tied = name == "lm_head.weight" and config.tied_head
        if name not in needed and not tied and not family.ignored(name):
            raise CheckpointError(f"{where}: tensor {name} isn't understood, and leaving it out could change the result.")
    return specs


def chat_defaults(checkpoint: Checkpoint) -> SamplingParams:
    """The model's own sampling parameters for chat: from generation_config.json beside a directory's config, or from GGUF's
    `general.sampling.*` keys; what neither says is the family's usual (SmolLM2: temperature 0.2, top-p 0.9, by its model card)."""
    gguf = checkpoint.kind == "gguf"
    said: Mapping[str, object] = checkpoint.metadata if gguf else _generation_config(checkpoint.path)
    prefix = "general.sampling." if gguf else ""
    smollm2 = "smollm2" in f"{checkpoint.path.name} {checkpoint.metadata.get('general.name', '')}".lower()
    values: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9} if smollm2 else {"temperature": 0.7, "top_p": 0.95}
    for ours, theirs in (
        ("temperature", ("temperature", "temp")),
        ("top_k", ("top_k",)),
        ("top_p", ("top_p",)),
        ("min_p", ("min_p",)),
    ):
        for name in theirs:
            if isinstance(value := said.get(prefix + name), (int, float)):
                values[ours] = int(value) if ours == "top_k" else float(value)
    try:
        return SamplingParams(max_tokens=CHAT_MAX_TOKENS, **values)
    except RequestError:
        return SamplingParams(max_tokens=CHAT_MAX_TOKENS, temperature=0.7, top_p=0.95)


def end_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """The end tokens that a checkpoint's config names, for one without a tokenizer to say them."""
    if checkpoint.kind == "gguf":
        named = checkpoint.metadata.get("tokenizer.ggml.eos_token_id")
    else:
        text = checkpoint.metadata.get("text_config")
        inner = text.get("eos_token_id") if isinstance(text, dict) else None
        said = _generation_config(checkpoint.path).get("eos_token_id")
        named = said if said is not None else checkpoint.metadata.get("eos_token_id", inner)
    ids = named if isinstance(named, list) else [named]
    return frozenset(each for each in ids if isinstance(each, int) and not isinstance(each, bool) and each >= 0)


def _generation_config(path: Path) -> dict[str, object]:
    try:
        values = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
