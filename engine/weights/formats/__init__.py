"""The stored tensor formats that can be read, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.weights.formats.floats import BF16, F16, F32, F64
from engine.weights.formats.format import Format
from engine.weights.formats.k_quants import Q4_K, Q5_K, Q6_K
from engine.weights.formats.q4 import Q4_0, Q4_1
from engine.weights.formats.q5 import Q5_0, Q5_1
from engine.weights.formats.q8 import Q8_0

FORMATS: Mapping[str, Format] = MappingProxyType(
    {each.name: each for each in (F64, F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)}
)

__all__ = ["FORMATS", "Format"]
