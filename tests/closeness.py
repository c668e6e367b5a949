"""The one rule of "how close is equal" (the design's own words), for every family's parity tests.

An oracle computes the same ids cut into chunks in five ways. ε is the largest difference between its own logits over
these: what rounding alone does. An engine is equal to it when no logit is further off than 4ε + 1e-6 · max|logit|, and
its greedy id is the oracle's wherever the oracle's two best logits are further apart than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Split = tuple[int, ...]


def pieces(num_tokens: int, size: int) -> Split:
    """`num_tokens` cut into chunks of `size` and what is left."""
    return tuple(min(size, num_tokens - start) for start in range(0, num_tokens, size))


def five_splits(num_tokens: int) -> tuple[Split, ...]:
    """Five different ways to cut `num_tokens`: whole, in halves, thirteens, sevens, and one by one."""
    splits = tuple(pieces(num_tokens, size) for size in (num_tokens, -(-num_tokens // 2), 13, 7, 1))
    assert len(set(splits)) == 5, f"{num_tokens} tokens are too few for five different splits"
    return splits


@dataclass(frozen=True)
class Expected:
    """What an oracle says of one sequence of ids: `logits [tokens, vocab]` of the uncut pass, and its ε."""

    logits: Tensor
    epsilon: float

    @property
    def tolerance(self) -> float:
        return 4 * self.epsilon + 1e-6 * float(self.logits.abs().max())


@dataclass(frozen=True)
class Verdict:
    """How far the judged logits are off. `disagreements` of the `decided` rows, those whose two best logits are further
    apart than the tolerance, have another greedy id. A NaN is never within the tolerance."""

    error: float
    tolerance: float
    disagreements: int
    decided: int

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance and not self.disagreements


def expect(oracle: Callable[[Split], Tensor], num_tokens: int, splits: Sequence[Split] | None = None) -> Expected:
    """The oracle's logits and ε. `oracle(split)`: logits `[tokens, vocab]` of the ids cut so; `splits`: five, the first uncut."""
    splits = five_splits(num_tokens) if splits is None else splits
    assert len(set(splits)) == 5 and all(sum(split) == num_tokens for split in splits) and splits[0] == (num_tokens,)
    found = torch.stack([oracle(split).float() for split in splits])
    epsilon = float((found.amax(0) - found.amin(0)).max())
    assert epsilon < 1e-3 * float(found[0].abs().max()), (
        f"the oracle is at odds with itself, by {epsilon}: its splits aren't one sequence"
    )
    return Expected(found[0], epsilon)


def judge(ours: Tensor, expected: Expected, rows: Sequence[int] | None = None) -> Verdict:
    """The verdict on `ours`, `[len(rows), vocab]`: the logits of the positions `rows` (all of them where it is None)."""
    theirs = expected.logits if rows is None else expected.logits[list(rows)]
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} logits were judged against {tuple(theirs.shape)}"
    ours = ours.float().cpu()
    best = theirs.topk(2, dim=-1)
    decided = best.values[:, 0] - best.values[:, 1] > expected.tolerance
    other = ours.argmax(-1) != best.indices[:, 0]
    return Verdict(float((ours - theirs).abs().max()), expected.tolerance, int((other & decided).sum()), int(decided.sum()))
