"""What a step's sampled ids do to their jobs: tokens are appended, ends are found, deltas are sent."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import FinishReason, Stats, TokenDelta
from engine.sampler import Sampled
from engine.scheduler import Job


def commit(jobs: Sequence[Job], sampled: Sequence[Sampled], now: float) -> list[tuple[Job, FinishReason, str | None]]:
    """Append each job's id and send it on; returns the jobs that ended, each with its finish reason and error.

    A job's end token is left out of its tokens. The caller frees what the ended jobs hold, then calls `finish`.
    """
    ended: list[tuple[Job, FinishReason, str | None]] = []
    for job, outcome in zip(jobs, sampled, strict=True):
        if outcome.token_id is None:
            ended.append((job, "error", "the model's logits weren't finite; the weights or the dtype may be at fault."))
            continue
        reason = _append(job, outcome, now)
        if reason is not None:
            ended.append((job, reason, None))
    return ended


def _append(job: Job, outcome: Sampled, now: float) -> FinishReason | None:
    token_id, params, state = outcome.token_id, job.sampling.params, job.sampling
    assert token_id is not None and job.seq is not None
    if job.first_token_s is None:
        job.first_token_s = now
    job.last_token_s = now
    if token_id in state.end_ids and len(state.output_token_ids) >= params.min_tokens:
        return "stop"
    state.output_token_ids.append(token_id)
    logprobs = (outcome.logprob,) if outcome.logprob is not None else ()
    job.request.deltas.put(TokenDelta(token_ids=(token_id,), logprobs=logprobs))
    if job.text is not None:
        job.text.push((token_id,))
        if job.text.stopped:
            return "stop"
    if len(state.output_token_ids) >= params.max_tokens or job.seq.num_tokens + 1 >= job.budget_tokens:
        return "length"
    job.seq.append([token_id])
    return None


def finish(job: Job, reason: FinishReason, error: str | None = None) -> Stats:
    """Send the last delta, with the request's figures; returns these."""
    stats = stats_of(job)
    job.request.deltas.put(TokenDelta(finish_reason=reason, error=error, stats=stats))
    return stats


def stats_of(job: Job) -> Stats:
    """The figures of a job as they stand. The prefill rate counts the tokens that were computed, from admission to the
    first token; the decode rate the tokens after the first."""
    prompt, outputs = len(job.request.prompt_token_ids), job.num_output_tokens
    ttft = prefill = decode = None
    if job.first_token_s is not None:
        ttft = (job.first_token_s - job.request.submitted_s) * 1e3
        if job.admitted_s is not None and job.num_preemptions == 0:
            prefill = (prompt - job.cached_tokens) / max(job.first_token_s - job.admitted_s, 1e-9)
        if outputs > 1 and job.last_token_s is not None:
            decode = (outputs - 1) / max(job.last_token_s - job.first_token_s, 1e-9)
    return Stats(prompt, job.cached_tokens, ttft, prefill, decode)
