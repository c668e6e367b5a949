"""What the console costs on decode: the same model answering in the console, on a real terminal, and in `footplate run`.

    python tests/bench/console_cost.py [--rounds 5] [--tokens 200] [--size 120x40] [ENGINE FLAGS]

Rounds alternate between the two, each in a process of its own; the figures are the engine's own decode rates (tokens after
the first, over the time from the first to the last), and the verdict is the ratio of their medians. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "console"))

from pty_session import Session, session

PROMPT = "Write a long story about a lighthouse keeper and the ships that pass."
RATE = re.compile(r"ttft [\d,.]+ m?s · ([\d,.]+) tok/s")
ANSWERED = re.compile(r"answering · ([\d,]+) tok")


def headless(tokens: int, flags: list[str]) -> float:
    """Decode tokens/s of `footplate run`, sampling as a chat does."""
    command = [sys.executable, "-m", "console.cli", "run", PROMPT, "--json", "--max-tokens", str(tokens), "--temperature", "0.2"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["stats"]["decode_tokens_per_s"])


def found(running: Session, pattern: re.Pattern[str], timeout_s: float = 300) -> str:
    """Read until `pattern` is on the screen; its group."""
    deadline = time.monotonic() + timeout_s
    while (match := pattern.search(running.text)) is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"{pattern.pattern!r} never came:\n{running.text}")
        running.read()
    return match.group(1)


def in_console(tokens: int, size: tuple[int, int], flags: list[str]) -> float:
    """Decode tokens/s of an answer in the console, stopped with Esc after about `tokens` tokens."""
    with tempfile.TemporaryDirectory() as home, session(["-m", "console.cli", *flags], Path(home), size) as running:
        running.until("○ idle", timeout_s=300)
        running.child.send(PROMPT + "\r")
        while int(found(running, ANSWERED).replace(",", "")) < tokens:
            running.read()
        running.child.send("\x1b")
        rate = float(found(running, RATE).replace(",", ""))
        running.child.send("\x11")
        running.until("left with 0")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--size", default="120x40")
    options, flags = parser.parse_known_args()
    columns, rows = (int(part) for part in options.size.split("x"))
    alone: list[float] = []
    shown: list[float] = []
    for number in range(options.rounds):
        alone.append(headless(options.tokens, flags))
        shown.append(in_console(options.tokens, (columns, rows), flags))
        print(f"round {number + 1}: headless {alone[-1]:.1f} tok/s, in the console {shown[-1]:.1f}", flush=True)
    without, beside = statistics.median(alone), statistics.median(shown)
    print(f"medians {without:.1f} and {beside:.1f} tok/s: the console costs {1 - beside / without:.1%} of decode")


if __name__ == "__main__":
    main()
