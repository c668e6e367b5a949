"""PrefixTree: which KV blocks hold which prefixes, so that a prompt reuses what is still there.

A block's key is the SHA-256 of its parent's key and its own token ids; the root's key holds the adapter id. A key therefore
names the whole prefix up to the block's end under one adapter, and a collision would be one of SHA-256 (a
non-cryptographic hash let one prompt read another's KV: CVE-2025-25183).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.cache.blocks import BlockPool
from engine.errors import InvariantBroken

KEPT_EVICTIONS = 4  # remembers the keys of so many times the pool's blocks after their eviction, to name the cause of a miss


@dataclass(slots=True, eq=False)
class _Node:
    """One cached block. num_children: cached blocks that continue it."""

    key: bytes
    block: int
    parent: _Node | None
    num_children: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a prompt is cached: the blocks, the tokens they hold, and a sentence on why it isn't more."""

    blocks: tuple[int, ...]
    num_tokens: int
    note: str


class PrefixTree:
    """The tree of cached blocks. It takes and drops blocks through the pool, whose ref counts say which of them are in use.

    Eviction takes the least recently used block that nothing continues and no sequence holds.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def blocks(self) -> Iterator[int]:
        """The blocks the tree keeps."""
        return (node.block for node in self._nodes.values())

    def keys(self, token_ids: Sequence[int], adapter_id: int, num_tokens: int, known: Sequence[bytes] = ()) -> list[bytes]:
        """The keys of the full blocks within the first `num_tokens`; `known` are the first of them, computed before."""
        size = self.pool.block_size
        keys = list(known)
        parent = keys[-1] if keys else hashlib.sha256(b"footplate prefix" + adapter_id.to_bytes(8, "little")).digest()
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            parent = hashlib.sha256(parent + array("q", token_ids[start : start + size]).tobytes()).digest()
            keys.append(parent)
        return keys

    def match(self, keys: Sequence[bytes], num_tokens: int) -> PrefixMatch:
        """What is cached of a prompt of `num_tokens` with these block keys. At least one token is left to compute, for its
        logits. Nothing is taken: the caller shares the blocks."""
        size = self.pool.block_size
        usable = min(len(keys), (num_tokens - 1) // size)
        blocks: list[int] = []
        for key in keys[:usable]:
            node = self._nodes.get(key)
            if node is None:
                break
            blocks.append(node.block)
        return PrefixMatch(tuple(blocks), len(blocks) * size, self._note(keys, len(blocks), usable, num_tokens))

    def _note(self, keys: Sequence[bytes], found: int, usable: int, num_tokens: int) -> str:
        size = self.pool.block_size
        if not usable:
            return f"a prompt of {num_tokens} tokens holds no whole block of {size} before its last token"
        if found == usable:
            left = num_tokens - found * size
            return f"all whole blocks were cached; {left} tokens after the last of them are computed"
        if keys[found] in self._evicted:
            return f"the block after token {found * size} was evicted"
        if found:
            return f"nothing cached continues the prompt after token {found * size}"
        return "nothing cached begins like this prompt"

    def has(self, key: bytes) -> bool:
        """Whether the block with this key is cached."""
        return key in self._nodes

    def insert(self, keys: Sequence[bytes], block_table: Sequence[int]) -> None:
        """Keep the blocks of a prefix, held by the caller's sequence: block i has keys[i]. One whose key is cached already, in
        another block, is left out."""
        parent: _Node | None = None
        for key, block in zip(keys, block_table, strict=False):
            node = self._nodes.get(key)
            if node is None:
                self.pool.keep(block)
                node = self._nodes[key] = _Node(key, block, parent)
                self._evicted.pop(key, None)
                if parent is not None:
                    parent.num_children += 1
            parent = node
        self.touch(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a path as just used, its end first, so that the end is evicted before what it continues."""
        for key in reversed(keys):
            if key in self._nodes:
                self._nodes.move_to_end(key)

    def evict(self, num_blocks: int, spare: Collection[int] = ()) -> int:
        """Drop up to `num_blocks` unused blocks, least recently used first, but none in `spare`; returns how many became free."""
        freed = 0
        held: list[bytes] = []
        while freed < num_blocks:
            victim = None
            for node in self._nodes.values():
                if self.pool.refs(node.block) or node.block in spare:
                    held.append(node.key)
                elif not node.num_children:
                    victim = node
                    break
            if victim is None:
                break
            freed += self._drop(victim)
            # What a sequence holds is in use: out of the way of the next search, in unchanged order.
            for key in held:
                self._nodes.move_to_end(key)
            held.clear()
        return freed

    def discard(self, keys: Sequence[bytes]) -> None:
        """Let go of a path from its end on, as far as nothing else continues it: its contents may be wrong."""
        for key in reversed(keys):
            node = self._nodes.get(key)
            if node is not None:
                if node.num_children:
                    return
                self._drop(node)

    def _drop(self, node: _Node) -> int:
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1
        self._evicted[node.key] = None
        while len(self._evicted) > KEPT_EVICTIONS * self.pool.num_blocks:
            self._evicted.popitem(last=False)
        return int(self.pool.drop(node.block))

    def check(self) -> None:
        """Recount the children; raises `InvariantBroken` on any difference."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                if self._nodes.get(node.parent.key) is not node.parent:
                    raise InvariantBroken(f"KV block {node.block} continues a prefix that isn't cached any more.")
                children[node.parent.key] = children.get(node.parent.key, 0) + 1
        for node in self._nodes.values():
            if node.num_children != children.get(node.key, 0):
                raise InvariantBroken(f"KV block {node.block}: {node.num_children} children in the books.")
