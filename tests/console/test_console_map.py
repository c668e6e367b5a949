"""The block map: right states, right grouping, and no row painted that didn't change."""

from __future__ import annotations

import itertools
import time

import pytest
from driving import driven
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import idle_view, kv_view, recorded_view

from console.panes.kv_blocks import KvPane
from console.widgets.block_map import GLYPHS, BlockMap, cell_states
from engine.view import BlockState


def test_glyphs_alone_tell_the_states_apart() -> None:
    assert len(set(GLYPHS.values())) == len(BlockState)


@given(st.binary(max_size=300).map(lambda data: bytes(byte % 5 for byte in data)), st.integers(1, 9))
def test_a_cell_is_free_only_if_all_its_blocks_are(states: bytes, group: int) -> None:
    cells = cell_states(states, group)
    for i, cell in enumerate(cells):
        blocks = states[i * group : (i + 1) * group]
        assert (cell == BlockState.FREE) == (set(blocks) == {0})
        assert cell == 0 or blocks.count(cell) == max(blocks.count(state) for state in range(1, 5))


async def test_each_block_is_drawn_as_its_state_in_order() -> None:
    states = bytes(i % 5 for i in range(300))
    async with driven(view=idle_view(kv=kv_view(300, states=states))) as console:
        block_map = console.main.query_one(BlockMap)
        drawn = "".join(block_map.render_line(y).text for y in range(block_map.size.height))
        assert drawn.rstrip() == "".join(GLYPHS[BlockState(state)] for state in states)


async def test_more_blocks_than_cells_are_grouped_and_it_says_so() -> None:
    async with driven(view=idle_view(kv=kv_view(45_000))) as console:
        block_map = console.main.query_one(BlockMap)
        width, height = block_map.size
        group = block_map.blocks_per_cell
        assert (group - 1) * width * height < 45_000 <= group * width * height
        assert f"1 cell = {group} blocks" in console.screen_text()
        assert "/ 45,000" in console.screen_text()


async def test_only_rows_with_a_changed_block_are_painted() -> None:
    async with driven(size=(200, 50), view=recorded_view()) as console:
        block_map = console.main.query_one(BlockMap)
        width = block_map.size.width
        states = bytearray(kv_view().states)
        states[3 * width + 5] ^= 1
        states[7 * width] = 2
        rendered: list[int] = []
        original = block_map.render_line
        block_map.render_line = lambda y: (rendered.append(y), original(y))[1]  # type: ignore[method-assign]
        before = block_map.painted_rows
        console.engine.publish(kv=kv_view(states=bytes(states)))
        await console.tick(3)
        assert block_map.painted_rows - before == 2
        assert sorted(set(rendered)) == [3, 7]


async def test_a_view_with_the_same_states_paints_nothing() -> None:
    async with driven(view=recorded_view()) as console:
        block_map = console.main.query_one(BlockMap)
        before = block_map.painted_rows
        for _ in range(5):
            console.engine.publish(kv=kv_view())
            await console.tick(3)
        assert block_map.painted_rows == before


async def test_an_idle_console_paints_nothing_at_all() -> None:
    async with driven(view=recorded_view()) as console:
        await console.tick(20)
        painted: list[object] = []
        display = console.app._display
        console.app._display = lambda screen, renderable: (painted.append(renderable), display(screen, renderable))[1]  # type: ignore[method-assign]
        for _ in range(10):
            console.engine.publish()  # a new view in which nothing changed
            await console.tick()
        assert [renderable for renderable in painted if renderable is not None] == []
        console.engine.publish(step=18_205)
        await console.tick()
        assert painted  # the control: a change is painted


async def test_the_map_is_drawn_at_most_four_times_a_second() -> None:
    async with driven(view=recorded_view()) as console:
        pane = console.main.query_one(KvPane)
        block_map = console.main.query_one(BlockMap)
        shown: list[float] = []
        original = block_map.show
        block_map.show = lambda kv: (shown.append(console.now), original(kv))[1]  # type: ignore[method-assign]
        for i in range(30):
            console.engine.publish(kv=kv_view(states=bytes((i + j) % 5 for j in range(1024))))
            await console.tick()
        assert 6 <= len(shown) <= 12
        assert min(b - a for a, b in itertools.pairwise(shown)) > 0.249
        await console.tick(3)
        assert pane._drawn is console.engine.view.kv  # the last picture isn't lost to the limit


@pytest.mark.parametrize("num_blocks", [45_000])
async def test_a_large_map_is_updated_within_its_budget(num_blocks: int) -> None:
    async with driven(size=(200, 50), view=idle_view(kv=kv_view(num_blocks))) as console:
        block_map = console.main.query_one(BlockMap)
        states = bytearray(console.engine.view.kv.states)  # type: ignore[union-attr]
        spent = []
        for i in range(20):
            for j in range(64):  # what a busy step touches
                states[(i * 64 + j) * 7 % num_blocks] = 1 + (i + j) % 3
            kv = kv_view(64)
            changed = type(kv)(num_blocks, 16, 46_080, bytes(states), kv.refs, kv.owners, kv.touched_steps, 0, 0, 0, 0)
            start = time.perf_counter()
            block_map.show(changed)
            spent.append(time.perf_counter() - start)
        assert sorted(spent)[10] < 0.02, f"median {sorted(spent)[10] * 1000:.1f} ms"
