"""The gated delta rule in fp32, one token and one head at a time (arXiv 2412.06464, eq. 10)."""

from __future__ import annotations

import torch
from torch import Tensor


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(Σx² + eps)` over the last dimension, fp32 in x's shape."""
    x = x.float()
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalise: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs fp32 `[rows, v_heads, v_dim]`, the states after each row fp32 `[rows, v_heads, k_dim, v_dim]`) of one sequence.

    S ← e^g S;  S ← S + k ⊗ β (v − Sᵀk);  o = Sᵀ q · scale. In the paper's letters α = e^g and S is transposed.

    q, k: `[rows, k_heads, k_dim]`, l2-normed first if `normalise`; v: `[rows, v_heads, v_dim]`; value head h reads key head
    h // (v_heads // k_heads); g (log decay, ≤ 0), beta: `[rows, v_heads]`; state: `[v_heads, k_dim, v_dim]`, left as it is;
    scale: of q, k_dim^-0.5 where it is None.
    """
    rows, v_heads, v_dim = v.shape
    group = v_heads // k.shape[1]
    q, k = (l2_normalise(q), l2_normalise(k)) if normalise else (q.float(), k.float())
    q = q * (k.shape[2] ** -0.5 if scale is None else scale)
    states = torch.empty(rows, *state.shape, dtype=torch.float32, device=v.device)
    out = torch.empty(rows, v_heads, v_dim, dtype=torch.float32, device=v.device)
    for h in range(v_heads):
        s = state[h].float()
        for t in range(rows):
            key, query = k[t, h // group], q[t, h // group]
            s = s * torch.exp(g[t, h].float())
            s = s + torch.outer(key, beta[t, h].float() * (v[t, h].float() - s.T @ key))
            out[t, h] = s.T @ query
            states[t, h] = s
    return out, states
