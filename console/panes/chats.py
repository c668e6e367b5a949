"""Pane 1: the chat: a transcript that streams, and the prompt under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from console.bridge import Answer, Bridge
from console.conversation import Conversation, Turn
from console.panes.pane import Pane
from console.sanitise import one_line, sanitise
from console.widgets.answer import AnswerText
from console.widgets.charts import bar
from console.widgets.figures import bytes_text, count, milliseconds, percent, rate
from console.widgets.prompt import Prompt
from console.widgets.rows import Part, Row, Rows, flowed, wrapped
from console.widgets.transcript import Transcript
from engine.view import EngineView

SHOWN_PROMPT_CHARS = 4_000
"""How much of one's own prompt the transcript repeats."""
TITLE_CHARS = 40


def answer_figures(answer: Answer, width: int) -> list[Row]:
    """The figures under an answer: `ttft 182 ms · 41.3 tok/s · 96 cached of 140 · 128 tok`, how it ended if not by itself, and
    what was done to its prompt; on as many rows as they need."""
    completion = answer.completion
    if completion is None:
        return []
    stats = completion.stats
    num_tokens = f"{count(len(completion.token_ids))} tok"
    parts: list[Part] = []
    if stats.ttft_ms is not None:
        parts.append(Part(f"ttft {milliseconds(stats.ttft_ms)}", "dim"))
    if stats.decode_tokens_per_s is not None:
        parts.append(Part(rate(stats.decode_tokens_per_s), "dim"))
    parts.append(Part(f"{count(stats.cached_tokens)} cached of {count(stats.prompt_tokens)}", "dim"))
    parts.append(Part(num_tokens, "dim"))
    if completion.finish_reason == "length":
        parts.append(Part(f"cut off at {num_tokens}", "warn"))
    elif completion.finish_reason == "cancelled":
        parts.append(Part("stopped", "warn"))
    note = one_line(answer.handle.note or "") if answer.handle is not None else ""
    return flowed(parts, " · ", width) + [(Part(line, "dim"),) for line in wrapped(note, max(20, width)) if note]


class TurnView(Vertical):
    """One turn of the transcript: the prompt, who answers, the answer, its figures or the reason there is none."""

    DEFAULT_CSS = """
    TurnView { height: auto; margin-bottom: 1; }
    """

    def __init__(self, turn: Turn, model_name: Callable[[], str]) -> None:
        super().__init__()
        self.turn = turn
        self._model_name = model_name
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the end is on the screen."""
        return self._ended

    def compose(self) -> ComposeResult:
        prompt = self.turn.prompt
        shown = sanitise(prompt[:SHOWN_PROMPT_CHARS])
        if len(prompt) > SHOWN_PROMPT_CHARS:
            shown += f"\n… and {count(len(prompt) - SHOWN_PROMPT_CHARS)} more characters"
        yield Static(Content("you"), classes="speaker -you", markup=False)
        yield Static(Content(shown), classes="said", markup=False)
        yield Rows(lambda width, height: [(Part(self._model_name(), "accent"),)], classes="speaker")
        yield AnswerText()
        yield Rows(self._figures, classes="figures")
        yield Static(Content(""), classes="failure", markup=False)

    def advance(self) -> bool:
        """Take in what has arrived; whether anything did."""
        answer = self.turn.answer
        if answer is None or self._ended or not self.is_mounted:
            return False
        self.query_one("Rows.speaker", Rows).redraw()  # the name is known once the model has loaded
        text = answer.take()
        if text:
            self.turn.text += text
            self.query_one(AnswerText).push(text)
        if answer.ended:
            self._ended = True
            self._show_end(answer)
        return bool(text) or self._ended

    def _show_end(self, answer: Answer) -> None:
        self.query_one(".figures", Rows).redraw()
        if answer.state == "failed":
            failure = self.query_one(".failure", Static)
            failure.update(Content("✖ " + sanitise(answer.error or "")))
            failure.display = True

    def _figures(self, width: int, height: int) -> list[Row]:
        answer = self.turn.answer
        return answer_figures(answer, width) if answer is not None else []


class ChatsPane(Pane):
    """Holds the conversation: sends prompts, streams answers, stops, repeats and copies them."""

    number: ClassVar[int | None] = 1
    label: ClassVar[str] = "chats"
    explains: ClassVar[str] = """\
A conversation with the model. The title shows the tokens that the conversation takes up of the context served, and their \
share.

Under each answer:
ttft      time to first token: from the submission to the first token
tok/s     tokens per second after the first
cached    prompt tokens whose keys and values came from the prefix cache, of all prompt tokens
tok       tokens of the answer

A prompt that was refused, or an answer that failed, stays on the screen but isn't told to the model later. A stopped \
answer is, as far as it went.

enter sends, ^j begins a new line. page up and page down scroll the transcript. A paste of more than 4,000 characters is \
shown folded and sent whole."""

    def __init__(self, bridge: Bridge, *, id: str) -> None:
        super().__init__(id=id)
        self._bridge = bridge
        self.conversation = Conversation()
        self._view: EngineView | None = None
        self._welcome_rows: tuple[Row, ...] = ()

    def compose_body(self) -> ComposeResult:
        with Transcript(id="transcript"), Vertical(id="turns"):
            yield Rows(self._welcome, id="welcome")
        yield Rows(self._status, id="chat-status")
        with Horizontal(id="prompt-line"):
            yield Static(Content(">"), id="prompt-mark", markup=False)
            yield Prompt(self.offer, id="prompt")

    def focus_target(self) -> Widget:
        return self.query_one(Prompt)

    # -- what the engine does

    def show(self, view: EngineView, now: float) -> None:
        changed = view is not self._view
        self._view = view
        moved = sum(turn_view.advance() for turn_view in self.query(TurnView) if not turn_view.ended) > 0
        if changed:
            self.query_one("#welcome", Rows).redraw()
        if changed or moved:
            self.query_one("#chat-status", Rows).redraw()
            self._show_figure()

    @property
    def answering(self) -> Answer | None:
        """The answer that is under way."""
        last = self.conversation.last
        return last.answer if last is not None and last.answer is not None and not last.answer.ended else None

    @property
    def last_answer_text(self) -> str:
        """The newest answer, as far as it went; "" when there is none."""
        return next((turn.text for turn in reversed(self.conversation.turns) if turn.text), "")

    # -- what the person does

    def offer(self, prompt: str) -> bool:
        """Send `prompt` unless an answer is under way; whether it was sent."""
        if self.answering is not None:
            self.app.notify("An answer is under way: esc stops it; the prompt stays here until then.", severity="warning")
            return False
        self.send(prompt)
        return True

    def on_prompt_scrolled(self, event: Prompt.Scrolled) -> None:
        event.stop()
        self.query_one(Transcript).page(event.pages)

    def send(self, prompt: str) -> None:
        """Ask the model; the transcript shows the turn at once."""
        turn = Turn(prompt)
        self.conversation.turns.append(turn)
        self._ask(turn)

    def stop_answer(self) -> bool:
        """Stop the answer under way; whether there was one."""
        answer = self.answering
        if answer is None:
            return False
        self._bridge.stop(answer)
        self.query_one("#chat-status", Rows).redraw()
        return True

    async def regenerate(self) -> None:
        """Drop the last answer and ask again."""
        last = self.conversation.last
        if last is None or self.answering is not None:
            return
        self.conversation.turns.pop()
        views = list(self.query(TurnView))
        if views:
            await views[-1].remove()
        self.send(last.prompt)

    async def new_chat(self) -> None:
        """Stop what runs, clear the transcript and begin anew."""
        self.stop_answer()
        self.conversation = Conversation()
        await self.query(TurnView).remove()
        self.query_one("#welcome", Rows).redraw()
        self.query_one("#chat-status", Rows).redraw()
        self._show_figure()
        self.query_one(Prompt).focus()

    def _ask(self, turn: Turn) -> None:
        title = one_line(self.conversation.title, TITLE_CHARS)
        turn.answer = self._bridge.ask(self.conversation.messages_for(turn), title)
        self.query_one("#turns").mount(TurnView(turn, self._model_name))
        self.query_one(Transcript).anchor()
        self.query_one("#welcome", Rows).redraw()
        self.query_one("#chat-status", Rows).redraw()

    # -- what is drawn

    def _model_name(self) -> str:
        model = self._view.model if self._view is not None else None
        return one_line(model.name, 60) if model is not None else "model"

    def _show_figure(self) -> None:
        tokens = self.conversation.context_tokens()
        model = self._view.model if self._view is not None else None
        if tokens is None or model is None:
            self.set_figures(())
            return
        share = percent(tokens, model.max_seq_len)
        fraction = f"{count(tokens)} / {count(model.max_seq_len)} tok"
        self.set_figures((f"{fraction} · {share} of the context", f"{fraction} · {share}", share))

    def _status(self, width: int, height: int) -> list[Row]:
        answer = self.answering
        rule: Row = (Part("─" * width, "frame"),)
        view = self._view
        if view is not None and view.state in ("failed", "stopped"):
            why = f"Engine stopped: {view.error}" if view.error else "The engine has stopped."
            lines = wrapped(one_line(why), max(8, width - 2))
            return [rule, *((Part("  " if i else "✖ ", "bad"), Part(line, "bad")) for i, line in enumerate(lines[:6]))]
        if answer is None:
            return [rule]
        if answer.stop_asked:
            text = "stopping"
        elif answer.handle is not None:
            text = f"answering · {count(len(answer.handle.token_ids))} tok · esc stops"
        elif view is not None and view.state == "loading":
            text = "waiting for the model to load · esc takes it back"
        else:
            text = "sending"
        text = f" {text} "
        return [(Part("─" * max(0, width - len(text) - 2), "frame"), Part(text, "accent"), Part("──", "frame"))]

    def _welcome(self, width: int, height: int) -> list[Row]:
        view = self._view
        if view is None:
            return []
        if view.state == "loading":
            return self._loading(view, width)
        if self.conversation.turns or view.model is None:
            return []
        model = view.model
        facts = f"{model.family} · {model.num_layers} layers · {count(model.num_parameters)} parameters · {model.weight_format}"
        chat = "chat template" if model.has_chat_template else "no chat template"
        return [
            (Part(one_line(model.name), "strong"),),
            (Part(one_line(facts), "dim"),),
            (Part(f"{count(model.max_seq_len)} tokens of context · {chat}", "dim"),),
            (),
            (
                Part("enter", "key"),
                Part(" sends   ", "dim"),
                Part("^j", "key"),
                Part(" new line   ", "dim"),
                Part("F1", "key"),
                Part(" help", "dim"),
            ),
        ]

    def _loading(self, view: EngineView, width: int) -> list[Row]:
        progress = view.loading
        if progress is None:
            return [(Part("◌ ", "accent"), Part("starting the engine", "strong")), ()]
        rows: list[Row] = [(Part("◌ ", "accent"), Part(one_line(progress.stage) or "loading", "strong")), ()]
        if progress.total_bytes:
            cells = max(8, min(48, width - 30))
            done, total = progress.done_bytes, progress.total_bytes
            filled = bar(done, total, cells)
            figures = f"  {bytes_text(done)} / {bytes_text(total)} · {percent(done, total)}"
            rows[1] = (Part(filled, "part-1"), Part("·" * (cells - len(filled)), "kv-free"), Part(figures, "dim"))
        return [*rows, ()]
