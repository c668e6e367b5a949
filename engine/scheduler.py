"""The scheduler: who runs in the next step, with how many tokens. It owns requests and their lifetimes, and knows no tensors.

Decode comes first, one token for every running answer; what is left of the token budget is shared by the prompts. When
blocks run out, the newest running request is preempted: its blocks are freed and it is computed again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.batch import PlanRow, StepPlan
from engine.errors import InvariantBroken
from engine.model.lifecycle import Lifecycle
from engine.request import Request
from engine.sampler import RowState
from engine.sequence import Sequence
from engine.text import TextStream
from engine.view import RequestState


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine. seq: None while it waits; sampling: its sampler state, which holds the
    generated ids; keys: prefix keys of its known ids' full blocks; text: only with stop strings, to find them; order: when it
    was first admitted (the newest is preempted first)."""

    request: Request
    sampling: RowState
    budget_tokens: int
    text: TextStream | None = None
    seq: Sequence | None = None
    order: int = -1
    num_preemptions: int = 0
    num_restores: int = 0
    spill_key: int | None = None
    cached_tokens: int = 0
    cache_note: str = ""
    kv_matched_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    admitted_s: float | None = None
    keys: list[bytes] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.sampling.output_token_ids)

    def known_token_ids(self) -> list[int]:
        """Prompt and generated ids: what a (re)start computes or finds cached."""
        return [*self.request.prompt_token_ids, *self.sampling.output_token_ids]

    @property
    def state(self) -> RequestState:
        if self.seq is None:
            return "preempted" if self.num_preemptions else "queued"
        return "decode" if self.seq.num_tokens - self.seq.num_computed_tokens == 1 and self.num_output_tokens else "prefill"


class Scheduler:
    """Admission, token budget, mixed batches and preemption."""

    def __init__(self, lifecycle: Lifecycle, max_batch: int, max_batch_tokens: int) -> None:
        self.lifecycle = lifecycle
        self.max_batch = max_batch
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preempted: list[Job] = []
        self._order = 0

    def add(self, job: Job) -> None:
        """Queue a job behind those that wait."""
        self.waiting.append(job)

    def jobs(self) -> Iterator[Job]:
        """Every unfinished job, the running ones first, oldest first."""
        yield from self.running
        yield from self.waiting

    def find(self, request_id: int) -> Job | None:
        """The unfinished job of a request."""
        return next((job for job in self.jobs() if job.request.request_id == request_id), None)

    def remove(self, job: Job, *, spoiled: bool = False) -> None:
        """Take a job out, wherever it is, and free what it holds. Its tokens stay in the prefix cache unless they are `spoiled`."""
        if job.seq is not None:
            self.running.remove(job)
            if spoiled:
                self.lifecycle.discard_prefix(job.seq)
                self.lifecycle.free_sequence(job.seq)
            else:
                self.lifecycle.retire_sequence(job.seq)
            job.seq = None
        else:
            self.waiting.remove(job)
            if job.spill_key is not None and self.lifecycle.spill is not None:
                self.lifecycle.spill.drop(job.spill_key)

    def plan(self) -> tuple[StepPlan, list[Job]]:
        """The next step and its jobs, in the same order. Admits and preempts on the way; an empty plan means nothing can run."""
        self._admit()
        while True:
            decode = [job for job in self.running if job.state == "decode"]
            rows, jobs = self._rows(decode)
            needed = sum(self.lifecycle.blocks_needed(row.seq, row.seq.num_computed_tokens + row.q_len) for row in rows)
            missing = needed - self.lifecycle.num_free_blocks
            if missing <= 0 or self.lifecycle.reclaim_prefix_blocks(missing) >= missing:
                return StepPlan(tuple(rows), len(decode)), jobs
            self._preempt(max(self.running, key=lambda job: job.order))

    def _rows(self, decode: list[Job]) -> tuple[list[PlanRow], list[Job]]:
        rows: list[PlanRow] = []
        for job in decode:
            assert job.seq is not None
            rows.append(PlanRow(job.seq, 1, 1))
        jobs = list(decode)
        left = self.max_batch_tokens - len(rows)
        prefill = sorted((job for job in self.running if job.state != "decode"), key=_num_missing)
        for index, job in enumerate(prefill):
            # Shortest first, each with an equal share of what is left: a short prompt never waits for a long one's end.
            length = min(_num_missing(job), left // (len(prefill) - index) or left)
            if not length:
                break
            assert job.seq is not None
            rows.append(PlanRow(job.seq, length, int(length == _num_missing(job))))
            jobs.append(job)
            left -= length
        return rows, jobs

    def _next_waiting(self) -> list[Job]:
        """The waiting jobs in the order they may start: preempted ones first, then those of the chat (title) with the fewest
        running requests, so that one chat's many don't shut another out; among equals first come, first served."""
        ahead = Counter(job.request.title for job in self.running)
        keys: dict[int, tuple[bool, int]] = {}
        for job in self.waiting:
            keys[id(job)] = (not job.num_preemptions, ahead[job.request.title])
            ahead[job.request.title] += 1
        return sorted(self.waiting, key=lambda job: keys[id(job)])

    def _admit(self) -> None:
        """Start waiting jobs, as long as a row and the blocks of the whole prompt are there for each. A job whose
        next block a running prefill is about to cache waits for it, and lets others pass."""
        if not self.waiting or not self.lifecycle.num_free_rows:
            return
        promised = sum(self._unreserved(job) for job in self.running)
        coming = {key for job in self.running if job.state == "prefill" for key in job.keys}
        reading = False
        for job in self._next_waiting():
            if not self.lifecycle.num_free_rows or len(self.running) >= self.max_batch:
                return
            tokens = job.known_token_ids()
            if len(job.keys) < len(tokens) // self.lifecycle.blocks.block_size:
                job.keys = self.lifecycle.prompt_keys(tokens)
            next_key = next((key for key in job.keys if not self.lifecycle.prefix.has(key)), None)
            if next_key in coming:
                continue
            needed = promised + -(-(len(tokens) + 1) // self.lifecycle.blocks.block_size)
            # A spilled state comes back whole: it reuses no cached block.
            reusing = tokens if job.spill_key is None else []
            room = self.lifecycle.reclaim_prefix_blocks_for(reusing, 0, needed, job.keys)
            if needed - room.reused_blocks > self.lifecycle.num_free_blocks:
                if not self.running and not reading:
                    raise InvariantBroken(
                        f"request {job.request.request_id} needs {needed} KV blocks and nothing runs, but only "
                        f"{self.lifecycle.num_free_blocks} of {self.lifecycle.num_total_blocks} are free."
                    )
                return
            spill = self.lifecycle.spill
            if spill is not None and job.spill_key is not None and not spill.ready(job.spill_key):
                # It is read back now that there is room, which nobody behind may take meanwhile.
                promised, reading = needed, True
                continue
            self.waiting.remove(job)
            self._start(job, tokens)
            promised += self._unreserved(job)
            coming.update(job.keys)

    def _start(self, job: Job, tokens: list[int]) -> None:
        seq = self.lifecycle.alloc_sequence_for(job.budget_tokens, job.request.request_id)
        key, job.spill_key, job.seq = job.spill_key, None, seq
        if key is not None and self.lifecycle.unspill_sequence(seq, tokens, key):
            job.num_restores += 1
        else:
            found = self.lifecycle.adopt_prefix(seq, tokens, job.keys)
            if job.order < 0:
                job.cached_tokens, job.cache_note, job.kv_matched_tokens = found.num_tokens, found.note, found.kv_tokens
        if job.order < 0:
            job.order = self._order
            self._order += 1
            job.admitted_s = time.monotonic()
        self.running.append(job)
        self.running.sort(key=lambda each: each.order)

    def _unreserved(self, job: Job) -> int:
        """Blocks that a running job's known tokens still need."""
        return 0 if job.seq is None else self.lifecycle.blocks_needed(job.seq, job.seq.num_tokens + 1)

    def _preempt(self, job: Job) -> None:
        if len(self.running) == 1:
            raise InvariantBroken(
                f"request {job.request.request_id} alone needs more than the {self.lifecycle.num_total_blocks} KV blocks, "
                "which its admission should have ruled out."
            )
        assert job.seq is not None
        self.running.remove(job)
        job.spill_key = self.lifecycle.spill_sequence(job.seq)
        self.lifecycle.retire_sequence(job.seq)
        job.seq = None
        job.num_preemptions += 1
        self.preempted.append(job)
        self.waiting.appendleft(job)


def _num_missing(job: Job) -> int:
    """Known ids of a running job that aren't computed yet."""
    assert job.seq is not None
    return job.seq.num_tokens - job.seq.num_computed_tokens
