"""Sampling filters and draws for one row, in fp32 and plain Python order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def filtered_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution a row is drawn from, fp64 `[vocab]`: temperature, then the top_k largest, then the smallest set whose
    probability reaches top_p (arXiv 1904.09751), then those of at least min_p times the largest (arXiv 2407.01082)."""
    scaled = logits.double() / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-float(scaled[i]), i))
    kept = order[:top_k] if top_k else order
    weights = [math.exp(float(scaled[i] - scaled[order[0]])) for i in kept]
    total = sum(weights)
    nucleus, reached = [], 0.0
    for i, weight in zip(kept, weights, strict=True):
        if reached >= top_p:
            break
        nucleus.append((i, weight))
        reached += weight / total
    largest = nucleus[0][1]
    nucleus = [(i, weight) for i, weight in nucleus if weight >= min_p * largest]
    total = sum(weight for _, weight in nucleus)
    out = torch.zeros(len(scaled), dtype=torch.float64)
    for i, weight in nucleus:
        out[i] = weight / total
    return out


def mix32(value: int) -> int:
    """A 32-bit finaliser with full avalanche ("lowbias32", Chris Wellons' hash prospector)."""
    value &= MASK32
    value ^= value >> 16
    value = value * 0x7FEB352D & MASK32
    value ^= value >> 15
    value = value * 0x846CA68B & MASK32
    return value ^ (value >> 16)


def uniform(seed: int, position: int, token_id: int) -> float:
    """The number in (0, 1) that decides about `token_id` at the `position`-th generated token of a request with `seed`."""
    key = mix32(seed ^ mix32((seed >> 32) + 0x9E3779B9))
    key = mix32(key ^ mix32(position + 0x85EBCA6B))
    return (float(mix32(mix32(token_id + key) ^ key) >> 9) + 0.5) / 2**23


def draw(probabilities: Tensor, seed: int, position: int) -> int:
    """The drawn id: the largest p / −log(u), one u per id (the exponential race, equal to drawing from p)."""
    race = [float(p) / -math.log(uniform(seed, position, i)) for i, p in enumerate(probabilities)]
    return max(range(len(race)), key=race.__getitem__)
