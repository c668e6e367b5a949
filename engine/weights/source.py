"""SourceFile: an open weight file whose every read is checked against its real size; TensorInfo: where a tensor lies in it.

Plain reads instead of a memory map: a file that shrinks while it is open gives an error here, where a map would end
the process with SIGBUS, and the pages of a map would count as ours in the memory picture.
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one stored tensor lies: `nbytes` bytes at the absolute byte `offset` of `file`.

    `shape` is in torch order (rows before columns; GGUF's dimensions reversed). `format` is the name of its stored
    format ("F32", "Q4_1", …; `engine.weights.formats.FORMATS` has those that can be read).
    """

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    nbytes: int
    file: Path


class SourceFile:
    """An open file of known size. Raises `CheckpointError` if it is missing, unreadable or no regular file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            # Non-blocking, so that a named pipe in a model's place can't hang the load.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: can't be opened ({_reason(error)}); check the path and its permissions.") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path}: is not a regular file; give a model file.")
        self.size_bytes = found.st_size
        self._file: FileIO | None = FileIO(descriptor, "rb")

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Exactly `nbytes` bytes from `offset`. Raises `CheckpointError` before allocating when the file is shorter."""
        self._check(offset, nbytes)
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) from `offset`. Raises `CheckpointError` when the file is shorter, changed or closed."""
        self._check(offset, len(buffer))
        with self._lock:
            if self._file is None:
                raise CheckpointError(f"{self.path}: was closed; open the checkpoint again to read from it.")
            try:
                self._file.seek(offset)
                done = 0
                while done < len(buffer):
                    count = self._file.readinto(buffer[done:])
                    if not count:
                        raise CheckpointError(f"{self.path}: became shorter while it was read; wait until its download has ended.")
                    done += count
            except OSError as error:
                raise CheckpointError(f"{self.path}: can't be read ({_reason(error)}); check the disk.") from error

    def close(self) -> None:
        """Close the file; later reads raise. Closing twice is fine."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size_bytes:
            raise CheckpointError(
                f"{self.path}: is truncated: bytes {offset} to {offset + nbytes} are needed and the file has {self.size_bytes}; "
                "download it again."
            )


def quoted(text: str) -> str:
    """A name from a file, ready for a message: escaped, and cut after 80 characters."""
    return ascii(text) if len(text) <= 80 else f"{text[:80]!a}…"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
