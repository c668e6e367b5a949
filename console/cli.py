"""The command line: `footplate`, `run`, `inspect`, `bench`, `pull`. Imports neither textual nor torch itself.

Exit codes: 0 done; 1 understood but refused or failed, with a sentence on stderr; 2 the command line can't be
understood; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineConfig

PACKAGES = ("engine", "kernels", "console", "themes")
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line (`sys.argv` without `argv`)."""
    try:
        clash = shadowed_package()
        if clash is not None:
            print(f"footplate: {clash}", file=sys.stderr)
            return FAILED
        return _carry_out(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _carry_out(argv: Sequence[str] | None) -> int:
    # Only now: these imports fail, or are another's, when a package is shadowed.
    from console import cli_output
    from engine.errors import FootplateError

    try:
        options = build_parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except SystemExit as exit_:  # argparse's: --help, --version, usage
        return exit_.code if isinstance(exit_.code, int) else USAGE
    except KeyboardInterrupt:
        cli_output.say("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        cli_output.abandon_stdout()
        return OK  # the reader took what it wanted (`| head`)
    except FootplateError as error:
        cli_output.say(str(error))
        return FAILED
    except Exception as error:  # a person never meets a traceback unless they ask for one
        if os.environ.get("FOOTPLATE_TRACEBACK"):
            raise
        detail = str(error) or "no message"
        cli_output.say(f"stopped by an unexpected {type(error).__name__}: {detail} (FOOTPLATE_TRACEBACK=1 shows where).")
        return FAILED


def shadowed_package() -> str | None:
    """A sentence when another distribution's package hides one of ours, else None.

    Our packages lie side by side, so one found elsewhere is another's. `kernels` can also be overwritten where it
    lies (an installer writes both into one site-packages); then its docstring isn't ours.
    """
    home = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if origin is None:
            return f"its package {name!r} is missing from {home}; install footplate anew."
        overwritten = False
        if name == "kernels":
            with contextlib.suppress(OSError, UnicodeDecodeError):
                overwritten = "Operations of the engine" not in origin.read_text(encoding="utf-8")[:400]
        if origin.parent.parent != home or overwritten:
            return (
                f"another distribution's package {name!r} ({origin.parent}) hides footplate's own; install footplate in an "
                "environment of its own (pipx install . does), or uninstall the other."
            )
    return None


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; `options.command` is the function that carries it out."""
    from engine import __version__

    # Absent flags stay absent (SUPPRESS): a subparser's defaults would overwrite what came before the command.
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_engine_flags(flags)
    parser = argparse.ArgumentParser(
        prog="footplate",
        description="A local LLM inference engine with its operator's console. Without a command: the console.",
        parents=[flags],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"footplate {__version__}")
    parser.set_defaults(command=open_console)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    run = commands.add_parser("run", help="answer one prompt on stdout", parents=[flags], allow_abbrev=False)
    run.add_argument("prompt", help="the prompt; - reads it from stdin (one newline at its end is dropped)")
    run.add_argument("--max-tokens", type=int, default=256, metavar="N", help="end after N tokens (default 256)")
    run.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    run.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same answer")
    run.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    run.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    run.add_argument("--json", action="store_true", help="one JSON object instead of text")
    run.add_argument("--view-json", metavar="FILE", help="write the engine's last view to FILE")
    run.set_defaults(command=_run, usage_error=run.error)

    inspect = commands.add_parser("inspect", help="what a model is, from its headers", parents=[flags], allow_abbrev=False)
    inspect.add_argument("inspected", metavar="M", help="a checkpoint directory, a .gguf file, a name, or a hub id")
    inspect.add_argument("--json", action="store_true", help="one JSON object instead of text")
    inspect.set_defaults(command=_inspect)

    bench = commands.add_parser("bench", help="measure speed on this machine", parents=[flags], allow_abbrev=False)
    bench.add_argument("--shape", metavar="NAME", help="random weights of a real shape instead of --model: " + ", ".join(SHAPES))
    bench.add_argument("--batch", type=int, default=1, metavar="B", help="requests at once (default 1)")
    bench.add_argument("--prompt-tokens", type=int, default=512, metavar="P", help="prompt length (default 512)")
    bench.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens to generate (default 128)")
    bench.add_argument("--repeats", type=int, default=3, metavar="R", help="measured runs; the medians are shown (default 3)")
    bench.add_argument("--json", action="store_true", help="one JSON object instead of text")
    bench.set_defaults(command=_bench)

    pull = commands.add_parser("pull", help="fetch a model into the cache", allow_abbrev=False)
    pull.add_argument("name", metavar="NAME", help="a model's name or a hub id")
    pull.set_defaults(command=_pull)
    return parser


SHAPES = ("smollm2-135m", "qwen3-0.6b", "qwen3-8b", "qwen3.5-0.8b", "qwen3.5-9b")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that are EngineConfig's fields, in a group of their own."""
    from engine.config import CIRCUITS, DEFAULT_MODEL, DEVICES, DTYPES

    group = parser.add_argument_group("engine flags")
    group.add_argument("--model", metavar="M", help=f"checkpoint directory, .gguf file, name or hub id (default {DEFAULT_MODEL})")
    group.add_argument("--device", choices=DEVICES, help="where it runs (default auto: a CUDA GPU if there is one)")
    group.add_argument("--dtype", choices=DTYPES, help="auto: bfloat16 where the hardware computes in it, else float32")
    group.add_argument("--circuit", choices=CIRCUITS, help="what computes (default auto: the quickest)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical cores)")
    group.add_argument("--num-kv-blocks", type=int, metavar="N", help="KV blocks (default: from the memory that is free)")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens a KV block (default 16)")
    group.add_argument("--max-seq-len", type=int, metavar="N", help="context in tokens (default: the model's, as memory allows)")
    group.add_argument("--max-batch", type=int, metavar="N", help="requests that run at once (default 16)")
    group.add_argument("--max-batch-tokens", type=int, metavar="N", help="tokens a step (default 512)")
    group.add_argument("--ssm-cache-slots", type=int, metavar="N", help="snapshots of recurrent state (hybrid models; default 16)")
    group.add_argument(
        "--ssm-checkpoint-interval", type=int, metavar="N", help="tokens between a long answer's snapshots (default 256)"
    )
    group.add_argument("--ssm-draft-rows", type=int, metavar="N", help="verify rows a sequence can roll back to (default 0)")
    group.add_argument("--spill-dir", metavar="DIR", help="keep preempted requests' states there instead of computing them again")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of the flags that were given. Raises `FootplateError` naming a flag whose value can't work."""
    import dataclasses

    from engine.config import EngineConfig

    names = (field.name for field in dataclasses.fields(EngineConfig))
    return EngineConfig(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def open_console(options: argparse.Namespace) -> int:
    """Open the console on the flags' engine; refuse where there is no terminal to draw it on."""
    from engine.errors import FootplateError

    config = engine_config(options)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise FootplateError("the console needs a terminal on stdin and stdout; `footplate run` answers a prompt without one.")
    from console.app import run_console

    return run_console(config)


def _run(options: argparse.Namespace) -> int:
    from console.cli_run import run

    return run(options, engine_config(options))


def _inspect(options: argparse.Namespace) -> int:
    from console.cli_reports import report_inspection

    return report_inspection(options, engine_config(options))


def _bench(options: argparse.Namespace) -> int:
    from console.cli_reports import report_bench

    return report_bench(options, engine_config(options))


def _pull(options: argparse.Namespace) -> int:
    from console.cli_reports import report_pull

    return report_pull(options)


if __name__ == "__main__":
    sys.exit(main())
