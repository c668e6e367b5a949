"""Paged attention with torch's scaled_dot_product_attention over gathered pages.

Decode rows of a batch run together, padded to the longest; each longer span (prefill chunk, verify) runs alone.
What depends on the step and not on the layer (which pages, which masks) is computed once, in `AttentionPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Span:
    """The rows one sequence contributes: rows [start, start + q_len) are its positions kv_len − q_len … kv_len − 1."""

    start: int
    q_len: int
    kv_len: int
    table_row: int


@dataclass(slots=True)
class AttentionPlan:
    """Page indices and masks of one step, shared by its layers.

    num_decode leading rows have q_len 1. decode_slots: `[num_decode, longest]` token slots, padded with the null
    slot (a zero row that is never allocated, so that stale or non-finite pages can't leak through a mask).
    """

    spans: tuple[Span, ...]
    num_decode: int
    decode_slots: Tensor | None
    decode_positions: Tensor | None
    decode_lens: Tensor | None
    span_slots: tuple[Tensor, ...]
    _masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    def decode_mask(self, window: int | None) -> Tensor | None:
        """bool `[num_decode, 1, 1, longest]`, True where a row may look; None where all rows see everything."""
        key = (-1, window)
        if key not in self._masks:
            self._masks[key] = self._make_decode_mask(window)
        return self._masks[key]

    def _make_decode_mask(self, window: int | None) -> Tensor | None:
        assert self.decode_positions is not None and self.decode_lens is not None
        lens = [span.kv_len for span in self.spans[: self.num_decode]]
        longest = max(lens)
        if min(lens) == longest and (window is None or longest <= window):
            return None
        mask = self.decode_positions < self.decode_lens
        if window is not None:
            mask &= self.decode_positions >= self.decode_lens - window
        return mask[:, None, None, :]

    def span_mask(self, index: int, window: int | None) -> Tensor | None:
        """bool `[q_len, kv_len]` for a span that starts inside its sequence or has a window; None: plainly causal."""
        key = (index, window)
        if key not in self._masks:
            span = self.spans[index]
            mask = None
            if span.q_len != span.kv_len or (window is not None and span.kv_len > window):
                device = self.span_slots[index - self.num_decode].device
                key_pos = torch.arange(span.kv_len, device=device)
                query_pos = torch.arange(span.kv_len - span.q_len, span.kv_len, device=device)[:, None]
                mask = key_pos <= query_pos
                if window is not None:
                    mask &= key_pos > query_pos - window
            self._masks[key] = mask
        return self._masks[key]


def plan_attention(spans: Sequence[Span], block_tables: Tensor, block_size: int, null_slot: int) -> AttentionPlan:
    """The AttentionPlan of a step. block_tables: int64 `[rows, max_blocks]`; spans with q_len 1 at the front decode together."""
    device = block_tables.device
    num_decode = next((i for i, span in enumerate(spans) if span.q_len != 1), len(spans))
    offsets = torch.arange(block_size, device=device)

    def slots_of(rows: Tensor, kv_len: int) -> Tensor:
        blocks = block_tables.index_select(0, rows)[:, : -(-kv_len // block_size)]
        return (blocks[:, :, None] * block_size + offsets).view(rows.shape[0], -1)[:, :kv_len]

    decode_slots = decode_positions = decode_lens = None
    if num_decode:
        longest = max(span.kv_len for span in spans[:num_decode])
        rows = torch.tensor([span.table_row for span in spans[:num_decode]], device=device)
        decode_lens = torch.tensor([[span.kv_len] for span in spans[:num_decode]], device=device)
        decode_positions = torch.arange(longest, device=device)
        decode_slots = slots_of(rows, longest)
        if num_decode > 1:
            decode_slots = decode_slots.masked_fill(decode_positions >= decode_lens, null_slot)
    span_slots = tuple(slots_of(torch.tensor([span.table_row], device=device), span.kv_len)[0] for span in spans[num_decode:])
    return AttentionPlan(tuple(spans), num_decode, decode_slots, decode_positions, decode_lens, span_slots)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store the rows' keys and values, `[rows, kv_heads, head_dim]`, at their token slots, int64 `[rows]`, of the
    caches `[slots, kv_heads, head_dim]`."""
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of every row over its own sequence's pages, `[rows, heads, head_dim]` in q's dtype.

    q: `[rows, heads, head_dim]`; k_cache, v_cache: `[slots, kv_heads, head_dim]`; window: a query at position p
    sees keys in (p − window, p].
    """
    group = q.shape[1] // k_cache.shape[1]
    parts: list[Tensor] = []
    n = plan.num_decode
    if n:
        parts.append(decode_attention(q[:n], k_cache, v_cache, plan, scale, window))
    for index in range(n, len(plan.spans)):
        span = plan.spans[index]
        slots = plan.span_slots[index - n]
        k = k_cache.index_select(0, slots).transpose(0, 1)[None]
        v = v_cache.index_select(0, slots).transpose(0, 1)[None]
        rows = q[span.start : span.start + span.q_len].transpose(0, 1)[None]
        mask = plan.span_mask(index, window)
        out = functional.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=group > 1
        )
        parts.append(out[0].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """`paged_attention` of the plan's decode rows alone, in one attention over their gathered pages."""
    n, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    assert plan.decode_slots is not None
    longest = plan.decode_slots.shape[1]
    flat = plan.decode_slots.reshape(-1)
    k = k_cache.index_select(0, flat).view(n, longest, kv_heads, head_dim).transpose(1, 2)
    v = v_cache.index_select(0, flat).view(n, longest, kv_heads, head_dim).transpose(1, 2)
    # The query heads of one kv head stand as rows of one small attention: no key is copied per head.
    rows = q.view(n, kv_heads, group, head_dim)
    mask = plan.decode_mask(window)
    if mask is not None:
        mask = mask.expand(n, 1, group, longest)
    return functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale).reshape(n, heads, head_dim)
