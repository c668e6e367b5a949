"""BlockPool against a model of it: any order of taking, sharing, keeping and giving back, with a recount after each step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.blocks import BlockPool
from engine.errors import BatchRefused, InvariantBroken
from engine.view import BlockState


class PoolMachine(RuleBasedStateMachine):
    """The model: which holders have which blocks, which the tree keeps, and the free ones in the order they became free."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.holders: dict[int, list[int]] = {}
        self.kept: set[int] = set()
        self.free = list(range(num_blocks))
        self.owners: dict[int, int] = {}
        self.touched = dict.fromkeys(range(num_blocks), -1)
        self.next_holder = 0

    def refs(self) -> Counter[int]:
        return Counter(block for blocks in self.holders.values() for block in blocks)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.touched[block] = self.pool.step

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(BatchRefused, match=f"{count} KV blocks are needed and {len(self.free)} of"):
                self.pool.allocate(count, self.next_holder)
            return
        blocks = self.pool.allocate(count, self.next_holder)
        assert blocks == self.free[:count], "not the oldest-freed first"
        del self.free[:count]
        self.holders[self.next_holder] = blocks
        self.owners |= dict.fromkeys(blocks, self.next_holder)
        self.touch(blocks)
        self.next_holder += 1

    @precondition(lambda self: self.refs() or self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        held = sorted(set(self.refs()) | self.kept)
        blocks = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
        self.pool.share(blocks, self.next_holder)
        self.holders[self.next_holder] = blocks
        self.owners |= dict.fromkeys(blocks, self.next_holder)
        self.touch(blocks)
        self.next_holder += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.holders)))
        blocks = self.holders.pop(holder)
        self.pool.release(reversed(blocks))
        self.touch(blocks)
        for block in reversed(blocks):
            if not self.refs()[block] and block not in self.kept:
                self.free.append(block)

    @precondition(lambda self: set(self.refs()) - self.kept)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.refs()) - self.kept)))
        self.pool.keep(block)
        self.kept.add(block)
        self.touch([block])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.kept.remove(block)
        freed = not self.refs()[block]
        assert self.pool.drop(block) is freed
        self.touch([block])
        if freed:
            self.free.append(block)

    @rule()
    def next_step(self) -> None:
        self.pool.step += 1

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def misuse_a_free_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.free))
        with pytest.raises(InvariantBroken, match="is free and can't be shared"):
            self.pool.share([block], 0)
        with pytest.raises(InvariantBroken, match="released more often than it was taken"):
            self.pool.release([block])
        with pytest.raises(InvariantBroken, match="can't be kept: it is free"):
            self.pool.keep(block)
        with pytest.raises(InvariantBroken, match="isn't kept by the prefix tree"):
            self.pool.drop(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def keep_twice(self, data: st.DataObject) -> None:
        with pytest.raises(InvariantBroken, match="it is kept already"):
            self.pool.keep(data.draw(st.sampled_from(sorted(self.kept))))

    @invariant()
    def books_balance(self) -> None:
        pool, refs = self.pool, self.refs()
        pool.check(self.holders.values(), self.kept)
        assert pool.num_free == len(self.free)
        assert pool.num_cached == len(self.kept - set(refs))
        view = pool.view()
        owners, touched = memoryview(view.owners).cast("i"), memoryview(view.touched_steps).cast("i")
        for block in range(pool.num_blocks):
            assert pool.refs(block) == view.refs[block] == refs[block]
            expected = BlockState.FREE
            if refs[block]:
                expected = BlockState.ACTIVE if refs[block] == 1 else BlockState.SHARED
            elif block in self.kept:
                expected = BlockState.CACHED
            assert view.states[block] == expected
            assert owners[block] == (-1 if expected is BlockState.FREE else self.owners[block])
            assert touched[block] == self.touched[block]
        counts = view.num_free, view.num_active, view.num_shared, view.num_cached, view.num_pinned
        assert counts == tuple(view.states.count(state) for state in range(5))
        assert sum(counts) == view.num_blocks == pool.num_blocks


TestAnyOrderOfCallsKeepsTheBooks = PoolMachine.TestCase
TestAnyOrderOfCallsKeepsTheBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("table", "kept", "sentence"),
    [
        ([0], [], r"KV block 1: 1 refs in the books, 0 holders"),
        ([0, 1, 1], [], r"KV block 1: 1 refs in the books, 2 holders"),
        ([0, 1, 2], [], r"KV block 2: 0 refs in the books, 1 holders"),
        ([0, 1], [0], r"KV block 0: kept 0 times in the books, 1 in the tree"),
    ],
)
def test_a_recount_names_the_first_block_that_differs(table: list[int], kept: list[int], sentence: str) -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2, 7)
    pool.check([[0, 1]])
    with pytest.raises(InvariantBroken, match=sentence):
        pool.check([table], kept)


def test_a_recount_finds_a_damaged_free_list_and_damaged_counts() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(1, 7)
    pool._free.append(0)
    with pytest.raises(InvariantBroken, match=r"KV block 0: 1 times in the free list, 0 expected"):
        pool.check([[0]])
    pool._free.pop()
    pool._counts[BlockState.FREE] += 1
    with pytest.raises(InvariantBroken, match="differ from a recount"):
        pool.check([[0]])


def test_more_references_than_a_byte_holds_are_shown_as_255_and_counted_exactly() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1, 0)
    for holder in range(1, 300):
        pool.share([0], holder)
    assert pool.refs(0) == 300
    assert pool.view().refs[0] == 255
    for _ in range(300):
        pool.release([0])
    assert pool.num_free == 2
    pool.check([])


def test_a_view_is_a_picture_that_later_calls_leave_alone() -> None:
    pool = BlockPool(4, 4, block_bytes=123)
    pool.step = 9
    pool.allocate(2, 5)
    view = pool.view()
    pool.release([0, 1])
    assert (view.num_free, view.num_active, view.block_bytes, view.block_size_tokens) == (2, 2, 123, 4)
    assert view.states == bytes([1, 1, 0, 0])
    assert memoryview(view.owners).cast("i").tolist() == [5, 5, -1, -1]
    assert memoryview(view.touched_steps).cast("i").tolist() == [9, 9, -1, -1]
