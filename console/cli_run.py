"""`footplate run`: one prompt, answered on stdout."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from console import cli_output
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.request import Completion, RequestHandle, Stats
    from engine.view import EngineView

LAST_VIEW_WAIT_S = 1.0
CLOSE_WAIT_S = 30.0
INTERRUPTED_CLOSE_WAIT_S = 3.0


def run(options: argparse.Namespace, config: EngineConfig) -> int:
    """Answer `options.prompt` and write what was asked for. The exit code; refusals are raised as `FootplateError`."""
    if options.raw and options.system is not None:
        options.usage_error("--system needs the chat template, which --raw leaves out; give one of the two")
    # Everything that can be refused is, before a model is loaded.
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    prompt = checked_text("the prompt", read_stdin() if options.prompt == "-" else options.prompt)
    system = None if options.system is None else checked_text("--system", options.system)
    view_file = None if options.view_json is None else writable(Path(options.view_json))

    with loaded_engine(config) as engine:
        if options.raw:
            handle = engine.submit(prompt, params=params, title="run")
        else:
            roles = ([("system", system)] if system is not None else []) + [("user", prompt)]
            handle = engine.submit(messages=[{"role": role, "content": text} for role, text in roles], params=params, title="run")
        if handle.note is not None:
            cli_output.say(handle.note)
        try:
            completion = _follow(handle, quiet=options.json)
        except BaseException:
            handle.cancel()
            raise
        finally:
            if view_file is not None:
                _write_view(view_file, _last_view(engine))
        if completion.finish_reason == "error":
            raise RequestError(completion.error or "the request failed.")
        if options.json:
            cli_output.write_line(json.dumps(completion_as_json(completion, engine.view)))
    cli_output.write_error(figures(completion.stats, len(completion.token_ids), completion.finish_reason) + "\n")
    return 0


@contextlib.contextmanager
def loaded_engine(config: EngineConfig, *, shape: str | None = None) -> Iterator[Engine]:
    """A started, ready engine that is closed at the end; loading draws a progress line on a terminal's stderr.

    A second Ctrl-C while it closes ends the process at once.
    """
    from engine.engine import Engine

    engine = Engine(config, shape=shape)
    patience_s, stuck_code = CLOSE_WAIT_S, 1
    try:
        with cli_output.ProgressLine() as line:
            engine.start()
            while engine.view.state == "loading":
                if (load := engine.view.loading) is not None:
                    line.show(load.stage, load.done_bytes, load.total_bytes)
                time.sleep(0.02)
        engine.wait_ready()
        yield engine
    except KeyboardInterrupt:
        patience_s, stuck_code = INTERRUPTED_CLOSE_WAIT_S, 130
        raise
    finally:
        with _second_interrupt_exits():
            engine.close(patience_s)
            if engine.view.state not in ("stopped", "failed"):
                # The engine's thread is inside a call that can't be interrupted; the interpreter's own end could crash on it.
                cli_output.say("the engine was busy and did not end in time; the process was ended around it.")
                os._exit(stuck_code)


@contextlib.contextmanager
def _second_interrupt_exits() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers, or gets Ctrl-C
        yield
        return
    before = signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_stdin() -> str:
    """All of stdin, one newline at its end dropped (as a shell's `$(…)` does). Raises `RequestError` unless it is UTF-8."""
    if sys.stdin is None:
        raise RequestError("the prompt was to come from stdin, but stdin is closed.")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the prompt from stdin isn't UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it first."
        ) from error
    return text[:-1] if text.endswith("\n") else text


def checked_text(what: str, text: str) -> str:
    """`text`, or a `RequestError`: empty, or holding a lone surrogate (which bytes of argv that aren't UTF-8 become too)."""
    if not text:
        raise RequestError(f"{what} is empty; give it some text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} isn't valid text: at character {error.start} it holds bytes that aren't UTF-8 (a lone surrogate); "
            "give it in UTF-8."
        ) from error
    return text


def writable(path: Path) -> Path:
    """`path`, or a `RequestError` when a file can't be made there: better now than after the answer."""
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(
            f"--view-json {str(path)!r}: {'that is a directory' if path.is_dir() else 'its directory does not exist'}."
        )
    return path


def _follow(handle: RequestHandle, *, quiet: bool) -> Completion:
    if not quiet:
        sink = cli_output.text_sink()
        try:
            for delta in handle:
                sink.write(delta)
        finally:
            sink.finish()
    return handle.wait()


def _last_view(engine: Engine) -> EngineView:
    """The engine's view once it shows the request as ended (views are published up to a tenth of a second later)."""
    deadline = time.monotonic() + LAST_VIEW_WAIT_S
    while engine.view.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine.view


def _write_view(path: Path, view: EngineView) -> None:
    from engine.view import as_json

    try:
        path.write_text(json.dumps(as_json(view)) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--view-json {str(path)!r} can't be written: {error.strerror or error}.") from error


def completion_as_json(completion: Completion, view: EngineView) -> dict[str, object]:
    """The Completion's fields as JSON-ready data, with the model's name and the forward that served it."""
    fields: dict[str, object] = dataclasses.asdict(completion)
    fields["model"] = None if view.model is None else view.model.name
    fields["forward"] = None if view.forward is None else dataclasses.asdict(view.forward)
    return fields


def figures(stats: Stats, output_tokens: int, finish_reason: str) -> str:
    """One line of a request's figures; what wasn't measured is left out."""
    parts = []
    if stats.ttft_ms is not None:
        parts.append(f"ttft {stats.ttft_ms:,.0f} ms")
    prefill = "" if stats.prefill_tokens_per_s is None else f"{stats.prefill_tokens_per_s:,.1f} tok/s, "
    parts.append(f"prefill {prefill}{stats.prompt_tokens:,} tokens, {stats.cached_tokens:,} cached")
    decode = "" if stats.decode_tokens_per_s is None else f"{stats.decode_tokens_per_s:,.1f} tok/s, "
    parts.append(f"decode {decode}{output_tokens:,} tokens")
    parts.append(finish_reason)
    return " · ".join(parts)
