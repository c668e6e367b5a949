"""What every hybrid family is asked, whatever its MLPs: chunks that cross the 64-token chunks of the scan, many prompts in one
ragged pass, and faults on purpose. The verdict is always that of the rule in `closeness`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from closeness import Expected, Split, pieces
from family_scenes import Scene, with_wrong_rope
from oracle import expected_of
from tiny_hybrids import VOCAB
from transformers import PreTrainedModel
from under_test import all_logits, loaded

from engine.layers.gated_delta import GatedDeltaNet
from engine.model.base import PrefillSlice
from engine.model.transformer import TransformerModel

# 150 ids: over two chunks of 64; the first 70 are over one. A whole number of neither 64s nor 16s.
IDS = [(37 * i * i + 11 * i + 5) % VOCAB for i in range(150)]
SHORT = 70
# Ends before, at and after a boundary of the 64-token chunks, and chunks that start in the middle of one.
MANY_CHUNKS: tuple[Split, ...] = (
    (64, 64, 22),
    (63, 65, 22),
    (65, 64, 21),
    (1, 64, 63, 22),
    (127, 1, 1, 21),
    (128, 22),
    (129, 21),
    (2, 3, 1, 122, 22),
    (40, 70, 40),
    (149, 1),
)


@dataclass
class TinyHybrid:
    """A checkpoint directory, the model it was made from, and what that says of the first ids."""

    path: Path
    model: PreTrainedModel
    _expected: dict[int, Expected] = field(default_factory=dict)

    def expected(self, num_tokens: int = len(IDS)) -> Expected:
        """What transformers says of the first `num_tokens` of IDS."""
        if num_tokens not in self._expected:
            self._expected[num_tokens] = expected_of(self.model, IDS[:num_tokens])
        return self._expected[num_tokens]


class Variants:
    """The checkpoints of one family by the names of their variants; each is made once."""

    def __init__(self, make: Callable[..., PreTrainedModel], changes: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
        self._make, self._changes, self._directory = make, changes, directory
        self._made: dict[str, TinyHybrid] = {}

    def __getitem__(self, name: str) -> TinyHybrid:
        if name not in self._made:
            model = self._make(**self._changes[name])
            path = self._directory / str(len(self._made))
            model.save_pretrained(path)
            self._made[name] = TinyHybrid(path, model)
        return self._made[name]


def loaded_hybrid(path: Path, **flags: Any) -> Any:
    """`loaded` with room for all of IDS in one batch, logits of every row included."""
    return loaded(path, **({"max_batch": len(IDS), "max_batch_tokens": 4 * len(IDS), "ssm_cache_slots": 4} | flags))


def prompts_in_one_pass(model: TransformerModel, lengths: Sequence[int], seed: int) -> Scene:
    """Prompts of `lengths` ids go through ragged passes together, each in chunks of its own sizes, beside decodes of those that
    are through: the last logits of each prompt, and of two tokens after it."""
    dice = random.Random(seed)
    seqs = [model.lifecycle.alloc_sequence() for _ in lengths]
    rows, at = [], []
    while any(seq.num_tokens < length + 2 for seq, length in zip(seqs, lengths, strict=True)):
        decoding, slices, ends = [], [], []
        for seq, length in zip(seqs, lengths, strict=True):
            start = seq.num_tokens
            if length <= start < length + 2:
                decoding.append(seq)
            elif start < length:
                size = min(dice.choice((1, 5, 31, 64, 80)), length - start)
                slices.append(PrefillSlice(IDS[:length], seq, start, size, start + size == length))
                ends.append(start + size)
        now = [seq.num_tokens for seq in decoding]
        result = model.forward.mixed_forward_batch([IDS[i] for i in now], decoding, slices)
        if result.decode_logits is not None:
            rows.append(result.decode_logits.clone())
            at += now
        for logits, end in zip(result.prefill_logits, ends, strict=True):
            if logits is not None:
                rows.append(logits.clone())
                at.append(end - 1)
    for seq in seqs:
        model.lifecycle.free_sequence(seq)
    return torch.cat(rows), at


# Faults on purpose, each in a model that has passed


def _recurrent(model: TransformerModel) -> list[GatedDeltaNet]:
    return [layer.mixer for layer in model.forward.layers if isinstance(layer.mixer, GatedDeltaNet)]


def wrong_rope(model: TransformerModel) -> None:
    with_wrong_rope(model, 10000.0)


def one_conv_tap_off(model: TransformerModel) -> None:
    _recurrent(model)[0].conv_weight[0].mul_(1.02)


def one_decay_off(model: TransformerModel) -> None:
    _recurrent(model)[-1].decay[0].mul_(1.05)


def no_output_gate(model: TransformerModel) -> None:
    """The gates' rows of one attention layer's q projection, all zero: every gate is a half."""
    q = model.store.get("model.layers.1.self_attn.q_proj.weight")
    head_dim = model.config.head_dim
    q.view(-1, 2, head_dim, q.shape[1])[:, 1].zero_()


def _between_chunks(model: TransformerModel, spoil: Callable[[int], None]) -> None:
    run = model.forward.run

    def spoiled(plan: Any, *args: Any) -> Any:
        for part in plan.rows:
            if part.seq.num_computed_tokens:
                spoil(part.seq.ssm_slot)
        return run(plan, *args)

    model.forward.run = spoiled  # type: ignore[method-assign]  # a fault put in on purpose


def one_state_lost(model: TransformerModel) -> None:
    """Between two chunks, one head of one layer forgets its state."""

    def forget(slot: int) -> None:
        _recurrent(model)[1].h[slot, 2].zero_()

    _between_chunks(model, forget)


def one_window_late(model: TransformerModel) -> None:
    """Between two chunks, one layer's convolution window slips by one token."""

    def slip(slot: int) -> None:
        window = _recurrent(model)[0].conv[slot]
        window.copy_(window.roll(1, 0))

    _between_chunks(model, slip)


def no_shared_expert_gate(model: TransformerModel) -> None:
    """The gate of one layer's shared expert is a half, whatever the token."""
    model.store.get("model.layers.0.mlp.shared_expert_gate.weight").zero_()


FAULTS = (wrong_rope, one_conv_tap_off, one_decay_off, no_output_gate, one_state_lost, one_window_late)


def split_logits(model: TransformerModel, split: Split) -> torch.Tensor:
    """The logits of every position of the first ids, computed in chunks of `split`."""
    return all_logits(model, IDS[: sum(split)], split)


def chunk_sizes(num_tokens: int) -> tuple[Split, ...]:
    """The ids whole, one by one, and in chunks of some sizes."""
    return tuple(pieces(num_tokens, size) for size in (num_tokens, 1, 3, 16, 33, 64, 65))
