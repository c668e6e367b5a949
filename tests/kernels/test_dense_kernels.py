"""Norm, rope, linear and the MLP's gate against their references: float32 to rounding, bfloat16 within stated bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.families.config import RopeConfig
from engine.layers.rope import RopeTable
from kernels.linear import eager as linear_eager
from kernels.linear import reference as linear_reference
from kernels.mlp import eager as mlp_eager
from kernels.mlp import reference as mlp_reference
from kernels.norm import eager as norm_eager
from kernels.norm import reference as norm_reference
from kernels.rope import eager as rope_eager
from kernels.rope import reference as rope_reference

BF16 = 2.0**-8  # half a unit in the last place of a bfloat16, relative: one rounding's error at most
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_within(ours: Tensor, reference: Tensor, bound: Tensor | float) -> None:
    assert torch.isfinite(ours).all()
    excess = (ours.float() - reference).abs() - bound
    assert bool((excess <= 0).all()), f"off by {float(excess.max())} more than the bound"


@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (5, 3, 24)], ids=["a row", "rows", "heads"])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norm_equals_its_reference(shape: tuple[int, ...], eps: float) -> None:
    x, weight = randn(*shape, scale=0.1), 1 + randn(shape[-1], seed=1, scale=0.2)
    reference = norm_reference.rms_norm(x, weight, eps)
    assert_within(norm_eager.rms_norm(x, weight, eps), reference, 1e-6 * reference.abs() + 1e-7)
    low, low_weight = x.bfloat16(), weight.bfloat16()
    ours = norm_eager.rms_norm(low, low_weight, eps)
    assert ours.dtype == torch.bfloat16
    reference = norm_reference.rms_norm(low, low_weight, eps)
    assert_within(ours, reference, 2 * BF16 * reference.abs() + 1e-6)


def test_norm_s_epsilon_counts_where_the_row_is_small() -> None:
    x, weight = torch.full((1, 8), 1e-4), torch.ones(8)
    assert_within(norm_eager.rms_norm(x, weight, 1e-6), torch.full((1, 8), 1e-4 / math.sqrt(1e-8 + 1e-6)), 1e-6)
    assert_within(norm_eager.rms_norm(torch.zeros(1, 8), weight, 1e-6), torch.zeros(1, 8), 0.0)


@pytest.mark.parametrize("rotary", [16, 8, 2], ids=["whole head", "half of it", "one pair"])
def test_rope_equals_its_reference_and_passes_the_other_channels_through(rotary: int) -> None:
    config = RopeConfig(theta=10000.0, rotary_dim=rotary)
    positions = torch.tensor([0, 1, 5, 63])
    x = randn(4, 3, 16)
    # cos, sin, the product and the sum are each rounded, and the reference's fp32 angle is off by 63 · 2⁻²⁴.
    for dtype, bound in ((torch.float32, (4 + 63) * 2.0**-24), (torch.bfloat16, 4 * BF16)):
        rows = x.to(dtype)
        cos, sin = RopeTable(config, 64, CPU, dtype).rows(positions)
        ours = rope_eager.rotate(rows, cos, sin)
        assert ours.dtype == dtype
        reference = rope_reference.rotate(rows, positions, torch.tensor(config.inv_freq()))
        assert_within(ours, reference, bound * 2 * rows.float().abs().amax())
        assert torch.equal(ours[..., rotary:], rows[..., rotary:])
        assert torch.equal(ours[0], rows[0]), "position 0 isn't rotated"


def test_rope_is_exact_at_far_positions() -> None:
    # In float32 the angle alone would be off by 8191 · 2⁻²⁴ ≈ 5e-4 there.
    config = RopeConfig(theta=100000.0, rotary_dim=16)
    far = torch.tensor([8191])
    cos, sin = RopeTable(config, 8192, CPU, torch.float32).rows(far)
    x = randn(1, 2, 16)
    angles = 8191.0 * torch.tensor([100000.0 ** (-i / 8) for i in range(8)], dtype=torch.float64)
    a, b = x[..., :8].double(), x[..., 8:].double()
    exact = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    assert_within(rope_eager.rotate(x, cos, sin), exact.float(), 1e-6)


def test_rope_keeps_lengths_and_depends_on_distances_alone() -> None:
    table = RopeTable(RopeConfig(theta=500.0, rotary_dim=16), 64, CPU, torch.float32)
    q, k = randn(1, 1, 16), randn(1, 1, 16, seed=1)

    def score(query_at: int, key_at: int) -> float:
        rotated = [rope_eager.rotate(x, *table.rows(torch.tensor([at]))).flatten() for x, at in ((q, query_at), (k, key_at))]
        assert abs(float(rotated[0].norm()) - float(q.norm())) < 1e-5
        return float(rotated[0] @ rotated[1])

    assert abs(score(40, 30) - score(15, 5)) < 1e-5
    assert abs(score(40, 30) - score(40, 31)) > 1e-2


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_its_reference(rows: int, bias: bool) -> None:
    x, weight, offset = randn(rows, 48), randn(33, 48, seed=1, scale=0.1), randn(33, seed=2) if bias else None
    reference = linear_reference.linear(x, weight, offset)
    assert_within(linear_eager.linear(x, weight, offset), reference, 48 * 2.0**-24 * 4)
    low = [None if t is None else t.bfloat16() for t in (x, weight, offset)]
    ours = linear_eager.linear(*low)  # type: ignore[arg-type]  # None only where there is no bias
    assert ours.dtype == torch.bfloat16
    reference = linear_reference.linear(*low)  # type: ignore[arg-type]  # as above
    # Sums are kept in fp32; the product and its sum with the bias are rounded.
    product = linear_reference.linear(low[0], low[1])  # type: ignore[arg-type]  # as above
    assert_within(ours, reference, BF16 * (product.abs() + reference.abs()) + 1e-5)


def test_a_row_alone_gets_what_it_gets_among_others() -> None:
    # One row goes another way (a matrix-vector product): the same numbers to fp32 rounding, and the same shape.
    x, weight, offset = randn(5, 48), randn(33, 48, seed=1, scale=0.1), randn(33, seed=2)
    together = linear_eager.linear(x, weight, offset)
    for i in range(5):
        alone = linear_eager.linear(x[i : i + 1], weight, offset)
        assert alone.shape == (1, 33)
        assert_within(alone[0], together[i], 1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_equals_its_reference(activation: str) -> None:
    gate, up = randn(6, 40, scale=3.0), randn(6, 40, seed=1)
    reference = mlp_reference.gate(gate, up, activation)
    assert_within(mlp_eager.gate(gate, up, activation), reference, 2e-6 * up.abs() + 2e-6 * reference.abs())
    low_gate, low_up = gate.bfloat16(), up.bfloat16()
    kept = low_gate.clone(), low_up.clone()
    ours = mlp_eager.gate(low_gate, low_up, activation)
    assert ours.dtype == torch.bfloat16
    reference = mlp_reference.gate(low_gate, low_up, activation)
    # The activation and the product are rounded.
    assert_within(ours, reference, 2 * BF16 * reference.abs() + 1e-4)
    assert torch.equal(low_gate, kept[0])
    assert torch.equal(low_up, kept[1]), "an input was overwritten"


def test_the_gate_s_two_activations_differ() -> None:
    gate, up = randn(2, 8), torch.ones(2, 8)
    silu, gelu = (mlp_eager.gate(gate, up, name) for name in ("silu", "gelu_tanh"))
    assert float((silu - gelu).abs().max()) > 0.05
    torch.testing.assert_close(gelu, torch.nn.functional.gelu(gate), rtol=0, atol=2e-3)
