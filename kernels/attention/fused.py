"""Paged attention that reads a sequence's pages where they lie, when they lie one after the other: nothing is gathered.

A sequence's blocks are mostly handed out in a row, so that its keys are one slice of the cache. The slices of all layers are
made once a step, in one call; a sequence whose blocks lie apart is gathered as `eager` does. So are several decode rows: one
attention over a gathered batch takes less than one for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.eager import AttentionPlan, decode_attention


class PageRuns:
    """Where one step's sequences lie in the cache, `[layers, 2, slots, kv_heads, head_dim]`; made per step, used by its layers."""

    def __init__(self, kv_cache: Tensor, plan: AttentionPlan) -> None:
        self.kv_cache = kv_cache
        self.plan = plan
        self._pages: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def pages(self, index: int, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        """(keys, values) of span `index` in attention layer `layer`, each `[1, kv_heads, tokens, head_dim]`: the last `window` of
        its tokens for a decode row, all of them for a longer span."""
        span = self.plan.spans[index]
        keep = span.kv_len if window is None or span.q_len > 1 else min(window, span.kv_len)
        first, start = span.kv_len - keep, span.first_slot
        if start < 0:
            slots = self.plan.span_slots(index)
            k, v = (each.index_select(0, slots[first:]).transpose(0, 1)[None] for each in self.kv_cache[layer])
            return k, v
        found = self._pages.get((index, keep))
        if found is None:
            run = self.kv_cache.narrow(2, start + first, keep).transpose(2, 3).unsqueeze(2)
            found = self._pages[index, keep] = run.flatten(0, 1).unbind(0)
        return found[2 * layer], found[2 * layer + 1]


def paged_attention(q: Tensor, runs: PageRuns, layer: int, scale: float, window: int | None) -> Tensor:
    """Causal attention of every row over its own sequence's pages, `[rows, heads · head_dim]` in q's dtype.

    q: `[rows, heads, head_dim]`; layer: the attention layer's number in the cache; window: a query at position p sees keys in
    (p − window, p].
    """
    plan = runs.plan
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = runs.kv_cache.shape[3]
    group = heads // kv_heads
    parts: list[Tensor] = []
    together = plan.num_decode if plan.num_decode > 1 else 0
    if together:
        k_cache, v_cache = runs.kv_cache[layer]
        parts.append(decode_attention(q[:together], k_cache, v_cache, plan, scale, window).reshape(together, heads * head_dim))
    for index in range(together, len(plan.spans)):
        span = plan.spans[index]
        k, v = runs.pages(index, layer, window)
        if span.q_len == 1:
            # The query heads of one kv head stand as rows of one small attention: no key is copied per head.
            rows = q[span.start].view(1, kv_heads, group, head_dim)
            out = functional.scaled_dot_product_attention(rows, k, v, scale=scale)
            parts.append(out.view(1, heads * head_dim))
        else:
            rows = q[span.start : span.start + span.q_len].transpose(0, 1)[None]
            mask = plan.span_mask(index, window)
            out = functional.scaled_dot_product_attention(
                rows, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=group > 1
            )
            parts.append(out[0].transpose(0, 1).reshape(span.q_len, heads * head_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
