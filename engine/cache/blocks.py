"""BlockPool: the only owner of KV blocks and their reference counts.

Flat arrays (state, refs, owner, last touched step) are kept up to date in place, so that a view of 45,000 blocks is a
copy of bytes and not a pass over objects.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.errors import BatchRefused, InvariantBroken
from engine.view import BlockState, KvView

_FREE, _ACTIVE, _SHARED, _CACHED = BlockState.FREE, BlockState.ACTIVE, BlockState.SHARED, BlockState.CACHED


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A block is free, held by sequences (its refs count them), or kept by
    the prefix tree alone; a block the tree keeps while sequences hold it stays when they let go."""

    def __init__(self, num_blocks: int, block_size: int, block_bytes: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.step = 0
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = array("i", bytes(4 * num_blocks))
        self._kept = bytearray(num_blocks)
        self._states = bytearray(num_blocks)
        self._shown_refs = bytearray(num_blocks)
        self._owners = array("i", [-1]) * num_blocks
        self._touched = array("i", [-1]) * num_blocks
        self._counts = [num_blocks, 0, 0, 0, 0]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix tree holds."""
        return self._counts[_CACHED]

    def refs(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._refs[block]

    def allocate(self, count: int, owner: int) -> list[int]:
        """`count` blocks with one reference each, oldest-freed first. Raises `BatchRefused`, changing nothing, when
        fewer are free."""
        if count > len(self._free):
            raise BatchRefused(f"{count} KV blocks are needed and {len(self._free)} of {self.num_blocks} are free.")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._owners[block] = owner
            self._show(block)
        return blocks

    def share(self, blocks: Iterable[int], owner: int) -> None:
        """Add one reference to blocks that are held or cached."""
        for block in blocks:
            if not self._refs[block] and not self._kept[block]:
                raise InvariantBroken(f"KV block {block} is free and can't be shared.")
            self._refs[block] += 1
            self._owners[block] = owner
            self._show(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference of each block back; the last one frees it unless the prefix tree keeps it."""
        for block in blocks:
            if self._refs[block] <= 0:
                raise InvariantBroken(f"KV block {block} was released more often than it was taken.")
            self._refs[block] -= 1
            if not self._refs[block] and not self._kept[block]:
                self._free.append(block)
            self._show(block)

    def keep(self, block: int) -> None:
        """The prefix tree keeps a block that a sequence holds."""
        if self._kept[block] or not self._refs[block]:
            raise InvariantBroken(f"KV block {block} can't be kept: it is {'kept already' if self._kept[block] else 'free'}.")
        self._kept[block] = 1
        self._show(block)

    def drop(self, block: int) -> bool:
        """The prefix tree lets a block go; returns whether that freed it."""
        if not self._kept[block]:
            raise InvariantBroken(f"KV block {block} isn't kept by the prefix tree.")
        self._kept[block] = 0
        freed = not self._refs[block]
        if freed:
            self._free.append(block)
        self._show(block)
        return freed

    def _show(self, block: int) -> None:
        refs = self._refs[block]
        state = (_ACTIVE if refs == 1 else _SHARED) if refs else (_CACHED if self._kept[block] else _FREE)
        old = self._states[block]
        if state != old:
            self._counts[old] -= 1
            self._counts[state] += 1
            self._states[block] = state
        self._shown_refs[block] = min(refs, 255)
        if state == _FREE:
            self._owners[block] = -1
        self._touched[block] = self.step

    def view(self) -> KvView:
        """The pool as the console draws it."""
        free, active, shared, cached, pinned = self._counts
        return KvView(
            num_blocks=self.num_blocks,
            block_size_tokens=self.block_size,
            block_bytes=self.block_bytes,
            states=bytes(self._states),
            refs=bytes(self._shown_refs),
            owners=self._owners.tobytes(),
            touched_steps=self._touched.tobytes(),
            num_free=free,
            num_active=active,
            num_shared=shared,
            num_cached=cached,
            num_pinned=pinned,
        )

    def check(self, tables: Iterable[Sequence[int]], kept: Iterable[int] = ()) -> None:
        """Recount from the holders, their block tables and the tree's blocks; raises `InvariantBroken` on any difference."""
        held = Counter(block for table in tables for block in table)
        tree = Counter(kept)
        free = Counter(self._free)
        for block in range(self.num_blocks):
            if self._refs[block] != held[block]:
                raise InvariantBroken(f"KV block {block}: {self._refs[block]} refs in the books, {held[block]} holders.")
            if self._kept[block] != tree[block]:
                raise InvariantBroken(f"KV block {block}: kept {self._kept[block]} times in the books, {tree[block]} in the tree.")
            expected = 0 if held[block] or tree[block] else 1
            if free[block] != expected:
                raise InvariantBroken(f"KV block {block}: {free[block]} times in the free list, {expected} expected.")
        counts = [self._states.count(state) for state in range(5)]
        if counts != self._counts or counts[_FREE] != len(self._free):
            raise InvariantBroken(f"KV block counts {self._counts} differ from a recount {counts}.")
