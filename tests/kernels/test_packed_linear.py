"""Products from packed 4-bit weights: against the reference and the stored format's own values, few rows and many, every format."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from engine.weights.formats import FORMATS
from kernels.attention.eager import Span, paged_attention, plan_attention
from kernels.attention.fused import PageRuns
from kernels.attention.fused import paged_attention as paged_attention_in_place
from kernels.norm import eager as eager_norm
from kernels.norm import fused as fused_norm
from kernels.packed_linear.embedding import packed_embedding
from kernels.packed_linear.fused import MAX_TILE_ROWS, Scratch, dequantise, packed_linear
from kernels.packed_linear.packing import PLANES, missing_support, pack, packed_bytes, quanta_of
from kernels.packed_linear.reference import packed_linear as reference
from kernels.rope.eager import rotate
from kernels.rope.fused import rotate_

pytestmark = pytest.mark.skipif(missing_support() is not None, reason=str(missing_support()))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


each_format = pytest.mark.parametrize("name", PLANES)
ROWS, COLUMNS = 96, 512  # not a whole number of 64-row tiles; two super-blocks


def stored(name: str, rows: int = ROWS, seed: int = 0) -> Tensor:
    """Rows in a stored format, uint8 `[rows, bytes]`: quantised where the gguf package can, else random bits under small scales."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, COLUMNS, generator=generator) * 0.05
    try:
        return torch.from_numpy(gguf.quantize(weights.numpy(), Kind[name]))
    except NotImplementedError:
        pass
    block_bytes = FORMATS[name].block_bytes
    raw = torch.randint(0, 256, (rows, COLUMNS // 256, block_bytes), generator=generator, dtype=torch.uint8)
    for at in (208,) if name == "Q6_K" else (0, 2):
        raw[..., at : at + 2] = torch.tensor([0.004], dtype=torch.float16).view(torch.uint8)
    return raw.flatten(1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@each_format
def test_packed_weights_are_the_stored_ones_but_for_bfloat16_scales(name: str) -> None:
    raw = stored(name)
    weight = pack([quanta_of(raw, name)], COLUMNS)
    expected = FORMATS[name].dequantise(raw)
    found = dequantise(weight, Scratch([weight])).T.view(weight.padded_rows, weight.planes, COLUMNS).float().sum(1)
    assert relative_error(found[:ROWS], expected) < (0.006 if name == "Q6_K" else 0.004)
    assert not found[ROWS:].any(), "rows that pad the last tile are 0"
    assert (weight.num_rows, weight.planes) == (ROWS, PLANES[name])
    assert weight.num_bytes == packed_bytes(ROWS, COLUMNS, name)


@each_format
@pytest.mark.parametrize("rows", [1, 2, 5, MAX_TILE_ROWS, MAX_TILE_ROWS + 1, 70])
def test_the_product_is_the_reference_s_from_tiles_and_from_the_scratch(name: str, rows: int) -> None:
    raw = stored(name)
    quanta = quanta_of(raw, name)
    weight = pack([quanta], COLUMNS)
    x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = sum(reference(x, *plane) for plane in quanta.planes)
    assert isinstance(expected, Tensor)
    assert relative_error(expected, x.float() @ FORMATS[name].dequantise(raw).T) < (0.006 if name == "Q6_K" else 1e-5)
    for scratch in (Scratch([weight]), None):
        found = packed_linear(x, weight, scratch)
        assert (found.dtype, tuple(found.shape)) == (torch.bfloat16, (rows, ROWS))
        assert relative_error(found, expected) < 0.006


def test_matrices_packed_as_one_give_each_one_s_rows() -> None:
    parts = [stored("Q4_1", rows, seed=rows) for rows in (80, 32, 48)]
    x = torch.randn(3, COLUMNS).to(torch.bfloat16)
    together = pack([quanta_of(part, "Q4_1") for part in parts], COLUMNS)
    apart = [pack([quanta_of(part, "Q4_1")], COLUMNS) for part in parts]
    found = packed_linear(x, together, Scratch([together]))
    assert torch.equal(found, torch.cat([packed_linear(x, weight, Scratch([weight])) for weight in apart], dim=1))
    with pytest.raises(ValueError, match="different precision"):
        pack([quanta_of(stored("Q4_0"), "Q4_0"), quanta_of(stored("Q8_0"), "Q8_0")], COLUMNS)


@each_format
def test_rows_of_a_packed_embedding_are_the_stored_ones(name: str) -> None:
    raw = stored(name)
    ids = torch.tensor([0, 95, 31, 32, 64, 33, 31])
    found = packed_embedding(ids, pack([quanta_of(raw, name)], COLUMNS))
    assert found.dtype == torch.float32
    assert relative_error(found, FORMATS[name].dequantise(raw)[ids]) < (0.006 if name == "Q6_K" else 0.004)


def test_a_zero_of_m_alone_would_be_far_off() -> None:
    """The product subtracts 8 from the quanta: Q4_1's minimum must be raised by 8 scales."""
    [(q, scales, zeros)] = quanta_of(stored("Q4_1"), "Q4_1").planes
    x = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(2))
    right, wrong = reference(x, q, scales, zeros), reference(x, q, scales, zeros - 8 * scales)
    assert relative_error(wrong, right) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norm_by_length_is_the_rms_norm(dtype: torch.dtype, eps: float) -> None:
    x, weight = torch.randn(5, 96).to(dtype), torch.rand(96) + 0.5
    found = fused_norm.rms_norm(x, weight * 96**0.5, torch.tensor((96 * eps) ** 0.5), torch.float32)
    torch.testing.assert_close(found, eager_norm.rms_norm(x.float(), weight, eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_in_place_has_the_eager_bits(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 6, 32).to(dtype)
    cos, sin = torch.randn(7, 1, 32).to(dtype), torch.randn(7, 1, 32).to(dtype)
    expected = rotate(rows[:, :4], cos, sin)
    rest = rows[:, 4:].clone()
    rotate_(rows[:, :4], cos, sin)
    assert torch.equal(rows[:, :4], expected)
    assert torch.equal(rows[:, 4:], rest)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("in_a_row", [True, False])
def test_attention_over_pages_where_they_lie_is_eager_s(window: int | None, in_a_row: bool) -> None:
    """One layer of two, a decode row alone and beside others, and two chunks; blocks in a row, and not."""
    size, kv_heads, dim, heads = 4, 2, 16, 6
    cache = torch.randn(2, 2, 40 * size, kv_heads, dim)
    tables = torch.stack([torch.arange(first, first + 8) for first in (1, 10, 20, 30)])
    if not in_a_row:
        tables = tables.flip(1)
    for lens in ([(1, 30)], [(1, 9), (1, 30), (1, 17)], [(1, 21), (5, 5), (6, 27)]):
        starts = [sum(q for q, _ in lens[:i]) for i in range(len(lens))]
        spans = [
            Span(start, q_len, kv_len, row, int(tables[row, 0]) * size if in_a_row else -1)
            for row, (start, (q_len, kv_len)) in enumerate(zip(starts, lens, strict=True))
        ]
        q = torch.randn(sum(q_len for q_len, _ in lens), heads, dim)
        plan = plan_attention(spans, tables, size, 39 * size)
        expected = paged_attention(q, cache[1, 0], cache[1, 1], plan, 0.25, window)
        found = paged_attention_in_place(q, PageRuns(cache, plan), 1, 0.25, window)
        torch.testing.assert_close(found, expected.flatten(1), rtol=1e-5, atol=1e-6)
