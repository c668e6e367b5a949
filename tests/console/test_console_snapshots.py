"""Pictures of the main screen, compared as SVG: recorded views, a fixed clock, no times, paths or versions in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from driving import Driven
from scripted_engine import ScriptedEngine, idle_view, loading_view, recorded_view
from textual.pilot import Pilot

from engine.view import EngineView

ANSWER = """\
In the heart of the sea, a keeper stands **alone**,
with a lamp and `code`.

- one
- two

```python
for i in range(3):
    print(i)
```
"""
Snap = Callable[..., bool]
Scene = Callable[[Driven], Awaitable[None]]


async def talk(console: Driven) -> None:
    """One finished answer and one under way."""
    await console.ask("Write a short poem about a lighthouse keeper.")
    console.engine.say(ANSWER)
    console.engine.end()
    await console.tick(3)
    await console.ask("Again, [b]with[/b] rhyme\nand twice as long.")
    console.engine.say("Sure, ", "here it is:")
    console.engine.publish(recorded_view())
    await console.tick(4)


def taken(snap_compare: Snap, view: EngineView, size: tuple[int, int], scene: Scene) -> bool:
    """Whether the picture of `scene` is the committed one."""
    console = Driven(ScriptedEngine(view))

    async def play(pilot: Pilot[int]) -> None:
        console.pilot = pilot
        await console.tick(2)
        await scene(console)
        await asyncio.sleep(0.05)
        await console.tick(3)

    return snap_compare(console.app, terminal_size=size, run_before=play)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=["80x24", "120x40", "200x50"])
def test_the_chat_beside_its_instruments(snap_compare: Snap, size: tuple[int, int]) -> None:
    assert taken(snap_compare, idle_view(), size, talk)


def test_loading(snap_compare: Snap) -> None:
    async def nothing(console: Driven) -> None:
        pass

    assert taken(snap_compare, loading_view(), (120, 40), nothing)


@pytest.mark.parametrize("key", ["2", "6", "7"], ids=["kv", "memory", "engine"])
def test_an_instrument_as_a_tab(snap_compare: Snap, key: str) -> None:
    async def choose(console: Driven) -> None:
        await console.press("escape", key)

    assert taken(snap_compare, recorded_view(), (80, 24), choose)


def test_a_stopped_engine(snap_compare: Snap) -> None:
    async def fail(console: Driven) -> None:
        await console.ask("hello")
        console.engine.say("half an ans")
        await console.tick()
        console.engine.publish(state="failed", error="CUDA error: an illegal memory access was encountered; restart footplate.")
        await console.tick(10)

    assert taken(snap_compare, idle_view(), (80, 24), fail)


def test_help(snap_compare: Snap) -> None:
    async def ask_for_help(console: Driven) -> None:
        await console.press("escape", "2", "f1")

    assert taken(snap_compare, recorded_view(), (120, 40), ask_for_help)


def test_the_light_theme(snap_compare: Snap) -> None:
    async def lighten(console: Driven) -> None:
        console.app.theme = "footplate-light"
        await talk(console)

    assert taken(snap_compare, idle_view(), (120, 40), lighten)
