"""The MLP of a layer with a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMlp
from kernels.moe.eager import moe


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every row passes, times the sigmoid of `gate`, `[rows, hidden]` → `[rows, 1]` (Qwen2-MoE, Qwen3-Next)."""

    mlp: GatedMlp
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * self.mlp(x)


class SparseMoe:
    """`Σ_e w_e · expert_e(x)` over each row's top_k experts, `[rows, hidden]` → the same; plus the shared expert, if there is one.

    router: `[experts, hidden]`; gate_up: `[experts, 2 · intermediate, hidden]`; down: `[experts, hidden, intermediate]`.
    """

    def __init__(
        self,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        norm_topk: bool,
        activation: str,
        shared: SharedExpert | None = None,
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.top_k = top_k
        self.norm_topk = norm_topk
        self.activation = activation
        self.shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        routed = moe(x, self.router, self.gate_up, self.down, self.top_k, self.norm_topk, self.activation)
        return routed if self.shared is None else routed + self.shared(x)
