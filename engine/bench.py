"""What `footplate bench` measures: time to first token, prefill and decode speed, step and host time."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.request import RequestHandle, Stats

POLL_S = 0.005
WARM_UP_TOKENS = 8
SECOND_TURN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured: `batch` requests at once, each of `prompt_tokens` random ids and `new_tokens` greedy ones."""

    batch: int = 1
    prompt_tokens: int = 512
    new_tokens: int = 128
    repeats: int = 3

    def check(self, max_batch: int) -> None:
        """Raise `RequestError` naming the flag of a value that can't be measured."""
        for flag, value, least in (
            ("--batch", self.batch, 1),
            ("--prompt-tokens", self.prompt_tokens, 1),
            ("--new-tokens", self.new_tokens, 2),
            ("--repeats", self.repeats, 1),
        ):
            if value < least:
                raise RequestError(f"{flag} must be at least {least}, not {value}.")
        if self.batch > max_batch:
            raise RequestError(f"--batch {self.batch} is above --max-batch {max_batch}; raise the second to run them at once.")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, or the medians of several. `decode_tokens_per_s` is one request's (their median);
    `decode_tokens_per_s_total` all requests' together while all of them decode. `second_turn_ttft_ms`: of a request that goes on
    from the first one's prompt and answer with SECOND_TURN_TOKENS new ids, `second_turn_cached_tokens` of which were cached.
    None: not measured."""

    ttft_ms: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    decode_tokens_per_s_total: float | None
    step_ms: float | None
    host_ms: float | None
    second_turn_ttft_ms: float | None = None
    second_turn_cached_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The medians, every run behind them, and what they were measured on."""

    model: str
    family: str
    num_parameters: int
    weight_format: str
    device: str
    dtype: str
    threads: int
    forward: str
    digest: str
    launches_per_step: int | None
    workload: Workload
    median: Figures
    runs: tuple[Figures, ...]
    versions: dict[str, str]

    def as_json(self) -> dict[str, object]:
        """The report as JSON-ready data."""
        return asdict(self)


def measure(engine: Engine, workload: Workload, progress: Callable[[str], None] | None = None) -> Report:
    """The Report of `workload` on a loaded, idle engine. Raises `RequestError` when the engine refuses the requests."""
    view = engine.view
    assert view.model is not None and view.forward is not None  # set before an engine is ready
    runs: list[Figures] = []
    for repeat in range(workload.repeats + 1):
        if progress is not None:
            progress("warming up" if repeat == 0 else f"run {repeat} of {workload.repeats}")
        # Fresh ids each time, so that no prefix cache can answer for the model; the first run warms up and isn't counted.
        new_tokens = min(WARM_UP_TOKENS, workload.new_tokens) if repeat == 0 else workload.new_tokens
        figures = _run_once(engine, workload, new_tokens, seed=repeat, vocab_size=view.model.vocab_size)
        if repeat > 0:
            runs.append(figures)
    return Report(
        model=view.model.name,
        family=view.model.family,
        num_parameters=view.model.num_parameters,
        weight_format=view.model.weight_format,
        device=view.model.device,
        dtype=view.model.dtype,
        threads=view.model.threads,
        forward=view.forward.name,
        digest=view.forward.digest,
        launches_per_step=view.forward.launches_per_step,
        workload=workload,
        median=Figures(*(_median([getattr(run, name) for run in runs]) for name in Figures.__slots__)),
        runs=tuple(runs),
        versions=_versions(),
    )


def _run_once(engine: Engine, workload: Workload, new_tokens: int, *, seed: int, vocab_size: int) -> Figures:
    ids = random.Random(seed)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    prompts = [[ids.randrange(vocab_size) for _ in range(workload.prompt_tokens)] for _ in range(workload.batch)]
    handles: list[RequestHandle] = []
    try:
        handles += (engine.submit(prompt, params=params, title=f"bench {n}") for n, prompt in enumerate(prompts))
        samples = _watch(engine, handles)
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    first_turns = [handle.result() for handle in handles]
    stats = [each.stats for each in first_turns]
    turn = [*prompts[0], *first_turns[0].token_ids, *(ids.randrange(vocab_size) for _ in range(SECOND_TURN_TOKENS))]
    second = _second_turn(engine, turn)
    first_tokens_s = [each.ttft_ms / 1000 for each in stats if each.ttft_ms is not None]
    alone = workload.batch == 1
    # Several prompts share steps with each other's decode, so their prefill is timed as a whole: all prompt tokens
    # over the time until the last first token.
    prefill = (
        stats[0].prefill_tokens_per_s if alone else _rate(workload.batch * workload.prompt_tokens, max(first_tokens_s, default=0))
    )
    per_request = _median([each.decode_tokens_per_s for each in stats])
    total = per_request if alone else samples.total_rate()
    return Figures(
        ttft_ms=_median([each.ttft_ms for each in stats]),
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=per_request,
        decode_tokens_per_s_total=total,
        step_ms=None if total is None else workload.batch * 1000 / total,
        host_ms=_median(samples.host_ms),
        second_turn_ttft_ms=second.ttft_ms if second is not None else None,
        second_turn_cached_tokens=second.cached_tokens if second is not None else None,
    )


def _second_turn(engine: Engine, turn: list[int]) -> Stats | None:
    """The figures of a turn's first token; None when the context can't hold the turn."""
    try:
        return engine.generate(turn, params=SamplingParams(max_tokens=1, ignore_eos=True)).stats
    except RequestError:
        return None


class _Samples:
    """Token counts over the time in which every request decodes, and the view's host time in it."""

    def __init__(self) -> None:
        self.window: list[tuple[float, int]] = []
        self.host_ms: list[float | None] = []

    def total_rate(self) -> float | None:
        """Tokens per second of all requests together; None when the window was too short to tell."""
        if len(self.window) < 2:
            return None
        (start_s, start), (end_s, end) = self.window[0], self.window[-1]
        return _rate(end - start, end_s - start_s)


def _watch(engine: Engine, handles: Sequence[RequestHandle]) -> _Samples:
    """Read the handles until all are done. Polling at 5 ms leaves the interpreter to the engine's thread."""
    samples, last_count, last_view = _Samples(), -1, 0
    while not all(handle.done for handle in handles):
        for handle in handles:
            handle.poll()
        counts = [len(handle.token_ids) for handle in handles]
        if all(counts) and not any(handle.done for handle in handles):
            if sum(counts) != last_count:
                last_count = sum(counts)
                samples.window.append((time.monotonic(), last_count))
            if (view := engine.view).published != last_view:
                last_view = view.published
                samples.host_ms.append(view.host_ms)
        time.sleep(POLL_S)
    return samples


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 and amount > 0 else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _versions() -> dict[str, str]:
    import torch

    from engine import __version__

    return {"footplate": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def as_lines(report: Report) -> list[str]:
    """The report as lines for a person; what wasn't measured is a dash."""
    work, median = report.workload, report.median
    launches = "" if report.launches_per_step is None else f", {report.launches_per_step} launches a step"
    forward = f"{report.forward} {report.digest}".rstrip()
    rows = [
        ("ttft", median.ttft_ms, "ms"),
        ("prefill", median.prefill_tokens_per_s, "tok/s"),
        ("decode, each", median.decode_tokens_per_s, "tok/s"),
        ("decode, all", median.decode_tokens_per_s_total, "tok/s"),
        ("step", median.step_ms, "ms"),
        ("host part", median.host_ms, "ms"),
        (
            "second turn",
            median.second_turn_ttft_ms,
            f"ms to first token, {median.second_turn_cached_tokens or 0:,.0f} cached",
        ),
    ]
    return [
        f"{report.model}  {report.family}, {report.num_parameters:,} parameters, {report.weight_format}",
        f"  {report.device} {report.dtype}, {report.threads} threads · forward {forward}{launches}",
        f"  batch {work.batch} · {work.prompt_tokens} prompt tokens · {work.new_tokens} new tokens · median of {work.repeats}",
        "  " + " · ".join(f"{name} {version}" for name, version in report.versions.items()),
        "",
        *(f"  {name:<13} {'–' if value is None else f'{value:,.2f}':>12} {unit}" for name, value, unit in rows),
    ]
