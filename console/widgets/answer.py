"""AnswerText: a streaming answer as Markdown, from text nobody vouches for.

Every chunk is sanitised before it is parsed, and what the parser makes of character references (`&#x202e;`) once more
after. HTML is shown as text instead of vanishing, line breaks stay line breaks, and a link shows where it leads and opens
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any, Self

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.content import Content
from textual.geometry import Region
from textual.widgets import Markdown, Static
from textual.widgets._markdown import MarkdownFence, MarkdownParagraph

from console.sanitise import Sanitiser, sanitise

MAX_COLOURED_CHARS = 20_000
MAX_NESTING = 32
"""Levels of lists and quotes, two to a list; each becomes three nested widgets."""

log = logging.getLogger(__name__)


class _Parser(MarkdownIt):
    """Markdown as models write it."""

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False, "linkify": False, "maxNesting": MAX_NESTING})
        self.disable(["image", "linkify", "reference"], ignoreInvalid=True)  # a definition of a reference isn't drawn at all

    def parse(self, src: str, env: MutableMapping[str, Any] | None = None) -> list[Token]:
        tokens = _without_depths(super().parse(src, env), src)
        for token in tokens:
            if token.type == "inline":
                token.children = _plain_links(token.children or [])
                for child in token.children:
                    if child.type == "softbreak":
                        child.type = "hardbreak"
                    child.content = sanitise(child.content)
        return tokens


def _without_depths(tokens: list[Token], src: str) -> list[Token]:
    """`tokens` with each block that is nested down to `MAX_NESTING` as a paragraph of its plain lines: what is deeper the
    parser left out."""
    if all(token.level < MAX_NESTING - 1 for token in tokens):
        return tokens
    lines = src.splitlines()
    shallow: list[Token] = []
    block: list[Token] = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            too_deep = any(part.level >= MAX_NESTING - 1 for part in block)
            shallow += _unmarked(lines, block[0].map or [0, len(lines)]) if too_deep else block
            block = []
    return shallow


def _unmarked(lines: list[str], span: list[int]) -> list[Token]:
    children: list[Token] = []
    for line in lines[span[0] : span[1]]:
        children += [Token("text", "", 0, content=line), Token("hardbreak", "br", 0)]
    return [
        Token("paragraph_open", "p", 1, map=span, block=True),
        Token("inline", "", 0, map=span, level=1, children=children[:-1], block=True),
        Token("paragraph_close", "p", -1, block=True),
    ]


def _plain_links(children: list[Token]) -> list[Token]:
    """`children` with each link as its text and, where that differs, its address."""
    plain: list[Token] = []
    opened: list[tuple[str, int]] = []
    for child in children:
        if child.type == "link_open":
            opened.append((str(child.attrs.get("href", "")), len(plain)))
        elif child.type == "link_close" and opened:
            address, start = opened.pop()
            if address != "".join(part.content for part in plain[start:]):
                plain.append(Token("text", "", 0, content=f" ({address})"))
        else:
            plain.append(child)
    return plain


class Paragraph(MarkdownParagraph):
    """A paragraph that grows at its end without laying out the screen or painting its earlier lines again, while its height
    stays. Most of a streaming answer's cost is in those two."""

    _grown: tuple[Region, ...] | None = None
    _wrapped: tuple[int, Content, list[Content]] | None = None
    """Width, content and lines of the last wrap."""

    def set_content(self, content: Content) -> None:
        width, height = self.content_size
        if not (self.is_attached and width and height):
            super().set_content(content)
            return
        known = self._wrapped
        before = known[2] if known is not None and known[0] == width and known[1] is self._content else self._content.wrap(width)
        after = content.wrap(width)
        self._content = content
        self._wrapped = (width, content, after)
        if len(after) != height or len(before) != height:
            self.update(content)
            return
        changed = [y for y, (old, new) in enumerate(zip(before, after, strict=True)) if not old.is_same(new)]
        if changed:
            self._grown = tuple(Region(0, y, width, 1) for y in changed)
            self.update(content, layout=False)
            self._grown = None

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if self._grown is not None and not regions:
            regions = self._grown
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


class CodeBlock(MarkdownFence):
    """A fenced block, coloured only where its language is named (guessing tries every lexer there is, for seconds) and while
    it is short enough to be coloured anew ten times a second."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        if not language or len(code) > MAX_COLOURED_CHARS:
            return Content(code)
        from console.widgets.code_colours import coloured

        return coloured(code, language)


class AnswerText(Markdown):
    """Markdown that grows. `push` may be called as often as text comes: what arrives while the last piece is being laid
    out is laid out together."""

    BLOCKS = {  # noqa: RUF012  # Textual declares it so
        **Markdown.BLOCKS,
        "paragraph_open": Paragraph,
        "fence": CodeBlock,
        "code_block": CodeBlock,
    }

    def __init__(self) -> None:
        super().__init__(parser_factory=_Parser, open_links=False)
        self._sanitiser = Sanitiser()
        self._arrived: list[str] = []
        self._drain_task: asyncio.Task[None] | None = None
        self._shown: list[str] = []

    @property
    def shown(self) -> str:
        """The sanitised text so far."""
        return "".join(self._shown)

    def push(self, text: str) -> None:
        """Append raw text of the model."""
        text = self._sanitiser.feed(text)
        if not text:
            return
        self._shown.append(text)
        self._arrived.append(text)
        if self._drain_task is None or self._drain_task.done():
            self._drain_task = asyncio.create_task(self._drain())

    async def settled(self) -> None:
        """Return once everything pushed is laid out."""
        if self._drain_task is not None:
            await asyncio.shield(self._drain_task)

    async def _drain(self) -> None:
        while self._arrived and self.is_attached:
            text = "".join(self._arrived)
            self._arrived.clear()
            try:
                await self.append(text)
            except Exception:  # a fault of the Markdown widget must not cost the person the text
                log.exception("markdown failed; the answer is shown as plain text")
                await self._show_plain()
                return

    async def _show_plain(self) -> None:
        await self.remove_children()
        plain = Static(Content(self.shown), markup=False)
        await self.mount(plain)
        while self.is_attached:
            self._arrived.clear()
            plain.update(Content(self.shown))
            await asyncio.sleep(0.1)
            if not self._arrived:
                return
