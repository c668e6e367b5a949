"""The whole thing, once: the command line, a real terminal, the real small model."""

from __future__ import annotations

import re
from pathlib import Path

from pty_session import session


def test_load_chat_stop_ask_again_and_quit(smollm2_gguf: Path, tmp_path: Path) -> None:
    arguments = ["-m", "console.cli", "--model", str(smollm2_gguf), "--device", "cpu", "--num-kv-blocks", "64"]
    with session(arguments, tmp_path) as running:
        assert running.until("1 chats") < 3.0  # the frame is there long before torch is
        running.until("idle", 120)
        assert "0 / 64" in running.text
        running.child.send("Count from one to twenty in words.\r")
        running.until("answering · 4 tok", 60)
        running.child.send("\x1b")
        running.until("stopped", 30)
        running.until("cached of", 5)
        first = re.search(r"(\d+) cached of (\d+)", running.text)
        assert first is not None and first[1] == "0"
        running.child.send("And backwards?\r")
        running.until("answering · 1 tok", 60)
        running.child.send("\x1b")
        running.until("cached of", 30)
        for _ in range(200):
            running.read()
            figures = re.findall(r"(\d+) cached of (\d+)", running.text)
            if len(figures) == 2:
                break
        assert int(figures[1][0]) >= 32, figures  # the second turn reuses the blocks of the first
        assert "cached" in running.text
        running.child.send("one more\r")
        running.until("answering", 30)
        running.child.send("\x11")
        assert running.until("left with 0") < 2.5
        running.assert_restored()
