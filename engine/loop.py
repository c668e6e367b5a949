"""The engine thread's loop: drain commands → plan → forward → sample → commit → publish."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable

from engine.commands import (
    CancelRequest,
    Command,
    FlushPrefixCache,
    LoadState,
    ProfileStep,
    Refused,
    SaveState,
    SetForward,
    Ticket,
    Wake,
)
from engine.commit import commit, finish
from engine.device import read_memory
from engine.errors import CommandRefused, FootplateError, InvariantBroken
from engine.meters import Meters
from engine.model.transformer import TransformerModel
from engine.request import FinishReason
from engine.sampler import Sampler
from engine.scheduler import Job, Scheduler
from engine.transfers import Loaded, Transfers
from engine.view import EngineView, MemoryItem, MemoryView, ModelView, RequestView, TicketView, Totals

PUBLISH_S = 0.1
MEMORY_S = 0.5
IDLE_WAIT_S = 0.25
SPILL_WAIT_S = 0.005
MAX_TICKETS = 64


Message = Job | Ticket | Loaded | Refused | Wake
Publish = Callable[[EngineView], None]


class EngineLoop:
    """Owns every mutable engine object; lives on the engine thread alone. `inbox` is the only way in, `publish` the way out."""

    def __init__(
        self,
        model: TransformerModel,
        model_view: ModelView,
        inbox: queue.SimpleQueue[Message],
        publish: Publish,
        max_batch_tokens: int,
    ) -> None:
        self.model = model
        self.scheduler = Scheduler(model.lifecycle, model.logits.logits_buffer.shape[0], max_batch_tokens)
        self.sampler = Sampler(model.gpu_backend, model.vocab_size)
        self.meters = Meters(time.monotonic())
        self.step = 0
        self._model_view = model_view
        self._inbox = inbox
        self._publish = publish
        self._published = 0
        self._published_at = 0.0
        self._tickets: deque[Ticket] = deque(maxlen=MAX_TICKETS)
        self._memory: MemoryView | None = None
        self._memory_at = 0.0
        self._checked = True
        self._transfers = Transfers(model.lifecycle, inbox.put)

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Serve until `should_stop`. Raises what can't be laid at a request's door (`InvariantBroken` and the like)."""
        self.publish()
        while not should_stop():
            changed = self._drain()
            worked = self._step()
            now = time.monotonic()
            moved = self.meters.close_interval(now, len(self.scheduler.running), len(self.scheduler.waiting))
            if changed or (worked and now - self._published_at >= PUBLISH_S) or (not worked and moved):
                self.publish()
            if not worked:
                self._idle()

    def stop(self, error: str | None) -> None:
        """End every unfinished request: cancelled, or with `error` when the engine failed. The pools' books are left alone
        after a failure, for they may be what failed."""
        for job in list(self.scheduler.jobs()):
            if error is None:
                self._end(job, "cancelled")
            else:
                finish(job, "error", error)
        self._transfers.abandon(self.step, error or "the engine was closed.")

    def _idle(self) -> None:
        if not self._checked:
            # Nothing runs: the books must balance now, whatever was cancelled, preempted or failed before.
            self._check()
            self._checked = True
            self.publish()
        try:
            # A waiting job that can't start yet waits for its spilled state to be read back.
            message = self._inbox.get(timeout=SPILL_WAIT_S if self.scheduler.waiting else IDLE_WAIT_S)
        except queue.Empty:
            return
        if self._accept(message):
            self.publish()

    def _check(self) -> None:
        self.model.lifecycle.check()
        if self.model.lifecycle.live():
            raise InvariantBroken("nothing runs, but a sequence still holds blocks.")

    # Commands and submissions

    def _drain(self) -> bool:
        changed = False
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return changed
            changed |= self._accept(message)

    def _accept(self, message: Message) -> bool:
        """Take one message; whether the view should be published at once."""
        if isinstance(message, Job):
            self.scheduler.add(message)
            self.meters.totals["requests"] += 1
            self.meters.totals["prompt_tokens"] += len(message.request.prompt_token_ids)
            self._checked = False
            return True
        if isinstance(message, Ticket):
            self._tickets.append(message)
            try:
                if isinstance(message.command, (SaveState, LoadState)):
                    self._transfers.begin(message, self.step)
                    return True
                value = self._apply(message.command)
            except FootplateError as error:
                message.settle("refused", self.step, reason=str(error))
            else:
                message.settle("applied", self.step, value=value)
            self._note("ticket", f"{message.command.describe()}: {message.reason or message.state}")
            return True
        if isinstance(message, Refused):
            self.meters.totals["refused"] += 1
            self._note("refused", message.reason)
            return True
        if isinstance(message, Loaded):
            self._transfers.finish(message, self.step)
            self._note("ticket", f"{message.ticket.command.describe()}: {message.ticket.reason or message.ticket.state}")
            return True
        return False

    def _apply(self, command: Command) -> object:
        if isinstance(command, CancelRequest):
            job = self.scheduler.find(command.request_id)
            if job is None:
                raise CommandRefused(f"request {command.request_id} isn't running or waiting; it ended already or never was.")
            self._end(job, "cancelled")
            return None
        if isinstance(command, FlushPrefixCache):
            return self.model.lifecycle.reclaim_prefix_blocks(self.model.lifecycle.num_total_blocks)
        if isinstance(command, SetForward):
            # Between two steps nothing is in flight and the last one is committed.
            self.model.circuit.set_forward(command.name)
            self._memory = None
            return self.model.circuit.forward_disclosure()
        if isinstance(command, ProfileStep):
            self.model.circuit.profile_next_step()
            return None
        raise CommandRefused(f"this engine doesn't know the command {type(command).__name__}.")

    # One step

    def _step(self) -> bool:
        """Plan, compute and commit one step; whether there was anything to do."""
        begin = time.perf_counter()
        self.model.lifecycle.blocks.step = self.step
        plan, jobs = self.scheduler.plan()
        self._note_preemptions()
        if not plan.rows:
            return False
        self.step += 1
        forward_begin = time.perf_counter()
        try:
            logits = self.model.forward.run(plan)
            drawing = [job for job, row in zip(jobs, plan.rows, strict=True) if row.num_logits]
            sampled = self.sampler.sample(logits, [job.sampling for job in drawing]) if logits is not None else []
        except InvariantBroken:
            raise
        except Exception as error:
            self._fail(jobs, error)
            return True
        forward_s = time.perf_counter() - forward_begin
        now = time.monotonic()
        first = [job for job in drawing if job.first_token_s is None]
        for job in jobs[: plan.num_decode]:
            if job.seq is not None:
                self.model.ssm_state.decode_marconi_checkpoint(job.seq)
        for job in jobs[plan.num_decode :]:
            if job.seq is not None:
                # At once, so that requests that share the prompt needn't wait for the answer's end.
                self.model.lifecycle.cache_sequence(job.seq)
        for job, reason, message in commit(drawing, sampled, now):
            self._end(job, reason, message)
        for job in first:
            if job.first_token_s is not None:
                self.meters.first_token((job.first_token_s - job.request.submitted_s) * 1e3)
        self.meters.totals["output_tokens"] += len(drawing)
        prefill_tokens = plan.num_tokens - plan.num_decode
        self.meters.step(time.perf_counter() - begin, forward_s, plan.num_decode, prefill_tokens)
        return True

    def _note_preemptions(self) -> None:
        for job in self.scheduler.preempted:
            self.meters.totals["preemptions"] += 1
            self._note("preempt", f"{_name(job)}: preempted, for KV blocks ran out; it will be computed again")
        self.scheduler.preempted.clear()

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        """An admitted batch raised: its requests end with a sentence, and the engine goes on."""
        sentence = str(error) if isinstance(error, FootplateError) else f"the forward pass failed: {type(error).__name__}: {error}"
        self._note("error", sentence)
        for job in jobs:
            self._end(job, "error", sentence)

    def _end(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """Free what a job holds, then tell its reader."""
        self.scheduler.remove(job, spoiled=reason == "error")
        finish(job, reason, error)
        self.meters.totals["cached_tokens"] += job.cached_tokens
        totals = {"cancelled": "cancelled", "error": "failed"}.get(reason, "finished")
        self.meters.totals[totals] += 1
        if reason in ("cancelled", "error"):
            self._note(reason, f"{_name(job)}: {error or 'cancelled'}")

    def _note(self, kind: str, text: str) -> None:
        self.meters.event(self.step, time.time(), kind, text)

    # The view

    def publish(self) -> None:
        """Make a view and hand it out."""
        now = time.monotonic()
        self._published += 1
        self._published_at = now
        if self._memory is None or now - self._memory_at >= MEMORY_S:
            self._memory, self._memory_at = self._read_memory(), now
        scheduler, meters = self.scheduler, self.meters
        num_running = len(scheduler.running)
        self._publish(
            EngineView(
                published=self._published,
                monotonic_s=now,
                state="running" if num_running or scheduler.waiting else "idle",
                model=self._model_view,
                forward=self.model.circuit.forward_disclosure(),
                profile=self.model.circuit.last_profile(),
                step=self.step,
                kv=self.model.lifecycle.blocks.view(),
                ssm=self.model.ssm_view(),
                memory=self._memory,
                requests=tuple(_request_view(job, now) for job in scheduler.jobs()),
                num_running=num_running,
                num_waiting=len(scheduler.waiting),
                step_ms=meters.step_ms,
                host_ms=meters.host_ms,
                decode_tokens_per_s=meters.decode_tokens_per_s,
                prefill_tokens_per_s=meters.prefill_tokens_per_s,
                last_ttft_ms=meters.last_ttft_ms,
                totals=Totals(**meters.totals),
                history=meters.history(),
                tickets=tuple(_ticket_view(ticket) for ticket in self._tickets),
                events=meters.events(),
            )
        )

    def _read_memory(self) -> MemoryView:
        """The model's own books, and what the driver or the OS counts beyond them as "other", so that the items add up."""
        reading = read_memory(self.model.device)
        items = self.model.memory_items()
        other = reading.used_bytes - sum(item.bytes for item in items)
        return MemoryView((*items, MemoryItem("other", other)), reading.used_bytes, reading.capacity_bytes, reading.source)


def _name(job: Job) -> str:
    return job.request.title or f"request {job.request.request_id}"


def _request_view(job: Job, now: float) -> RequestView:
    seq = job.seq
    return RequestView(
        request_id=job.request.request_id,
        title=job.request.title,
        state=job.state,
        prompt_tokens=len(job.request.prompt_token_ids),
        cached_tokens=job.cached_tokens,
        computed_tokens=seq.num_computed_tokens if seq else 0,
        output_tokens=job.num_output_tokens,
        max_tokens=job.sampling.params.max_tokens,
        num_blocks=len(seq.block_table) if seq else 0,
        waited_ms=((job.admitted_s or now) - job.request.submitted_s) * 1e3,
        cache_note=job.cache_note,
        kv_matched_tokens=job.kv_matched_tokens,
    )


def _ticket_view(ticket: Ticket) -> TicketView:
    return TicketView(ticket.ticket_id, ticket.command.describe(), ticket.state, ticket.reason, ticket.step)
