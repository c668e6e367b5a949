"""Dequantisation against the gguf package's, bit for bit: the arithmetic is the same float32 operations in the same order."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.weights.formats import FORMATS

QUANTISED = sorted(name for name in FORMATS if name.startswith("Q"))


def oracle(name: str, raw: np.ndarray) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.ascontiguousarray(dequantize(raw, GGMLQuantizationType[name])))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bit patterns, signs of zeros included; any NaN equals any NaN."""
    nan = theirs.isnan()
    return torch.equal(ours.isnan(), nan) and torch.equal(ours[~nan].view(torch.int32), theirs[~nan].view(torch.int32))


@pytest.mark.parametrize("name", QUANTISED)
def test_random_blocks_dequantise_to_the_oracles_bits(name):
    form = FORMATS[name]
    # Random bytes reach every scale there is: subnormal, negative, infinite and NaN ones too.
    raw = np.random.default_rng(7).integers(0, 256, (300, 5 * form.block_bytes), dtype=np.uint8)
    ours = form.dequantise(torch.from_numpy(raw))
    assert ours.dtype == torch.float32
    assert ours.shape == (300, 5 * form.block_elements)
    theirs = oracle(name, raw)
    assert theirs.isfinite().float().mean() > 0.5
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("name", QUANTISED)
def test_every_byte_of_a_block_matters(name):
    form = FORMATS[name]
    block = torch.from_numpy(np.random.default_rng(3).integers(1, 120, (1, form.block_bytes), dtype=np.uint8))
    before = form.dequantise(block)
    assert before.isfinite().all()
    for index in range(form.block_bytes):
        changed = block.clone()
        changed[0, index] ^= 0x15
        assert not torch.equal(form.dequantise(changed), before), f"byte {index} is ignored"


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_block_sizes_are_ggmls(name):
    assert (FORMATS[name].block_elements, FORMATS[name].block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_stored_bytes_are_not_changed(name):
    form = FORMATS[name]
    raw = torch.randint(0, 256, (3, 2 * form.block_bytes), dtype=torch.uint8)
    before = raw.clone()
    form.dequantise(raw)
    assert torch.equal(raw, before)


@pytest.mark.parametrize(
    ("name", "dtype"), [("F64", torch.float64), ("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_floats_are_read_as_they_are(name, dtype):
    values = torch.randn(4, 6, dtype=torch.float64).to(dtype)
    assert torch.equal(FORMATS[name].dequantise(values.view(torch.uint8)), values.float())


@pytest.mark.parametrize("name", QUANTISED)
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(name):
    with pytest.raises(ValueError, match="multiple of"):
        FORMATS[name].dequantise(torch.zeros(2, FORMATS[name].block_bytes + 1, dtype=torch.uint8))
