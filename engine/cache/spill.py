"""Spill: the states of preempted sequences on disk, so that they needn't be computed again.

Writing and reading happen on a thread of their own. The engine thread hands over copies on the host, asks whether one is back,
and takes it; it never waits for the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from torch import Tensor

from engine.errors import FootplateError

Write = Callable[[BinaryIO, tuple[int, ...], list[Tensor]], None]
Read = Callable[[BinaryIO, int], tuple[tuple[int, ...], list[Tensor]]]


@dataclass(slots=True)
class _Entry:
    """One spilled state: `token_ids` and `tensors` while it is in memory (before it is written, and once it is read back)."""

    key: int
    token_ids: tuple[int, ...]
    tensors: list[Tensor] | None
    where: Literal["memory", "disk", "reading", "lost"] = "memory"
    lock: threading.Lock = field(default_factory=threading.Lock)


class Spill:
    """A directory of spilled states, emptied by `close`. `write` and `read` know the file format."""

    def __init__(self, directory: Path, write: Write, read: Read) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=directory, prefix="footplate-spill-", ignore_cleanup_errors=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise FootplateError(f"--spill-dir {directory}: {reason}; choose a directory that can be written.") from error
        self._write, self._read = write, read
        self._entries: dict[int, _Entry] = {}
        self._keys = itertools.count(1)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="footplate-spill", daemon=True)
        self._thread.start()

    def put(self, token_ids: tuple[int, ...], tensors: list[Tensor]) -> int:
        """Take over a state's copy on the host; returns its key. It is written in the background."""
        entry = _Entry(next(self._keys), token_ids, tensors)
        self._entries[entry.key] = entry
        self._work.put(lambda: self._to_disk(entry))
        return entry.key

    def ready(self, key: int) -> bool:
        """Whether the state can be taken (or is known to be lost) without waiting; starts reading it if it isn't being read."""
        entry = self._entries[key]
        with entry.lock:
            if entry.where == "disk":
                entry.where = "reading"
                self._work.put(lambda: self._from_disk(entry))
            return entry.where in ("memory", "lost")

    def take(self, key: int) -> tuple[tuple[int, ...], list[Tensor]] | None:
        """The state, once it is `ready`, and forget it; None when the disk lost it: compute it again."""
        entry = self._entries[key]
        with entry.lock:
            tensors, lost = entry.tensors, entry.where == "lost"
        self.drop(key)
        return None if lost or tensors is None else (entry.token_ids, tensors)

    def drop(self, key: int) -> None:
        """Forget a state and remove its file."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            with entry.lock:
                entry.where = "lost"
            self._work.put(lambda: self._remove(entry))

    def __len__(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """End the thread and remove the directory; idempotent."""
        self._work.put(None)
        self._thread.join(timeout=10)
        self._folder.cleanup()

    def _path(self, entry: _Entry) -> Path:
        return Path(self._folder.name) / f"{entry.key}.state"

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _to_disk(self, entry: _Entry) -> None:
        with entry.lock:
            tensors = entry.tensors
            if entry.where != "memory" or tensors is None:
                return
        try:
            with self._path(entry).open("wb") as file:
                self._write(file, entry.token_ids, tensors)
        except (FootplateError, OSError):
            return  # a full disk: the state stays in memory
        with entry.lock:
            if entry.where == "memory":
                entry.where, entry.tensors = "disk", None

    def _remove(self, entry: _Entry) -> None:
        # What can't be removed is left for `close`: the thread must live on.
        with contextlib.suppress(OSError):
            self._path(entry).unlink(missing_ok=True)

    def _from_disk(self, entry: _Entry) -> None:
        try:
            path = self._path(entry)
            with path.open("rb") as file:
                token_ids, tensors = self._read(file, path.stat().st_size)
            found = tensors if token_ids == entry.token_ids else None
        except (FootplateError, OSError, MemoryError):
            found = None
        with entry.lock:
            entry.where, entry.tensors = ("lost", None) if found is None else ("memory", found)
