"""Gated DeltaNet: a token mixer whose memory is a recurrent state instead of keys and values (arXiv 2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Batch, StateSpan
from engine.families.config import GatedDeltaConfig
from engine.layers.linear import Linear
from kernels.causal_conv.eager import conv_rows, conv_step, window_at, windows_per_row
from kernels.gated_delta.eager import CHUNK_ROWS, chunked, l2_normalise, recurrent_rows, recurrent_step, state_at


class GatedDeltaNet:
    """One recurrent layer. It owns no state: h, fp32 `[slots, heads, key_dim, value_dim]`, and conv, `[slots, taps, channels]`, are
    its layer's share of the pool.

    conv_weight: fp32 `[taps + 1, channels]`; a_log, dt_bias: fp32 `[heads]`; norm_weight: `[value_dim]`.
    """

    def __init__(
        self,
        config: GatedDeltaConfig,
        projections: tuple[Linear, Linear, Linear, Linear, Linear],
        conv_weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
        eps: float,
        h: Tensor,
        conv: Tensor,
    ) -> None:
        self.config = config
        self.qkv_proj, self.z_proj, self.b_proj, self.a_proj, self.out_proj = projections
        self.conv_weight = conv_weight
        self.decay = -a_log.float().exp()
        self.dt_bias = dt_bias.float()
        self.norm_weight = norm_weight
        self.eps = eps
        self.h = h
        self.conv = conv

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden]` → the same; advances the state of every sequence of the batch by its rows."""
        rows, config = x.shape[0], self.config
        qkv, z = self.qkv_proj(x), self.z_proj(x)
        beta = self.b_proj(x).float().sigmoid()
        g = self.decay * functional.softplus(self.a_proj(x).float() + self.dt_bias)
        parts: list[Tensor] = []
        n = batch.attention.num_decode
        if n:
            mixed = conv_step(qkv[:n], self.conv_weight, None, self.conv, batch.state_slots)
            parts.append(recurrent_step(*self._split(mixed), g[:n], beta[:n], self.h, batch.state_slots))
        for span in batch.state_spans:
            here = slice(span.start, span.start + span.q_len)
            parts.append(self._span(qkv[here], g[here], beta[here], span))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out_proj(self._gated_norm(out, z.view(rows, config.num_v_heads, config.value_dim)).view(rows, -1))

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, rows = self.config, mixed.shape[0]
        width = config.num_k_heads * config.key_dim
        q, k, v = torch.split(mixed, [width, width, config.num_v_heads * config.value_dim], dim=-1)
        keys = (rows, config.num_k_heads, config.key_dim)
        return l2_normalise(q.reshape(keys)), l2_normalise(k.reshape(keys)), v.reshape(rows, config.num_v_heads, config.value_dim)

    def _span(self, qkv: Tensor, g: Tensor, beta: Tensor, span: StateSpan) -> Tensor:
        before = self.conv[span.slot].clone()
        mixed, window = conv_rows(qkv, self.conv_weight, None, before)
        q, k, v = self._split(mixed)
        self.conv[span.slot] = window
        if span.row_slots:
            out, states = recurrent_rows(q, k, v, g, beta, self.h[span.slot])
            row_slots = torch.tensor(span.row_slots, device=self.h.device)
            self.h.index_copy_(0, row_slots, states)
            self.conv.index_copy_(0, row_slots, windows_per_row(qkv, before))
            self.h[span.slot] = states[-1]
            return out
        out, final, starts = chunked(q, k, v, g, beta, self.h[span.slot])
        for offset, slot in span.snapshots:
            # Not by splitting the chunk: from the state at its start, by a partial update up to the boundary.
            first = (offset - 1) // CHUNK_ROWS * CHUNK_ROWS
            part = slice(first, min(first + CHUNK_ROWS, span.q_len))
            self.h[slot] = state_at(k[part], v[part], g[part], beta[part], starts[first // CHUNK_ROWS], offset - first)
            self.conv[slot] = window_at(qkv, before, offset)
        self.h[span.slot] = final
        return out

    def _gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        """RMS norm of each head, times SiLU(z): `[rows, heads, value_dim]` in z's dtype."""
        normed = functional.rms_norm(out.float(), (out.shape[-1],), None, self.eps)
        return (self.norm_weight * normed.to(z.dtype) * functional.silu(z.float())).to(z.dtype)
