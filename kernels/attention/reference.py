"""Attention of one sequence over a paged KV cache, in fp32, one head and one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: list[int], kv_len: int, scale: float, window: int | None = None
) -> Tensor:
    """Causal softmax attention of the last `q_len` positions of a sequence: fp32 `[q_len, heads, head_dim]`.

    q: `[q_len, heads, head_dim]`, positions kv_len − q_len … kv_len − 1; k_cache, v_cache: `[blocks, block_size,
    kv_heads, head_dim]`; query head h reads kv head h // (heads // kv_heads). A query at p sees keys in (p − window, p].
    """
    q_len, heads, _ = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    where = [(block_table[p // block_size], p % block_size) for p in range(kv_len)]
    keys = torch.stack([k_cache[b, o] for b, o in where]).float()
    values = torch.stack([v_cache[b, o] for b, o in where]).float()
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for i in range(q_len):
        p = kv_len - q_len + i
        first = 0 if window is None else max(0, p - window + 1)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = keys[first : p + 1, g] @ q[i, h].float() * scale
            out[i, h] = torch.softmax(scores, 0) @ values[first : p + 1, g]
    return out
