"""`reclaim_prefix_blocks` and `reclaim_prefix_blocks_for`, to the block: what may go, what a prompt will reuse, what is counted."""

from __future__ import annotations

import pytest
from pools import small_lifecycle

from engine.errors import BatchRefused, InvariantBroken
from engine.model.base import PrefixReclaim
from engine.model.lifecycle import Lifecycle
from engine.sequence import Sequence


def computed(lifecycle: Lifecycle, tokens: list[int], *, adopt: bool = True) -> Sequence:
    """A sequence whose tokens all count as computed, in blocks of its own where the cache has none (or isn't asked)."""
    seq = lifecycle.alloc_sequence()
    if adopt:
        lifecycle.adopt_prefix(seq, tokens)
    else:
        seq.append(tokens)
    lifecycle.reserve(seq, len(tokens))
    seq.advance(len(tokens) - seq.num_computed_tokens)
    return seq


def cached(lifecycle: Lifecycle, tokens: list[int]) -> None:
    lifecycle.retire_sequence(computed(lifecycle, tokens))


def test_reclaiming_frees_as_many_as_asked_and_no_more() -> None:
    lifecycle = small_lifecycle(num_blocks=10, block_size=4)
    cached(lifecycle, list(range(26)))  # six whole blocks, and one that isn't cached
    assert (lifecycle.num_free_blocks, lifecycle.blocks.num_cached) == (4, 6)
    assert lifecycle.reclaim_prefix_blocks(2) == 2
    assert lifecycle.num_free_blocks == 6
    again = lifecycle.prefix.match(lifecycle.prompt_keys(list(range(26))), 26)
    assert again.num_tokens == 16, "the end goes first"
    assert lifecycle.reclaim_prefix_blocks(100) == 4
    assert lifecycle.reclaim_prefix_blocks(1) == 0
    assert lifecycle.num_free_blocks == 10
    lifecycle.check()


def test_what_a_prompt_will_reuse_is_counted_and_spared() -> None:
    lifecycle = small_lifecycle(num_blocks=10, block_size=4)
    cached(lifecycle, [1] * 16)
    cached(lifecycle, [2] * 20)
    assert lifecycle.num_free_blocks == 1
    prompt = [1] * 12 + [3] * 12  # three of its six blocks are cached, the least recently used ones
    assert lifecycle.reclaim_prefix_blocks_for(prompt, 0, 6) == PrefixReclaim(3, 2)
    assert lifecycle.num_free_blocks == 3
    assert lifecycle.reclaim_prefix_blocks_for(prompt, 0, 6) == PrefixReclaim(3, 0)
    seq = lifecycle.alloc_sequence()
    assert lifecycle.adopt_prefix(seq, prompt).num_tokens == 12
    lifecycle.reserve(seq, len(prompt))
    assert lifecycle.num_free_blocks == 0
    lifecycle.check()


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again() -> None:
    lifecycle = small_lifecycle(num_blocks=6, block_size=4)
    cached(lifecycle, [1] * 16)
    assert lifecycle.reclaim_prefix_blocks_for([1] * 16, 0, 5) == PrefixReclaim(3, 0)
    assert lifecycle.reclaim_prefix_blocks_for([1] * 17, 0, 5) == PrefixReclaim(4, 0)


def test_another_adapter_and_an_empty_prompt_reuse_nothing() -> None:
    lifecycle = small_lifecycle(num_blocks=6, block_size=4)
    cached(lifecycle, [1] * 16)
    assert lifecycle.reclaim_prefix_blocks_for([1] * 16, 1, 2) == PrefixReclaim(0, 0)
    assert lifecycle.reclaim_prefix_blocks_for([], 0, 3) == PrefixReclaim(0, 1)
    assert lifecycle.reclaim_prefix_blocks_for([1] * 16, 1, 4) == PrefixReclaim(0, 1)
    assert lifecycle.blocks.num_cached == 2


def test_more_than_there_is_frees_all_that_can_go_and_says_how_many() -> None:
    lifecycle = small_lifecycle(num_blocks=8, block_size=4)
    cached(lifecycle, [1] * 12)
    holder = computed(lifecycle, [2] * 12)
    lifecycle.cache_sequence(holder)
    assert lifecycle.reclaim_prefix_blocks_for([3] * 40, 0, 11) == PrefixReclaim(0, 3)
    assert lifecycle.num_free_blocks == 5
    with pytest.raises(BatchRefused, match="6 KV blocks are needed and 5 of 8 are free"):
        lifecycle.reserve(holder, 36)
    lifecycle.free_sequence(holder)
    assert lifecycle.reclaim_prefix_blocks_for([2] * 12 + [3] * 20, 0, 8) == PrefixReclaim(3, 0)
    lifecycle.check()


def test_a_block_that_one_in_use_continues_stays() -> None:
    lifecycle = small_lifecycle(num_blocks=8, block_size=4)
    # Both compute the same first block before either is cached: the tree keeps the first one's.
    one, other = (computed(lifecycle, [1] * 4 + [n] * 4, adopt=False) for n in (2, 3))
    lifecycle.retire_sequence(one)
    lifecycle.cache_sequence(other)
    assert lifecycle.blocks.num_cached == 2, "the first block and its first end; nobody holds them"
    assert lifecycle.reclaim_prefix_blocks(8) == 1, "the first block is continued by one that is held"
    lifecycle.check()
    found = lifecycle.prefix.match(lifecycle.prompt_keys([1] * 4 + [3] * 4 + [1]), 9)
    assert found.num_tokens == 8
    lifecycle.free_sequence(other)
    assert lifecycle.reclaim_prefix_blocks(8) == 2
    assert lifecycle.num_free_blocks == 8


def test_keys_name_the_whole_prefix_and_its_adapter() -> None:
    lifecycle = small_lifecycle(num_blocks=8, block_size=4)
    base, other = lifecycle.prompt_keys([1, 2, 3, 4] * 3), lifecycle.prompt_keys([1, 2, 3, 4] * 3, 1)
    assert len({*base, *other}) == 6 and {len(key) for key in base} == {32}
    changed = lifecycle.prompt_keys([9, 2, 3, 4] + [1, 2, 3, 4] * 2)
    assert not set(changed) & set(base), "a block's key doesn't depend on what comes before it"
    assert lifecycle.prompt_keys([1, 2, 3, 4] * 2 + [1, 2, 3]) == base[:2]
    # Ids that run together as text are different keys: 1, 23 isn't 12, 3.
    assert lifecycle.prompt_keys([1, 23, 0, 0]) != lifecycle.prompt_keys([12, 3, 0, 0])


def test_only_an_empty_sequence_adopts_a_prefix() -> None:
    lifecycle = small_lifecycle(num_blocks=8, block_size=4)
    seq = computed(lifecycle, [1] * 5)
    with pytest.raises(InvariantBroken, match="empty sequence"):
        lifecycle.adopt_prefix(seq, [1] * 5)
