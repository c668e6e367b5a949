"""Paged attention with torch's scaled_dot_product_attention over gathered pages.

Decode rows of a batch run together, padded to the longest; each longer span (prefill chunk, verify) runs alone.
What depends on the step and not on the layer (which pages, which masks) is computed once, in `AttentionPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Span:
    """The rows one sequence contributes: rows [start, start + q_len) are its positions kv_len − q_len … kv_len − 1. first_slot: the
    token slot of its position 0 where all its positions follow one another in the cache, else −1."""

    start: int
    q_len: int
    kv_len: int
    table_row: int
    first_slot: int = -1


class AttentionPlan:
    """Page indices and masks of one step, shared by its layers; each is made when it is first asked for.

    num_decode leading rows have q_len 1.
    """

    def __init__(self, spans: tuple[Span, ...], num_decode: int, block_tables: Tensor, block_size: int, null_slot: int) -> None:
        self.spans = spans
        self.num_decode = num_decode
        self._block_tables = block_tables
        self._block_size = block_size
        self._null_slot = null_slot
        self._span_slots: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    @cached_property
    def decode_lens(self) -> Tensor:
        """int64 `[num_decode, 1]`."""
        return torch.tensor([[span.kv_len] for span in self.spans[: self.num_decode]], device=self._block_tables.device)

    @cached_property
    def decode_positions(self) -> Tensor:
        """0, 1, …, the longest decode row's last position, int64."""
        return torch.arange(max(span.kv_len for span in self.spans[: self.num_decode]), device=self._block_tables.device)

    @cached_property
    def decode_slots(self) -> Tensor:
        """`[num_decode, longest]` token slots, padded with the null slot (a zero row that is never allocated, so that stale or
        non-finite pages can't leak through a mask)."""
        slots = self._slots_of([span.table_row for span in self.spans[: self.num_decode]], self.decode_positions.shape[0])
        if self.num_decode == 1:
            return slots
        return slots.masked_fill(self.decode_positions >= self.decode_lens, self._null_slot)

    def span_slots(self, index: int) -> Tensor:
        """The token slots of span `index`, int64 `[kv_len]`."""
        if index not in self._span_slots:
            span = self.spans[index]
            self._span_slots[index] = self._slots_of([span.table_row], span.kv_len)[0]
        return self._span_slots[index]

    def _slots_of(self, table_rows: list[int], kv_len: int) -> Tensor:
        device, size = self._block_tables.device, self._block_size
        rows = torch.tensor(table_rows, device=device)
        blocks = self._block_tables.index_select(0, rows)[:, : -(-kv_len // size)]
        return (blocks[:, :, None] * size + torch.arange(size, device=device)).view(len(table_rows), -1)[:, :kv_len]

    def decode_mask(self, window: int | None) -> Tensor | None:
        """bool `[num_decode, 1, 1, longest]`, True where a row may look; None where all rows see everything."""
        key = (-1, window)
        if key not in self._masks:
            self._masks[key] = self._make_decode_mask(window)
        return self._masks[key]

    def _make_decode_mask(self, window: int | None) -> Tensor | None:
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
                device = self._block_tables.device
                key_pos = torch.arange(span.kv_len, device=device)
                query_pos = torch.arange(span.kv_len - span.q_len, span.kv_len, device=device)[:, None]
                mask = key_pos <= query_pos
                if window is not None:
                    mask &= key_pos > query_pos - window
            self._masks[key] = mask
        return self._masks[key]


def plan_attention(spans: Sequence[Span], block_tables: Tensor, block_size: int, null_slot: int) -> AttentionPlan:
    """The AttentionPlan of a step. block_tables: int64 `[rows, max_blocks]`; spans with q_len 1 at the front decode together."""
    num_decode = next((i for i, span in enumerate(spans) if span.q_len != 1), len(spans))
    return AttentionPlan(tuple(spans), num_decode, block_tables, block_size, null_slot)


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
        slots = plan.span_slots(index)
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
