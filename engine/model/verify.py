"""Verify: several drafted tokens of one sequence in one pass, to be accepted or taken back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.errors import BatchRefused
from engine.model.base import ModelVerify, Stream
from engine.model.forward import Forward, Part
from engine.model.lifecycle import Lifecycle
from engine.model.logits import Logits
from engine.sequence import Sequence


class Verify(ModelVerify):
    """The seed's single-sequence verify."""

    def __init__(self, forward: Forward, lifecycle: Lifecycle, logits: Logits) -> None:
        self.forward = forward
        self.lifecycle = lifecycle
        self.logits = logits

    def decode_verify(self, tokens: SequenceOf[int], seq: Sequence, stream: Stream = None) -> list[int]:
        """Run `tokens` (the anchor, then the drafts) as one pass and return the argmax id at each position; its k rows of logits
        are left in the arena. Every token advances the KV and the recurrent state; `accept` then settles how many count."""
        ssm = self.lifecycle.ssm
        rows: tuple[int, ...] = ()
        if ssm is not None:
            if len(tokens) > ssm.pool.sizes.draft_rows:
                raise BatchRefused(
                    f"a verify of {len(tokens)} rows needs as many draft rows of recurrent state, and there are "
                    f"{ssm.pool.sizes.draft_rows}; raise --ssm-draft-rows."
                )
            rows = tuple(ssm.pool.draft_slot(seq.ssm_slot, row) for row in range(len(tokens)))
            ssm.checkpoint_ssm_states(seq)
        logits = self.forward.run_parts([Part(seq, tuple(tokens), len(tokens), rows)])
        if logits is None:
            raise BatchRefused("a verify needs at least one token.")
        return self.logits.argmax_batch(logits, len(tokens))

    def accept(self, seq: Sequence, num_accepted: int, k: int) -> None:
        """Keep the first `num_accepted` of the last verify's k rows (anchor included) and take the others back: the recurrent
        state goes to the row's own, the rejected rows' KV is overwritten by what comes."""
        ssm, first = self.lifecycle.ssm, seq.num_computed_tokens - k
        if ssm is not None and num_accepted < k:
            ssm.rollback_ssm_states(seq, num_accepted)
        seq.take_back(k - num_accepted)
        if ssm is not None:
            ssm.after_verify(seq, first)
