"""A mixture of experts with torch's operators: each active expert's rows together, one pair of GEMMs for each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.eager import linear
from kernels.mlp.eager import gate


def route(x: Tensor, router_weight: Tensor, top_k: int, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """(chosen experts int64 `[rows, top_k]`, best first, their weights fp32 `[rows, top_k]`).

    x: `[rows, hidden]`; router_weight: `[experts, hidden]`. Logits are in x's dtype, as the models were trained; their softmax
    is fp32. norm_topk: whether the chosen weights are divided by their sum.
    """
    weights, experts = linear(x, router_weight).softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if norm_topk else weights


def run_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str = "silu") -> Tensor:
    """Each row's sum over its experts, weighted: `[rows, hidden]` in x's dtype, summed in fp32.

    x: `[rows, hidden]`; experts, weights: `[rows, top_k]`, a row's experts all different; gate_up: `[experts, 2 · intermediate,
    hidden]`, the gates' rows first; down: `[experts, hidden, intermediate]`.

    A row's terms are added in the order of its experts' numbers, on a GPU too: no row occurs twice in one `index_add_`. So
    what else is in a batch changes a row by nothing but this: an expert's GEMM may round differently with another number of rows.
    """
    top_k, intermediate = experts.shape[1], down.shape[2]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    rows, weights = order // top_k, weights.flatten().index_select(0, order)[:, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(flat.bincount(minlength=gate_up.shape[0]).tolist()):
        if count:
            mine = slice(first, first + count)
            first += count
            both = linear(x.index_select(0, rows[mine]), gate_up[expert])
            done = linear(gate(both[:, :intermediate], both[:, intermediate:], activation), down[expert])
            out.index_add_(0, rows[mine], done * weights[mine])
    return out.to(x.dtype)


def moe(
    x: Tensor, router_weight: Tensor, gate_up: Tensor, down: Tensor, top_k: int, norm_topk: bool, activation: str = "silu"
) -> Tensor:
    """The mixture of experts, `[rows, hidden]` in x's dtype: `route`, then `run_experts`."""
    experts, weights = route(x, router_weight, top_k, norm_topk)
    return run_experts(x, experts, weights, gate_up, down, activation)
