"""The scrolling part of a chat. It follows what is added at its end until the person scrolls away, and again once they are back."""

from __future__ import annotations

from textual.containers import VerticalScroll


class Transcript(VerticalScroll):
    """Holds the turns of a conversation."""

    def on_mount(self) -> None:
        self.anchor()

    def page(self, pages: int) -> None:
        """Scroll by so many pages; at the end it follows again."""
        target = self.scroll_y + pages * max(1, self.scrollable_content_region.height - 1)
        if target >= self.max_scroll_y:
            self.anchor()
        else:
            self.scroll_to(y=max(0, target), animate=False, immediate=True)

    def action_scroll_end(self) -> None:
        self.anchor()

    def action_page_down(self) -> None:
        self.page(1)

    def action_page_up(self) -> None:
        self.page(-1)
