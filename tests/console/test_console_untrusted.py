"""Text nobody vouches for: brackets are never markup, control sequences never reach the terminal, and no word is lost."""

from __future__ import annotations

import dataclasses
import random
import re

from driving import Driven, driven
from rich.console import RenderableType
from scripted_engine import idle_view, recorded_view
from textual._compositor import CompositorUpdate
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.events import Paste
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Tooltip

from console.panes.chats import TurnView
from console.widgets.answer import AnswerText
from engine.view import EventView, LoadProgress, MemoryItem, RequestView

BRACKETS = [  # [textual#5581], [textual#6155]
    "[/",
    "[00]",
    "[b + x",
    '["a", [1, 2], {"b": "]"}]',
    "[red]x[/red]",
    "[/nothing]",
    "[@click=app.quit]x[/]",
    "\\[b]",
    "[bold",
]
PAYLOADS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIC8K\x07",
    "title": "\x1b]0;owned\x1b\\",
    "clear": "\x1b[2J\x1b[1;1H",
    "eight-bit": "\x9d0;owned\x9c\x9b2J",
    "kitty graphics": "\x1b_Ga=T,f=100;AAAA\x1b\\",
    "unterminated": "\x1b]0;owned",
}
REVEALING = re.compile("cm0gLXJm|owned|\x1b\\[2J\x1b\\[1;1H|Ga=T|[\x9b\x9d\x90]")


def hostile_view(text: str) -> dict[str, object]:
    """A view with `text` in every place that takes text from outside."""
    view = recorded_view()
    assert view.model is not None and view.forward is not None and view.memory is not None
    return {
        "model": dataclasses.replace(view.model, name=text, family=text, device=text, dtype=text, weight_format=text),
        "forward": dataclasses.replace(view.forward, name=text, digest=text),
        "memory": dataclasses.replace(view.memory, items=(MemoryItem(text, view.memory.total_bytes),)),
        "requests": (RequestView(7, text, "decode", 140, 96, 140, 41, 256, 12, 0.0, text),),
        "events": (EventView(1, 0.0, text, text),),
    }


class Written:
    """Everything the app would have written to its terminal: what a driver that isn't headless gets."""

    def __init__(self, console: Driven) -> None:
        self.text = ""
        self._app = console.app
        self._display = console.app._display
        console.app._display = self._collect  # type: ignore[method-assign]

    def _collect(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        if isinstance(renderable, CompositorUpdate):
            self.text += renderable.render_segments(self._app.console)
        self._display(screen, renderable)


async def test_brackets_are_shown_as_they_are_everywhere() -> None:
    async with driven(view=idle_view()) as console:
        for number, text in enumerate(BRACKETS, 1):
            console.prompt.post_message(Paste(text))
            await console.pilot.press("enter")
            await console.until_submitted(number)
            assert console.engine.submitted[-1]["messages"][-1]["content"] == text
            console.engine.say(f"answer {text} end")
            console.engine.end("error", error=f"failed {text} end")
            console.engine.publish(**hostile_view(text))
            console.app.notify(f"note {text} end", title=text, severity="error")
            await console.tick(2)
            shown = console.screen_text()
            assert shown.count(text) >= 6, text
            assert f"note {text} end" in shown
            await console.chats.new_chat()
        console.engine.publish(state="failed", error="why " + "".join(BRACKETS))
        await console.tick(2)
        assert "why [/[00][b + x" in console.screen_text()
        for key in ("escape", "2", "right", "7", "f1"):
            await console.press(key)


async def test_control_sequences_never_reach_the_terminal() -> None:
    async with driven(view=idle_view()) as console:
        written = Written(console)
        for number, payload in enumerate(PAYLOADS.values(), 1):
            text = f"be{payload}\nfore"
            console.prompt.post_message(Paste(text))
            await console.pilot.press("enter")
            await console.until_submitted(number)
            console.engine.say(*text)
            await console.tick()
            for char in text:  # split at every point there is
                console.engine.say(char)
                console.app.bridge.tick(console.now)
                console.main.query_one(TurnView).advance()
            console.engine.say(f"```{payload}\n{payload}\n```\n| {payload} |\n|---|\n| {payload} |\n")
            console.engine.end("error", error=text)
            console.engine.publish(**hostile_view(text))
            console.app.notify(text, title=text)
            await console.tick(2)
            await console.chats.new_chat()
        console.engine.publish(state="failed", error=text)
        await console.tick(2)
        console.engine.publish(state="loading", model=None, loading=LoadProgress(text, 1, 2))
        await console.tick(2)
        assert "fore" in written.text
        assert REVEALING.search(written.text) is None


async def test_character_references_cannot_smuggle_invisible_characters() -> None:
    async with driven() as console:
        written = Written(console)
        await console.ask()
        console.engine.say("user&#x202e;txt.exe &#8203;&#x2066;&#xfeff; `&#x202e;` &#27;[2J")
        await console.tick(2)
        assert "usertxt.exe" in written.text
        assert not set(written.text) & set("\u202e\u200b\u2066\ufeff")
        assert "\x1b[2J" not in written.text.split("usertxt")[1][:200]


async def test_what_a_widget_lets_through_is_stopped_at_the_last_gate() -> None:
    from textual.content import Content
    from textual.widgets import Static

    async with driven() as console:
        written = Written(console)
        await console.main.mount(Static(Content("gate\x1b]0;owned\x1b\\\u202eopen"), markup=False), before="#header")
        await console.tick(2)
        assert "gateopen" in written.text
        assert "owned" not in written.text


async def test_links_show_where_they_lead_and_open_nothing() -> None:
    async with driven() as console:
        await console.ask()
        console.engine.say("[the docs](https://evil.example/) <https://a.example> [f](file:///etc/passwd)")
        await console.tick(2)
        assert "the docs (https://evil.example/) https://a.example" in console.screen_text()
        metas = [
            segment.style.meta for strip in console.app.screen._compositor.render_strips() for segment in strip if segment.style
        ]
        assert not any("link(" in str(meta.get("@click", "")) for meta in metas)


async def test_a_table_can_be_hovered_over_whatever_its_cells_hold() -> None:
    async with driven() as console:
        console.app.TOOLTIP_DELAY = 0.01
        await console.ask()
        console.engine.say("| a[/ | b |\n|---|---|\n| [/c] | [b + x |\n")
        await console.tick(2)
        for cell in console.main.query("MarkdownTableContent > *"):
            await console.pilot.hover(cell)
            await console.pilot.pause(0.1)
        tooltip = console.main.query_one(Tooltip)
        assert tooltip.display
        assert "[b + x" in console.screen_text()


class _Page(App[None]):
    def compose(self) -> ComposeResult:
        yield VerticalScroll(id="page")


def _visible(widget: Widget) -> str:
    leaves = [child for child in widget.walk_children(Widget) if not child.children]
    return "\n".join(getattr(leaf.render(), "plain", "") for leaf in leaves)


MARKS = [
    *(
        "# ",
        "## ",
        "- ",
        "* ",
        "1. ",
        "2) ",
        "> ",
        "```\n",
        "```py\n",
        "~~~\n",
        "\n",
        "\n\n",
        "  ",
        "    ",
        "\t",
        "**",
        "*",
        "_",
        "`",
        "``",
        "~~",
    ),
    *(
        "[",
        "](",
        "]",
        "![",
        "](x)",
        "<div>",
        "</div>",
        "<!-- ",
        "&amp;",
        "\\",
        "\n---\n",
        "\n===\n",
        "[/",
        "[red]",
        '[x]: http://e "t"\n',
    ),
    *("- [ ] ", "$", "\u2028", "\x85", "{", ">" * 30, "- " * 30, "\\\n", "日本語", "❤️", "\x1b[31m", "\x1b]0;t\x07"),
]


async def test_no_word_of_an_answer_is_lost_however_it_is_marked_up_or_cut() -> None:
    app = _Page()
    async with app.run_test(size=(80, 30)):
        page = app.query_one("#page")
        for seed in range(20):
            rnd = random.Random(seed)
            words = [f"w{i}w" for i in range(rnd.randint(3, 25))]
            source = "".join(word + " " + rnd.choice(MARKS) for word in words)
            answer = AnswerText()
            await page.mount(answer)
            at = 0
            while at < len(source):
                size = rnd.randint(1, 9)
                answer.push(source[at : at + size])
                await answer.settled()
                at += size
            shown = _visible(answer)
            assert [word for word in words if word not in shown] == [], (seed, source)
            await page.remove_children()


async def test_a_fault_of_the_markdown_widget_costs_no_text() -> None:
    async with driven() as console:
        await console.ask()
        answer = console.main.query_one(AnswerText)

        def broken(text: str) -> object:
            raise ValueError("markdown broke")

        answer.append = broken  # type: ignore[method-assign, assignment]
        console.engine.say("plain words ")
        await console.tick()
        console.engine.say("go on")
        await console.tick(3)
        assert "plain words go on" in console.screen_text()
