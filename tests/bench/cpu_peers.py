"""SmolLM2 on a CPU beside llama.cpp and transformers: decode after a 512-token prompt, prefill of 512, and 8 chats at once.

    python tests/bench/cpu_peers.py MODEL.gguf [--llama-python PYTHON] [--threads 2] [--runs 5] [--json FILE]

Each engine lives in a process of its own and is asked in turn, run by run, so that what else the machine does meets all alike;
medians are printed, and the ratios that the engine's goals name. llama.cpp is asked through llama-cpp-python in the interpreter
that `--llama-python` names (made for 0.3.36); `--llama-plain-buffers` leaves its weights as the file has them, for machines on
which its AMX copies fault. transformers dequantises the file to bfloat16. Ids are random and new in every run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 512
NEW_TOKENS = 64
CHATS = 8
VOCAB = 40000  # ids below this are in SmolLM2's vocabulary, and no control tokens are below 100


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCAB), k=PROMPT_TOKENS)


# One engine each: an object whose `run(seed)` measures once.


class Footplate:
    """The whole engine, as `footplate bench` asks it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import os

        os.environ["HF_HUB_OFFLINE"] = "1"
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from engine import Engine, EngineConfig

        config = EngineConfig(
            model=str(options.model), device="cpu", dtype="bfloat16", threads=options.threads, circuit=options.circuit
        )
        self.engine = Engine.load(config=config)

    def run(self, seed: int) -> dict[str, Any]:
        from engine import SamplingParams
        from engine.commands import FlushPrefixCache

        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        alone = self.engine.generate(prompt(seed), params)
        decode_host_ms = self.engine.view.host_ms
        begin = time.perf_counter()
        handles = [self.engine.submit(prompt(1000 * seed + chat), params=params) for chat in range(CHATS)]
        first_all: float | None = None
        count_then = 0
        while not all(handle.done for handle in handles):
            for handle in handles:
                handle.poll()
            counts = [len(handle.token_ids) for handle in handles]
            if first_all is None and all(counts):
                first_all, count_then = time.perf_counter(), sum(counts)
            if first_all is not None and not any(handle.done for handle in handles):
                last, count_last = time.perf_counter(), sum(counts)
            time.sleep(0.005)
        assert first_all is not None
        self.engine.command(FlushPrefixCache()).result(60)
        forward = self.engine.view.forward
        assert forward is not None
        return {
            "prefill_tokens_per_s": alone.stats.prefill_tokens_per_s,
            "decode_tokens_per_s": alone.stats.decode_tokens_per_s,
            "chats_tokens_per_s": (count_last - count_then) / (last - first_all),
            "chats_s": time.perf_counter() - begin,
            "host_ms": decode_host_ms,
            "forward": f"{forward.name} {forward.digest}".strip(),
        }


class LlamaCpp:
    """llama.cpp by llama-cpp-python's `eval`, and an argmax over its logits."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp  # type: ignore[import-not-found]  # lives in an interpreter of its own

        if options.llama_plain_buffers:
            params = llama_cpp.llama_cpp.llama_model_default_params()
            params.use_extra_bufts = False
            llama_cpp.llama_cpp.llama_model_default_params = lambda: params
        threads = options.threads
        self.llama = llama_cpp.Llama(
            str(options.model), n_ctx=1024, n_batch=PROMPT_TOKENS, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def run(self, seed: int) -> dict[str, Any]:
        self.llama.reset()
        begin = time.perf_counter()
        self.llama.eval(prompt(seed))
        token = self._best()
        first = time.perf_counter()
        for _ in range(NEW_TOKENS - 1):
            self.llama.eval([token])
            token = self._best()
        end = time.perf_counter()
        return {"prefill_tokens_per_s": PROMPT_TOKENS / (first - begin), "decode_tokens_per_s": (NEW_TOKENS - 1) / (end - first)}

    def _best(self) -> int:
        import llama_cpp  # as above
        import numpy as np

        logits = llama_cpp.llama_get_logits_ith(self.llama._ctx.ctx, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),))))


class Transformers:
    """transformers in bfloat16, its own cache, greedy."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        path = Path(options.model)
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()

    def run(self, seed: int) -> dict[str, Any]:
        import torch
        from transformers import DynamicCache

        with torch.inference_mode():
            cache = DynamicCache(config=self.model.config)
            begin = time.perf_counter()
            out = self.model(torch.tensor([prompt(seed)]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            first = time.perf_counter()
            for _ in range(NEW_TOKENS // 4):
                out = self.model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
            end = time.perf_counter()
        return {"prefill_tokens_per_s": PROMPT_TOKENS / (first - begin), "decode_tokens_per_s": NEW_TOKENS // 4 / (end - first)}


ENGINES = {"footplate": Footplate, "llama.cpp": LlamaCpp, "transformers": Transformers}


def work(options: argparse.Namespace) -> None:
    """A peer's process: load, then one line of JSON for each line read."""
    engine = ENGINES[options.worker](options)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(int(line))), flush=True)


class Peer:
    """The parent's end of a peer's process."""

    def __init__(self, name: str, python: str, options: argparse.Namespace) -> None:
        self.name = name
        command = [python, __file__, str(options.model), "--worker", name, "--threads", str(options.threads)]
        command += ["--circuit", options.circuit] + (["--llama-plain-buffers"] if options.llama_plain_buffers else [])
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line("ready")

    def ask(self, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self, expected: str | None = None) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") if expected is None else line.strip() == expected:
                return line
        raise SystemExit(f"{self.name} ended before it answered; its messages are above.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--llama-python", metavar="PYTHON", help="an interpreter with llama-cpp-python; without it llama.cpp is left out"
    )
    parser.add_argument("--llama-plain-buffers", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--circuit", default="auto")
    parser.add_argument("--without", choices=ENGINES, action="append", default=[], help="leave an engine out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    pythons = {"footplate": sys.executable, "llama.cpp": options.llama_python, "transformers": sys.executable}
    peers = [Peer(name, python, options) for name, python in pythons.items() if python and name not in options.without]
    runs: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for seed in range(options.runs + 1):
        for peer in peers:
            found = peer.ask(seed + 1)
            if seed:  # the first of each warms up
                runs[peer.name].append(found)
    for peer in peers:
        peer.end()
    report = summary(runs)
    print("\n".join(lines(report)))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"threads": options.threads, "model": options.model.name, **report, "runs": runs}, indent=1) + "\n"
        )


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by engine and figure, and the ratios of ours to the peers'."""
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0] if isinstance(found[0][key], (int, float))}
        for name, found in runs.items()
    }
    ours = medians["footplate"]
    ratios = {"8 chats / one": ours["chats_tokens_per_s"] / ours["decode_tokens_per_s"]}
    for name, theirs in medians.items():
        if name != "footplate":
            for key in ("decode_tokens_per_s", "prefill_tokens_per_s"):
                ratios[f"{key.split('_')[0]} / {name}"] = ours[key] / theirs[key]
    return {"forward": runs["footplate"][0]["forward"], "medians": medians, "ratios": ratios}


def lines(report: dict[str, Any]) -> list[str]:
    out = [f"footplate serves with {report['forward']}"]
    for name, figures in report["medians"].items():
        out.append(f"{name:<14}" + "  ".join(f"{key} {value:,.2f}" for key, value in figures.items()))
    return out + [f"{name:<26} {value:.2f}×" for name, value in report["ratios"].items()]


if __name__ == "__main__":
    main()
