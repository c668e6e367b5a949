"""The sampler: logits rows → token ids, one request's parameters per row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.request import TokenLogprob
from engine.sampling import SamplingParams
from kernels.sampling.eager import FilterRows, draw, penalise, seed_key


@dataclass(slots=True)
class RowState:
    """What the sampler keeps for one request: its parameters, how many tokens it has generated, which ids end it, and the
    token counts its penalties need (made when first needed)."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    end_ids: Collection[int]
    output_token_ids: list[int] = field(default_factory=list)
    prompt_seen: Tensor | None = None
    output_counts: Tensor | None = None
    counted: int = 0

    @property
    def penalised(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0

    @property
    def needs_own_logits(self) -> bool:
        return self.penalised or bool(self.params.logit_bias) or len(self.output_token_ids) < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's outcome: the id, or None when the row's logits weren't finite; the logprob if it was asked for."""

    token_id: int | None
    logprob: TokenLogprob | None = None


class Sampler:
    """Chooses one id per row. Parameter tensors are remade only when the batch's rows change."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._rows: tuple[RowState, ...] = ()
        self._filters: FilterRows | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[RowState]) -> list[Sampled]:
        """The outcome of each row. logits: `[rows, vocab]`, left unchanged.

        Order: penalties, logit bias, min_tokens, temperature, top-k, top-p, min-p. Logprobs are of the model's own
        distribution, before any of these.
        """
        chosen_from = logits
        if any(row.needs_own_logits for row in rows):
            chosen_from = logits.float().clone()
            for index, row in enumerate(rows):
                if row.needs_own_logits:
                    chosen_from[index] = self._adjust(chosen_from[index], row)
        if all(row.params.temperature == 0 for row in rows):
            # The largest of a row with a NaN is that NaN; one with only −inf has no choice either.
            largest, ids = chosen_from.max(-1)
            usable = torch.isfinite(largest)
            if chosen_from is not logits:
                usable &= ~logits.isnan().any(-1)
        else:
            positions = torch.tensor([len(row.output_token_ids) for row in rows], device=self.device)
            ids = draw(chosen_from, self._filters_of(rows), positions)
            usable = torch.isfinite(chosen_from.gather(1, ids[:, None])[:, 0]) & ~logits.isnan().any(-1)
        logprobs = self._logprobs(logits, ids, rows)
        verdicts: list[tuple[int, int]] = list(zip(ids.tolist(), usable.tolist(), strict=True))
        return [Sampled(token_id if ok else None, logprobs[index]) for index, (token_id, ok) in enumerate(verdicts)]

    def _adjust(self, logits: Tensor, row: RowState) -> Tensor:
        params = row.params
        if row.penalised:
            seen, counts = self._counts(row)
            logits = penalise(logits, seen, counts, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self.device)
            biases = torch.tensor(list(params.logit_bias.values()), device=self.device, dtype=logits.dtype)
            logits = logits.index_add(0, ids, biases)
        if len(row.output_token_ids) < params.min_tokens and row.end_ids:
            logits = logits.index_fill(0, torch.tensor(sorted(row.end_ids), device=self.device), -torch.inf)
        return logits

    def _counts(self, row: RowState) -> tuple[Tensor, Tensor]:
        if row.prompt_seen is None or row.output_counts is None:
            row.prompt_seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            row.prompt_seen[torch.tensor(list(row.prompt_token_ids), device=self.device)] = True
            row.output_counts = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
        fresh = row.output_token_ids[row.counted :]
        if fresh:
            ids = torch.tensor(fresh, device=self.device)
            row.output_counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            row.counted = len(row.output_token_ids)
        return row.prompt_seen, row.output_counts

    def _filters_of(self, rows: Sequence[RowState]) -> FilterRows:
        same = len(rows) == len(self._rows) and all(new is old for new, old in zip(rows, self._rows, strict=True))
        if self._filters is None or not same:
            params = [row.params for row in rows]

            def floats(values: list[float]) -> Tensor:
                return torch.tensor(values, device=self.device, dtype=torch.float32)

            self._rows = tuple(rows)
            self._filters = FilterRows(
                temperature=floats([p.temperature for p in params]),
                top_k=torch.tensor([p.top_k for p in params], device=self.device),
                top_p=floats([p.top_p for p in params]),
                min_p=floats([p.min_p for p in params]),
                keys=torch.tensor([seed_key(row.seed) for row in rows], device=self.device),
                any_top_k=any(p.top_k for p in params),
                any_top_p=any(p.top_p < 1 for p in params),
                any_min_p=any(p.min_p for p in params),
            )
        return self._filters

    def _logprobs(self, logits: Tensor, ids: Tensor, rows: Sequence[RowState]) -> list[TokenLogprob | None]:
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        out: list[TokenLogprob | None] = [None] * len(rows)
        for index in wanted:
            logprobs = logits[index].float().log_softmax(-1)
            count = min(rows[index].params.logprobs or 0, self.vocab_size)
            token_id = int(ids[index])
            values, tops = logprobs.topk(count) if count else (logprobs[:0], ids[:0])
            top = tuple(zip(tops.tolist(), values.tolist(), strict=True))
            out[index] = TokenLogprob(token_id, float(logprobs[token_id]), top)
        return out
