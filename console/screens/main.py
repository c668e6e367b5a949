"""The main screen: where the panes stand at each size, which one has the focus, and what its keys do."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Tooltip

from console import keys
from console.bridge import Bridge
from console.clipboard import save_copy
from console.panes.chats import ChatsPane
from console.panes.engine import EnginePane
from console.panes.events import EventsPane
from console.panes.kv_blocks import KvPane
from console.panes.memory import MemoryPane
from console.panes.pane import Pane
from console.panes.recurrent import RecurrentPane
from console.screens.help import HelpScreen
from console.widgets.bars import HeaderBar, KeyBar, Tab, TabBar, active_keys
from console.widgets.figures import count
from engine.view import EngineView

SIDE_BY_SIDE = (100, 28)
"""The smallest size in cells at which instruments stand beside the chat; below it the panes are tabs."""
TWO_COLUMNS = 160
"""The width from which the instruments themselves have two columns."""
TALL = 20
"""The height from which the events have more than nothing."""


class MainScreen(Screen[None]):
    """Chat and instruments. `show` hands each view to the panes; each repaints only what changed."""

    BINDINGS: ClassVar = keys.bindings("main")
    ESCAPE_TO_MINIMIZE = False
    AUTO_FOCUS = "#prompt"

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self._bridge = bridge
        self._maximised = False
        self.chats = ChatsPane(bridge, id="chats")
        self.engine = EnginePane(id="engine")
        self._recurrent = RecurrentPane(id="recurrent")
        self._has_state = False
        self._every: tuple[Pane, ...] = (self.chats, KvPane(id="kv"), self._recurrent, MemoryPane(id="memory"), self.engine)
        self._current: Pane = self.chats
        self._events = EventsPane(lambda: bridge.tickets, id="events")
        self._header = HeaderBar(id="header")
        self._tabs = TabBar(self._tab_list, id="tabs")
        self._keys = KeyBar(self.unavailable, id="keys")

    def compose(self) -> ComposeResult:
        yield self._header
        yield self._tabs
        with Container(id="panes"):
            yield self.chats
            with Container(id="instruments"):
                yield from self._every[1:]
        yield self._events
        yield self._keys

    @property
    def panes(self) -> tuple[Pane, ...]:
        """The panes this model has use for: recurrent state is a hybrid model's."""
        return tuple(pane for pane in self._every if pane is not self._recurrent or self._has_state)

    # -- drawing

    def show(self, view: EngineView, now: float) -> None:
        """Draw `view` at the console's time `now`."""
        if (view.ssm is not None) != self._has_state:
            self._has_state = view.ssm is not None
            self._arrange()
        self._header.show(view)
        for pane in (*self.panes, self._events):
            if pane.display and pane.is_mounted:
                pane.show(view, now)
        self._tabs.redraw()
        self._keys.redraw()

    def on_mount(self) -> None:
        for tooltip in self.query(Tooltip):
            tooltip._render_markup = False  # the Markdown widget makes tooltips of what a model wrote into a table
        self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def on_descendant_focus(self) -> None:
        focused = self.focused
        pane = next((node for node in focused.ancestors if isinstance(node, Pane)), None) if focused is not None else None
        if pane in self.panes and pane is not self._current:
            self._choose(pane)
        self._keys.redraw()

    @property
    def tabbed(self) -> bool:
        """Whether the panes are tabs at this size."""
        width, height = self.size
        return width < SIDE_BY_SIDE[0] or height < SIDE_BY_SIDE[1]

    def _choose(self, pane: Pane) -> None:
        self._current = pane
        self._arrange()

    def _arrange(self) -> None:
        width, height = self.size
        alone = self.tabbed or self._maximised
        self.set_class(alone, "-alone")
        self.set_class(width >= TWO_COLUMNS and not alone, "-two-columns")
        self._tabs.display = self.tabbed and not self._maximised and height > 3
        self._header.display = height > 4
        self._keys.display = height > 5
        self._events.display = height >= TALL and not (self._maximised and self.tabbed)
        self._events.set_class(self.tabbed, "-flat")
        self.set_class(self._has_state, "-hybrid")
        for pane in self._every:
            pane.display = pane in self.panes and (not alone or pane is self._current)
            pane.set_class(self.tabbed and not self._maximised, "-flat")
        self.query_one("#instruments").display = not alone or self._current is not self.chats
        self._tabs.redraw()

    def _tab_list(self) -> list[Tab]:
        return [Tab(pane.id or "", f"{pane.number} {pane.label}", pane is self._current, pane.figure_within) for pane in self.panes]

    # -- keys

    def unavailable(self, binding_id: str) -> str | None:
        """Why an action can't be done now, as a sentence; None when it can."""
        chats = self.chats
        if binding_id == "answer.stop" and chats.answering is None:
            return "No answer is under way."
        if binding_id == "chat.regenerate":
            if chats.answering is not None:
                return "An answer is under way: esc stops it."
            if chats.conversation.last is None:
                return "There is no prompt to answer again."
        if binding_id == "chat.copy" and not chats.last_answer_text:
            return "There is no answer to copy."
        if binding_id == "pane.recurrent" and not self._has_state:
            return "This model has no recurrent layers."
        if binding_id == "request.cancel" and self.engine.selected_request is None:
            return "No request is running or waiting."
        return None

    def _refused(self, binding_id: str) -> bool:
        reason = self.unavailable(binding_id)
        if reason is not None:
            self.notify(reason, severity="warning")
        return reason is not None

    def action_focus_pane(self, pane_id: str) -> None:
        """Show and focus a pane."""
        if pane_id == self._recurrent.id and self._refused("pane.recurrent"):
            return
        self._focus_pane(next(pane for pane in self.panes if pane.id == pane_id))

    def action_focus_pane_by(self, by: int) -> None:
        """Focus the next pane, or the one before."""
        self._focus_pane(self.panes[(self.panes.index(self._current) + by) % len(self.panes)])

    def _focus_pane(self, pane: Pane) -> None:
        self._choose(pane)
        target = pane.focus_target()
        if target is not None:
            target.focus()

    def action_maximise(self) -> None:
        """Give the current pane the whole screen, or give it back."""
        self._maximised = not self._maximised
        self._arrange()

    def action_stop(self) -> None:
        """Stop the answer; else undo what is in the way: a maximised pane, the focus elsewhere, the focus in the prompt."""
        if self.chats.stop_answer():
            return
        if self._maximised:
            self.action_maximise()
        elif self._current is not self.chats or self.focused is not self.chats.focus_target():
            self._focus_pane(self.chats)
        else:
            self.query_one("#transcript").focus()

    async def action_new_chat(self) -> None:
        """Begin a new conversation."""
        self._focus_pane(self.chats)
        await self.chats.new_chat()

    async def action_regenerate(self) -> None:
        """Answer the last prompt again."""
        if not self._refused("chat.regenerate"):
            await self.chats.regenerate()

    def action_copy_answer(self) -> None:
        """Copy the last answer: through the terminal (OSC 52), and to a file for terminals that don't take it."""
        if self._refused("chat.copy"):
            return
        text = self.chats.last_answer_text
        self.app.copy_to_clipboard(text)
        saved = save_copy(text)
        self.notify(f"Copied {count(len(text))} characters to the clipboard{saved}.")

    def action_cancel_request(self) -> None:
        """Cancel the request selected in the engine pane."""
        if self._refused("request.cancel"):
            return
        request = self.engine.selected_request
        if request is not None:
            outcome = self._bridge.cancel(request.request_id)
            if isinstance(outcome, str):
                self.notify(outcome, severity="error")
            self._events.redraw()

    def action_help(self) -> None:
        """Explain the current pane."""
        pane = self._current
        rows = [(keys.key_text(key), keys.BY_ID[binding_id].what) for binding_id, key, _ in active_keys(self)]
        self.app.push_screen(HelpScreen(f"{pane.number} {pane.label}", pane.explains, rows))
