"""Drives a ConsoleApp on a scripted engine by hand: no timer, a clock that moves when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripted_engine import ScriptedEngine, idle_view
from textual.pilot import Pilot

from console.app import ConsoleApp
from console.panes.chats import ChatsPane
from console.screens.main import MainScreen
from console.widgets.answer import AnswerText
from console.widgets.prompt import Prompt
from engine.view import EngineView


class Driven:
    """An app under test."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.now = 100.0
        self.app = ConsoleApp(engine, clock=lambda: self.now, tick_s=None)
        self.pilot: Pilot[int]

    @property
    def main(self) -> MainScreen:
        return self.app.main

    @property
    def chats(self) -> ChatsPane:
        return self.main.chats

    @property
    def prompt(self) -> Prompt:
        return self.main.query_one(Prompt)

    async def tick(self, times: int = 1, step_s: float = 0.1) -> None:
        """Let so many ticks pass, and everything they started settle."""
        for _ in range(times):
            self.now += step_s
            self.app.tick()
            await self.pilot.pause()
            for answer in self.main.query(AnswerText):
                await answer.settled()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.tick()

    async def ask(self, prompt: str = "Write a poem.") -> None:
        """Send a prompt and wait until the engine has it."""
        before = len(self.engine.requests)
        self.chats.send(prompt)
        await self.until_submitted(before + 1)

    async def until_submitted(self, number: int) -> None:
        for _ in range(200):
            if len(self.engine.requests) >= number:
                break
            await asyncio.sleep(0.005)
        assert len(self.engine.requests) == number
        await self.tick(2)

    def screen_text(self) -> str:
        """What a person would read, line by line."""
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())


@asynccontextmanager
async def driven(size: tuple[int, int] = (120, 40), view: EngineView | None = None) -> AsyncIterator[Driven]:
    """A running console; the engine is idle unless another view is given."""
    driven = Driven(ScriptedEngine(view if view is not None else idle_view()))
    async with driven.app.run_test(size=size, notifications=True, tooltips=True) as pilot:
        driven.pilot = pilot
        await driven.tick(2)
        yield driven
