"""Every binding does what the key bar says, and letters act only when the prompt hasn't the focus."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import driven
from scripted_engine import recorded_view
from textual.widgets import Static

from console import clipboard, keys
from console.screens.help import HelpScreen
from console.widgets.bars import KeyBar
from console.widgets.block_map import BlockMap


def test_binding_ids_are_unique_and_no_scope_binds_a_key_twice() -> None:
    assert len({key.id for key in keys.KEYS}) == len(keys.KEYS)
    for scope in {key.scope for key in keys.KEYS}:
        bound = [one for key in keys.KEYS if key.scope == scope for one in key.keys.split(",")]
        assert len(bound) == len(set(bound)), scope


async def test_enter_sends_and_empties_the_prompt() -> None:
    async with driven() as console:
        await console.press(*"hello", "enter")
        await console.until_submitted(1)
        assert console.engine.submitted[0]["messages"] == [{"role": "user", "content": "hello"}]
        assert console.prompt.text == ""


async def test_enter_on_an_empty_prompt_sends_nothing() -> None:
    async with driven() as console:
        await console.press("space", "enter")
        assert console.chats.conversation.turns == []


async def test_a_new_line_can_be_typed_in_every_terminal() -> None:
    async with driven() as console:
        await console.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d", "ctrl+enter", "e")
        assert console.prompt.text == "a\nb\nc\nd\ne"
        assert console.prompt.size.height == 5
        await console.press("enter")
        await console.until_submitted(1)
        assert console.engine.submitted[0]["messages"][0]["content"] == "a\nb\nc\nd\ne"


async def test_letters_and_digits_are_typed_while_the_prompt_has_the_focus() -> None:
    async with driven() as console:
        await console.press("m", "x", "1", "2", "6", "7", "q")
        assert console.prompt.text == "mx1267q"
        assert not console.main.has_class("-alone")


async def test_escape_stops_the_answer_and_what_came_stays() -> None:
    async with driven() as console:
        await console.ask()
        console.engine.say("As far as ", "it went")
        await console.tick()
        await console.press("escape")
        assert console.engine.cancelled == [console.engine.requests[0].request_id]
        assert "stopping" in console.screen_text()
        console.engine.end("cancelled")
        await console.tick(2)
        assert "As far as it went" in console.screen_text()
        assert "stopped" in console.screen_text()
        await console.ask("And then?")
        assert console.engine.submitted[1]["messages"][1]["content"] == "As far as it went"


async def test_escape_leaves_the_prompt_and_comes_back() -> None:
    async with driven() as console:
        await console.press("escape")
        assert not console.prompt.has_focus
        await console.press("2")
        assert console.main.query_one(BlockMap).has_focus
        await console.press("escape")
        assert console.prompt.has_focus


async def test_digits_and_tab_focus_the_panes_in_order() -> None:
    async with driven() as console:
        seen = []
        for key in ("escape", "7", "6", "2", "1"):
            await console.press(key)
            seen.append(next(pane.id for pane in console.main.panes if pane.is_focused))
        assert seen == ["chats", "engine", "memory", "kv", "chats"]
        seen = []
        for _ in range(4):
            await console.press("tab")
            seen.append(next(pane.id for pane in console.main.panes if pane.is_focused))
        assert seen == ["kv", "memory", "engine", "chats"]
        await console.press("shift+tab")
        assert next(pane.id for pane in console.main.panes if pane.is_focused) == "engine"


async def test_m_gives_a_pane_the_whole_screen_and_back() -> None:
    async with driven() as console:
        await console.press("escape", "2", "m")
        assert [pane.id for pane in console.main.panes if pane.display] == ["kv"]
        assert console.main.query_one(BlockMap).size.width == 118
        await console.press("m")
        assert [pane.id for pane in console.main.panes if pane.display] == ["chats", "kv", "memory", "engine"]
        await console.press("m", "escape")
        assert all(pane.display for pane in console.main.panes)


async def test_x_cancels_the_selected_request_and_the_ticket_shows_at_once() -> None:
    async with driven(view=recorded_view()) as console:
        await console.press("escape", "7", "up")
        console.engine.view  # noqa: B018  # no view is published between key and ticket
        await console.pilot.press("x")
        await console.pilot.pause()
        assert console.engine.cancelled == [7]
        assert "cancel request 7  queued" in console.screen_text()
        console.engine.tickets[0].settle("applied", 18_205)
        await console.tick()
        assert "cancel request 7  applied at step 18,205" in console.screen_text()
        await console.tick(times=1, step_s=6.0)
        assert "cancel request 7" not in console.screen_text()


async def test_x_without_a_request_says_why_not() -> None:
    async with driven() as console:
        await console.press("escape", "x")
        assert console.engine.cancelled == []
        assert "No request is running or waiting." in console.screen_text()


async def test_up_and_down_select_a_request() -> None:
    async with driven(view=recorded_view()) as console:
        await console.press("escape", "7")
        assert console.main.engine.selected_request is not None
        assert console.main.engine.selected_request.request_id == 8
        await console.press("up")
        assert console.main.engine.selected_request.request_id == 7
        await console.press("up")
        assert console.main.engine.selected_request.request_id == 7
        await console.press("down")
        assert console.main.engine.selected_request.request_id == 8


async def test_the_block_cursor_moves_and_names_its_block() -> None:
    async with driven(size=(200, 50), view=recorded_view()) as console:
        await console.press("escape", "2", "right", "right", "down")
        width = console.main.query_one(BlockMap).size.width
        assert f"block {2 + width:,} · " in console.screen_text()
        await console.press("up", "left")
        assert "block 1 · active · 1 ref · request 7 lighthouse keeper · step 18,190" in console.screen_text()
        await console.press("end")
        assert "block 1,023 · free · 0 refs · step –" in console.screen_text()
        await console.press("right")
        assert "block 1,023 · " in console.screen_text()
        await console.press("home")
        assert "block 0 · " in console.screen_text()


async def test_a_new_chat_forgets_the_old_one() -> None:
    async with driven() as console:
        await console.ask("first")
        console.engine.say("one")
        console.engine.end()
        await console.tick(2)
        await console.press("ctrl+n")
        assert "first" not in console.screen_text()
        await console.ask("second")
        assert console.engine.submitted[1]["messages"] == [{"role": "user", "content": "second"}]


async def test_a_new_chat_stops_the_answer_under_way() -> None:
    async with driven() as console:
        await console.ask("first")
        await console.press("ctrl+n")
        assert console.engine.cancelled == [console.engine.requests[0].request_id]


async def test_regenerate_asks_the_same_again_in_place() -> None:
    async with driven() as console:
        await console.ask("first")
        console.engine.say("bad answer")
        console.engine.end()
        await console.tick(2)
        await console.press("ctrl+r")
        await console.until_submitted(2)
        assert console.engine.submitted[1]["messages"] == console.engine.submitted[0]["messages"]
        assert "bad answer" not in console.screen_text()
        assert console.screen_text().count("first") == 1


async def test_copy_goes_to_the_terminal_and_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clipboard, "copy_path", lambda: tmp_path / "copied.txt")
    async with driven() as console:
        await console.ask()
        console.engine.say("the answer")
        console.engine.end()
        await console.tick(2)
        await console.press("ctrl+y")
        assert console.app.clipboard == "the answer"
        assert (tmp_path / "copied.txt").read_text() == "the answer"
        assert (tmp_path / "copied.txt").stat().st_mode & 0o077 == 0
        assert "Copied 10 characters" in console.screen_text()


async def test_copy_says_so_when_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(clipboard, "copy_path", lambda: tmp_path / "file" / "copied.txt")
    assert "no copy in a file" in clipboard.save_copy("text")


async def test_help_explains_the_focused_pane_and_its_keys() -> None:
    async with driven() as console:
        await console.press("escape")
        for key, words in (("1", "prefix cache"), ("2", "pinned"), ("6", "add up"), ("7", "gap")):
            await console.press(key, "f1")
            assert isinstance(console.app.screen, HelpScreen)
            text = "\n".join(str(static.content) for static in console.app.screen.query(Static))
            assert words in text
            assert "^q" in text
            await console.press("escape")
            assert not isinstance(console.app.screen, HelpScreen)
            if key == "1":  # the prompt has the focus and would take the next digit
                await console.press("escape")


async def test_the_palette_holds_our_actions_and_runs_them() -> None:
    async with driven(size=(120, 120)) as console:
        await console.press("ctrl+p")
        for _ in range(40):
            await console.pilot.pause(0.05)
            if "Screenshot" in console.screen_text():
                break
        shown = " ".join(console.screen_text().split())
        for key in keys.KEYS:
            if key.name:
                assert f"{key.name} {key.what} ({keys.key_text(key.keys)})" in shown
        assert "(x) Not now: No request is running or waiting." in shown
        await console.press(*"maximise")
        for _ in range(40):
            await console.pilot.pause(0.05)
            if "Screenshot" not in console.screen_text():
                break
        await console.press("down", "enter")
        await console.pilot.pause(0.1)
        await console.tick(2)
        assert console.main.has_class("-alone")


async def test_quit_leaves_in_mid_answer() -> None:
    async with driven() as console:
        await console.ask()
        console.engine.say("half an ans")
        await console.pilot.press("ctrl+q")
        await console.pilot.pause()
        assert not console.app.is_running


async def test_ctrl_c_says_how_to_leave() -> None:
    async with driven() as console:
        await console.press("ctrl+c")
        assert "^q quits" in console.screen_text()


async def test_a_remapped_key_acts_and_is_shown() -> None:
    async with driven() as console:
        console.app.set_keymap({"pane.maximise": "z"})
        await console.press("escape", "m")
        assert not console.main.has_class("-alone")
        await console.press("z")
        assert console.main.has_class("-alone")
        assert "z maximise" in console.main.query_one(KeyBar).plain


async def test_what_cannot_be_done_is_greyed_and_says_why_when_tried() -> None:
    async with driven() as console:
        row = console.main.query_one(KeyBar).rows[0]
        assert next(part.ink for part in row if part.text == "^r") == "off"
        await console.press("ctrl+r")
        assert "There is no prompt to answer again." in console.screen_text()


async def test_a_click_on_the_key_bar_and_on_a_tab_acts_as_the_key() -> None:
    async with driven(size=(80, 24)) as console:
        await console.pilot.click("#tabs", offset=(14, 0))
        await console.tick()
        assert [pane.id for pane in console.main.panes if pane.display] == ["kv"]
        bar = console.main.query_one(KeyBar)
        await console.pilot.click("#keys", offset=(bar.plain.index("F1") + 1, 0))
        await console.tick()
        assert isinstance(console.app.screen, HelpScreen)
