"""One decoder layer: norm, token mixer, residual, norm, MLP, residual."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.batch import Batch
from engine.layers.mlp import GatedMlp
from engine.layers.moe import SparseMoe
from engine.layers.norm import RmsNorm


class Mixer(Protocol):
    """A token mixer: attention, or a recurrent layer."""

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden]` → the same."""


class DecoderLayer:
    """Pre-norm layer; with post norms each branch is normalised again before it joins the residual (Gemma)."""

    def __init__(
        self,
        input_norm: RmsNorm,
        mixer: Mixer,
        mlp_norm: RmsNorm,
        mlp: GatedMlp | SparseMoe,
        mixer_post_norm: RmsNorm | None = None,
        mlp_post_norm: RmsNorm | None = None,
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mixer_post_norm = mixer_post_norm
        self.mlp_post_norm = mlp_post_norm

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """`[rows, hidden]` → the same."""
        mixed = self.mixer(self.input_norm(x), batch)
        x = x + (mixed if self.mixer_post_norm is None else self.mixer_post_norm(mixed))
        fed = self.mlp(self.mlp_norm(x))
        return x + (fed if self.mlp_post_norm is None else self.mlp_post_norm(fed))
