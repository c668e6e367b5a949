"""PackedWeight: a matrix as torch's CPU int4 product reads it, and how stored blocks of other formats become one.

`torch.ops.aten._weight_int4pack_mm_for_cpu` computes with (q − 8) · scale + zero, q of 4 bits, scale and zero bfloat16 for each
group of 32 elements of a row. What has more than 4 bits is held as two planes side by side, q = 16 · high + low: the row is
twice as long and meets the input twice, so that both planes are summed in fp32 before anything is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

GROUP = 32
# Rows are padded to a multiple of this: the largest tile of any of torch's layouts, so that no tile is cut.
ROW_TILE = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`[num_rows, num_columns]` weights, held in `tiles` (uint8, torch's own order) and `scales_zeros` (bfloat16
    `[planes · num_columns / 32, padded rows, 2]`)."""

    tiles: Tensor
    scales_zeros: Tensor
    num_rows: int
    num_columns: int
    planes: int

    @property
    def padded_rows(self) -> int:
        return self.scales_zeros.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.tiles.nbytes + self.scales_zeros.nbytes


def packed_bytes(num_rows: int, num_columns: int, format_name: str) -> int:
    """The bytes a PackedWeight of that shape, stored as `format_name`, takes."""
    rows = -(-num_rows // ROW_TILE) * ROW_TILE
    width = num_columns * PLANES[format_name]
    return rows * width // 2 + rows * (width // GROUP) * 4


@dataclass(frozen=True, slots=True)
class Quanta:
    """A matrix between its stored blocks and its tiles: `planes` uint8 `[rows, columns]` of 0…15, each with fp32 scales and
    zeros `[rows, columns / 32]`."""

    planes: tuple[tuple[Tensor, Tensor, Tensor], ...]


def pack(parts: list[Quanta], num_columns: int) -> PackedWeight:
    """The rows of `parts`, one matrix after the other, as one PackedWeight. All must have as many planes."""
    counts = {len(part.planes) for part in parts}
    if len(counts) != 1:
        raise ValueError("matrices of different precision can't be packed as one.")
    [planes] = counts
    num_rows = sum(part.planes[0][0].shape[0] for part in parts)
    padded = -(-num_rows // ROW_TILE) * ROW_TILE
    quanta = torch.full((padded, planes * num_columns), 8, dtype=torch.int32)
    scales_zeros = torch.zeros(planes * num_columns // GROUP, padded, 2, dtype=torch.bfloat16)
    at = 0
    for part in parts:
        end = at + part.planes[0][0].shape[0]
        lost = torch.zeros_like(part.planes[0][1])
        for plane, (q, scales, zeros) in enumerate(part.planes):
            quanta[at:end, plane * num_columns : (plane + 1) * num_columns] = q
            groups = slice(plane * num_columns // GROUP, (plane + 1) * num_columns // GROUP)
            rounded = scales.to(torch.bfloat16)
            # What rounding a scale takes from the group's mean is given back by the last plane's zero.
            lost += (scales - rounded) * (q.view(*scales.shape, GROUP).sum(-1, dtype=torch.float32) / GROUP - 8.0)
            last = plane == planes - 1
            scales_zeros[groups, at:end, 0] = rounded.T
            scales_zeros[groups, at:end, 1] = (zeros + lost if last else zeros).T.to(torch.bfloat16)
        at = end
    return PackedWeight(_tiles(quanta), scales_zeros, num_rows, num_columns, planes)


def _tiles(quanta: Tensor) -> Tensor:
    tiles: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quanta.contiguous(), 1)
    return tiles


@cache
def tile_rows() -> int:
    """Rows of a tile in this CPU's layout, 0 where the layout isn't known. A tile of t rows holds, for every column, t / 2 bytes:
    byte j has row j in its low and row j + t / 2 in its high half. torch chooses t by the CPU's vectors."""
    quanta = torch.randint(0, 16, (2 * ROW_TILE, GROUP), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = _tiles(quanta).view(-1)
    for rows in (64, 32, 16):
        tiles = quanta.view(-1, rows, GROUP).transpose(1, 2)
        expected = tiles[:, :, : rows // 2] | tiles[:, :, rows // 2 :] << 4
        if torch.equal(expected.reshape(-1).to(torch.uint8), packed):
            return rows
    return 0


def missing_support() -> str | None:
    """Why this machine can't compute from packed weights, or None if it can."""
    try:
        rows = tile_rows()
    except (RuntimeError, AttributeError) as error:
        return f"torch {torch.__version__} has no packed int4 product for this CPU ({error})"
    return None if rows else "torch packs int4 weights on this CPU in an order that isn't known here"


# From stored blocks


def quanta_of(raw: Tensor, format_name: str) -> Quanta:
    """The Quanta of stored rows, uint8 `[rows, bytes_per_row]`. Raises `KeyError` for a format that isn't in `PLANES`."""
    block_bytes, read, _ = _READERS[format_name]
    return Quanta(read(raw.view(raw.shape[0], -1, block_bytes)))


_Planes = tuple[tuple[Tensor, Tensor, Tensor], ...]


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(blocks: Tensor) -> Tensor:
    """uint8 `[rows, blocks, 32]` of blocks whose last 16 bytes hold element j low and j + 16 high."""
    return torch.cat((blocks & 15, blocks >> 4), dim=-1)


def _fifth_bits(high: Tensor) -> Tensor:
    """0 or 16 for each of 32 elements, uint8 `[rows, blocks, 32]`, of 4 bytes of bits each."""
    return ((high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1) << 4).flatten(-2)


def _one(q: Tensor, scales: Tensor, zeros: Tensor) -> _Planes:
    return ((q.flatten(1), scales, zeros),)


def _two(q: Tensor, scales: Tensor, zeros: Tensor) -> _Planes:
    """q · scale + zero for whole numbers q of −128…127 (int16 `[rows, blocks, 32]`): 16 · high · scale, then the rest."""
    low = q & 15
    high = (q - low) // 16 + 8
    return (
        (high.to(torch.uint8).flatten(1), 16 * scales, torch.zeros_like(scales)),
        (low.to(torch.uint8).flatten(1), scales, zeros + 8 * scales),
    )


def _q4_0(blocks: Tensor) -> _Planes:
    scales = _half(blocks, 0)
    return _one(_nibbles(blocks[..., 2:]), scales, torch.zeros_like(scales))


def _q4_1(blocks: Tensor) -> _Planes:
    scales = _half(blocks, 0)
    return _one(_nibbles(blocks[..., 4:]), scales, _half(blocks, 2) + 8 * scales)


def _q5_0(blocks: Tensor) -> _Planes:
    q = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int16) - 16
    scales = _half(blocks, 0)
    return _two(q, scales, torch.zeros_like(scales))


def _q5_1(blocks: Tensor) -> _Planes:
    q = (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).to(torch.int16) - 16
    scales = _half(blocks, 0)
    return _two(q, scales, _half(blocks, 2) + 16 * scales)


def _q8_0(blocks: Tensor) -> _Planes:
    scales = _half(blocks, 0)
    return _two(blocks[..., 2:].contiguous().view(torch.int8).to(torch.int16), scales, torch.zeros_like(scales))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K's and Q5_K's eight sub-blocks, fp32 `[rows, 8 · blocks]` (as `engine.weights.formats`)."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=-1)
    return (_half(blocks, 0)[..., None] * scales).flatten(1), (_half(blocks, 2)[..., None] * minima).flatten(1)


def _k_nibbles(packed: Tensor) -> Tensor:
    """uint8 `[rows, blocks, 8, 32]`: each run of 32 bytes holds one sub-block low and the next high."""
    runs = packed.reshape(*packed.shape[:-1], 4, 32)
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> _Planes:
    scales, minima = _k_scales(blocks)
    return _one(_k_nibbles(blocks[..., 16:]), scales, 8 * scales - minima)


def _q5_k(blocks: Tensor) -> _Planes:
    scales, minima = _k_scales(blocks)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    q = (_k_nibbles(blocks[..., 48:]) | fifth).to(torch.int16) - 16
    return _two(q, scales, 16 * scales - minima)


def _q6_k(blocks: Tensor) -> _Planes:
    """Its scales go with 16 elements, the product's with 32: rounded anew to 8 bits in groups of 32, which moves a weight by at
    most 1/254 of its group's largest, as much as bfloat16 does."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 2, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    pairs = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3) << 4
    q = torch.cat((low & 15, low >> 4), dim=-2).bitwise_or_(pairs).view(*blocks.shape[:-1], 16, 16).float() - 32.0
    scales = _half(blocks, 208)[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    weights = (q * scales[..., None]).view(blocks.shape[0], -1, GROUP)
    step = weights.abs().amax(-1) / 127
    whole = (weights / step.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().to(torch.int16)
    return _two(whole, step, torch.zeros_like(step))


# Stored format: bytes a block, how it is read, planes.
_READERS: Mapping[str, tuple[int, Callable[[Tensor], _Planes], int]] = {
    "Q4_0": (18, _q4_0, 1),
    "Q4_1": (20, _q4_1, 1),
    "Q4_K": (144, _q4_k, 1),
    "Q5_0": (22, _q5_0, 2),
    "Q5_1": (24, _q5_1, 2),
    "Q5_K": (176, _q5_k, 2),
    "Q6_K": (210, _q6_k, 2),
    "Q8_0": (34, _q8_0, 2),
}
PLANES: Mapping[str, int] = {name: planes for name, (_, _, planes) in _READERS.items()}
"""The stored formats that can be packed, and the planes each takes."""
