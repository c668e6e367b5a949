"""The causal convolution: eager against the reference and against transformers' functions, at every split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, causal_conv1d_update

from kernels.causal_conv import eager, reference

EPS = torch.finfo(torch.float32).eps

Conv = tuple[Tensor, Tensor, Tensor | None, Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are small: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(rows: int, channels: int = 37, taps: int = 4, bias: bool = False, dtype: torch.dtype = torch.float32) -> Conv:
    """(x, weight, bias, state); an odd number of channels, so that vectors have a rest."""
    torch.manual_seed(0)
    x, state = torch.randn(rows, channels).to(dtype), torch.randn(taps - 1, channels).to(dtype)
    return x, torch.randn(taps, channels), torch.randn(channels) if bias else None, state


def assert_close(ours: Tensor, theirs: Tensor, taps: int = 4) -> None:
    """A sum of taps + 1 products of size 1 to 10, and a SiLU of it, each rounded."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= (taps + 2) * EPS * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 50])
def test_rows_equal_the_reference(rows: int, taps: int, bias: bool) -> None:
    x, weight, b, state = make(rows, taps=taps, bias=bias)
    out, after = eager.conv_rows(x, weight, b, state)
    expected, expected_after = reference.causal_conv(x, weight, b, state)
    assert_close(out, expected, taps)
    assert torch.equal(after, expected_after)


def test_rows_of_many_blocks_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", 37 * 8)
    x, weight, bias, state = make(50, bias=True)
    out, after = eager.conv_rows(x, weight, bias, state)
    expected, expected_after = reference.causal_conv(x, weight, bias, state)
    assert_close(out, expected)
    assert torch.equal(after, expected_after)


@pytest.mark.parametrize("bias", [False, True])
def test_rows_and_steps_equal_transformers(bias: bool) -> None:
    x, weight, b, _ = make(20, bias=bias)
    theirs = causal_conv1d_fn(x.T[None], weight.T.contiguous(), b, "silu")[0].T
    zeros = torch.zeros(3, 37)
    out, after = eager.conv_rows(x, weight, b, zeros)
    assert_close(out, theirs)
    their_state = after.T[None].clone()
    pool = after[None].clone()
    row = torch.randn(1, 37)
    their_row = causal_conv1d_update(row.T[None], their_state, weight.T.contiguous(), b, "silu")[0].T
    assert_close(eager.conv_step(row, weight, b, pool, torch.tensor([0])), their_row)
    assert torch.equal(pool[0], their_state[0].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_every_split_into_rows_and_steps_has_the_same_bits(bias: bool, dtype: torch.dtype) -> None:
    x, weight, b, state = make(30, channels=64, bias=bias, dtype=dtype)
    whole, end = eager.conv_rows(x, weight, b, state)
    for split in range(31):
        first, middle = eager.conv_rows(x[:split], weight, b, state)
        second, after = eager.conv_rows(x[split:], weight, b, middle)
        assert torch.equal(torch.cat((first, second)), whole)
        assert torch.equal(after, end)
        pool = torch.full((4, 3, 64), float("nan"), dtype=dtype)
        pool[2] = middle
        steps = [eager.conv_step(x[t : t + 1], weight, b, pool, torch.tensor([2])) for t in range(split, 30)]
        assert torch.equal(torch.cat((first, *steps)), whole)
        assert torch.equal(pool[2], end)
        assert pool[[0, 1, 3]].isnan().all(), "a slot of no sequence was written"


def test_a_step_of_many_sequences_has_the_bits_of_each_alone() -> None:
    x, weight, bias, _ = make(5, channels=64, bias=True)
    pool = torch.randn(8, 3, 64)
    alone, slots = pool.clone(), torch.tensor([6, 1, 0, 7, 3])
    out = eager.conv_step(x, weight, bias, pool, slots)
    for b, slot in enumerate(slots):
        assert torch.equal(eager.conv_step(x[b : b + 1], weight, bias, alone, slot[None]), out[b : b + 1])
    assert torch.equal(alone, pool)


def test_a_step_may_read_one_slot_and_write_another() -> None:
    x, weight, bias, state = make(1)
    pool = torch.stack((state, torch.zeros_like(state)))
    eager.conv_step(x, weight, bias, pool, torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(pool[0], state)
    assert torch.equal(pool[1], torch.cat((state[1:], x)))


def test_every_split_of_an_odd_width_is_the_same_but_for_rounding() -> None:
    x, weight, bias, state = make(30, bias=True)
    expected, _ = reference.causal_conv(x, weight, bias, state)
    for split in range(31):
        first, middle = eager.conv_rows(x[:split], weight, bias, state)
        second, _ = eager.conv_rows(x[split:], weight, bias, middle)
        assert_close(torch.cat((first, second)), expected)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_the_window_at_any_row_is_the_state_of_a_sequence_that_ends_there(rows: int, taps: int) -> None:
    x, weight, bias, state = make(rows, taps=taps)
    windows = eager.windows_per_row(x, state)
    assert windows.shape == (rows, taps - 1, 37)
    assert torch.equal(eager.window_at(x, state, 0), state)
    for row in range(1, rows + 1):
        _, after = reference.causal_conv(x[:row], weight, bias, state)
        assert torch.equal(eager.window_at(x, state, row), after)
        assert torch.equal(windows[row - 1], after)
    window = eager.window_at(x, state, rows)
    window.fill_(7.0)
    assert not (x == 7.0).any() and not (state == 7.0).any(), "the window is a view of its inputs"


def test_bfloat16_sums_are_float32_and_rounded_once() -> None:
    x, weight, bias, state = make(50, bias=True, dtype=torch.bfloat16)
    out, after = eager.conv_rows(x, weight, bias, state)
    exact, _ = eager.conv_rows(x.float(), weight, bias, state.float())
    assert out.dtype == after.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    assert torch.equal(after, x[-3:])


def test_a_checkpoints_weights_are_turned_tap_major() -> None:
    weight = torch.randn(37, 1, 4, dtype=torch.bfloat16)
    turned = eager.tap_major(weight)
    assert turned.dtype == torch.float32 and turned.is_contiguous()
    assert torch.equal(turned, weight[:, 0].float().T)
    assert torch.equal(eager.tap_major(weight[:, 0]), turned)


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu() -> None:
    x, weight, bias, state = make(50, bias=True)
    expected, expected_after = reference.causal_conv(x, weight, bias, state)
    assert bias is not None
    on_gpu = [y.cuda() for y in (x, weight, bias, state)]
    out, after = eager.conv_rows(*on_gpu)
    assert_close(out.cpu(), expected)
    assert torch.equal(after.cpu(), expected_after)
    pool = on_gpu[3][None].repeat(2, 1, 1)
    for t in range(50):
        rows = on_gpu[0][[t, 0]]
        got = eager.conv_step(rows, *on_gpu[1:3], pool, torch.tensor([1, 0], device="cuda"))
        assert_close(got[:1].cpu(), expected[t : t + 1])
    assert torch.equal(pool[1].cpu(), expected_after)
