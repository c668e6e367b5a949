"""Sampling of a batch against the reference of one row: filters, the draw, its distribution, and its independence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.eager import FilterRows, draw, filtered_probabilities, mix32, penalise, seed_key, uniform

VOCAB = 40


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def rows_of(params: Sequence[Params]) -> FilterRows:
    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    return FilterRows(
        temperature=floats([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        keys=torch.tensor([seed_key(p.seed) for p in params]),
        any_top_k=any(p.top_k for p in params),
        any_top_p=any(p.top_p < 1 for p in params),
        any_min_p=any(p.min_p for p in params),
    )


def logits_of(rows: int, seed: int = 3, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


GRID = [
    Params(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product((0.3, 1.0, 4.0), (0, 1, 7, 1000), (1.0, 0.9, 0.35), (0.0, 0.2, 1.0))
]


def test_every_combination_of_filters_equals_the_reference_in_one_batch() -> None:
    logits = logits_of(len(GRID))
    ours = filtered_probabilities(logits, rows_of(GRID))
    for row, params in enumerate(GRID):
        expected = reference.filtered_probabilities(logits[row], params.temperature, params.top_k, params.top_p, params.min_p)
        torch.testing.assert_close(ours[row].double(), expected, rtol=1e-4, atol=1e-7, msg=lambda text, p=params: f"{p}: {text}")
        assert torch.equal(ours[row] > 0, expected > 0), params


@settings(max_examples=60, deadline=None)
@given(
    params=st.builds(
        Params,
        temperature=st.floats(0.05, 10.0),
        top_k=st.integers(0, VOCAB + 5),
        top_p=st.floats(0.01, 1.0),
        min_p=st.floats(0.0, 1.0),
        seed=st.integers(0, 2**63 - 1),
    ),
    position=st.integers(0, 2**20),
    seed=st.integers(0, 1000),
)
def test_any_row_equals_the_reference(params: Params, position: int, seed: int) -> None:
    logits = logits_of(1, seed)
    ours = filtered_probabilities(logits, rows_of([params]))[0]
    expected = reference.filtered_probabilities(logits[0], params.temperature, params.top_k, params.top_p, params.min_p)
    kept = int((ours > 0).sum()), int((expected > 0).sum())
    assert abs(kept[0] - kept[1]) <= 1  # a threshold may fall on either side of the last id by rounding
    if kept[0] == kept[1]:
        torch.testing.assert_close(ours.double(), expected, rtol=1e-3, atol=1e-7)
        drawn = int(draw(logits, rows_of([params]), torch.tensor([position]))[0])
        assert drawn == reference.draw(expected, params.seed, position)


def test_each_filter_leaves_exactly_what_its_name_says() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = probabilities.log().repeat(6, 1)
    cases = [
        (Params(), [0, 1, 2, 3, 4]),
        (Params(top_k=2), [0, 1]),
        (Params(top_p=0.75), [0, 1, 2]),  # the smallest set that reaches it
        (Params(min_p=0.3), [0, 1, 2]),  # at least 0.3 · 0.4
        (Params(top_k=3, top_p=0.8), [0, 1]),  # the nucleus of what top-k left
        (Params(top_p=0.01), [0]),  # the best id always stays
    ]
    ours = filtered_probabilities(logits, rows_of([params for params, _ in cases]))
    for row, (params, kept) in zip(ours, cases, strict=True):
        assert torch.nonzero(row).flatten().tolist() == kept, params
        torch.testing.assert_close(row[kept], probabilities[kept] / probabilities[kept].sum())


@pytest.mark.parametrize("params", [Params(top_k=2), Params(top_p=0.5), Params(min_p=0.9)])
def test_equal_logits_share_their_fate_at_a_threshold(params: Params) -> None:
    ours = filtered_probabilities(torch.tensor([[3.0, 2.0, 3.0, 3.0, 1.0]]), rows_of([params]))[0]
    torch.testing.assert_close(ours, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3, 0]))


def test_temperature_zero_is_the_largest_logit_whatever_the_filters() -> None:
    logits = logits_of(3)
    params = [Params(0.0), Params(0.0, top_k=3, top_p=0.2, seed=9), Params(1.0, seed=4)]
    assert draw(logits, rows_of(params), torch.tensor([0, 5, 0]))[:2].tolist() == logits[:2].argmax(-1).tolist()


def test_a_tiny_temperature_is_greedy_and_stays_finite() -> None:
    logits = logits_of(50) * 10
    params = [Params(1e-9, seed=i) for i in range(50)]
    assert torch.isfinite(filtered_probabilities(logits, rows_of(params))).all()
    assert draw(logits, rows_of(params), torch.zeros(50, dtype=torch.int64)).tolist() == logits.argmax(-1).tolist()


# The draw


def test_the_draw_is_the_reference_s_race() -> None:
    logits = logits_of(64, seed=11)
    params = [Params(0.8, top_k=i % 9, top_p=0.95, seed=1000 * i + 2**40 * (i % 3)) for i in range(64)]
    positions = torch.arange(64) * 7
    ours = draw(logits, rows_of(params), positions).tolist()
    for row, (p, position) in enumerate(zip(params, positions.tolist(), strict=True)):
        probabilities = reference.filtered_probabilities(logits[row], p.temperature, p.top_k, p.top_p, p.min_p)
        assert ours[row] == reference.draw(probabilities, p.seed, position)


def test_the_hash_equals_the_reference_s_on_every_kind_of_number() -> None:
    numbers = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 2**32, 2**40 + 5, 2**62]
    assert mix32(torch.tensor(numbers)).tolist() == [reference.mix32(number) for number in numbers]
    for seed in (0, 1, 2**32 - 1, 2**32, 2**63 - 1):
        ours = uniform(torch.tensor([seed_key(seed)]), torch.tensor([12]), 50)[0].tolist()
        assert ours == [reference.uniform(seed, 12, token_id) for token_id in range(50)]


def test_the_numbers_are_uniform_and_unrelated() -> None:
    count = 200
    keys = torch.tensor([seed_key(seed) for seed in range(count)])
    numbers = uniform(keys, torch.zeros(count, dtype=torch.int64), 1000)
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    buckets = (numbers * 100).long().flatten().bincount(minlength=100).double()
    expected = numbers.numel() / 100
    chi_square = float(((buckets - expected) ** 2 / expected).sum())
    assert chi_square < 160, chi_square  # 99 degrees of freedom: exceeded once in 10,000
    later = uniform(keys, torch.ones(count, dtype=torch.int64), 1000)
    other = uniform(keys + 1, torch.zeros(count, dtype=torch.int64), 1000)
    for unrelated in (later, other, numbers.roll(1, 0), numbers.roll(1, 1)):
        correlation = float(torch.corrcoef(torch.stack((numbers.flatten(), unrelated.flatten())))[0, 1])
        assert abs(correlation) < 0.01, correlation  # 200,000 pairs: σ is 0.0022


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_distribution(over: str) -> None:
    count = 4000
    logits = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]).log().repeat(count, 1)
    seeds = range(count) if over == "seeds" else [77] * count
    positions = torch.zeros(count, dtype=torch.int64) if over == "seeds" else torch.arange(count)
    drawn = draw(logits, rows_of([Params(seed=seed) for seed in seeds]), positions).bincount(minlength=6).double()
    expected = logits[0].exp().double() * count
    chi_square = float(((drawn - expected) ** 2 / expected).sum())
    assert chi_square < 25.7, (chi_square, drawn.tolist())  # 5 degrees of freedom: exceeded once in 10,000


def test_a_filtered_id_is_never_drawn() -> None:
    count = 2000
    logits = logits_of(1).repeat(count, 1)
    kept = set(logits[0].topk(5).indices.tolist())
    drawn = set(draw(logits, rows_of([Params(3.0, top_k=5, seed=i) for i in range(count)]), torch.arange(count)).tolist())
    assert drawn == kept


def test_a_row_draws_the_same_id_in_any_batch() -> None:
    logits = logits_of(24, seed=5, vocab=300)
    params = [
        Params(0.7 + i / 20, top_k=(0, 5, 50)[i % 3], top_p=(1.0, 0.9)[i % 2], min_p=(0.0, 0.05)[i % 2], seed=i) for i in range(24)
    ]
    params[3] = Params(0.0)
    positions = torch.arange(24) * 3
    together = draw(logits, rows_of(params), positions).tolist()
    alone = [int(draw(logits[i : i + 1], rows_of([params[i]]), positions[i : i + 1])[0]) for i in range(24)]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = draw(logits[order], rows_of([params[i] for i in order]), positions[order]).tolist()
    assert together == alone
    assert shuffled == [together[i] for i in order]
    other_seeds = [Params(p.temperature, p.top_k, p.top_p, p.min_p, p.seed + 1000) for p in params]
    assert draw(logits, rows_of(other_seeds), positions).tolist() != together
    assert draw(logits, rows_of(params), positions + 1).tolist() != together


# Penalties


@pytest.mark.parametrize(
    ("repetition", "frequency", "presence"), [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -0.8), (1.2, 0.3, 0.9)]
)
def test_penalties_are_their_formulas(repetition: float, frequency: float, presence: float) -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5, 3.0])
    prompt_seen = torch.tensor([True, True, False, False, False, False])
    counts = torch.tensor([0, 3, 1, 2, 0, 0], dtype=torch.int32)
    ours = penalise(logits, prompt_seen, counts, repetition, frequency, presence).tolist()
    for token_id in range(6):
        expected, count = float(logits[token_id]), int(counts[token_id])
        if prompt_seen[token_id] or count:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= count * frequency + (presence if count else 0.0)
        assert ours[token_id] == pytest.approx(expected, abs=1e-6), token_id
    assert ours[4:] == [0.5, 3.0], "an id that was never seen was penalised"


def test_no_penalty_changes_nothing() -> None:
    logits = logits_of(1)[0]
    seen, counts = torch.ones(VOCAB, dtype=torch.bool), torch.ones(VOCAB, dtype=torch.int32)
    assert torch.equal(penalise(logits, seen, counts, 1.0, 0.0, 0.0), logits)
