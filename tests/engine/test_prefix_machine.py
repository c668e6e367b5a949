"""The block pool, the prefix tree and the lifecycle over them against a plain model, in any order of operations: after each the
books are recounted, and every count, reference and cached prefix is the model's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from pools import small_lifecycle

from engine.errors import BatchRefused
from engine.sequence import Sequence

SIZE = 3
NUM_BLOCKS = 14
MAX_BATCH = 4
Path = tuple[int, ...]  # an adapter id, then the token ids up to a block's end

# Few ids and few beginnings, so that prefixes are shared, part inside blocks, and come back.
prompts = st.builds(
    lambda start, rest: [*start, *rest],
    st.sampled_from([[], [1] * 4, [1, 2, 3] * 2, [1, 2, 3, 1, 2, 4, 1], [2] * 9]),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=7),
)


@dataclass(eq=False)
class Held:
    """A sequence of the model: its ids, its blocks by name, and how many of them have had their keys worked out."""

    seq: Sequence
    adapter: int
    tokens: list[int]
    computed: int
    table: list[int]
    num_keys: int

    def path(self, blocks: int) -> Path:
        return self.adapter, *self.tokens[: blocks * SIZE]


@dataclass
class Books:
    """The model: sequences, and cached prefixes with the block each keeps, in the order they were last used in."""

    held: list[Held] = field(default_factory=list)
    nodes: dict[Path, int] = field(default_factory=dict)
    order: list[Path] = field(default_factory=list)
    fresh: int = 0

    def refs(self) -> Counter[int]:
        return Counter(block for held in self.held for block in held.table)

    def num_free(self) -> int:
        return NUM_BLOCKS - len(set(self.refs()) | set(self.nodes.values()))

    def children(self, path: Path) -> list[Path]:
        return [other for other in self.nodes if other[:-SIZE] == path]

    def match(self, adapter: int, tokens: list[int]) -> list[Path]:
        paths: list[Path] = []
        for blocks in range(1, (len(tokens) - 1) // SIZE + 1):
            path = (adapter, *tokens[: blocks * SIZE])
            if path not in self.nodes:
                break
            paths.append(path)
        return paths

    def touch(self, paths: list[Path]) -> None:
        """Used just now, the end first: it goes before what it continues."""
        for path in reversed(paths):
            if path in self.order:
                self.order.remove(path)
                self.order.append(path)

    def evict(self, count: int, spare: list[Path]) -> int:
        """Drop prefixes that nothing continues and nobody holds or will hold, the one used longest ago first."""
        refs, gone = self.refs(), 0
        while gone < count:
            in_use = [path for path in self.order if refs[self.nodes[path]] or path in spare]
            victim = next((path for path in self.order if path not in in_use and not self.children(path)), None)
            if victim is None:
                break
            # What is in use and was met on the way counts as used now.
            met = [path for path in self.order[: self.order.index(victim)] if path in in_use]
            self.order = [path for path in self.order if path not in met and path != victim] + met
            del self.nodes[victim]
            gone += 1
        return gone


class Pools(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = small_lifecycle(NUM_BLOCKS, SIZE, MAX_BATCH)
        self.books = Books()

    def keys_of(self, path: Path) -> bytes:
        return self.lifecycle.prompt_keys(path[1:], path[0])[-1]

    @precondition(lambda self: len(self.books.held) < MAX_BATCH)
    @rule(target=sequences, tokens=prompts, adapter=st.sampled_from([0, 0, 0, 1]), whole=st.sampled_from([True, True, True, False]))
    def begin(self, tokens: list[int], adapter: int, whole: bool) -> Held:
        """Admit a prompt; mostly compute and cache it too, as far as blocks are there."""
        seq = self.lifecycle.alloc_sequence_for(40, owner=7)
        seq.adapter_id = adapter
        paths = self.books.match(adapter, tokens)
        found = self.lifecycle.adopt_prefix(seq, tokens)
        assert found.num_tokens == seq.num_computed_tokens == seq.num_cached_tokens == len(paths) * SIZE
        held = Held(seq, adapter, [*tokens], found.num_tokens, [self.books.nodes[path] for path in paths], len(paths))
        self.books.held.append(held)
        self.books.touch(paths)
        if whole:
            self.compute(held, len(tokens))
            self.cache(held)
        return held

    @rule(held=sequences, count=st.integers(1, 8))
    def compute(self, held: Held, count: int) -> None:
        count = min(count, len(held.tokens) - held.computed)
        missing = max(0, -(-(held.computed + count) // SIZE) - len(held.table))
        if missing > self.books.num_free():
            before = list(held.seq.block_table)
            with pytest.raises(BatchRefused):
                self.lifecycle.reserve(held.seq, held.computed + count)
            assert held.seq.block_table == before
            return
        self.lifecycle.reserve(held.seq, held.computed + count)
        held.seq.advance(count)
        held.computed += count
        for _ in range(missing):
            self.books.fresh += 1
            held.table.append(self.books.fresh)

    @rule(held=sequences)
    def cache(self, held: Held) -> None:
        self.lifecycle.cache_sequence(held.seq)
        self._cached(held)

    @rule(held=sequences, tokens=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5))
    def answer(self, held: Held, tokens: list[int]) -> None:
        """Ids are generated: all but the last are computed too."""
        if held.seq.num_tokens + len(tokens) <= 40:
            held.seq.append(tokens)
            held.tokens += tokens
            self.compute(held, len(held.tokens) - held.computed - 1)

    @rule(held=consumes(sequences), how=st.sampled_from(["retire", "retire", "retire", "free", "spoil"]))
    def end(self, held: Held, how: str) -> None:
        if how == "retire":
            self._cached(held)
            self.lifecycle.retire_sequence(held.seq)
        elif how == "free":
            self.lifecycle.free_sequence(held.seq)
            self.lifecycle.free_sequence(held.seq)  # twice is once
        else:
            self.lifecycle.discard_prefix(held.seq)
            self.lifecycle.free_sequence(held.seq)
            self._discarded(held)
        self.books.held.remove(held)

    @rule(target=sequences, held=consumes(sequences))
    def preempt(self, held: Held) -> Held:
        self.end(held, "retire")
        return self.begin(held.tokens, held.adapter, False)

    def _cached(self, held: Held) -> None:
        blocks = held.computed // SIZE
        if blocks > held.num_keys:
            for n in range(1, blocks + 1):
                if held.path(n) not in self.books.nodes:
                    self.books.nodes[held.path(n)] = held.table[n - 1]
                    self.books.order.append(held.path(n))
            held.num_keys = blocks
            self.books.touch([held.path(n) for n in range(1, blocks + 1)])

    def _discarded(self, held: Held) -> None:
        for n in range(held.num_keys, 0, -1):
            path = held.path(n)
            if path in self.books.nodes:
                if self.books.children(path):
                    break
                del self.books.nodes[path]
                self.books.order.remove(path)

    @rule(count=st.sampled_from([1, 1, 2, 3, NUM_BLOCKS]))
    def reclaim(self, count: int) -> None:
        assert self.lifecycle.reclaim_prefix_blocks(count) == self.books.evict(count, [])
        if not self.books.held and count == NUM_BLOCKS:
            assert self.lifecycle.num_free_blocks == NUM_BLOCKS

    @rule(tokens=prompts, adapter=st.sampled_from([0, 0, 0, 1]), more=st.integers(1, 4))
    def reclaim_for(self, tokens: list[int], adapter: int, more: int) -> None:
        spare = self.books.match(adapter, tokens)
        needed = len(spare) + self.books.num_free() + more  # so that something has to go
        found = self.lifecycle.reclaim_prefix_blocks_for(tokens, adapter, needed)
        assert (found.reused_blocks, found.reclaimed_blocks) == (len(spare), self.books.evict(more, spare))
        assert self.books.match(adapter, tokens) == spare
        enough = self.lifecycle.reclaim_prefix_blocks_for(tokens, adapter, needed - more)
        assert (enough.reused_blocks, enough.reclaimed_blocks) == (len(spare), 0)

    @invariant()
    def the_books_balance(self) -> None:
        self.lifecycle.check()

    @invariant()
    def every_count_is_the_model_s(self) -> None:
        pool, refs = self.lifecycle.blocks, self.books.refs()
        assert self.lifecycle.num_free_blocks == self.books.num_free()
        assert pool.num_cached == sum(not refs[block] for block in self.books.nodes.values())
        view = pool.view()
        assert view.num_active == sum(count == 1 for count in refs.values())
        assert view.num_shared == sum(count > 1 for count in refs.values())
        for held in self.books.held:
            assert [pool.refs(block) for block in held.seq.block_table] == [refs[block] for block in held.table]
        assert len(self.lifecycle.prefix) == len(self.books.nodes)
        assert all(self.lifecycle.prefix.has(self.keys_of(path)) for path in self.books.nodes)

    @invariant()
    def one_name_is_one_block(self) -> None:
        names: dict[int, int] = {}
        for held in self.books.held:
            for name, block in zip(held.table, held.seq.block_table, strict=True):
                assert names.setdefault(name, block) == block
        assert len(set(names.values())) == len(names)

    def teardown(self) -> None:
        for held in list(self.books.held):
            self.lifecycle.free_sequence(held.seq)
        self.lifecycle.check()
        self.lifecycle.reclaim_prefix_blocks(NUM_BLOCKS)
        assert self.lifecycle.num_free_blocks == NUM_BLOCKS, "something holds a block when nothing runs"


TestPools = Pools.TestCase
TestPools.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
