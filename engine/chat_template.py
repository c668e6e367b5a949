"""render_chat: messages → the token ids of a prompt, through the model's chat template.

A person's text can't become a control token: control tokens written in it are broken with a character that no message
holds before the template sees it, the rendered text is cut at the control tokens that are left (the template's own), and
the pieces between are mended and encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import RequestError, TokenizerError
from engine.template_process import ChatRenderer, TemplateFailed
from engine.token_matcher import TokenMatcher
from engine.tokenizer import Tokenizer, check_text

__all__ = ["ChatPrompt", "ChatRenderer", "TemplateFailed", "render_chat"]

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat. `note` is a sentence about what had to be done differently, None when nothing had; `text` is what
    the token ids say."""

    token_ids: list[int]
    note: str | None
    text: str


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    content: str
    token_ids: tuple[int, ...] = ()


def render_chat(
    tokenizer: Tokenizer,
    renderer: ChatRenderer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> ChatPrompt:
    """The prompt for `messages`: mappings of "role" (system, user, assistant or tool), "content" (text) and, for an answer,
    "token_ids" (as they were generated, without the end token).

    Such ids go into the prompt as they are, so that the prefix cache meets them again, wherever the template shows the
    answer's text unchanged. A template that refuses the messages gets them once more in a form most templates take; one
    that fails altogether is replaced by plain "role: text" lines. The note says so.

    Raises `RequestError` for messages that aren't of this form, `TokenizerError` when there is no template.
    """
    checked = _checked(messages)
    if renderer is None:
        raise TokenizerError("the model has no chat template; send a raw prompt instead (`footplate run --raw`).")
    failed: TemplateFailed | None = None
    for change, form in _forms(checked):
        try:
            parts, note = _rendered(tokenizer, renderer, form, add_generation_prompt)
        except TemplateFailed as error:
            failed = failed or error
            if error.kind != "raised":
                break  # it wouldn't do better with other messages, and could take as long again
            continue
        if failed is not None:
            note = " ".join(filter(None, [f"The chat template refused this conversation ({failed}); {change}.", note]))
        return _prompt(tokenizer, parts, note)
    lines = [f"{message.role}: {message.content}\n" for message in checked]
    text = "".join(lines) + ("assistant:" if add_generation_prompt else "")
    return _prompt(
        tokenizer, [text], f"The chat template can't be used here ({failed}); the conversation was written as plain lines instead."
    )


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[_Message]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages, not {type(messages).__name__}.")
    if not messages:
        raise RequestError("there are no messages; write one.")
    checked: list[_Message] = []
    for n, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise RequestError(f'message {n} must be a mapping with "role" and "content", not {type(message).__name__}.')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(f"message {n} has the role {role!r}; use one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise RequestError(f'message {n} ({role}) needs its text in "content", not {type(content).__name__}.')
        check_text(content)
        given = message.get("token_ids")
        token_ids = () if given is None else tuple(given) if isinstance(given, Sequence) else (None,)
        if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
            raise RequestError(f"message {n} ({role}) has token_ids that aren't token ids; leave them out.")
        checked.append(_Message(role, content, token_ids if role == "assistant" else ()))
    return checked


def _forms(messages: list[_Message]) -> Iterator[tuple[str, list[_Message]]]:
    """The messages, then what most templates take that refuse them: (what was done, messages)."""
    yield "", messages
    joined = _joined(message for message in messages if message.content.strip() or message.role != "assistant")
    if joined != messages:
        yield "messages of one role in a row were joined, and empty answers left out", joined
    system = [message.content for message in joined if message.role == "system"]
    turns = [replace(message, role="user") if message.role == "tool" else message for message in joined if message.role != "system"]
    first = next((n for n, message in enumerate(turns) if message.role == "user"), None)
    if first is not None:
        turns[first] = replace(turns[first], content="\n\n".join([*system, turns[first].content]))
    turns = _joined(turns)
    if turns != joined and first is not None:
        yield "it was rendered with user and assistant messages in turn only, the system text put before the first", turns


def _joined(messages: Iterator[_Message] | list[_Message]) -> list[_Message]:
    joined: list[_Message] = []
    for message in messages:
        if joined and joined[-1].role == message.role:
            joined[-1] = _Message(message.role, f"{joined[-1].content}\n\n{message.content}")
        else:
            joined.append(message)
    return joined


def _prompt(tokenizer: Tokenizer, parts: Sequence[str | int | tuple[int, ...]], note: str | None) -> ChatPrompt:
    ids = tokenizer.encode_parts(parts)
    shown = [
        part if isinstance(part, str) else tokenizer.decode([part] if isinstance(part, int) else part, skip_special=False)
        for part in parts
    ]
    return ChatPrompt(ids, note, "".join(shown))


def _rendered(
    tokenizer: Tokenizer, renderer: ChatRenderer, messages: list[_Message], add_generation_prompt: bool
) -> tuple[list[str | int | tuple[int, ...]], str | None]:
    """The rendering as plain text, control tokens and generated ids, and a note. Raises `TemplateFailed`."""
    unused = _unused_characters("".join([renderer.template, *(message.content for message in messages)]))
    shield = _Shield(tokenizer.control, next(unused), unused)
    shielded = [shield.put_on(message.content) for message in messages]

    def render(contents: list[str]) -> str:
        return renderer.render(
            [{"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)],
            add_generation_prompt=add_generation_prompt,
        )

    text = render(shielded)
    answers = {n: message.token_ids for n, message in enumerate(messages) if message.token_ids and message.content}
    kept = {n: ids for n, ids in answers.items() if _is_its_text(tokenizer, ids, messages[n].content)}
    placed: list[str | tuple[int, ...]] = [text]
    num_placed = 0
    if kept:
        mark = next(unused)
        try:
            marked = render([f"{mark}{n}{mark}" if n in kept else content for n, content in enumerate(shielded)])
        except TemplateFailed:
            marked = ""
        placed = _place(text, re.split(f"{mark}([0-9]+){mark}", marked), shielded, kept)
        num_placed = sum(not isinstance(part, str) for part in placed)
    parts: list[str | int | tuple[int, ...]] = []
    for part in placed:
        if isinstance(part, str):
            parts += [piece if isinstance(piece, int) else shield.take_off(piece) for piece in tokenizer.control.split(part)]
        else:
            parts.append(part)
    note = None
    if num_placed < len(answers):
        num_missed = len(answers) - num_placed
        several = "An earlier answer was" if num_missed == 1 else f"{num_missed} earlier answers were"
        note = (
            f"{several} tokenised again, because the chat template, an edit or a stop string changed the text; "
            "the prefix cache can't be used from there on."
        )
    return [part for part in parts if part != ""], note


def _is_its_text(tokenizer: Tokenizer, token_ids: tuple[int, ...], content: str) -> bool:
    # Control tokens a model wrote inside its answer (ignore_eos) would cut the conversation in two if they came back as ids.
    return tokenizer.special_ids.isdisjoint(token_ids) and tokenizer.decode(token_ids) == content


def _place(text: str, marked: list[str], contents: list[str], kept: Mapping[int, tuple[int, ...]]) -> list[str | tuple[int, ...]]:
    """`text` with the generated ids in place of the answers, as far as the template shows them unchanged.

    `marked` is the rendering with marks in the answers' place, cut at them: [text, number, text, number, …, text]. The two
    renderings are walked in step; where they part, the template did something else to an answer than to a mark.
    """
    parts: list[str | tuple[int, ...]] = []
    at = start = 0  # text[start:at] is text since the last ids
    for before, number, after in zip(marked[0::2], marked[1::2], marked[2::2], strict=False):
        if not text.startswith(before, at):
            break
        at += len(before)
        content = contents[int(number)]
        if text.startswith(content + after, at):
            parts += [text[start:at], kept[int(number)]]
            at = start = at + len(content)
            continue
        trimmed = next((each for each in (content.strip(), content.rstrip()) if text.startswith(each + after, at)), None)
        if trimmed is None:
            break
        at += len(trimmed)
    return [*parts, text[start:]]


class _Shield:
    """Keeps a message's text from being read as control tokens, alone or together with what a template writes around it."""

    def __init__(self, control: TokenMatcher, mark: str, unused: Iterator[str]) -> None:
        self._control = control
        self._mark = mark
        self._unused = unused
        self._stand_ins: dict[str, str] = {}  # control tokens of one character can't be broken, only replaced

    def put_on(self, content: str) -> str:
        """`content` with its control tokens broken."""
        bare = content.strip()
        start, end = (len(content) - len(content.lstrip()), len(content.rstrip())) if bare else (0, len(content))
        at_start = self._control.may_end_in(content) or self._control.may_end_in(bare)
        at_end = self._control.may_begin_in(content) or self._control.may_begin_in(bare)
        # Next to the text itself, not to the whitespace around it, so that a template's `trim` still finds that.
        content = "".join(
            [content[:start], self._mark if at_start else "", content[start:end], self._mark if at_end else "", content[end:]]
        )
        for token in self._control.present(content):
            broken = token[0] + self._mark + token[1:] if len(token) > 1 else self._stand_ins.setdefault(token, next(self._unused))
            content = content.replace(token, broken)
        return content

    def take_off(self, text: str) -> str:
        """A piece of the rendered text as it was written."""
        text = text.replace(self._mark, "")
        for token, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, token)
        return text


def _unused_characters(text: str) -> Iterator[str]:
    """Characters that `text` doesn't hold: Unicode's noncharacters first, then private ones."""
    used = set(text)
    return (chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE)) if chr(code) not in used)
