"""The ways every family is asked for logits: chunk after chunk, token by token, several at once, and beside each other.

Each scene returns the model's logits and the positions they belong to, to be judged by the rule in `closeness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from closeness import Split
from torch import Tensor

from engine.layers.rope import RopeTable
from engine.model.transformer import TransformerModel

Scene = tuple[Tensor, list[int]]


def step_decode(model: TransformerModel, ids: Sequence[int], first: int) -> Scene:
    """`first` ids in one prefill, the others one by one."""
    seq = model.lifecycle.alloc_sequence()
    rows = [model.forward.prefill(ids[:first], seq).clone()]
    rows += [model.forward.decode(token, seq).clone() for token in ids[first:]]
    model.lifecycle.free_sequence(seq)
    return torch.cat(rows), list(range(first - 1, len(ids)))


def batched_decode(model: TransformerModel, ids: Sequence[int], lengths: Sequence[int], steps: int) -> Scene:
    """Sequences of `lengths` ids, decoded together."""
    seqs = [model.lifecycle.alloc_sequence() for _ in lengths]
    for seq, length in zip(seqs, lengths, strict=True):
        model.forward.prefill(ids[:length], seq)
    rows, at = [], []
    for _ in range(steps):
        now = [seq.num_tokens for seq in seqs]
        rows.append(model.forward.decode_batch([ids[i] for i in now], seqs).clone())
        at += now
    for seq in seqs:
        model.lifecycle.free_sequence(seq)
    return torch.cat(rows), at


def chunks_beside_decodes(model: TransformerModel, ids: Sequence[int], lengths: Sequence[int], chunks: Split) -> Scene:
    """Sequences of `lengths` ids decode while another prompt is prefilled in `chunks`."""
    assert sum(chunks) == len(ids)
    decoding = [model.lifecycle.alloc_sequence() for _ in lengths]
    for seq, length in zip(decoding, lengths, strict=True):
        model.forward.prefill(ids[:length], seq)
    joining, start = model.lifecycle.alloc_sequence(), 0
    rows, at = [], []
    for size in chunks:
        now = [seq.num_tokens for seq in decoding]
        result = model.forward.mixed_forward([ids[i] for i in now], decoding, ids, joining, start, size, start + size == len(ids))
        assert result.decode_logits is not None
        rows.append(result.decode_logits.clone())
        at += now
        start += size
    assert result.prefill_logits is not None
    rows.append(result.prefill_logits.clone())
    for seq in (*decoding, joining):
        model.lifecycle.free_sequence(seq)
    return torch.cat(rows), [*at, len(ids) - 1]


def with_wrong_rope(model: TransformerModel, theta: float) -> None:
    """Turn the ropes of base `theta` into ones whose base is 1 % larger."""
    ropes = dict(model.forward.ropes)
    wrong = [config for config in ropes if config.theta == theta]
    assert wrong, f"no rope has the base {theta}"
    for config in wrong:
        table = ropes[config]
        ropes[config] = RopeTable(replace(config, theta=theta * 1.01), table.cos.shape[0], table.cos.device, table.cos.dtype)
    model.forward.ropes = ropes
