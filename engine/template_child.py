"""The process in which chat templates run: JSON lines in, JSON lines out, jinja2 and the standard library only.

A template is a program that came with a model. Here it gets a sandboxed Jinja environment, no other process's memory,
and limits on memory, time and output; `engine.chat_template` ends the process when it takes too long.

Run as `python -I template_child.py MAX_MEMORY_BYTES MAX_OUTPUT_BYTES SITE…`, SITE being where jinja2 lies. It says
{"started": true}. The first line it reads is {"template", "bos_token", "eos_token"}, answered with {"ready": true} or an
error; each further line is {"messages", "add_generation_prompt"}, answered with {"text"} or an error. An error is
{"error", "kind"}: "raised" (the template refused or failed), "broken" (it doesn't parse), "too long" or "memory".
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

# Were the parent killed while a template loops, nobody would end this process: then the alarm does.
_ALARM_S = 10


class _TooLong(Exception):
    pass


def main(argv: list[str]) -> None:
    """Answer requests from stdin until it is closed."""
    max_memory_bytes, max_output_bytes = int(argv[1]), int(argv[2])
    sys.path += argv[3:]
    import jinja2.sandbox  # noqa: F401  # now, so that the parent's clock doesn't run for it

    asked, answers = sys.stdin.buffer, sys.stdout.buffer

    def answer(content: Mapping[str, object]) -> None:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()

    def attempt(work: Callable[[], T], failed: str) -> T | None:
        _alarm(_ALARM_S)
        try:
            return work()
        except _TooLong:
            answer({"error": f"it wrote more than {max_output_bytes:,} bytes", "kind": "too long"})
        except MemoryError:
            answer({"error": f"it needed more than {max_memory_bytes >> 20} MiB of memory", "kind": "memory"})
        except Exception as error:
            answer({"error": describe(error), "kind": failed})
        finally:
            _alarm(0)
        return None

    _limit_memory(max_memory_bytes)
    answer({"started": True})
    start = json.loads(asked.readline() or b"{}")
    if not start:
        return
    # Compiling folds constants, so it is as dangerous as rendering.
    render = attempt(
        lambda: compile_template(start["template"], start["bos_token"], start["eos_token"], max_output_bytes), "broken"
    )
    if render is None:
        return
    answer({"ready": True})
    for line in asked:
        request = json.loads(line)
        text = attempt(partial(render, request["messages"], request["add_generation_prompt"]), "raised")
        if text is not None:
            answer({"text": text})


def compile_template(
    template: str, bos_token: str, eos_token: str, max_output_bytes: int
) -> Callable[[list[dict[str, str]], bool], str]:
    """A function (messages, add_generation_prompt) → text. Raises jinja2's TemplateSyntaxError for a template that doesn't parse.

    The environment is the one chat templates are written for: blocks trimmed, `break` and `continue`, `tojson` that leaves
    non-ASCII text alone, `raise_exception`, `strftime_now`, and `generation` blocks, whose contents are written as they are.
    """
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    def strftime_now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)

    def tojson(
        value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    compiled = environment.from_string(template)

    def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        parts: list[str] = []
        num_bytes = 0
        for part in compiled.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        ):
            num_bytes += len(part.encode("utf-8", errors="surrogatepass"))
            if num_bytes > max_output_bytes:
                raise _TooLong
            parts.append(part)
        return "".join(parts)

    return render


def describe(error: Exception) -> str:
    """An error in one short line: its first line, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _limit_memory(max_memory_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)  # its default action ends the process, also inside one long C call


if __name__ == "__main__":
    main(sys.argv)
