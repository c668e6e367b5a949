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
    """One bindable action. `keys`: comma-separated defaults; `label`: a word for the key bar ("" keeps it off the bar);
    `name`: what the palette calls it ("" keeps it out); `what`: a sentence for the help. A `priority` key acts even while
    the prompt has the focus and would use the key itself."""

    id: str
    keys: str
    action: str
    scope: Scope
    label: str
    name: str
    what: str
    priority: bool = False


KEYS: tuple[Key, ...] = (
    Key("prompt.send", "enter", "send", "prompt", "send", "", "Send the prompt.", True),
    Key(
        "prompt.newline",
        "ctrl+j,shift+enter,alt+enter,ctrl+enter",
        "newline",
        "prompt",
        "newline",
        "",
        "Begin a new line. ^j works in every terminal; shift+enter in those that can tell it from enter.",
    ),
    Key("app.help", "f1", "help", "main", "help", "Help", "Explain the focused pane: its figures and its keys.", True),
    Key("app.palette", "ctrl+p", "command_palette", "app", "palette", "", "Find any action by name.", True),
    Key(
        "answer.stop",
        "escape",
        "stop",
        "main",
        "stop",
        "Stop the answer",
        "Stop the answer; else leave the prompt, or return to it.",
    ),
    Key("pane.next", "tab", "focus_pane_by(1)", "main", "pane", "", "Focus the next pane.", True),
    Key("pane.previous", "shift+tab", "focus_pane_by(-1)", "main", "", "", "Focus the previous pane.", True),
    Key("chat.new", "ctrl+n", "new_chat", "main", "new", "New conversation", "Clear the chat and begin a new conversation.", True),
    Key("chat.regenerate", "ctrl+r", "regenerate", "main", "again", "Answer again", "Answer the last prompt again in place.", True),
    Key(
        "chat.copy", "ctrl+y", "copy_answer", "main", "copy", "Copy the answer", "Copy the last answer to clipboard and file.", True
    ),
    Key(
        "pane.maximise",
        "m",
        "maximise",
        "main",
        "maximise",
        "Maximise the pane",
        "Give the pane the whole screen, or give it back.",
    ),
    Key(
        "request.cancel",
        "x",
        "cancel_request",
        "main",
        "cancel",
        "Cancel a request",
        "Cancel the request selected in the engine pane.",
    ),
    Key("pane.chats", "1", "focus_pane('chats')", "main", "", "Focus: chat", "Focus the chat."),
    Key("pane.kv", "2", "focus_pane('kv')", "main", "", "Focus: KV blocks", "Focus the map of KV blocks."),
    Key(
        "pane.recurrent",
        "3",
        "focus_pane('recurrent')",
        "main",
        "",
        "Focus: recurrent state",
        "Focus a hybrid model's recurrent state.",
    ),
    Key("pane.memory", "6", "focus_pane('memory')", "main", "", "Focus: memory", "Focus the memory breakdown."),
    Key("pane.engine", "7", "focus_pane('engine')", "main", "", "Focus: engine", "Focus the engine's figures and requests."),
    Key("map.left", "left", "move_cursor(-1, 0)", "map", "", "", "Move the block cursor left."),
    Key("map.right", "right", "move_cursor(1, 0)", "map", "", "", "Move the block cursor right."),
    Key("map.up", "up", "move_cursor(0, -1)", "map", "", "", "Move the block cursor up."),
    Key("map.down", "down", "move_cursor(0, 1)", "map", "", "", "Move the block cursor down."),
    Key("map.first", "home", "cursor_to_end(False)", "map", "", "", "Move the block cursor to the first block."),
    Key("map.last", "end", "cursor_to_end(True)", "map", "", "", "Move the block cursor to the last block."),
    Key("engine.up", "up", "select(-1)", "engine", "", "", "Select the request above."),
    Key("engine.down", "down", "select(1)", "engine", "", "", "Select the request below."),
    Key("help.close", "escape,f1,q", "dismiss", "help", "close", "", "Close the help."),
    Key("app.quit", "ctrl+q", "quit", "app", "quit", "Quit", "Quit; running answers are ended.", True),
)
BY_ID = {key.id: key for key in KEYS}
DISPENSABLE = (
    "prompt.newline",
    "prompt.send",
    "chat.regenerate",
    "chat.copy",
    "request.cancel",
    "chat.new",
    "pane.next",
    "pane.maximise",
    "app.palette",
    "answer.stop",
)
"""What leaves a key bar that is too long, first to last."""
ORDER = {key.id: position for position, key in enumerate(KEYS)}
_SHORT = {"escape": "esc", "enter": "enter", "left": "←", "right": "→", "up": "↑", "down": "↓"}


def bindings(scope: Scope) -> list[BindingType]:
    """The bindings of one scope, for a class's `BINDINGS`."""
    return [
        Binding(
            key.keys, key.action, key.label or key.what, show=bool(key.label), priority=key.priority, tooltip=key.what, id=key.id
        )
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
