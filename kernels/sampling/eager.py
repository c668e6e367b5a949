"""Sampling of a batch of rows, on the device, with torch's operators.

A row's draw depends on its seed, its position and the id alone: not on the batch, the other rows, or a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
FEW_IDS = 256


@dataclass(frozen=True, slots=True)
class FilterRows:
    """Sampling parameters of a batch, each `[rows]`: temperature, top_p, min_p fp32; top_k, keys int64 (key: `seed_key(seed)`).
    Rows with temperature 0 are greedy. Which filters any row uses is known on the host."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


def mix32(value: Tensor) -> Tensor:
    """A 32-bit finaliser with full avalanche ("lowbias32", Chris Wellons' hash prospector), on int64 holding 32-bit values."""
    value = value & MASK32
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D & MASK32
    value = value ^ (value >> 15)
    value = value * 0x846CA68B & MASK32
    return value ^ (value >> 16)


def uniform(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """fp32 `[rows, vocab]` in (0, 1): one number for every id of every row. keys, positions: int64 `[rows]`."""
    return uniform_of(keys, positions, torch.arange(vocab_size, device=keys.device))


def uniform_of(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The numbers of `uniform` at these ids alone: fp32 in the shape of `ids`, int64 `[n]` or `[rows, n]`."""
    key = mix32(keys ^ mix32(positions + 0x85EBCA6B))[:, None]
    return ((mix32(mix32(ids + key) ^ key) >> 9).float() + 0.5) / 2**23


def seed_key(seed: int) -> int:
    """The 32-bit key of a 63-bit seed."""
    from kernels.sampling.reference import mix32 as mix

    return mix(seed ^ mix((seed >> 32) + 0x9E3779B9))


def filtered_probabilities(logits: Tensor, rows: FilterRows) -> Tensor:
    """The distributions rows are drawn from, fp32 `[rows, vocab]`: temperature, top-k, top-p (arXiv 1904.09751), min-p (arXiv
    2407.01082). logits: `[rows, vocab]`. Equal logits share their fate at a threshold: top-k may keep more than k of them."""
    scaled = logits.float() / rows.temperature.clamp(min=1e-6)[:, None]
    if rows.any_top_k:
        vocab = scaled.shape[1]
        k = torch.where(rows.top_k == 0, vocab, rows.top_k.clamp(max=vocab))
        kth = int(k[k < vocab].max()) if bool((k < vocab).any()) else 0
        if kth:
            largest = scaled.topk(kth, dim=-1).values
            threshold = largest.gather(1, (k.clamp(max=kth) - 1)[:, None])
            scaled = scaled.masked_fill((scaled < threshold) & (k < vocab)[:, None], -torch.inf)
    probabilities = scaled.softmax(-1)
    if rows.any_top_p:
        # The nucleus is nearly always among the first few ids; only where it isn't is the whole row sorted.
        ordered = probabilities.topk(min(FEW_IDS, probabilities.shape[1]), dim=-1).values
        if bool(((ordered.sum(-1) < rows.top_p) & (rows.top_p < 1.0)).any()):
            ordered = probabilities.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        kept = (before < rows.top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
        threshold = ordered.gather(1, kept - 1)
        cut = (probabilities < threshold) & (rows.top_p < 1.0)[:, None]
        probabilities = probabilities.masked_fill(cut, 0.0)
    if rows.any_min_p:
        threshold = probabilities.amax(-1, keepdim=True) * rows.min_p[:, None]
        probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True)


def draw(logits: Tensor, rows: FilterRows, positions: Tensor) -> Tensor:
    """The chosen ids, int64 `[rows]`: the largest logit where temperature is 0, else the winner of the exponential race
    p / −log(u), which is a draw from p. positions: int64 `[rows]`, how many tokens each request has generated."""
    probabilities = filtered_probabilities(logits, rows)
    if rows.any_top_k or rows.any_top_p or rows.any_min_p:
        few = min(FEW_IDS, logits.shape[1])
        values, ids = probabilities.topk(few, dim=-1)
        if bool((values[:, -1] == 0).all()):
            # Every id that may win is among these: the race is run by them alone, with the numbers they have in the whole.
            race = values / -uniform_of(rows.keys, positions, ids).log()
            winners = ids.gather(1, race.argmax(-1, keepdim=True))[:, 0]
            return torch.where(rows.temperature == 0, logits.argmax(-1), winners)
    race = probabilities / -uniform(rows.keys, positions, logits.shape[1]).log()
    return torch.where(rows.temperature == 0, logits.argmax(-1), race.argmax(-1))


def penalise(
    logits: Tensor, prompt_seen: Tensor, output_counts: Tensor, repetition: float, frequency: float, presence: float
) -> Tensor:
    """One row's logits after its penalties, fp32 `[vocab]`.

    Repetition (CTRL, arXiv 1909.05858, section 4.1): seen ids' logits are divided by it where positive, else multiplied.
    Frequency and presence (OpenAI API): minus count · frequency, minus presence where count > 0. prompt_seen: bool `[vocab]`;
    output_counts: int32 `[vocab]`.
    """
    logits = logits.float()
    if repetition != 1.0:
        seen = prompt_seen | (output_counts > 0)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    if frequency or presence:
        logits = logits - output_counts * frequency - (output_counts > 0) * presence
    return logits
