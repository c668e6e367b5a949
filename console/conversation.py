"""Conversation: the turns of one chat as the engine must see them, apart from how they are drawn.

An answer keeps the token ids the model produced, so that the next turn's prompt is spliced from them and the prefix cache
still matches. A turn whose answer failed or never began stays on the screen but is left out of the prompt: templates
refuse two user messages in a row, and one refused prompt must not refuse every later one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from console.bridge import Answer, Message


@dataclass(slots=True)
class Turn:
    """A prompt and the answer to it; `text` is the raw answer received so far."""

    prompt: str
    answer: Answer | None = None
    text: str = ""

    @property
    def in_context(self) -> bool:
        """Whether later turns are told of this one."""
        return self.answer is not None and self.answer.state == "done" and bool(self.text)

    def messages(self) -> list[Message]:
        """The turn as chat messages."""
        assistant: dict[str, object] = {"role": "assistant", "content": self.text}
        if self.answer is not None and self.answer.completion is not None:
            assistant["token_ids"] = self.answer.completion.token_ids
        return [{"role": "user", "content": self.prompt}, assistant]


@dataclass(slots=True)
class Conversation:
    """The turns so far, oldest first."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The first prompt, which names the conversation."""
        return self.turns[0].prompt if self.turns else ""

    @property
    def last(self) -> Turn | None:
        """The newest turn."""
        return self.turns[-1] if self.turns else None

    def messages_for(self, turn: Turn) -> list[Message]:
        """What the engine is asked for `turn`: all turns before it that are in context, then its prompt."""
        messages: list[Message] = []
        for earlier in self.turns:
            if earlier is turn:
                break
            if earlier.in_context:
                messages += earlier.messages()
        messages.append({"role": "user", "content": turn.prompt})
        return messages

    def context_tokens(self) -> int | None:
        """Tokens of the newest turn in context: its prompt (with all before it) and its answer. None before there is one."""
        for turn in reversed(self.turns):
            if turn.in_context and turn.answer is not None and turn.answer.completion is not None:
                completion = turn.answer.completion
                return len(completion.prompt_token_ids) + len(completion.token_ids)
        return None
