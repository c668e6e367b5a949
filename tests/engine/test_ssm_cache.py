"""Prefix caching of a hybrid model: what a turn reuses, and that it equals the turn computed anew, by the rule in `closeness`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hybrid_engine import Turn, cold, loaded, own, snapshots_of, take_turn
from tiny_engine import prompt_of

from engine.model.transformer import TransformerModel


@pytest.fixture(scope="module")
def model(tiny_hybrid: Path) -> Iterator[TransformerModel]:
    """Blocks of 16, a snapshot every 32 tokens of an answer; the tests flush its cache."""
    with loaded(tiny_hybrid, ssm_checkpoint_interval=32, ssm_cache_slots=24) as model:
        yield model


@pytest.fixture(autouse=True)
def _flushed(model: TransformerModel) -> None:
    lifecycle = model.lifecycle
    lifecycle.reclaim_prefix_blocks(lifecycle.num_total_blocks)
    assert lifecycle.num_free_blocks == lifecycle.num_total_blocks
    occupancy = model.ssm_state.ssm_snapshot_occupancy()
    assert occupancy is not None
    assert occupancy[0] == 0, "a snapshot outlived its block"


# Turns


@pytest.mark.parametrize("prompt_tokens", [5, 16, 17, 64, 65, 150])
@pytest.mark.parametrize("answer_tokens", [1, 12, 40])
def test_a_second_turn_resumes_at_the_newest_block_boundary(
    model: TransformerModel, prompt_tokens: int, answer_tokens: int
) -> None:
    first = take_turn(model, prompt_of(prompt_tokens, prompt_tokens), answer_tokens)
    assert first.cached == 0
    # The id drawn last was never computed.
    boundary = (prompt_tokens + answer_tokens - 1) // 16 * 16
    prompt = [*first.ids, *prompt_of(9, 77)]
    second = take_turn(model, prompt, 4)
    assert second.cached == boundary == second.found.kv_tokens
    if answer_tokens == 40:
        assert second.cached > prompt_tokens, "the answer's blocks weren't reused"
    second.equals(own(model, second.ids))


def test_a_long_chat_resumes_every_turn_where_the_last_one_ended(model: TransformerModel) -> None:
    ids = prompt_of(20, 1)
    for i in range(6):
        before = len(ids)
        turn = take_turn(model, ids, 23, chunk=13)
        assert turn.cached == (0 if i == 0 else (before - 8) // 16 * 16)
        ids = [*turn.ids, *prompt_of(7, i)]
    assert len(ids) == 20 + 6 * 30
    turn.equals(own(model, turn.ids))


@pytest.mark.parametrize("block_size", [4, 64])
def test_other_block_sizes_resume_as_well(tiny_hybrid: Path, block_size: int) -> None:
    with loaded(tiny_hybrid, block_size=block_size, num_kv_blocks=4096 // block_size) as model:
        first = take_turn(model, prompt_of(120, 5), 30)
        second = take_turn(model, [*first.ids, *prompt_of(9, 77)], 4)
        assert second.cached == 149 // block_size * block_size
        second.equals(own(model, second.ids))


def test_a_hit_with_the_same_splits_is_bit_equal_to_a_run_without_a_cache(model: TransformerModel) -> None:
    prompt = prompt_of(96, 2)
    for boundary in (16, 64, 80):
        model.lifecycle.reclaim_prefix_blocks(model.lifecycle.num_total_blocks)
        # The giver's first chunk ends at the boundary, which is its last one below its own end.
        take_turn(model, [*prompt[:boundary], 7], chunk=boundary)
        hit = take_turn(model, prompt)
        assert hit.cached == boundary
        anew = cold(model, prompt, (boundary, len(prompt) - boundary))
        # As the hit was: logits of the last row alone.
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill_chunk(prompt, seq, 0, boundary, False)
        control = model.forward.prefill_chunk(prompt, seq, boundary, len(prompt) - boundary, True)
        assert control is not None
        assert torch.equal(hit.logits, control)
        model.lifecycle.free_sequence(seq)
        assert torch.allclose(hit.logits[0], anew[-1], atol=1e-4)


def test_the_same_hit_after_other_work_gives_the_same_bits(model: TransformerModel) -> None:
    """The snapshot lies within a 64-token chunk of the scan, and in the middle of the giver's only chunk."""
    giver = take_turn(model, prompt_of(107, 3), 20)
    asked = [*giver.ids[:100], *prompt_of(21, 4)]
    assert snapshots_of(model, giver.ids) == [96, 112]
    first = take_turn(model, asked, 8)
    assert first.cached == 96
    for seed in range(3):
        take_turn(model, prompt_of(50, 100 + seed), 10)
    # The tail of the first hit is cached too by now: ask beside it, but for the same rows.
    again = take_turn(model, [*asked[:100], *prompt_of(21, 5)], 8)
    repeated = take_turn(model, [*asked[:100], *prompt_of(21, 6)], 8)
    assert again.cached == repeated.cached == 96
    fresh = take_turn(model, [*asked[:100], *prompt_of(21, 4)[:-1], 9], 8)
    once_more = take_turn(model, [*asked[:100], *prompt_of(21, 4)[:-1], 9], 8)
    assert fresh.cached == once_more.cached == 112, "a snapshot was to be taken at the tail of the first"
    assert torch.equal(fresh.logits, once_more.logits)


# Junctions


@pytest.mark.parametrize("common_tokens", [37, 64, 70, 130])
def test_prompts_that_part_leave_a_snapshot_at_their_junction(model: TransformerModel, common_tokens: int) -> None:
    common, junction = prompt_of(common_tokens, 8), common_tokens // 16 * 16
    first = take_turn(model, [*common, *prompt_of(60, 9)])
    second = take_turn(model, [*common, *prompt_of(61, 10)])
    assert (first.cached, second.cached, second.found.kv_tokens) == (0, 0, junction)
    assert second.found.note == f"the KV blocks match {junction} tokens, but the last state snapshot on their way is at 0"
    third = take_turn(model, [*common, *prompt_of(62, 11)], 5)
    assert third.cached == junction
    third.equals(own(model, third.ids))
    second.equals(own(model, second.ids))


def test_a_junction_below_a_junction_is_found_too(model: TransformerModel) -> None:
    trunk, bough = prompt_of(40, 1), prompt_of(40, 2)
    for seed in (3, 4):
        take_turn(model, [*trunk, *prompt_of(30, seed)])
    for seed in (5, 6):
        take_turn(model, [*trunk, *bough, *prompt_of(30, seed)])
    turn = take_turn(model, [*trunk, *bough, *prompt_of(30, 7)], 3)
    assert turn.cached == 80
    turn.equals(own(model, turn.ids))
    beside = take_turn(model, [*trunk, *prompt_of(30, 8)], 3)
    assert beside.cached == 32
    beside.equals(own(model, beside.ids))


# Rewinds: a prompt edited somewhere in what was answered


@pytest.mark.parametrize("cut", [*range(14, 19), *range(62, 67), 111, 112, 113, 127, 128, 129, 159])
def test_an_edit_at_any_offset_resumes_at_the_nearest_snapshot_before_it(model: TransformerModel, cut: int) -> None:
    giver = take_turn(model, prompt_of(70, 12), 90)
    assert len(giver.ids) == 160
    held = snapshots_of(model, giver.ids)
    assert held == [64, 96, 128, 144]
    edited = [*giver.ids[:cut], (giver.ids[cut] + 1) % 512, *prompt_of(5, cut)]
    turn = take_turn(model, edited, 3)
    assert turn.found.kv_tokens == cut // 16 * 16
    assert turn.cached == max((at for at in held if at <= cut), default=0)
    turn.equals(own(model, turn.ids))
    # Where it parted there is a snapshot now, and the giver's own are still good.
    after = take_turn(model, [*giver.ids[:cut], (giver.ids[cut] + 2) % 512, *prompt_of(5, cut)], 3)
    assert after.cached == cut // 16 * 16
    after.equals(own(model, after.ids))
    whole = take_turn(model, [*giver.ids, 3], 3)
    assert whole.cached == 144
    whole.equals(own(model, whole.ids))


def test_a_long_answer_leaves_a_snapshot_at_every_interval(tiny_hybrid: Path) -> None:
    with loaded(tiny_hybrid, ssm_checkpoint_interval=48, ssm_cache_slots=8) as model:
        giver = take_turn(model, prompt_of(20, 13), 170)
        # The prompt's tail, every 48 tokens, and the turn's end.
        assert snapshots_of(model, giver.ids) == [16, 48, 96, 144, 176]
        turn = take_turn(model, [*giver.ids[:150], *prompt_of(10, 1)], 3)
        assert turn.cached == 144
        turn.equals(own(model, turn.ids))


def test_an_interval_of_no_whole_block_snapshots_where_both_meet(tiny_hybrid: Path) -> None:
    with loaded(tiny_hybrid, ssm_checkpoint_interval=24, ssm_cache_slots=8) as model:
        giver = take_turn(model, prompt_of(5, 13), 110)
        assert snapshots_of(model, giver.ids) == [48, 96, 112]


# Order


def _chats() -> list[list[int]]:
    """Ten prompts: some begin alike, some hold others whole, one is shorter than a block."""
    trunk, bough = prompt_of(70, 20), prompt_of(40, 21)
    return [
        [*trunk, *prompt_of(11, 1)],
        [*trunk, *prompt_of(12, 2)],
        [*trunk, *bough],
        [*trunk, *bough, *prompt_of(5, 3)],
        [*trunk, *bough, *prompt_of(50, 4)],
        trunk[:64],
        trunk[:65],
        trunk[:9],
        prompt_of(33, 5),
        [*prompt_of(33, 5), *prompt_of(90, 6)],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_ten_prompts_in_any_order_answer_as_each_does_alone(model: TransformerModel, seed: int) -> None:
    prompts = _chats()
    order = random.Random(seed).sample(range(10), 10)
    turns = {i: take_turn(model, prompts[i], 4, chunk=random.Random(seed + i).choice([16, 50, 500])) for i in order}
    assert sum(turn.cached > 0 for turn in turns.values()) >= 3
    for i in order:
        turns[i].equals(own(model, turns[i].ids))
    again = {i: take_turn(model, prompts[i], 4) for i in order}
    assert sum(turn.cached > 0 for turn in again.values()) >= 8
    for i in order:
        again[i].equals(own(model, again[i].ids))


def _answers(turns: list[Turn]) -> list[torch.Tensor]:
    return [turn.logits for turn in turns]


def test_the_same_order_twice_gives_the_same_bits(model: TransformerModel) -> None:
    rounds = []
    for _ in range(2):
        model.lifecycle.reclaim_prefix_blocks(model.lifecycle.num_total_blocks)
        rounds.append(_answers([take_turn(model, prompt, 4) for prompt in _chats()]))
    assert all(torch.equal(one, other) for one, other in zip(*rounds, strict=True))


# Eviction of snapshots


def test_the_snapshot_worth_least_goes_first_and_its_block_stays(tiny_hybrid: Path) -> None:
    """Four slots: a short old prompt's snapshot saves the fewest tokens and was used longest ago."""
    with loaded(tiny_hybrid, ssm_cache_slots=4) as model:
        old_short, old_long = prompt_of(20, 1), prompt_of(130, 2)
        take_turn(model, old_short)
        take_turn(model, old_long)
        for seed in (3, 4, 5):
            take_turn(model, prompt_of(40, seed))
        assert model.ssm_state.ssm_snapshot_occupancy() == (4, 4)
        lost = model.lifecycle.prefix.match(model.lifecycle.prompt_keys([*old_short, 9]), 21)
        assert (lost.num_tokens, lost.kv_tokens) == (0, 16)
        kept = take_turn(model, [*old_long, 9])
        assert kept.cached == 128
        kept.equals(own(model, kept.ids))


@pytest.mark.parametrize("slots", [0, 1, 2, 3])
def test_a_few_snapshots_or_none_change_no_answer(tiny_hybrid: Path, slots: int) -> None:
    with loaded(tiny_hybrid, ssm_cache_slots=slots, ssm_checkpoint_interval=32) as model:
        assert model.ssm_state.ssm_snapshot_occupancy() == ((0, slots) if slots else None)
        cached = 0
        for seed in (30, 30, 31):
            ids = prompt_of(40, seed)
            for _ in range(2):
                turn = take_turn(model, ids, 30, chunk=48)
                turn.equals(own(model, turn.ids))
                cached += turn.cached
                ids = [*turn.ids, *prompt_of(5, seed)]
        used = model.ssm_state.ssm_snapshot_occupancy()
        assert (cached > 0, used) == (slots > 0, (slots, slots) if slots else None)
