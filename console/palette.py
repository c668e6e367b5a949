"""What the command palette offers: every named key of ours, with its key and the reason when it can't act now.

A provider of our own, because Textual reads the help text of its system commands as markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.types import IgnoreReturnCallbackType

from console import keys

if TYPE_CHECKING:
    from console.app import ConsoleApp


class Offer(NamedTuple):
    """One line of the palette."""

    name: str
    what: str
    run: IgnoreReturnCallbackType

    def display(self, name: Content | None = None) -> Content:
        """Name and explanation; nothing in them is markup."""
        return Content("\n").join((name or Content(self.name), Content(self.what).stylize("dim")))


class ActionProvider(Provider):
    """Offers the console's actions."""

    def offers(self) -> Iterator[Offer]:
        """All of them, in the order of `keys.KEYS`."""
        app = cast("ConsoleApp", self.app)
        for key in keys.KEYS:
            if key.name:
                reason = app.main.unavailable(key.id)
                node: Any = app if key.scope == "app" else app.main
                what = f"{key.what} ({keys.key_text(app.key_of(key.id))})" + (f" Not now: {reason}" if reason else "")
                yield Offer(key.name, what, partial(node.run_action, key.action))
        yield Offer("Theme", "Choose another theme.", app.action_change_theme)
        yield Offer("Screenshot", "Save the screen as an SVG file.", partial(app.deliver_screenshot))

    async def discover(self) -> Hits:
        for offer in self.offers():
            yield DiscoveryHit(offer.display(), offer.run, text=offer.name)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for offer in self.offers():
            score = matcher.match(offer.name)
            if score > 0:
                yield Hit(score, offer.display(matcher.highlight(offer.name)), offer.run, text=offer.name)
