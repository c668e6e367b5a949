"""The console's app: one timer that drains the engine into the screen; and how it is run and left.

Leaving is in a fixed order: Textual restores the terminal, then the engine is closed, then descriptors point back. A
signal asks for the same; if that takes too long (a blocked terminal, a step that won't end) the terminal is restored
by main force and the process ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, TextIO

from rich.segment import Segment
from textual.app import App
from textual.binding import BindingType
from textual.color import Color
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.screen import Screen

from console import keys
from console.bridge import Bridge, EngineLike
from console.driver import ConsoleDriver
from console.palette import ActionProvider
from console.sanitise import one_line, sanitise
from console.screens.main import MainScreen
from console.terminal import Terminal, log_path
from engine.config import EngineConfig
from themes import DARK, LIGHT, THEMES

TICK_S = 0.1
"""The console draws at most ten times a second."""

CLOSE_WITHIN_S = 0.6
"""How long leaving waits for the engine thread."""
SIGNAL_DEADLINE_S = 3.0

log = logging.getLogger(__name__)


class _LastGate(LineFilter):
    """Whatever a widget draws, no control character leaves in its text: the boundary's second lock."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(segment.text.isprintable() for segment in segments):
            return segments
        return [
            segment if segment.control or segment.text.isprintable() else Segment(sanitise(segment.text), segment.style)
            for segment in segments
        ]


class ConsoleApp(App[int]):
    """The console around one engine. `clock` and `tick_s=None` (no timer: `tick()` is called by hand) are for tests."""

    TITLE = "footplate"
    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("app")
    COMMANDS: ClassVar = {ActionProvider}
    COMMAND_PALETTE_BINDING = "ctrl+p"

    def __init__(
        self,
        engine: EngineLike,
        *,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float | None = TICK_S,
    ) -> None:
        super().__init__(driver_class=ConsoleDriver if terminal is not None else None)
        self.terminal = terminal
        self.bridge = Bridge(engine)
        self._clock = clock
        self._tick_s = tick_s
        self._has_loaded = False
        self.animation_level = "none"
        self.loop: asyncio.AbstractEventLoop | None = None
        self._main = MainScreen(self.bridge)
        self._filters.append(_LastGate())
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK.name

    @property
    def main(self) -> MainScreen:
        """The main screen, whatever stands over it."""
        return self._main

    def get_default_screen(self) -> Screen[Any]:
        return self._main

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our colour variables, for themes that don't have them."""
        return dict((DARK if self.current_theme.dark else LIGHT).variables)

    def on_ready(self) -> None:
        """Start the engine, now that the first frame is on its way, and the one timer."""
        self.loop = asyncio.get_running_loop()
        self.bridge.start()
        if self._tick_s is not None:
            self.set_interval(self._tick_s, self.tick)

    def tick(self) -> None:
        """Drain the engine and draw what changed."""
        now = self._clock()
        self.bridge.tick(now)
        if self.terminal is not None and not self._has_loaded and self.bridge.view.state != "loading":
            self._has_loaded = True
            gc.freeze()  # what torch and the model made stays; collections that visit it hold decode up by tenths of a second
        if self._main.is_mounted:
            self._main.show(self.bridge.view, now)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a note; its text is never markup, whoever wrote it."""
        super().notify(sanitise(message), title=sanitise(title), severity=severity, timeout=timeout, markup=False)

    async def action_quit(self) -> None:
        """Leave, in order."""
        self.exit(0)

    def action_help_quit(self) -> None:
        """Someone pressed ^c to leave."""
        self.notify("^q quits; esc stops an answer.")

    def key_of(self, binding_id: str) -> str:
        """The key an action has now: the keymap's, or the default."""
        return self._keymap.get(binding_id) or keys.BY_ID[binding_id].keys


def run_console(config: EngineConfig) -> int:
    """Run the console on an engine with `config`; the exit code: 0 left in order, 1 the engine or the console failed,
    128 + n ended by signal n. Raises `FootplateError` where there is no terminal."""
    from engine.engine import Engine

    return run_on(Engine(config))


def run_on(engine: EngineLike) -> int:
    """Run the console on an engine that hasn't been started; the exit code, as of `run_console`."""
    with Terminal() as terminal:
        _send_log_to(sys.stderr)
        app = ConsoleApp(engine, terminal=terminal)
        with _Signals(app, terminal):
            result = app.run()
        crashed = result is None  # whoever leaves in order leaves with a code
        closed = _close_in_time(app.bridge, CLOSE_WITHIN_S)
    view = engine.view
    code = result if result is not None else int(crashed or view.state == "failed")
    if crashed:
        print(f"footplate: the console met an error of its own; {log_path()} holds the details.", file=sys.stderr)
    elif view.state == "failed":
        print(f"footplate: engine stopped: {one_line(view.error or 'no reason was given.')}", file=sys.stderr)
    gc.freeze()  # or the interpreter's last collection visits every object torch has made, for half a second
    if not closed:
        # The engine thread is inside a call that can't be interrupted; the interpreter's own end would wait for it or crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _Signals:
    """Turns SIGTERM, SIGHUP and SIGINT into an orderly end, with a deadline."""

    NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def __init__(self, app: ConsoleApp, terminal: Terminal) -> None:
        self._app = app
        self._terminal = terminal
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> None:
        for number in self.NUMBERS:
            self._before[number] = signal.signal(number, self._end)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _end(self, number: int, frame: object) -> None:
        code = 128 + number
        threading.Thread(target=self._insist, args=(code,), name="footplate-deadline", daemon=True).start()
        loop = self._app.loop
        if loop is not None:
            loop.call_soon_threadsafe(self._app.exit, code)

    def _insist(self, code: int) -> None:
        time.sleep(SIGNAL_DEADLINE_S)
        self._terminal.restore()
        os._exit(code)


def _close_in_time(bridge: Bridge, timeout_s: float) -> bool:
    """Close the engine; whether it was done in time. On a thread of its own: closing while torch is imported waits for it."""
    closer = threading.Thread(target=bridge.close, args=(timeout_s,), name="footplate-close", daemon=True)
    closer.start()
    closer.join(timeout_s)
    return not any(thread.is_alive() for thread in threading.enumerate() if thread is closer or thread.name == "footplate-engine")


def _send_log_to(stream: TextIO) -> None:
    logging.basicConfig(stream=stream, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
