"""A mixture of experts in fp32, one row and one expert at a time (arXiv 2101.03961, section 2; top-k as in arXiv 1701.06538)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mlp.reference import gate


def moe(
    x: Tensor, router_weight: Tensor, gate_up: Tensor, down: Tensor, top_k: int, norm_topk: bool, activation: str = "silu"
) -> Tensor:
    """`Σ_{e ∈ top_k(p)} p_e · down_e(act(gate_e x) · up_e x)` with p = softmax(router x): fp32 `[rows, hidden]`.

    x: `[rows, hidden]`; router_weight: `[experts, hidden]`; gate_up: `[experts, 2 · intermediate, hidden]`, the gates' rows
    first; down: `[experts, hidden, intermediate]`; norm_topk: whether the chosen p are divided by their sum. Of equal p the
    expert with the lower number is chosen.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    intermediate = down.shape[2]
    for t, row in enumerate(x.float()):
        logits = router_weight.float() @ row
        weights = torch.exp(logits - logits.max())
        weights = weights / weights.sum()
        chosen = sorted(range(len(weights)), key=lambda expert: (-float(weights[expert]), expert))[:top_k]
        total = sum(weights[expert] for expert in chosen) if norm_topk else 1.0
        for expert in chosen:
            both = gate_up[expert].float() @ row
            acted = gate(both[:intermediate], both[intermediate:], activation)
            out[t] += weights[expert] / total * (down[expert].float() @ acted)
    return out
