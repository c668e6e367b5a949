"""ChatRenderer: a model's chat template, run in a child process that is ended when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from engine.errors import TokenizerError

TIMEOUT_S = 2.0
MAX_OUTPUT_BYTES = 1 << 20
MAX_MEMORY_BYTES = 512 << 20
_START_TIMEOUT_S = 30.0  # an interpreter and jinja2, on a machine that is busy loading a model
_MAX_REPLY_BYTES = 8 * MAX_OUTPUT_BYTES  # JSON writes a character in up to six bytes per UTF-8 byte
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


class TemplateFailed(TokenizerError):
    """A chat template gave no text. `kind`: "raised" (it refused these messages, or failed on them), "broken" (it doesn't
    parse), "timeout", "too long", "memory" or "ended" (its process went away)."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class ChatRenderer:
    """Renders messages with one chat template. One child process is kept for it, started at the first use.

    The child has `timeout_s` for each rendering, writes at most `max_output_bytes` of UTF-8 and holds at most
    `max_memory_bytes`; it is ended when it takes longer, and a new one is started for the next rendering. Thread-safe.
    """

    def __init__(
        self,
        template: str,
        bos: str,
        eos: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        self.template = template
        self._start = {"template": template, "bos_token": bos, "eos_token": eos}
        self._timeout_s = timeout_s
        self._limits = (max_memory_bytes, max_output_bytes)
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._broken = ""  # why the template doesn't parse

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The template's text for `messages`, mappings of "role" and "content". Raises `TemplateFailed`."""
        request = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        with self._lock:
            if self._broken:
                raise TemplateFailed(self._broken, "broken")
            if self._child is None or not self._child.alive:
                self._child = self._new_child()
            return str(self._ask(self._child, request).get("text", ""))

    def close(self) -> None:
        """End the child process. A later `render` starts a new one."""
        with self._lock:
            if self._child is not None:
                self._child.end()
                self._child = None

    def _new_child(self) -> _Child:
        try:
            child = _Child(self._limits)
        except OSError as error:
            raise TemplateFailed(f"its process can't be started: {error}", "ended") from error
        child.read(_START_TIMEOUT_S)
        try:
            self._ask(child, self._start)
        except TemplateFailed as error:
            if error.kind == "broken":
                self._broken = str(error)
            raise
        return child

    def _ask(self, child: _Child, content: Mapping[str, object]) -> Mapping[str, object]:
        reply = child.ask(content, self._timeout_s)
        if "error" in reply:
            raise TemplateFailed(str(reply["error"]), str(reply.get("kind", "raised")))
        return reply


class _Child:
    """One process of `engine.template_child`. It is ended with this object, at the latest when the program exits."""

    def __init__(self, limits: tuple[int, int]) -> None:
        sites = {
            str(Path(spec.origin).parents[1]) for name in ("jinja2", "markupsafe") if (spec := find_spec(name)) and spec.origin
        }
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-B", "-X", "utf8", str(Path(__file__).with_name("template_child.py"))),
                *map(str, limits),
                *sorted(sites),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            start_new_session=True,  # so that Ctrl-C in the terminal doesn't reach it
        )
        self.end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, content: Mapping[str, object], timeout_s: float) -> Mapping[str, object]:
        """The child's answer to one line. Raises `TemplateFailed` when it took longer or ended, having ended it."""
        return self._exchange(json.dumps(content).encode() + b"\n", timeout_s)

    def read(self, timeout_s: float) -> Mapping[str, object]:
        """What the child says unasked."""
        return self._exchange(b"", timeout_s)

    def _exchange(self, line: bytes, timeout_s: float) -> Mapping[str, object]:
        process = self._process  # what the timer holds on to; not `self`, which may be forgotten meanwhile
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        # Killing the child also ends a blocked write or read here, so one timer covers both on every system.
        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        reply = b""
        try:
            stdin.write(line)
            stdin.flush()
            reply = stdout.readline(_MAX_REPLY_BYTES)
        except OSError:
            pass  # the child is gone: said below
        except BaseException:
            self.end()  # interrupted: its answer would be taken for the next one's
            raise
        finally:
            timer.cancel()
        content: object = None
        with contextlib.suppress(ValueError):
            content = json.loads(reply)
        if expired.is_set() or not isinstance(content, dict):
            self.end()
        if isinstance(content, dict):
            return content
        if expired.is_set():
            raise TemplateFailed(f"it was still running after {timeout_s:g} s", "timeout")
        raise TemplateFailed(f"its process ended unexpectedly (status {process.returncode})", "ended")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unwritten bytes for a process that is gone
                pipe.close()
    process.wait()
