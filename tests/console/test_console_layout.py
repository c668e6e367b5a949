"""Where things stand at each size, and that no size breaks it."""

from __future__ import annotations

import pytest
from driving import driven
from scripted_engine import idle_view, loading_view, recorded_view

from console.widgets.block_map import BlockMap


async def test_side_by_side_all_panes_are_there_with_number_name_and_figure() -> None:
    async with driven(view=recorded_view()) as console:
        text = console.screen_text()
        for words in (
            "1 chats",
            "2 kv blocks",
            "532 / 1,024",
            "52 %",
            "16 tok each",
            "6 memory",
            "612 MiB of 24.0 GiB",
            "7 engine",
            "run 2 wait 0",
        ):
            assert words in text
        header = text.splitlines()[0]
        for words in ("SmolLM2-135M-Instruct", "cpu bf16", "circuit legacy a3f1", "● running", "step 18,204"):
            assert words in header
        assert text.splitlines()[-1].startswith(" enter send")


async def test_at_80_by_24_the_panes_are_tabs() -> None:
    async with driven(size=(80, 24), view=recorded_view()) as console:
        assert [pane.id for pane in console.main.panes if pane.display] == ["chats"]
        lines = console.screen_text().splitlines()
        assert len(lines) == 24
        assert "▸1 chats  2 kv blocks  6 memory  7 engine" in lines[1]
        assert "circuit legacy a3f1" in lines[0]
        assert "^q quit" in lines[-1]
        await console.press("escape", "2")
        assert [pane.id for pane in console.main.panes if pane.display] == ["kv"]
        assert "532 / 1,024" in console.screen_text().splitlines()[1]
        await console.press("6")
        assert "weights" in console.screen_text()
        await console.press("7")
        assert "lighthouse keeper" in console.screen_text()


async def test_at_200_by_50_the_map_grows_to_one_cell_a_block() -> None:
    async with driven(size=(200, 50), view=recorded_view()) as console:
        assert console.main.query_one(BlockMap).blocks_per_cell == 1
        assert "host 1.20 ms" in console.screen_text()


async def test_memory_rows_add_up_to_the_title() -> None:
    async with driven(view=recorded_view()) as console:
        rows = console.main.query_one("#memory-rows").plain.splitlines()  # type: ignore[attr-defined]
        sizes = [float(row.split(" MiB")[0].split()[-1]) for row in rows[1:]]
        shares = [int(row.split(" %")[0].split()[-1]) for row in rows[1:]]
        assert sizes[-1] == pytest.approx(612.0)
        assert sum(sizes[:-1]) == pytest.approx(sizes[-1])
        assert sum(shares[:-1]) == shares[-1] == 100


async def test_no_data_is_a_gap() -> None:
    async with driven(view=idle_view(decode_tokens_per_s=None, step_ms=None, host_ms=None, last_ttft_ms=None)) as console:
        rows = console.main.query_one("#engine-rows").plain.splitlines()  # type: ignore[attr-defined]
        assert rows[0].split()[:2] == ["decode", "–"]
        assert "step –" in console.main.engine.figure


async def test_a_storm_of_sizes_down_to_one_cell_breaks_nothing() -> None:
    async with driven(view=recorded_view()) as console:
        await console.ask("a prompt that is long enough to wrap " * 4)
        console.engine.say("# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n- x\n  - y\n")
        for size in ((1, 1), (80, 24), (2, 50), (300, 2), (20, 6), (100, 28), (99, 27), (5, 5), (160, 28), (3, 3), (120, 40)):
            await console.pilot.resize_terminal(*size)
            console.app.tick()
            assert all(strip.cell_length == size[0] for strip in console.app.screen._compositor.render_strips())
            console.engine.publish(loading_view() if size == (20, 6) else recorded_view())
        assert "1 chats" in console.screen_text()


async def test_keys_work_at_the_smallest_sizes() -> None:
    async with driven(size=(20, 6), view=recorded_view()) as console:
        for key in ("escape", "2", "right", "6", "7", "down", "m", "m", "f1", "escape", "1", "tab", "tab"):
            await console.press(key)
            assert console.app.is_running
        assert console.main.panes[2].id == "memory" and console.main.focused is not None


async def test_other_themes_have_every_colour() -> None:
    async with driven(view=recorded_view()) as console:
        for theme in ("footplate-light", "nord", "textual-dark"):
            console.app.theme = theme
            await console.tick(2)
            assert "1 chats" in console.screen_text()


async def test_without_colour_states_and_focus_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with driven(view=recorded_view()) as console:
        text = console.screen_text()
        assert console.app.no_color
        assert {"█", "▓", "▒", "◆", "·"} <= set(text)
        assert "┏━ 1 chats" in text
        assert "╭─ 2 kv blocks" in text
