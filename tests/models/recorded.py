"""llama.cpp's recorded next-token distributions over a text of 512 ids, and how far ours are from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RECORDED = Path(__file__).parent.parent / "fixtures" / "llama_cpp"


def recorded_distributions() -> dict[str, np.ndarray]:
    """The arrays of smollm2_logits.npz; the script beside it, record_logits.py, says what they hold and how they came about."""
    with np.load(RECORDED / "smollm2_logits.npz") as file:
        return dict(file)


@dataclass(frozen=True)
class Agreement:
    """Mean KL(llama.cpp ‖ ours) in nats, and the share of positions whose most likely next token is the same."""

    kl: float
    top1: float


def agreement(ours: Iterable[Tensor], recorded: dict[str, np.ndarray]) -> Agreement:
    """How far `ours`, logits `[rows, vocab]` chunk by chunk, is from what was recorded. KL is taken over llama.cpp's 64 best
    tokens and one bucket for all others: a lower bound of the whole, which lumping tokens together can only make smaller."""
    divergences, same, start = [], 0, 0
    for logits in ours:
        rows = slice(start, start + len(logits))
        ids = torch.from_numpy(recorded["top_ids"][rows].astype(np.int64))
        theirs = torch.from_numpy(recorded["top_logprobs"][rows]).double()
        their_rest = torch.from_numpy(recorded["log_rest"][rows]).double()
        logprobs = logits.double().log_softmax(-1)
        mine = logprobs.gather(1, ids)
        my_rest = torch.log1p(-mine.exp().sum(-1))
        divergences.append((theirs.exp() * (theirs - mine)).sum(-1) + their_rest.exp() * (their_rest - my_rest))
        same += int((logits.argmax(-1) == ids[:, 0]).sum())
        start = rows.stop
    assert start == len(recorded["ids"])
    return Agreement(float(torch.cat(divergences).mean()), same / start)
