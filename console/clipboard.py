"""A copy in a file, for terminals that ignore OSC 52 and for sessions where the clipboard is on another machine."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_state_path


def copy_path() -> Path:
    """Where the last copied text lies."""
    return user_state_path("footplate") / "copied.txt"


def save_copy(text: str) -> str:
    """Write `text`, readable for its owner only; a clause that says where, or why it couldn't be written."""
    path = copy_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8", errors="replace"
        ) as file:
            file.write(text)
    except OSError as error:
        return f" (no copy in a file: {error.strerror or error})"
    return f" and to {path}"
