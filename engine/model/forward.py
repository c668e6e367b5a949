"""The forward passes of the seed's ModelForward: views on one ragged pass.

Every method builds a StepPlan, has it admitted (everything that can be refused is refused here, before any
sequence is touched) and runs it. An error of an admitted batch is raised, never retried.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import BatchBuilder, PlanRow, StepPlan
from engine.circuit.executor import Executor
from engine.errors import BatchRefused
from engine.families.config import ModelConfig, RopeConfig
from engine.layers.decoder import DecoderLayer
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope import RopeTable
from engine.model.base import MixedBatchResult, MixedForwardResult, ModelForward, PrefillSlice, Stream
from engine.model.lifecycle import Lifecycle
from engine.model.logits import Logits
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a call by the seed's names: the ids to append, how many of their last rows get logits, and, of a
    verify on a hybrid model, the slots for the state after each row."""

    seq: Sequence
    ids: tuple[int, ...]
    num_logits: int
    row_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainLayers:
    """What `legacy` computes with: the decoder layers, the norm after them, the embedding and the head, all dense."""

    layers: SequenceOf[DecoderLayer]
    final_norm: RmsNorm
    embedding: Tensor
    head: Linear


class Forward(ModelForward):
    """The model's one pass: `legacy`, the plain layer loop over the eager kernels, or the executor of a circuit. `serve` says
    which; before its first call nothing can be computed."""

    layers: SequenceOf[DecoderLayer]
    final_norm: RmsNorm
    embedding: Tensor
    head: Linear

    def __init__(
        self,
        config: ModelConfig,
        ropes: Mapping[RopeConfig, RopeTable],
        builder: BatchBuilder,
        lifecycle: Lifecycle,
        logits: Logits,
    ) -> None:
        self.executor: Executor | None = None
        self.ropes = ropes
        self.builder = builder
        self.lifecycle = lifecycle
        self.logits = logits
        self.vocab_size = config.vocab_size
        self.embedding_scale = config.embedding_scale

    def serve(self, plain: PlainLayers | None, executor: Executor | None) -> None:
        """Compute with `executor` from the next step on, or where it is None with the plain layers. Without those, none are held:
        the model's weights are packed."""
        for name in PlainLayers.__slots__:
            if plain is not None:
                setattr(self, name, getattr(plain, name))
            elif hasattr(self, name):
                delattr(self, name)
        self.executor = executor

    @property
    def kv_block_size(self) -> int:
        return self.lifecycle.blocks.block_size

    def prefill_tail_split(self, tokens: SequenceOf[int]) -> int | None:
        """Where a prefill of `tokens` leaves a snapshot: the largest block multiple below its length. No chunk is split there."""
        return self.lifecycle.ssm.tail_split(len(tokens)) if self.lifecycle.ssm is not None else None

    # The one pass

    def admit(self, plan: StepPlan, row_base: int = 0) -> None:
        """Raise `BatchRefused` if the plan can't run with its logits from arena row `row_base` on; nothing is changed."""
        if not plan.rows:
            raise BatchRefused("the batch is empty.")
        if plan.num_tokens > self.builder.max_tokens:
            raise BatchRefused(f"the batch has {plan.num_tokens} tokens; --max-batch-tokens is {self.builder.max_tokens}.")
        if row_base < 0 or row_base + plan.num_logits > self.builder.max_logits:
            raise BatchRefused(
                f"{plan.num_logits} rows of logits from row {row_base} on don't fit an arena of {self.builder.max_logits} rows; "
                "send a smaller batch or raise --max-batch."
            )
        needed = 0
        for part in plan.rows:
            end = part.seq.num_computed_tokens + part.q_len
            if part.seq.row < 0:
                raise BatchRefused("a sequence of the batch was freed.")
            if part.q_len < 1 or not 0 <= part.num_logits <= part.q_len or end > part.seq.num_tokens:
                raise BatchRefused(f"the batch asks for {part.q_len} rows of a sequence with {part.seq.num_tokens} tokens.")
            needed += self.lifecycle.blocks_needed(part.seq, end)
        if len({id(part.seq) for part in plan.rows}) != len(plan.rows):
            raise BatchRefused("a sequence appears twice in the batch.")
        if needed > self.lifecycle.num_free_blocks:
            raise BatchRefused(
                f"the batch needs {needed} more KV blocks and {self.lifecycle.num_free_blocks} are free; raise --num-kv-blocks."
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan, row_base: int = 0) -> Tensor | None:
        """Compute a plan: `[num_logits, vocab]`, the arena's rows from `row_base` on, or None when no row asked for logits.

        Sequences advance by their q_len. Raises `BatchRefused` before anything is touched.
        """
        self.admit(plan, row_base)
        for part in plan.rows:
            self.lifecycle.reserve(part.seq, part.seq.num_computed_tokens + part.q_len)
        ssm = self.lifecycle.ssm
        if ssm is not None:
            plan = StepPlan(
                tuple(replace(part, snapshots=ssm.take_snapshots(part.seq, part.q_len)) for part in plan.rows), plan.num_decode
            )
        try:
            logits = self._compute(plan, row_base)
        except BaseException:
            if ssm is not None:
                for part in plan.rows:
                    ssm.give_back(part.snapshots)
            raise
        for part in plan.rows:
            part.seq.advance(part.q_len)
            if ssm is not None:
                ssm.after_step(part)
        return logits

    def _compute(self, plan: StepPlan, row_base: int) -> Tensor | None:
        batch = self.builder.build(plan)
        batch.rope = {config: table.rows(batch.positions) for config, table in self.ropes.items()}
        if self.executor is not None:
            found = self.executor.run(batch)
            return None if found is None else self.logits.store(*found, row_base)
        hidden = functional.embedding(batch.token_ids, self.embedding)
        if self.embedding_scale != 1.0:
            # Rounded to the model's dtype first, as Gemma's own code does.
            hidden = hidden * torch.tensor(self.embedding_scale, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        logits = None
        if plan.num_logits:
            hidden = self.final_norm(hidden.index_select(0, batch.logit_rows))
            logits = self.logits.store(hidden, self.head(hidden), row_base)
        return logits

    # The seed's names for it

    def prefill(self, tokens: SequenceOf[int], seq: Sequence, stream: Stream = None) -> Tensor:
        """Compute a whole prompt; returns the logits of its last position, `[1, vocab]`."""
        return self.prefill_twophase(tokens, seq, self.builder.max_tokens, stream)

    def prefill_twophase(self, tokens: SequenceOf[int], seq: Sequence, chunk_size: int, stream: Stream = None) -> Tensor:
        """Compute a whole prompt in chunks of `chunk_size`; returns the logits of its last position, `[1, vocab]`.
        A prompt that doesn't fit is refused before its first chunk."""
        size = min(chunk_size, self.builder.max_tokens)
        if size < 1:
            raise BatchRefused(f"a chunk of {chunk_size} tokens can't be computed.")
        self._check_ids(seq, tokens)
        needed = self.lifecycle.blocks_needed(seq, len(tokens))
        if needed > self.lifecycle.num_free_blocks:
            raise BatchRefused(f"the prompt needs {needed} more KV blocks and {self.lifecycle.num_free_blocks} are free.")
        logits = None
        for start in range(0, len(tokens), size):
            length = min(size, len(tokens) - start)
            logits = self.prefill_chunk(tokens, seq, start, length, start + length == len(tokens), stream)
        if logits is None:
            raise BatchRefused("an empty prompt can't be computed.")
        return logits

    def prefill_chunk(
        self, tokens: SequenceOf[int], seq: Sequence, chunk_start: int, chunk_len: int, is_last_chunk: bool, stream: Stream = None
    ) -> Tensor | None:
        """Compute chunk_len prompt tokens from chunk_start; only the last chunk returns logits, `[1, vocab]`."""
        return self.prefill_batch_chunk([PrefillSlice(tokens, seq, chunk_start, chunk_len, is_last_chunk)], stream)[0]

    def prefill_batch_chunk(self, streams: SequenceOf[PrefillSlice], stream: Stream = None) -> list[Tensor | None]:
        """Compute one chunk for each slice; one entry each, in order: its last-token logits, or None."""
        return self.prefill_batch_chunk_rows(streams, stream, 0)

    def prefill_batch_chunk_rows(
        self, streams: SequenceOf[PrefillSlice], stream: Stream = None, row_base: int = 0
    ) -> list[Tensor | None]:
        """`prefill_batch_chunk` with the logits of finishing slices from row `row_base` of the arena on, so that they
        don't overwrite the decode rows of the same step. Refused when the arena ends before them."""
        return _deal(self._run_tokens([], [], streams, row_base), streams, 0)

    def decode(self, token: int, seq: Sequence, stream: Stream = None) -> Tensor:
        """One decode step of one sequence; returns the logits of the next token, `[1, vocab]`."""
        return self.decode_batch([token], [seq], stream)

    def decode_batch(self, tokens: SequenceOf[int], seqs: SequenceOf[Sequence], stream: Stream = None) -> Tensor:
        """One decode step of each sequence; returns logits, `[len(seqs), vocab]`."""
        logits = self._run_tokens(tokens, seqs, [])
        assert logits is not None
        return logits

    def mixed_forward(
        self,
        decode_tokens: SequenceOf[int],
        decode_seqs: SequenceOf[Sequence],
        prefill_tokens: SequenceOf[int],
        prefill_seq: Sequence,
        prefill_chunk_start: int,
        prefill_chunk_len: int,
        prefill_is_last: bool,
        stream: Stream = None,
    ) -> MixedForwardResult:
        """One decode step for each of decode_seqs and one prefill chunk, in one pass."""
        part = PrefillSlice(prefill_tokens, prefill_seq, prefill_chunk_start, prefill_chunk_len, prefill_is_last)
        result = self.mixed_forward_batch(decode_tokens, decode_seqs, [part], stream)
        return MixedForwardResult(result.decode_logits, result.prefill_logits[0])

    def mixed_forward_batch(
        self,
        decode_tokens: SequenceOf[int],
        decode_seqs: SequenceOf[Sequence],
        prefill_streams: SequenceOf[PrefillSlice],
        stream: Stream = None,
    ) -> MixedBatchResult:
        """One decode step for each of decode_seqs and one chunk for each slice, in one pass; prefill logits rows follow the
        decode rows in the arena."""
        logits = self._run_tokens(decode_tokens, decode_seqs, prefill_streams)
        count = len(decode_seqs)
        return MixedBatchResult(logits[:count] if logits is not None and count else None, _deal(logits, prefill_streams, count))

    def _run_tokens(
        self, tokens: SequenceOf[int], seqs: SequenceOf[Sequence], slices: SequenceOf[PrefillSlice], row_base: int = 0
    ) -> Tensor | None:
        if len(tokens) != len(seqs):
            raise BatchRefused(f"{len(tokens)} tokens for {len(seqs)} sequences.")
        parts = [Part(seq, (token,), 1) for token, seq in zip(tokens, seqs, strict=True)]
        for piece in slices:
            chunk = tuple(piece.tokens[piece.chunk_start : piece.chunk_start + piece.chunk_len])
            if piece.chunk_len < 1 or len(chunk) != piece.chunk_len:
                raise BatchRefused(
                    f"chunk {piece.chunk_start}+{piece.chunk_len} isn't within the {len(piece.tokens)} prompt tokens."
                )
            if piece.chunk_start != piece.seq.num_computed_tokens:
                raise BatchRefused(
                    f"the chunk starts at {piece.chunk_start}, but {piece.seq.num_computed_tokens} tokens are computed."
                )
            parts.append(Part(piece.seq, chunk, int(piece.is_last_chunk)))
        return self.run_parts(parts, len(seqs), row_base)

    def run_parts(self, parts: SequenceOf[Part], num_decode: int = 0, row_base: int = 0) -> Tensor | None:
        """Append each part's ids to its sequence and compute them; returns as `run`. The ids are taken back if the plan isn't
        admitted, so a refused batch leaves every sequence as it was."""
        if len({id(part.seq) for part in parts}) != len(parts):
            raise BatchRefused("a sequence appears twice in the batch.")
        for part in parts:
            self._check_ids(part.seq, part.ids)
        rows = (PlanRow(part.seq, len(part.ids), part.num_logits, row_slots=part.row_slots) for part in parts)
        plan = StepPlan(tuple(rows), num_decode)
        for part in parts:
            part.seq.append(list(part.ids))
        try:
            self.admit(plan, row_base)
        except BatchRefused:
            for part in reversed(parts):
                part.seq.take_back(len(part.ids))
            raise
        return self.run(plan, row_base)

    def _check_ids(self, seq: Sequence, ids: SequenceOf[int]) -> None:
        """Raise `BatchRefused` for ids that can't be appended to the sequence."""
        if seq.num_tokens != seq.num_computed_tokens:
            raise BatchRefused("a sequence of the batch has tokens that aren't computed yet.")
        if seq.num_tokens + len(ids) > seq.budget_tokens:
            raise BatchRefused(f"{len(ids)} more tokens exceed the sequence's budget of {seq.budget_tokens} tokens.")
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise BatchRefused(f"token id {token} isn't in the vocabulary of {self.vocab_size}.")


def _deal(logits: Tensor | None, slices: SequenceOf[PrefillSlice], first: int) -> list[Tensor | None]:
    """One `[1, vocab]` view for each finishing slice, None for the others."""
    out: list[Tensor | None] = []
    for piece in slices:
        if piece.is_last_chunk:
            assert logits is not None
            out.append(logits[first : first + 1])
            first += 1
        else:
            out.append(None)
    return out
