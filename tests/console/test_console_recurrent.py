"""The recurrent-state pane: there for a hybrid model and for no other, with every figure of the view in it."""

from __future__ import annotations

import dataclasses

import pytest
from driving import Driven
from scripted_engine import ScriptedEngine, idle_view, recorded_view
from test_console_snapshots import Snap, taken, talk

from console.panes.recurrent import RecurrentPane
from engine.view import EngineView, SsmView

STATE = SsmView(
    num_live=2,
    max_live=8,
    ring_entries=2,
    draft_rows=3,
    num_snapshots=5,
    max_snapshots=16,
    slot_bytes=3 * 2**20,
    num_hits=7,
    num_lookups=9,
)


def hybrid_view(view: EngineView) -> EngineView:
    """`view` of a hybrid model: its requests matched further in KV than a snapshot made usable."""
    note = "the KV blocks match 320 tokens, but the last state snapshot on their way is at 256"
    requests = tuple(
        dataclasses.replace(each, prompt_tokens=400, kv_matched_tokens=320, cached_tokens=256, cache_note=note)
        for each in view.requests
    )
    return dataclasses.replace(view, ssm=STATE, requests=requests)


@pytest.mark.parametrize("size", [(120, 40), (200, 50)], ids=["120x40", "200x50"])
def test_a_hybrid_model_beside_the_chat(snap_compare: Snap, size: tuple[int, int]) -> None:
    async def scene(console: Driven) -> None:
        await talk(console)
        console.engine.publish(hybrid_view(recorded_view()))
        await console.tick(4)

    assert taken(snap_compare, hybrid_view(idle_view()), size, scene)


def test_recurrent_state_as_a_tab(snap_compare: Snap) -> None:
    async def choose(console: Driven) -> None:
        await console.press("escape", "3")

    assert taken(snap_compare, hybrid_view(recorded_view()), (80, 24), choose)


async def test_every_figure_of_the_pool_is_on_the_screen() -> None:
    console = Driven(ScriptedEngine(hybrid_view(recorded_view())))
    async with console.app.run_test(size=(140, 44)) as pilot:
        console.pilot = pilot
        await console.tick(3)
        pane = console.app.main.query_one(RecurrentPane)
        assert pane.figure == "live 2/8 · draft 6/24 · ring 4 · snap 5/16 · 31 %"
        text = pane.query_one("#recurrent-rows").plain  # type: ignore[attr-defined]  # Rows
        assert "hits 7/9 · 78 %" in text and "15.0 MiB in snapshots · 3.00 MiB a slot" in text
        assert "320" in text and "256" in text and "but the last state snapshot on their way" in " ".join(text.split())


async def test_a_model_without_recurrent_layers_has_no_such_pane_and_key_3_says_so() -> None:
    console = Driven(ScriptedEngine(recorded_view()))
    async with console.app.run_test(size=(140, 44)) as pilot:
        console.pilot = pilot
        await console.tick(3)
        assert not console.app.main.query_one(RecurrentPane).display
        await console.press("escape", "3")
        assert "no recurrent layers" in " ".join(note.message for note in console.app._notifications)
        assert console.app.main.unavailable("pane.recurrent") == "This model has no recurrent layers."
        console.engine.publish(hybrid_view(recorded_view()))
        await console.tick(3)
        assert console.app.main.query_one(RecurrentPane).display
