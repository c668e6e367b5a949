"""Figures carry units, add up, and never claim none or all where there is some."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.widgets.charts import bar, sparkline, stacked
from console.widgets.figures import apportion, bytes_text, milliseconds, percent, rate, significant
from console.widgets.rows import Part, clip, row_cells, spread, wrapped


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (48, "48 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (45 * 1024, "45.0 KiB"),
        (612 * 2**20, "612 MiB"),
        (24 * 2**30, "24.0 GiB"),
        (1500 * 2**30, "1,500 GiB"),
    ],
)
def test_sizes_are_in_binary_units(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.182, "0.18"), (9.99, "9.99"), (9.996, "10.0"), (41.27, "41.3"), (99.96, "100"), (1234.5, "1,234")]
)
def test_three_digits_are_shown(value: float, text: str) -> None:
    assert significant(value) == text


def test_a_percentage_never_rounds_some_to_none_or_to_all() -> None:
    assert [percent(part, 1000) for part in (0, 1, 4, 400, 996, 999, 1000)] == [
        "0 %",
        "<1 %",
        "<1 %",
        "40 %",
        ">99 %",
        ">99 %",
        "100 %",
    ]
    assert percent(0, 0) == "–"


def test_no_data_is_a_gap_and_not_zero() -> None:
    assert rate(None) == "–"
    assert milliseconds(None) == "–"
    assert rate(0.0) == "0.00 tok/s"
    assert sparkline([None, 0.0, 8.0], 3) == [" ▁█"]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8), st.integers(0, 10_000))
def test_parts_add_up_to_the_whole_and_stay_within_one_unit_of_their_share(values: list[int], units: int) -> None:
    parts = apportion(values, units)
    total = sum(values)
    if not total:
        assert parts == [0] * len(values)
        return
    assert sum(parts) == units
    assert all(abs(part - value * units / total) < 1 + 1e-6 for part, value in zip(parts, values, strict=True))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=6), st.integers(0, 200))
def test_a_stacked_bar_fills_its_width(values: list[int], width: int) -> None:
    cells = stacked(values, width)
    assert sum(cells) == (width if sum(values) else 0)
    if width >= 2 * len(values):
        assert all(cell > 0 for cell, value in zip(cells, values, strict=True) if value)


def test_a_bar_shows_a_little_as_a_little() -> None:
    assert bar(1, 10_000, 10) == "▏"
    assert bar(10_000, 10_000, 10) == "█" * 10
    assert bar(0, 10, 10) == ""


def test_a_tall_chart_fills_from_the_foot() -> None:
    assert sparkline([1.0, 2.0, None, 4.0], 5, 2) == ["    █", " ▄█ █"]


def test_a_row_that_is_too_long_gives_way_on_the_left() -> None:
    row = spread((Part("a very long name"),), (Part("12 blk", "dim"),), 14)
    assert row_cells(row) == 14
    assert row[-1].text == "12 blk"
    assert clip("日本語テキスト", 7) == "日本語…"


def test_text_is_wrapped_by_cells() -> None:
    assert wrapped("日本語 text", 6) == ["日本語", "text"]
    assert all(len(line) <= 10 for line in wrapped("a" * 35 + " b", 10))
