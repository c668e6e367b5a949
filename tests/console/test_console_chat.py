"""The chat: streaming, figures, what the engine is told, and what happens when something fails."""

from __future__ import annotations

import dataclasses

from driving import driven
from scripted_engine import idle_view, loading_view

from console.bridge import Answer
from console.conversation import Conversation, Turn
from console.widgets.answer import AnswerText
from engine.request import Completion, Stats


async def test_text_streams_in_and_figures_follow() -> None:
    async with driven() as console:
        await console.ask()
        console.engine.say("In the heart ", "of the sea")
        await console.tick()
        assert "In the heart of the sea" in console.screen_text()
        assert "answering · 2 tok · esc stops" in console.screen_text()
        assert "ttft" not in console.main.query_one(".figures").plain  # type: ignore[attr-defined]
        console.engine.end()
        await console.tick(2)
        assert "ttft 182 ms · 41.3 tok/s · 96 cached of 140 · 2 tok" in console.screen_text()
        assert "142 / 8,192 tok · 2 % of the context" in console.screen_text()


async def test_many_tokens_between_two_ticks_are_laid_out_once() -> None:
    async with driven() as console:
        await console.ask()
        answer = console.main.query_one(AnswerText)
        appended: list[str] = []
        original = answer.append
        answer.append = lambda text: (appended.append(text), original(text))[1]  # type: ignore[method-assign]
        console.engine.say(*[f"w{i} " for i in range(100)])
        await console.tick()
        assert len(appended) == 1
        assert "w99" in console.screen_text()


async def test_the_second_turn_carries_the_ids_of_the_first_answer() -> None:
    async with driven() as console:
        await console.ask("one")
        console.engine.say("first ", "answer")
        console.engine.end()
        await console.tick(2)
        await console.ask("two")
        assert console.engine.submitted[1]["messages"] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "first answer", "token_ids": (0, 1)},
            {"role": "user", "content": "two"},
        ]
        assert console.engine.submitted[1]["title"] == "one"


async def test_the_engine_is_asked_off_the_ui_loop_with_the_models_own_parameters() -> None:
    async with driven() as console:
        await console.ask()
        assert console.engine.submit_threads == ["footplate-submit"]
        assert console.engine.submitted[0]["params"] == console.engine.chat_params


async def test_a_refused_prompt_shows_its_sentence_and_the_next_one_works() -> None:
    async with driven() as console:
        console.engine.refuse = "the prompt has 9,000 tokens, but the context holds 8,192; shorten it."
        console.chats.send("too long")
        for _ in range(100):
            await console.tick()
            if "✖" in console.screen_text():
                break
        assert "✖ the prompt has 9,000 tokens" in console.screen_text()
        console.engine.refuse = None
        await console.ask("short")
        assert console.engine.submitted[0]["messages"] == [{"role": "user", "content": "short"}]


async def test_a_failed_answer_shows_why_and_is_left_out_of_the_next_prompt() -> None:
    async with driven() as console:
        await console.ask("one")
        console.engine.say("half")
        console.engine.end("error", error="out of KV blocks in step 12; raise --num-kv-blocks.")
        await console.tick(2)
        assert "✖ out of KV blocks in step 12" in console.screen_text()
        await console.ask("two")
        assert console.engine.submitted[1]["messages"] == [{"role": "user", "content": "two"}]


async def test_an_answer_cut_off_says_so() -> None:
    async with driven() as console:
        await console.ask()
        console.engine.say("word")
        console.engine.end("length")
        await console.tick(2)
        assert "cut off at 1 tok" in console.screen_text()


async def test_a_stopped_engine_is_a_state_and_the_transcript_stays() -> None:
    async with driven() as console:
        await console.ask("one")
        console.engine.say("so far")
        await console.tick()
        console.engine.publish(state="failed", error="CUDA error: an illegal memory access [/red]")
        await console.tick(10)
        text = console.screen_text()
        assert "so far" in text
        assert "✖ failed" in text
        assert "Engine stopped: CUDA error: an illegal memory access [/red]" in " ".join(
            console.main.query_one("#chat-status").plain.split()
        )  # type: ignore[attr-defined]
        assert "✖ The engine stopped before the answer ended" in text
        await console.press(*"more", "enter")
        await console.tick(2)
        assert "The engine has stopped" in console.screen_text()


async def test_the_load_is_shown_and_a_prompt_typed_meanwhile_waits() -> None:
    async with driven(view=loading_view()) as console:
        text = console.screen_text()
        assert "◌ loading" in text
        assert "reading weights of SmolLM2-135M-Instruct" in text
        assert "120 MiB / 257 MiB · 47 %" in text
        await console.press(*"hi", "enter")
        assert "waiting for the model to load" in console.screen_text()
        assert console.engine.submitted == []
        assert "model" in console.screen_text()
        console.engine.publish(idle_view())
        await console.tick()
        await console.until_submitted(1)
        assert "┃ SmolLM2-135M-Instruct " in console.screen_text()
        console.engine.say("hello")
        await console.tick()
        assert "hello" in console.screen_text()


async def test_a_prompt_that_waits_can_be_taken_back() -> None:
    async with driven(view=loading_view()) as console:
        await console.press(*"hi", "enter", "escape")
        await console.tick()
        assert "Stopped before it was sent." in console.screen_text()
        console.engine.publish(idle_view())
        await console.tick(3)
        assert console.engine.submitted == []


async def test_a_second_prompt_waits_in_the_input_while_an_answer_runs() -> None:
    async with driven() as console:
        await console.ask("one")
        await console.press(*"two", "enter")
        assert console.prompt.text == "two"
        assert len(console.engine.submitted) == 1
        assert "An answer is under way" in console.screen_text()


async def test_a_large_paste_is_folded_and_sent_whole() -> None:
    from textual.events import Paste

    async with driven() as console:
        pasted = "line of text\r\n" * 80_000
        await console.press(*"see ")
        console.prompt.post_message(Paste(pasted))
        await console.tick()
        assert console.prompt.text == "see [pasted 1: 1,040,000 characters]"
        await console.press("!", "enter")
        await console.until_submitted(1)
        assert console.engine.submitted[0]["messages"][0]["content"] == "see " + "line of text\n" * 80_000 + "!"
        assert "more characters" in console.screen_text() or console.main.query_one("#transcript").max_scroll_y > 0


async def test_the_transcript_follows_the_answer_until_it_is_scrolled() -> None:
    async with driven() as console:
        await console.ask()
        console.engine.say("\n\n".join(f"paragraph {i}" for i in range(80)))
        await console.tick(2)
        transcript = console.main.query_one("#transcript")
        assert "paragraph 79" in console.screen_text()
        await console.press("pageup")
        assert "paragraph 79" not in console.screen_text()
        at = transcript.scroll_y
        console.engine.say("\n\nparagraph 80")
        await console.tick(2)
        assert transcript.scroll_y == at
        await console.press("pagedown", "pagedown", "pagedown")
        console.engine.say("\n\nparagraph 81")
        await console.tick(2)
        assert "paragraph 81" in console.screen_text()


async def test_emoji_keep_the_frame_straight() -> None:
    async with driven() as console:
        await console.ask("❤️ ⚠️ 👨‍👩‍👧 日本語")
        console.engine.say("a ❤️ b ⚠️ c 👨‍👩‍👧 d 🏳️‍🌈 e 한국어 e\u0301")
        await console.tick(2)
        strips = console.app.screen._compositor.render_strips()
        assert {strip.cell_length for strip in strips} == {120}


def test_a_stopped_answer_without_a_word_is_left_out_of_the_prompt() -> None:
    def ended(text: str, reason: str) -> Turn:
        answer = Answer([], "")
        answer.state = "done"
        answer.completion = Completion(text, (1,), (2,) if text else (), reason, Stats(1))  # type: ignore[arg-type]
        return Turn("prompt", answer, text)

    last = Turn("next")
    conversation = Conversation([ended("", "cancelled"), ended("some", "cancelled"), last])
    assert conversation.messages_for(last) == [
        {"role": "user", "content": "prompt"},
        {"role": "assistant", "content": "some", "token_ids": (2,)},
        {"role": "user", "content": "next"},
    ]
    assert dataclasses.is_dataclass(conversation)
