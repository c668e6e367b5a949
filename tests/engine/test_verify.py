"""Verify and rollback: several tokens in one pass, any number of them kept, equal to decoding these one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from closeness import judge
from hybrid_engine import loaded, own, poison_free, run, snapshots_of
from tiny_engine import prompt_of
from torch import Tensor

from engine.errors import BatchRefused, InvariantBroken
from engine.model.transformer import TransformerModel
from engine.sequence import Sequence

MAX_ROWS = 6
# The prompt ends 2 tokens before a block boundary: rows of most verifies lie on both sides of it.
IDS = prompt_of(80, 41)
PROMPT = 30


@pytest.fixture(scope="module")
def model(tiny_hybrid: Path) -> Iterator[TransformerModel]:
    with loaded(tiny_hybrid, ssm_draft_rows=MAX_ROWS) as model:
        yield model


@pytest.fixture(scope="module")
def stepped(model: TransformerModel) -> dict[int, tuple[Tensor, Tensor]]:
    """The state (h, conv) after each number of tokens, the prompt in one pass and the rest decoded one by one."""
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(IDS[:PROMPT], seq)
    states = {PROMPT: state_of(model, seq)}
    for token in IDS[PROMPT:]:
        model.forward.decode(token, seq)
        states[seq.num_tokens] = state_of(model, seq)
    model.lifecycle.free_sequence(seq)
    return states


def state_of(model: TransformerModel, seq: Sequence) -> tuple[Tensor, Tensor]:
    pool = model.ssm_pool
    assert pool is not None
    return pool.h[:, seq.ssm_slot].clone(), pool.conv[:, seq.ssm_slot].clone()


def assert_state(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Equal but for what other batches' rounding does; any other token's state is far off."""
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def begun(model: TransformerModel) -> Sequence:
    """A sequence that has computed the prompt, with NaN in all that it didn't write."""
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(IDS[:PROMPT], seq)
    pool = model.ssm_pool
    assert pool is not None
    poison_free(model.lifecycle, model.kv_cache)
    for row in range(MAX_ROWS):
        pool.h[:, pool.draft_slot(seq.ssm_slot, row)] = torch.nan
    pool.h[:, pool.checkpoint_slot(seq.ssm_slot)] = torch.nan
    return seq


def rejected(token: int) -> int:
    """Another id than the one that follows."""
    return (token + 1) % 512


def kept(model: TransformerModel, seq: Sequence) -> None:
    """The sequence goes on as if its tokens had been decoded one by one."""
    rows = [model.forward.decode(token, seq).clone() for token in IDS[seq.num_tokens : seq.num_tokens + 4]]
    at = list(range(seq.num_tokens - 4, seq.num_tokens))
    verdict = judge(torch.cat(rows), own(model, IDS), at)
    assert verdict.holds, verdict


@pytest.mark.parametrize("k", range(1, MAX_ROWS + 1))
def test_every_number_of_accepted_rows_equals_decoding_them(
    model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]], k: int
) -> None:
    for accepted in range(k + 1):
        seq = begun(model)
        # Anchor and drafts: the accepted ones are right, the others wrong.
        rows = [token if i < accepted else rejected(token) for i, token in enumerate(IDS[PROMPT : PROMPT + k])]
        best = model.verify.decode_verify(rows, seq)
        logits = model.logits.logits_buffer_ptr[:k].clone()
        assert best == logits.argmax(-1).tolist()
        assert seq.num_computed_tokens == PROMPT + k
        # Rows before the first wrong one equal decoding; row i sees the tokens up to its own.
        verdict = judge(logits[:accepted], own(model, IDS), list(range(PROMPT, PROMPT + accepted))) if accepted else None
        assert verdict is None or verdict.holds, verdict
        model.verify.accept(seq, accepted, k)
        assert seq.token_ids == IDS[: PROMPT + accepted]
        assert seq.num_computed_tokens == PROMPT + accepted
        assert_state(state_of(model, seq), stepped[PROMPT + accepted])
        kept(model, seq)
        model.lifecycle.free_sequence(seq)
        model.lifecycle.check()


def test_many_verifies_in_a_row_keep_to_the_path(model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]) -> None:
    seq = begun(model)
    for k, accepted in ((3, 1), (6, 6), (4, 0), (1, 1), (5, 3), (6, 5), (2, 2), (6, 1)):
        at = seq.num_tokens
        rows = [token if i < accepted else rejected(token) for i, token in enumerate(IDS[at : at + k])]
        model.verify.decode_verify(rows, seq)
        model.verify.accept(seq, accepted, k)
        assert seq.token_ids == IDS[: at + accepted]
        assert_state(state_of(model, seq), stepped[seq.num_tokens])
    kept(model, seq)
    model.lifecycle.free_sequence(seq)


def test_the_state_of_another_row_would_be_noticed(model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]) -> None:
    seq = begun(model)
    model.verify.decode_verify(IDS[PROMPT : PROMPT + 4], seq)
    model.ssm_state.rollback_ssm_states(seq, 2)
    with pytest.raises(AssertionError):
        assert_state(state_of(model, seq), stepped[PROMPT + 3])
    assert_state(state_of(model, seq), stepped[PROMPT + 2])
    model.lifecycle.free_sequence(seq)


def test_a_rollback_to_no_row_restores_the_checkpoint_to_the_bit(model: TransformerModel) -> None:
    seq = begun(model)
    before = state_of(model, seq)
    model.verify.decode_verify(IDS[PROMPT : PROMPT + 5], seq)
    assert not torch.equal(state_of(model, seq)[0], before[0])
    model.verify.accept(seq, 0, 5)
    for ours, theirs in zip(state_of(model, seq), before, strict=True):
        assert torch.equal(ours, theirs)
    model.lifecycle.free_sequence(seq)


def test_the_asynchronous_forms_do_on_a_cpu_what_the_others_do_in_order(
    model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]
) -> None:
    seq = begun(model)
    state = model.ssm_state
    state.start_checkpoint_async(seq)
    state.sync_secondary()
    for k, accepted in ((4, 2), (3, 3), (5, 1)):
        at = seq.num_tokens
        model.verify.decode_verify(IDS[at : at + k], seq)
        state.start_rollback_and_checkpoint_async(seq, accepted)
        state.sync_secondary()
        seq.take_back(k - accepted)
        assert_state(state_of(model, seq), stepped[at + accepted])
        # The new checkpoint is of the state rolled back to.
        rolled_back = state_of(model, seq)
        model.forward.decode(IDS[at + accepted], seq)
        state.rollback_ssm_states(seq, 0)
        seq.take_back(1)
        assert torch.equal(state_of(model, seq)[0], rolled_back[0])
    model.lifecycle.free_sequence(seq)


def test_committing_a_prefix_takes_the_state_of_its_last_row(
    model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]
) -> None:
    seq = begun(model)
    model.verify.decode_verify(IDS[PROMPT : PROMPT + 6], seq)
    for accepted in (6, 1, 4):
        model.ssm_state.commit_accepted_prefix(seq, accepted, 6)
        assert_state(state_of(model, seq), stepped[PROMPT + accepted])
    for accepted, k in ((0, 6), (7, 6), (4, 3)):
        with pytest.raises(InvariantBroken, match=f"{accepted} accepted rows of {k}"):
            model.ssm_state.commit_accepted_prefix(seq, accepted, k)
    model.lifecycle.free_sequence(seq)


# What is refused


def test_more_rows_than_the_pool_has_are_refused_and_nothing_changes(model: TransformerModel) -> None:
    seq = begun(model)
    before, blocks = state_of(model, seq), list(seq.block_table)
    with pytest.raises(BatchRefused, match="a verify of 7 rows .* there are 6; raise --ssm-draft-rows"):
        model.verify.decode_verify(IDS[PROMPT : PROMPT + 7], seq)
    with pytest.raises(BatchRefused, match="0 rows"):
        model.verify.decode_verify([], seq)
    with pytest.raises(BatchRefused, match="token id 512 isn't in the vocabulary"):
        model.verify.decode_verify([5, 512], seq)
    assert (seq.num_tokens, seq.num_computed_tokens, seq.block_table) == (PROMPT, PROMPT, blocks)
    assert torch.equal(state_of(model, seq)[0], before[0])
    kept(model, seq)
    model.lifecycle.free_sequence(seq)


def test_a_pool_without_draft_rows_refuses_with_a_sentence(tiny_hybrid: Path) -> None:
    with loaded(tiny_hybrid) as model:
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill(IDS[:PROMPT], seq)
        with pytest.raises(BatchRefused, match="a verify of 2 rows .* there are 0; raise --ssm-draft-rows"):
            model.verify.decode_verify(IDS[PROMPT : PROMPT + 2], seq)
        with pytest.raises(BatchRefused, match="keeps no draft rows of recurrent state; start it with --ssm-draft-rows"):
            model.ssm_state.checkpoint_ssm_states(seq)
        kept(model, seq)
        model.lifecycle.free_sequence(seq)


def test_a_model_without_recurrent_layers_verifies_without_draft_rows(tiny_llama: Path) -> None:
    with loaded(tiny_llama) as model:
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill(IDS[:PROMPT], seq)
        for k, accepted in ((3, 1), (8, 8), (5, 0)):
            at = seq.num_tokens
            rows = [token if i < accepted else rejected(token) for i, token in enumerate(IDS[at : at + k])]
            model.verify.decode_verify(rows, seq)
            model.verify.accept(seq, accepted, k)
            assert seq.token_ids == IDS[: at + accepted]
        kept(model, seq)
        model.lifecycle.free_sequence(seq)
        assert not model.ssm_state.has_ssm_layers
        assert model.ssm_state.ssm_snapshot_occupancy() is None


# The ring


def test_the_ring_holds_the_last_two_block_boundaries_and_restores_either(
    model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]
) -> None:
    seq = model.lifecycle.alloc_sequence()
    assert model.ssm_state.decode_rollback_ring_slots == 2
    for entry in (0, 1):
        with pytest.raises(BatchRefused, match=f"ring entry {entry} .* was never written"):
            model.ssm_state.restore_decode_ssm_snapshot(seq, entry)
    model.forward.prefill(IDS[:PROMPT], seq)
    assert seq.ring_tokens == [None, None]
    for token in IDS[PROMPT:70]:
        model.forward.decode(token, seq)
    assert sorted(at or 0 for at in seq.ring_tokens) == [48, 64]
    for at in (64, 48):
        model.ssm_state.restore_decode_ssm_snapshot(seq, seq.ring_tokens.index(at))
        assert seq.num_computed_tokens == at
        seq.take_back(seq.num_tokens - at)
        for ours, theirs in zip(state_of(model, seq), stepped[at], strict=True):
            assert torch.equal(ours, theirs)
    kept(model, seq)
    model.lifecycle.free_sequence(seq)


def test_another_answer_after_a_rewind_ends_its_turn_with_its_own_state(model: TransformerModel) -> None:
    """The newer of two ring entries is of tokens that were taken back: it must not become the turn's end."""
    lifecycle = model.lifecycle
    for entries_seen in range(2):
        lifecycle.reclaim_prefix_blocks(lifecycle.num_total_blocks)
        seq = lifecycle.alloc_sequence()
        model.forward.prefill(prompt_of(12 + 16 * entries_seen, 50), seq)
        start = seq.num_tokens
        for token in IDS[:40]:
            model.forward.decode(token, seq)
        older, newer = sorted(at or 0 for at in seq.ring_tokens)
        assert newer == older + 16
        model.ssm_state.restore_decode_ssm_snapshot(seq, seq.ring_tokens.index(older))
        assert start < older < newer
        seq.take_back(seq.num_tokens - older)
        for token in IDS[60:79]:
            model.forward.decode(token, seq)
        ids = list(seq.token_ids)
        lifecycle.retire_sequence(seq)
        again = lifecycle.alloc_sequence()
        asked = [*ids, *prompt_of(6, 51)]
        assert lifecycle.adopt_prefix(again, asked).num_tokens == newer
        logits = _compute(model, again)
        verdict = judge(logits, own(model, asked), [len(asked) - 1])
        assert verdict.holds, verdict
        lifecycle.free_sequence(again)


def test_a_snapshot_of_tokens_taken_back_is_given_up(model: TransformerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer's own snapshots wait for its end; one beyond a rewind is of the old answer."""
    monkeypatch.setattr(model.ssm_state, "checkpoint_interval", 64)
    lifecycle = model.lifecycle
    lifecycle.reclaim_prefix_blocks(lifecycle.num_total_blocks)
    seq = lifecycle.alloc_sequence()
    lifecycle.adopt_prefix(seq, IDS[:PROMPT])
    _compute(model, seq)
    for old, first in ((True, PROMPT), (False, 48)):
        for token in IDS[first:70] if old else prompt_of(22, 52):
            model.forward.decode(token, seq)
            model.ssm_state.decode_marconi_checkpoint(seq)
        assert [at for _, at in seq.pending_snapshots][-1] == 64
        if old:
            model.ssm_state.restore_decode_ssm_snapshot(seq, seq.ring_tokens.index(48))
            seq.take_back(seq.num_tokens - 48)
            assert 64 not in [at for _, at in seq.pending_snapshots]
            lifecycle.check()
    ids = list(seq.token_ids)
    lifecycle.retire_sequence(seq)
    again, asked = lifecycle.alloc_sequence(), [*ids[:66], *prompt_of(6, 53)]
    assert lifecycle.adopt_prefix(again, asked).num_tokens == 64
    verdict = judge(_compute(model, again), own(model, asked), [len(asked) - 1])
    assert verdict.holds, verdict
    lifecycle.free_sequence(again)


def test_a_rewind_into_what_the_prefix_cache_holds_is_refused(model: TransformerModel) -> None:
    lifecycle = model.lifecycle
    lifecycle.reclaim_prefix_blocks(lifecycle.num_total_blocks)
    seq = lifecycle.alloc_sequence()
    for start in (0, 16, 32):
        model.forward.prefill_chunk(IDS, seq, start, 16, False)
        lifecycle.cache_sequence(seq)
    with pytest.raises(BatchRefused, match="can't go back to 32 tokens: the prefix cache holds its first 48"):
        model.ssm_state.restore_decode_ssm_snapshot(seq, seq.ring_tokens.index(32))
    model.ssm_state.restore_decode_ssm_snapshot(seq, seq.ring_tokens.index(48))
    kept(model, seq)
    lifecycle.free_sequence(seq)


def test_a_verify_across_a_block_boundary_leaves_its_state_for_the_turn_s_end(
    model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Accepted rows on both sides of token 32: no step ends there, yet the turn's end is to resume there."""
    lifecycle = model.lifecycle
    for accepted, at_end in ((2, [32]), (5, [32]), (1, [16])):
        lifecycle.reclaim_prefix_blocks(lifecycle.num_total_blocks)
        seq = lifecycle.alloc_sequence()
        lifecycle.adopt_prefix(seq, IDS[:PROMPT])
        _compute(model, seq)
        model.verify.decode_verify(IDS[PROMPT : PROMPT + 5], seq)
        model.verify.accept(seq, accepted, 5)
        ids = list(seq.token_ids)
        lifecycle.retire_sequence(seq)
        assert snapshots_of(model, ids)[-1:] == at_end
        again = lifecycle.alloc_sequence()
        found = lifecycle.adopt_prefix(again, [*IDS[: PROMPT + accepted], 3])
        assert found.num_tokens == at_end[0]
        if at_end == [32]:
            assert_state(state_of(model, again), stepped[32])
        lifecycle.free_sequence(again)


def _compute(model: TransformerModel, seq: Sequence) -> Tensor:
    logits = run(model, seq, seq.num_tokens - seq.num_computed_tokens)
    assert logits is not None
    return logits


# Moving a sequence to another slot


def test_a_compacted_sequence_goes_on_and_its_neighbours_notice_nothing(model: TransformerModel) -> None:
    lifecycle = model.lifecycle
    seqs = [lifecycle.alloc_sequence() for _ in range(3)]
    for seq in seqs:
        model.forward.prefill(IDS[:PROMPT], seq)
    for token in IDS[PROMPT : PROMPT + 4]:
        model.forward.decode_batch([token] * 3, seqs)
    retired, survivor, other = seqs
    before, ring = state_of(model, survivor), list(survivor.ring_tokens)
    assert 32 in ring
    lifecycle.compact_sequence(survivor, retired.ssm_slot)
    lifecycle.detach_slot_for_reuse(retired)
    lifecycle.check()
    lifecycle.free_sequence(retired)
    lifecycle.check()
    poison_free(lifecycle, model.kv_cache)
    assert torch.equal(state_of(model, survivor)[0], before[0])
    logits = model.forward.decode_batch([IDS[34]] * 2, [survivor, other]).clone()
    assert torch.equal(logits[0], logits[1])
    # Once more, to a slot that was free; then back in time by its ring, which moved along.
    free = next(slot for slot in range(200) if model.ssm_state.pool.is_free_live(slot))
    lifecycle.compact_sequence(survivor, free)
    assert survivor.ssm_slot == free
    poison_free(lifecycle, model.kv_cache)
    model.ssm_state.restore_decode_ssm_snapshot(survivor, survivor.ring_tokens.index(32))
    survivor.take_back(survivor.num_tokens - 32)
    kept(model, survivor)
    for seq in (survivor, other):
        lifecycle.free_sequence(seq)
    assert lifecycle.num_free_rows == 256
    lifecycle.check()


def test_a_verify_may_be_settled_after_its_sequence_has_moved(
    model: TransformerModel, stepped: dict[int, tuple[Tensor, Tensor]]
) -> None:
    for accepted in (0, 2):
        seq = begun(model)
        model.verify.decode_verify(IDS[PROMPT : PROMPT + 4], seq)
        free = next(slot for slot in range(200) if model.ssm_state.pool.is_free_live(slot))
        model.lifecycle.compact_sequence(seq, free)
        poison_free(model.lifecycle, model.kv_cache)
        model.verify.accept(seq, accepted, 4)
        assert_state(state_of(model, seq), stepped[PROMPT + accepted])
        kept(model, seq)
        model.lifecycle.free_sequence(seq)
