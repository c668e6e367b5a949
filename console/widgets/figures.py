"""How figures are written on the screen: units always, absolute and relative, a gap where there is no data."""

from __future__ import annotations

from collections.abc import Sequence

NO_DATA = "–"
_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def count(value: int) -> str:
    """A whole number with thousands marked: `1,024`."""
    return f"{value:,}"


def significant(value: float) -> str:
    """Three significant digits, never in exponent form: `0.18`, `21.0`, `183`, `1,024`."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def bytes_text(num_bytes: int) -> str:
    """A size in the largest binary unit it fills: `612 MiB`, `23.4 GiB`, `48 B`."""
    for unit, size in _BYTE_UNITS:
        if num_bytes >= size:
            return f"{num_bytes} B" if unit == "B" else f"{significant(num_bytes / size)} {unit}"
    return "0 B"


def byte_unit(num_bytes: int) -> tuple[str, int]:
    """The binary unit that a column of sizes up to `num_bytes` is written in, and its size; MiB up to 10 GiB."""
    return ("GiB", 2**30) if num_bytes >= 10 * 2**30 else ("MiB", 2**20)


def percent(part: float, whole: float) -> str:
    """`40 %`; `<1 %` and `>99 %` where rounding would claim none or all; a gap for a whole of nothing."""
    if whole <= 0:
        return NO_DATA
    share = 100 * part / whole
    if 0 < share < 0.5:
        return "<1 %"
    if 99.5 <= share < 100:
        return ">99 %"
    return f"{share:.0f} %"


def rate(tokens_per_s: float | None) -> str:
    """`41.3 tok/s`, or a gap."""
    return NO_DATA if tokens_per_s is None else f"{significant(tokens_per_s)} tok/s"


def milliseconds(ms: float | None) -> str:
    """`21.0 ms`; seconds from ten of them on (`12.4 s`); or a gap."""
    if ms is None:
        return NO_DATA
    return f"{significant(ms)} ms" if ms < 9_995 else f"{significant(ms / 1000)} s"


def dtype_text(dtype: str) -> str:
    """The short name of a dtype: `bf16`."""
    return _SHORT_DTYPES.get(dtype, dtype)


def apportion(values: Sequence[int], units: int) -> list[int]:
    """`units` split in proportion to `values`, so that the parts add up to `units` exactly (largest remainder).

    Each part is within one unit of its true share. All zero when the values are.
    """
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    parts = [value * units // total for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (-(values[i] * units % total), i))
    for i in by_remainder[: units - sum(parts)]:
        parts[i] += 1
    return parts
