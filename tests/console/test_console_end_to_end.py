"""The whole thing, once: the command line, a real terminal, the real small model."""

from __future__ import annotations

import re
import time
from pathlib import Path

from pty_session import Session, session


def figures(running: Session, number: int, timeout_s: float) -> list[tuple[int, int]]:
    """Cached and prompt tokens of so many finished answers; an answer that takes longer than three tokens is stopped."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        running.read()
        found = re.findall(r"(\d+) cached of (\d+)", running.text)
        if len(found) >= number:
            return [(int(cached), int(prompt)) for cached, prompt in found]
        if re.search(r"answering · ([4-9]|\d\d+) tok", running.text):
            running.child.send("\x1b")
            time.sleep(0.2)
    raise AssertionError(running.text)


def test_load_chat_stop_ask_again_and_quit(smollm2_gguf: Path, tmp_path: Path) -> None:
    arguments = ["-m", "console.cli", "--model", str(smollm2_gguf), "--device", "cpu", "--num-kv-blocks", "64"]
    with session(arguments, tmp_path) as running:
        assert running.until("1 chats") < 3.0  # the frame is there long before torch is
        running.until("idle", 120)
        assert "0 / 64" in running.text
        running.child.send("Write a long story about a lighthouse keeper.\r")
        running.until("tok · esc stops", 60)  # however many tokens the first drawing shows
        assert figures(running, 1, 30)[0][0] == 0
        assert "stopped" in running.text
        running.child.send("And then?\r")
        second = figures(running, 2, 90)[1]
        assert second[0] >= 32, second  # the second turn reuses the blocks of the first
        running.child.send("one more\r")
        running.until("answering", 30)
        running.child.send("\x11")
        assert running.until("left with 0") < 2.5
        running.assert_restored()
