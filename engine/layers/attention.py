"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from engine.batch import Batch
from engine.families.config import LayerConfig, ModelConfig
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from kernels.attention.eager import paged_attention, write_kv
from kernels.rope.eager import rotate


class Attention:
    """One layer's attention. It owns no cache: k_cache and v_cache, `[slots, kv_heads, head_dim]`, are its layer's share."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        projections: tuple[Linear, Linear, Linear, Linear],
        norms: tuple[RmsNorm, RmsNorm] | None,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = projections
        self.norms = norms
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.rope = layer.rope
        self.window = layer.window
        self.scale = config.attention_scale
        self.head_dim = config.head_dim
        self.output_gate = config.output_gate

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden]` → the same; stores the rows' keys and values first."""
        rows = x.shape[0]
        gate = None
        q = self.q_proj(x)
        if self.output_gate:
            # Each head's rows hold its query, then its gate.
            q, gate = q.view(rows, -1, 2 * self.head_dim).chunk(2, dim=-1)
        q = q.reshape(rows, -1, self.head_dim)
        k = self.k_proj(x).view(rows, -1, self.head_dim)
        v = self.v_proj(x).view(rows, -1, self.head_dim)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        cos, sin = batch.rope[self.rope]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        write_kv(k, v, self.k_cache, self.v_cache, batch.slots)
        out = paged_attention(q, self.k_cache, self.v_cache, batch.attention, self.scale, self.window)
        if gate is not None:
            out = out * gate.sigmoid()
        return self.o_proj(out.reshape(rows, -1))
