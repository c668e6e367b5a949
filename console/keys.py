"""Every key of the console, once: its binding id (what a keymap names), its default keys, its action and its words.

Screens and panes take their bindings from here, the key bar and the command palette their order and wording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding, BindingType

Scope = Literal["app", "main", "prompt", "map", "engine", "help"]


@dataclass(frozen=True, slots=True)
class Key:
    """One bindable action. `keys`: comma-separated defaults; `label`: one or two words for the key bar ("" keeps it off the
    bar); `what`: a sentence for help and palette. `priority`: acts even while the prompt has the focus and would use the
    key itself."""

    id: str
    keys: str
    action: str
    label: str
    what: str
    scope: Scope
    priority: bool = False
    in_palette: bool = True


KEYS: tuple[Key, ...] = (
    Key("prompt.send", "enter", "send", "send", "Send the prompt.", "prompt", in_palette=False),
    Key(
        "prompt.newline",
        "ctrl+j,shift+enter,alt+enter,ctrl+enter",
        "newline",
        "newline",
        "Begin a new line in the prompt; ^j works in every terminal, shift+enter in those that can tell it from enter.",
        "prompt",
        in_palette=False,
    ),
    Key("app.help", "f1", "help", "help", "Explain the focused pane: its figures and its keys.", "main", priority=True),
    Key("app.palette", "ctrl+p", "app.command_palette", "palette", "Find any action by name.", "app", priority=True, in_palette=False),
    Key("answer.stop", "escape", "stop", "stop", "Stop the answer; when nothing runs, leave the prompt or come back to it.", "main"),
    Key("pane.next", "tab", "focus_pane_by(1)", "pane", "Focus the next pane.", "main", priority=True, in_palette=False),
    Key("pane.previous", "shift+tab", "focus_pane_by(-1)", "", "Focus the previous pane.", "main", priority=True, in_palette=False),
    Key("chat.new", "ctrl+n", "new_chat", "new", "Begin a new conversation; the one on the screen is cleared.", "main", priority=True),
    Key("chat.regenerate", "ctrl+r", "regenerate", "again", "Answer the last prompt again; the old answer is dropped.", "main", priority=True),
    Key("chat.copy", "ctrl+y", "copy_answer", "copy", "Copy the last answer to the clipboard, and to a file.", "main", priority=True),
    Key("pane.maximise", "m", "maximise", "maximise", "Give the focused pane the whole screen, or give it back.", "main"),
    Key("request.cancel", "x", "cancel_request", "cancel", "Cancel the request selected in the engine pane.", "main"),
    Key("pane.chats", "1", "focus_pane('chats')", "", "Focus the chat.", "main"),
    Key("pane.kv", "2", "focus_pane('kv')", "", "Focus the map of KV blocks.", "main"),
    Key("pane.memory", "6", "focus_pane('memory')", "", "Focus the memory breakdown.", "main"),
    Key("pane.engine", "7", "focus_pane('engine')", "", "Focus the engine's figures and requests.", "main"),
    Key("map.left", "left", "move_cursor(-1, 0)", "", "Move the block cursor left.", "map", in_palette=False),
    Key("map.right", "right", "move_cursor(1, 0)", "", "Move the block cursor right.", "map", in_palette=False),
    Key("map.up", "up", "move_cursor(0, -1)", "", "Move the block cursor up.", "map", in_palette=False),
    Key("map.down", "down", "move_cursor(0, 1)", "", "Move the block cursor down.", "map", in_palette=False),
    Key("map.first", "home", "cursor_to_end(False)", "", "Move the block cursor to the first block.", "map", in_palette=False),
    Key("map.last", "end", "cursor_to_end(True)", "", "Move the block cursor to the last block.", "map", in_palette=False),
    Key("engine.up", "up", "select(-1)", "", "Select the request above.", "engine", in_palette=False),
    Key("engine.down", "down", "select(1)", "", "Select the request below.", "engine", in_palette=False),
    Key("help.close", "escape,f1,q", "dismiss", "close", "Close the help.", "help", in_palette=False),
    Key("app.quit", "ctrl+q", "app.quit", "quit", "Quit; running answers are ended.", "app", priority=True),
)
BY_ID = {key.id: key for key in KEYS}
ORDER = {key.id: position for position, key in enumerate(KEYS)}
_SHORT = {"escape": "esc", "enter": "enter", "left": "←", "right": "→", "up": "↑", "down": "↓"}


def bindings(scope: Scope) -> list[BindingType]:
    """The bindings of one scope, for a class's `BINDINGS`."""
    return [
        Binding(key.keys, key.action, key.label or key.what, show=bool(key.label), priority=key.priority, tooltip=key.what, id=key.id)
        for key in KEYS
        if key.scope == scope
    ]


def key_text(key: str) -> str:
    """How a key is written: `^p`, `esc`, `F1`, `shift+tab`."""
    first = key.split(",")[0]
    if first.startswith("ctrl+") and len(first) == 6:
        return f"^{first[-1]}"
    if len(first) > 1 and first[0] == "f" and first[1:].isdigit():
        return first.upper()
    return _SHORT.get(first, first)
