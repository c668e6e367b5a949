"""Paged attention against its reference: decode, prefill, chunks, mixed batches, windows, and pages that hold rubbish."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import reference
from kernels.attention.eager import Span, paged_attention, plan_attention, write_kv

# (q_len, kv_len) of each sequence of a batch, decode rows first.
BATCHES = {
    "one decode row": [(1, 1)],
    "one long decode row": [(1, 37)],
    "decode rows of equal length": [(1, 16), (1, 16), (1, 16)],
    "decode rows of unequal length": [(1, 1), (1, 37), (1, 16), (1, 17)],
    "a whole prompt": [(23, 23)],
    "a chunk inside a prompt": [(7, 29)],
    "a whole prompt beside a chunk": [(16, 16), (5, 21)],
    "decode rows beside prompts": [(1, 9), (1, 33), (12, 12), (4, 20), (1, 8)],
}
each_batch = pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)


@dataclass
class Scene:
    """A paged cache of several sequences. Whatever isn't a written key or value is `filler`; the null block, the last, is 0."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: list[list[int]]
    spans: list[Span]
    block_size: int
    num_blocks: int

    def eager(self, window: int | None = None) -> Tensor:
        width = max(len(table) for table in self.tables)
        rows = torch.tensor([table + [self.num_blocks - 1] * (width - len(table)) for table in self.tables])
        plan = plan_attention(self.spans, rows, self.block_size, self.num_blocks * self.block_size)
        return paged_attention(self.q, self.k_cache, self.v_cache, plan, self.q.shape[-1] ** -0.5, window)

    def reference(self, window: int | None = None) -> Tensor:
        paged = (-1, self.block_size, *self.k_cache.shape[1:])
        return torch.cat(
            [
                reference.paged_attention(
                    self.q[span.start : span.start + span.q_len],
                    self.k_cache.view(paged),
                    self.v_cache.view(paged),
                    self.tables[span.table_row],
                    span.kv_len,
                    self.q.shape[-1] ** -0.5,
                    window,
                )
                for span in self.spans
            ]
        )


def make_scene(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    filler: float = float("nan"),
    seed: int = 0,
) -> Scene:
    generator = torch.Generator().manual_seed(seed)
    shuffled = random.Random(seed)
    needed = [-(-kv_len // block_size) for _, kv_len in lengths]
    num_blocks = sum(needed) + 3
    order = list(range(num_blocks))
    shuffled.shuffle(order)
    shape = ((num_blocks + 1) * block_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, filler, dtype=dtype) for _ in "kv")
    k_cache[num_blocks * block_size :] = v_cache[num_blocks * block_size :] = 0
    tables, spans, start = [], [], 0
    # Table rows are dealt out of order too: a span is found by its table_row, not by its place in the batch.
    rows = list(range(len(lengths)))
    shuffled.shuffle(rows)
    tables = [[] for _ in lengths]
    for (q_len, kv_len), row, count in zip(lengths, rows, needed, strict=True):
        tables[row] = [order.pop() for _ in range(count)]
        slots = torch.tensor([tables[row][p // block_size] * block_size + p % block_size for p in range(kv_len)])
        k, v = (torch.randn((kv_len, kv_heads, head_dim), generator=generator).to(dtype) for _ in "kv")
        write_kv(k, v, k_cache, v_cache, slots)
        spans.append(Span(start, q_len, kv_len, row))
        start += q_len
    q = torch.randn((start, heads, head_dim), generator=generator).to(dtype)
    return Scene(q, k_cache, v_cache, tables, spans, block_size, num_blocks)


@each_batch
@pytest.mark.parametrize("window", [None, 1, 3, 16, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_float32_equals_the_reference(lengths: list[tuple[int, int]], window: int | None, heads: int, kv_heads: int) -> None:
    scene = make_scene(lengths, heads=heads, kv_heads=kv_heads)
    ours = scene.eager(window)
    assert ours.shape == scene.q.shape
    torch.testing.assert_close(ours, scene.reference(window), rtol=0, atol=3e-6)


@each_batch
@pytest.mark.parametrize("window", [None, 16])
def test_bfloat16_is_within_two_roundings_of_the_reference(lengths: list[tuple[int, int]], window: int | None) -> None:
    scene = make_scene(lengths, dtype=torch.bfloat16)
    ours = scene.eager(window)
    assert ours.dtype == torch.bfloat16
    largest_value = float(scene.v_cache.float().nan_to_num().abs().max())
    # The weights and the result are rounded to 8 bits each; a weighted mean is at most the largest value.
    torch.testing.assert_close(ours.float(), scene.reference(window), rtol=0, atol=2 * 2**-8 * largest_value)


@settings(max_examples=40, deadline=None)
@given(
    decode=st.lists(st.integers(1, 40), max_size=4),
    prefill=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=3),
    block_size=st.sampled_from([1, 2, 5, 16]),
    window=st.none() | st.integers(1, 45),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch_equals_the_reference(
    decode: list[int], prefill: list[tuple[int, int]], block_size: int, window: int | None, seed: int
) -> None:
    lengths = [(1, kv_len) for kv_len in decode] + [(q_len, q_len + before) for q_len, before in prefill]
    if not lengths:
        return
    scene = make_scene(lengths, block_size=block_size, seed=seed)
    torch.testing.assert_close(scene.eager(window), scene.reference(window), rtol=0, atol=3e-6)


@each_batch
def test_pages_and_tails_that_hold_rubbish_change_no_bit(lengths: list[tuple[int, int]]) -> None:
    clean = make_scene(lengths, filler=0.0).eager()
    for filler in (float("nan"), float("inf"), 1e30):
        scene = make_scene(lengths, filler=filler)
        assert not bool(torch.equal(scene.k_cache.nan_to_num(7.0), make_scene(lengths, filler=0.0).k_cache))
        assert torch.equal(scene.eager(), clean), f"a page filled with {filler} was read"


def test_a_row_s_result_does_not_depend_on_who_sits_beside_it() -> None:
    lengths = BATCHES["decode rows of unequal length"]
    together = make_scene(lengths)
    out = together.eager()
    for span in together.spans:
        alone = Scene(
            together.q[span.start : span.start + 1],
            together.k_cache,
            together.v_cache,
            together.tables,
            [Span(0, 1, span.kv_len, span.table_row)],
            together.block_size,
            together.num_blocks,
        )
        torch.testing.assert_close(alone.eager()[0], out[span.start], rtol=0, atol=1e-6)


def test_a_window_hides_what_lies_before_it() -> None:
    scene = make_scene([(1, 30), (6, 30)], filler=0.0)
    seen = scene.eager(window=5)
    for span in scene.spans:
        for position in range(30 - 6 - 4):  # nothing that the first of the rows may still see
            block = scene.tables[span.table_row][position // 4]
            scene.k_cache[block * 4 + position % 4] += 5.0
            scene.v_cache[block * 4 + position % 4] -= 5.0
    assert torch.equal(scene.eager(window=5), seen)
    assert not torch.equal(scene.eager(), seen)


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else() -> None:
    k_cache, v_cache = torch.zeros(12, 2, 4), torch.zeros(12, 2, 4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    write_kv(k, v, k_cache, v_cache, torch.tensor([7, 0, 11]))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[[7, 0, 11]], rows)
        assert not cache[[1, 2, 3, 4, 5, 6, 8, 9, 10]].any()
