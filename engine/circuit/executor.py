"""Executor: runs a plan's launches on a batch."""

from __future__ import annotations

import time
from collections import Counter

from torch import Tensor

from engine.batch import Batch
from engine.circuit.plan import Plan
from engine.circuit.rules import Step
from engine.view import LaunchView
from kernels.attention.fused import PageRuns


class Executor:
    """Runs one plan. `run` is what a circuit's forward is; the step's batch is its argument, and nothing is kept between steps."""

    def __init__(self, plan: Plan, kv_cache: Tensor) -> None:
        self.plan = plan
        self._kv_cache = kv_cache
        self._launches = tuple(launch.run for launch in plan.launches)
        self._to_logits = next(i for i, launch in enumerate(plan.launches) if launch.ops[0].kind == "select_rows")
        self._profile_next = False
        counts = Counter((launch.rule, launch.kernel, launch.numerics) for launch in plan.launches)
        self.profile = tuple(LaunchView(*rule, count) for rule, count in counts.items())

    def run(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """(normed hidden rows `[num_logits, hidden]`, logits `[num_logits, vocab]`) of the rows that get logits, if
        there are any."""
        step = Step(batch, PageRuns(self._kv_cache, batch.attention))
        wants_logits = batch.logit_rows.shape[0] > 0
        launches = self._launches if wants_logits else self._launches[: self._to_logits]
        if self._profile_next:
            self._run_timed(step, len(launches))
        else:
            for launch in launches:
                launch(step)
        return (step.registers["hidden"], step.registers["logits"]) if wants_logits else None

    def profile_next_step(self) -> None:
        """Time each launch of the next step; `profile` then holds the sums by rule."""
        self._profile_next = True

    def _run_timed(self, step: Step, count: int) -> None:
        sums: dict[tuple[str, str, str], tuple[int, float]] = {}
        for launch in self.plan.launches[:count]:
            begin = time.perf_counter()
            launch.run(step)
            key = (launch.rule, launch.kernel, launch.numerics)
            times, total = sums.get(key, (0, 0.0))
            sums[key] = (times + 1, total + (time.perf_counter() - begin) * 1e6)
        self._profile_next = False
        self.profile = tuple(LaunchView(*rule, *times) for rule, times in sums.items())
