"""The gated delta rule: eager against the reference and against transformers' own torch functions, at every split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from kernels.gated_delta import eager, reference

EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Inputs:
    """One sequence: q, k l2-normed as the models have them, a state that isn't zero."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def between(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q[first:last], self.k[first:last], self.v[first:last], self.g[first:last], self.beta[first:last]

    def double(self) -> Inputs:
        return Inputs(*(x.double() for x in (*self.rows, self.state)))


def make(
    rows: int, k_heads: int = 2, v_heads: int = 4, k_dim: int = 16, v_dim: int = 24, decay: float = 0.3, seed: int = 0
) -> Inputs:
    """Random inputs with g uniform in [−decay, 0] and beta in [0, 1]."""
    torch.manual_seed(seed)
    q, k = (eager.l2_normalise(torch.randn(rows, k_heads, k_dim)) for _ in range(2))
    g, beta = -decay * torch.rand(rows, v_heads), torch.rand(rows, v_heads)
    return Inputs(q, k, torch.randn(rows, v_heads, v_dim), g, beta, torch.randn(v_heads, k_dim, v_dim))


def truth(x: Inputs) -> tuple[Tensor, Tensor]:
    """(outputs, states after each row) in float64: what rounding errors are measured against."""
    q, k, v, g, beta = x.double().rows
    state = x.state.double()
    group = v.shape[1] // k.shape[1]
    q, k = (y.repeat_interleave(group, 1) for y in (q * q.shape[2] ** -0.5, k))
    outs, states = [], []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - seen))[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def assert_close(out: Tensor, state: Tensor, expected_out: Tensor, expected_state: Tensor) -> None:
    """Within rounding. Each of a few hundred rows adds an error of about eps · |S| to the state, which later rows shrink again;
    an output is a state read by a query of length k_dim^-0.5. Measured: 8 eps · max|S| at most; a wrong term is 1e5 times that."""
    size = float(expected_state.abs().max())
    k_dim = expected_state.shape[-2]
    assert out.shape == expected_out.shape and state.shape == expected_state.shape
    assert float((state - expected_state).abs().max()) <= 32 * EPS * size
    assert float((out - expected_out).abs().max()) <= 32 * EPS * size * k_dim**-0.5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are small: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = {"like heads": (2, 2, 16, 16), "grouped": (2, 4, 16, 24), "one key head": (1, 3, 32, 8)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


@each_shape
@pytest.mark.parametrize("rows", [1, 5, 16, 63, 64, 65, 130, 192])
def test_chunks_equal_the_reference(shape: tuple[int, int, int, int], rows: int) -> None:
    x = make(rows, *shape)
    out, states = reference.gated_delta(*x.rows, x.state)
    chunked, end, starts = eager.chunked(*x.rows, x.state)
    assert_close(chunked, end, out, states[-1])
    assert starts.shape[0] == -(-rows // 64)
    assert torch.equal(starts[0], x.state)
    for index in range(1, len(starts)):
        assert_close(chunked, starts[index], out, states[64 * index - 1])


@each_shape
def test_rows_equal_the_reference(shape: tuple[int, int, int, int]) -> None:
    x = make(20, *shape)
    out, states = reference.gated_delta(*x.rows, x.state)
    rows, after = eager.recurrent_rows(*x.rows, x.state)
    assert_close(rows, after, out, states)


def test_a_step_of_many_sequences_equals_the_reference_for_each() -> None:
    pool = torch.full((9, 4, 16, 24), float("nan"))
    sequences = [make(3, seed=seed) for seed in range(4)]
    slots = torch.tensor([7, 0, 3, 4])
    for x, slot in zip(sequences, slots, strict=True):
        pool[slot] = x.state
    for t in range(3):
        step = [torch.cat(parts) for parts in zip(*(x.between(t, t + 1) for x in sequences), strict=True)]
        out = eager.recurrent_step(*step, pool, slots)
        for b, x in enumerate(sequences):
            expected, states = reference.gated_delta(*x.rows, x.state)
            assert_close(out[b], pool[slots[b]], expected[t], states[t])
    untouched = [slot for slot in range(9) if slot not in slots]
    assert pool[untouched].isnan().all(), "a slot of no sequence was written"


def test_a_step_may_read_one_slot_and_write_another() -> None:
    x = make(1)
    pool = torch.zeros(3, 4, 16, 24)
    pool[2] = x.state
    out = eager.recurrent_step(*x.rows, pool, torch.tensor([2]), torch.tensor([0]))
    in_place = pool.clone()
    assert torch.equal(eager.recurrent_step(*x.rows, in_place, torch.tensor([2])), out)
    assert torch.equal(pool[0], in_place[2])
    assert torch.equal(pool[2], x.state)


def test_normalising_queries_and_keys_is_as_in_the_reference_and_in_transformers() -> None:
    x = make(40)
    q, k = 3 * torch.randn(40, 2, 16), 3 * torch.randn(40, 2, 16)
    out, states = reference.gated_delta(q, k, x.v, x.g, x.beta, x.state, normalise=True)
    chunked, end, _ = eager.chunked(eager.l2_normalise(q), eager.l2_normalise(k), x.v, x.g, x.beta, x.state)
    assert_close(chunked, end, out, states[-1])
    assert torch.equal(eager.l2_normalise(q)[7:8], eager.l2_normalise(q[7:8])), "a row's bits depend on where it lies"
    batched = [y[None] for y in (q, k, *x.rows[2:])]
    theirs, their_end = torch_recurrent_gated_delta_rule(
        *batched, initial_state=x.state[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert_close(chunked, end, theirs[0], their_end[0])


def test_a_scale_of_ones_own_multiplies_the_outputs_only() -> None:
    x = make(70)
    out, end, _ = eager.chunked(*x.rows, x.state)
    scaled, same_end, _ = eager.chunked(*x.rows, x.state, scale=2 * 16**-0.5)
    assert torch.equal(scaled, 2 * out)
    assert torch.equal(same_end, end)
    assert torch.equal(
        eager.recurrent_rows(*x.between(0, 3), x.state, scale=1.0)[0] * 0.25, eager.recurrent_rows(*x.between(0, 3), x.state)[0]
    )


# Against transformers


@each_shape
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.3, 5.0, 50.0])
def test_eager_equals_transformers_and_rounds_no_worse(shape: tuple[int, int, int, int], decay: float) -> None:
    x = make(150, *shape, decay=decay)
    batched = [y[None] for y in x.rows]
    exact_out, exact_states = truth(x)
    theirs = torch_chunk_gated_delta_rule(*batched, initial_state=x.state[None], output_final_state=True)
    stepped = torch_recurrent_gated_delta_rule(*batched, initial_state=x.state[None], output_final_state=True)
    out, end, _ = eager.chunked(*x.rows, x.state)
    rows, after = eager.recurrent_rows(*x.rows, x.state)
    for their_out, their_end in (theirs, stepped):
        # Their running sums of decays are fp32: a chunk's 64 rows cost their differences up to 64 · decay · eps.
        room = (32 + 64 * decay) * EPS
        assert float((out - their_out[0]).abs().max()) <= room * float(exact_out.abs().max())
        assert float((end - their_end[0]).abs().max()) <= room * float(exact_states.abs().max())
    assert_close(out, end, exact_out, exact_states[-1])
    assert_close(rows, after[-1], exact_out, exact_states[-1])
    floor = EPS * float(exact_out.abs().max())
    their_error = max(float((their_out[0] - exact_out).abs().max()) for their_out, _ in (theirs, stepped))
    for ours in (out, rows):
        assert float((ours - exact_out).abs().max()) <= 2 * their_error + floor


# Splits


def test_every_split_into_a_prefill_and_steps_agrees() -> None:
    x = make(70)
    out, states = reference.gated_delta(*x.rows, x.state)
    slots = torch.tensor([1])
    for split in range(71):
        pool, parts = torch.zeros(2, 4, 16, 24), []
        pool[1] = x.state
        if split:
            first, pool[1], _ = eager.chunked(*x.between(0, split), x.state)
            parts.append(first)
        parts += [eager.recurrent_step(*x.between(t, t + 1), pool, slots) for t in range(split, 70)]
        assert_close(torch.cat(parts), pool[1], out, states[-1])


def test_every_split_into_two_prefills_agrees() -> None:
    x = make(150)
    out, states = reference.gated_delta(*x.rows, x.state)
    for split in range(1, 150):
        first, middle, _ = eager.chunked(*x.between(0, split), x.state)
        second, end, _ = eager.chunked(*x.between(split, 150), middle)
        assert_close(torch.cat((first, second)), end, out, states[-1])


def test_the_state_at_any_row_equals_stepping_there() -> None:
    x = make(150)
    _, states = reference.gated_delta(*x.rows, x.state)
    out, _, starts = eager.chunked(*x.rows, x.state)
    for row in range(151):
        chunk = min(row // 64, 2)
        first = 64 * chunk
        state = eager.state_at(*x.between(first, min(first + 64, 150))[1:], starts[chunk], row - first)
        assert_close(out, state, out, states[row - 1] if row else x.state)


# Bits


def test_the_state_at_a_row_has_the_bits_of_a_prefill_that_ends_there() -> None:
    x = make(150)
    _, _, starts = eager.chunked(*x.rows, x.state)
    for row in range(1, 150):
        chunk = row // 64
        _, end, _ = eager.chunked(*x.between(0, row), x.state)
        assert torch.equal(eager.state_at(*x.between(64 * chunk, 150)[1:], starts[chunk], row % 64), end), row


def test_rows_after_a_chunk_leave_its_bits_alone() -> None:
    x = make(192)
    whole, _, starts = eager.chunked(*x.rows, x.state)
    for rows in (64, 65, 100, 128, 191):
        out, _, first = eager.chunked(*x.between(0, rows), x.state)
        full = rows // 64 * 64
        assert torch.equal(out[:full], whole[:full])
        assert torch.equal(first, starts[: len(first)])


def test_rows_have_the_bits_of_steps_whatever_the_batch() -> None:
    x, others = make(9, 2, 4, 32, 32), make(9, 2, 4, 32, 32, seed=1)
    out, states = eager.recurrent_rows(*x.rows, x.state)
    pool = torch.randn(6, 4, 32, 32)
    pool[4] = x.state
    for t in range(9):
        # Alone in even steps; in odd ones last of five, the others at rows of their own.
        if t % 2:
            step = [torch.cat((b[:4], a)) for a, b in zip(x.between(t, t + 1), others.rows, strict=True)]
            got = eager.recurrent_step(*step, pool, torch.tensor([0, 1, 5, 2, 4]))[-1:]
        else:
            got = eager.recurrent_step(*x.between(t, t + 1), pool, torch.tensor([4]))
        assert torch.equal(got[0], out[t])
        assert torch.equal(pool[4], states[t])


# Padding, extremes, dtypes


def test_rows_without_beta_and_decay_are_exact_no_ops() -> None:
    x = make(5)
    padded = [torch.cat((y, torch.randn(70, *y.shape[1:]))) for y in x.rows[:3]]
    padded += [torch.cat((y, torch.zeros(70, *y.shape[1:]))) for y in x.rows[3:]]
    out, end, _ = eager.chunked(*x.rows, x.state)
    padded_out, padded_end, _ = eager.chunked(*padded, x.state)
    assert_close(padded_out[:5], padded_end, out, end)
    _, states = eager.recurrent_rows(*x.rows, x.state)
    _, padded_states = eager.recurrent_rows(*padded, x.state)
    assert torch.equal(padded_states[5:], states[-1:].expand(70, -1, -1, -1))
    nothing = [y[5:] for y in padded]
    _, unchanged, starts = eager.chunked(*nothing, x.state)
    assert torch.equal(unchanged, x.state)
    assert torch.equal(starts, x.state.expand(2, -1, -1, -1))
    pool = x.state[None].clone()
    eager.recurrent_step(*(y[:1] for y in nothing), pool, torch.tensor([0]))
    assert torch.equal(pool[0], x.state)


def test_a_thousand_rows_stay_close_with_and_without_decay() -> None:
    for decay in (0.0, 0.02):
        x = make(1000, 1, 2, 32, 32, decay=decay)
        out, states = truth(x)
        chunked, end, _ = eager.chunked(*x.rows, x.state)
        assert_close(chunked, end, out, states[-1])


def test_the_same_key_over_and_over_keeps_its_digits() -> None:
    # β = 1, no decay: A is all ones below the diagonal. Its powers grow to 1e17 and cancel; forward substitution doesn't.
    x = make(128, decay=0.0)
    like = Inputs(x.q, x.k[:1].expand_as(x.k), x.v, x.g, torch.ones_like(x.beta), x.state)
    out, states = truth(like)
    chunked, end, _ = eager.chunked(*like.rows, like.state)
    assert_close(chunked, end, out, states[-1])


@pytest.mark.parametrize("strongest", [-50.0, -1000.0, float("-inf")])
def test_strong_decay_forgets_and_later_decays_keep_their_digits(strongest: float) -> None:
    # A row of strong decay makes the running sums large; the small decays after it are differences of those.
    x = make(100, decay=0.05)
    x.g[10:14] = strongest
    out, states = truth(x)
    for ours, end in (eager.chunked(*x.rows, x.state)[:2], eager.recurrent_rows(*x.rows, x.state)):
        last = end if end.dim() == 3 else end[-1]
        assert_close(ours, last, out, states[-1])
    all_strong = Inputs(x.q, x.k, x.v, torch.full_like(x.g, strongest), x.beta, x.state)
    out, states = truth(all_strong)
    chunked, end, _ = eager.chunked(*all_strong.rows, x.state)
    assert_close(chunked, end, out, states[-1])
    assert torch.isfinite(chunked).all()
    if strongest < -100:
        alone = reference.gated_delta(*all_strong.between(99, 100), torch.zeros_like(x.state))[1][0]
        assert_close(chunked, end, out, alone)


def test_bfloat16_inputs_are_computed_in_float32_and_rounded_once() -> None:
    x = make(100)
    low = [y.bfloat16() for y in x.rows[:3]] + [x.g, x.beta]
    out, end, _ = eager.chunked(*low, x.state)
    exact, exact_end, _ = eager.chunked(*(y.float() for y in low), x.state)
    assert out.dtype == torch.bfloat16 and end.dtype == torch.float32
    assert torch.equal(out, exact.bfloat16())
    assert torch.equal(end, exact_end)
    rows, states = eager.recurrent_rows(*(y[:7] for y in low), x.state)
    exact_rows, exact_states = eager.recurrent_rows(*(y[:7].float() for y in low), x.state)
    assert torch.equal(rows, exact_rows.bfloat16())
    assert torch.equal(states, exact_states)
    # What rounding the inputs to 8 bits costs: 2^-9 of each, against the unrounded sequence.
    unrounded, _ = truth(x)
    assert float((out.double() - unrounded).abs().max()) <= 4 * 2**-9 * float(unrounded.abs().max())


def test_inputs_may_be_views_of_one_projection_and_are_left_as_they_are() -> None:
    x = make(70)
    mixed = torch.cat([y.flatten(1) for y in x.rows[:3]], 1)
    before, state = mixed.clone(), x.state.clone()
    q, k, v = (y.view(70, -1, d) for y, d in zip(mixed.split((32, 32, 96), 1), (16, 16, 24), strict=True))
    assert not v.is_contiguous()
    out, end, _ = eager.chunked(q, k, v, x.g, x.beta, x.state)
    expected, expected_end, _ = eager.chunked(*x.rows, x.state)
    assert torch.equal(out, expected) and torch.equal(end, expected_end)
    assert torch.equal(mixed, before) and torch.equal(x.state, state)


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu() -> None:
    x = make(150)
    out, states = truth(x)
    on_gpu = [y.cuda() for y in (*x.rows, x.state)]
    chunked, end, starts = eager.chunked(*on_gpu)
    assert_close(chunked.cpu(), end.cpu(), out, states[-1])
    at = eager.state_at(*(y[64:128] for y in on_gpu[1:5]), starts[1], 33)
    assert_close(chunked.cpu(), at.cpu(), out, states[96])
    rows, after = eager.recurrent_rows(*on_gpu)
    assert_close(rows.cpu(), after[-1].cpu(), out, states[-1])
    pool = torch.zeros(5, 4, 16, 24, device="cuda")
    pool[3] = on_gpu[5]
    slots = torch.tensor([3, 1], device="cuda")
    for t in range(150):
        step = [torch.cat((y[t : t + 1], y[:1])) for y in on_gpu[:5]]
        got = eager.recurrent_step(*step, pool, slots)
        assert_close(got[:1].cpu(), pool[3].cpu(), out[t : t + 1], states[t])
