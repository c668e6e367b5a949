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
from typing import TYPE_CHECKING

from engine.cache.blocks import BlockPool
from engine.errors import InvariantBroken

if TYPE_CHECKING:
    from engine.cache.ssm_pool import SsmPool

KEPT_EVICTIONS = 4  # remembers the keys of so many times the pool's blocks after their eviction, to name the cause of a miss


@dataclass(slots=True, eq=False)
class _Node:
    """One cached block. depth: blocks from the root to its end; num_children: cached blocks that continue it; snapshot: the
    recurrent-state slot with the state at its end, None without one; used: when it was last used, on the tree's own clock."""

    key: bytes
    block: int
    parent: _Node | None
    depth: int
    num_children: int = 0
    snapshot: int | None = None
    used: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a prompt is cached and can be used: the blocks, the tokens they hold, and a sentence on why it isn't more.

    A hybrid model resumes at a snapshot only: kv_tokens is how far the KV blocks alone match, snapshot the slot with the state at
    num_tokens (None at 0).
    """

    blocks: tuple[int, ...]
    num_tokens: int
    note: str
    kv_tokens: int
    snapshot: int | None = None


class PrefixTree:
    """The tree of cached blocks. It takes and drops blocks through the pool, whose ref counts say which of them are in use.

    Eviction takes the least recently used block that nothing continues and no sequence holds. With a recurrent-state pool, nodes
    can carry a snapshot; a snapshot goes with its node, or alone, when another is worth more (see `take_snapshot_slot`).
    """

    def __init__(self, pool: BlockPool, ssm: SsmPool | None = None) -> None:
        self.pool = pool
        self.ssm = ssm
        self.num_lookups = 0
        self.num_hits = 0
        self._clock = 0
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
        path: list[_Node] = []
        for key in keys[:usable]:
            node = self._nodes.get(key)
            if node is None:
                break
            path.append(node)
        note, kv_tokens, snapshot = self._note(keys, len(path), usable, num_tokens), len(path) * size, None
        if self.ssm is not None:
            while path and path[-1].snapshot is None:
                path.pop()
            snapshot = path[-1].snapshot if path else None
            if len(path) * size < kv_tokens:
                note = f"the KV blocks match {kv_tokens} tokens, but the last state snapshot on their way is at {len(path) * size}"
        return PrefixMatch(tuple(node.block for node in path), len(path) * size, note, kv_tokens, snapshot)

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
                node = self._nodes[key] = _Node(key, block, parent, 1 if parent is None else parent.depth + 1)
                self._evicted.pop(key, None)
                if parent is not None:
                    parent.num_children += 1
            parent = node
        self.touch(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark a path as just used, its end first, so that the end is evicted before what it continues."""
        self._clock += 1
        for key in reversed(keys):
            node = self._nodes.get(key)
            if node is not None:
                node.used = self._clock
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

    # Snapshots of recurrent state

    def snapshots(self) -> Iterator[int]:
        """The snapshot slots the tree holds."""
        return (node.snapshot for node in self._nodes.values() if node.snapshot is not None)

    def has_snapshot(self, key: bytes) -> bool:
        """Whether the state at the end of the block with this key is held."""
        node = self._nodes.get(key)
        return node is not None and node.snapshot is not None

    def attach_snapshot(self, key: bytes, slot: int) -> bool:
        """Tie a written snapshot to the block with this key; False, leaving the slot with the caller, when the block isn't cached
        or has one already."""
        node = self._nodes.get(key)
        if node is None or node.snapshot is not None:
            return False
        node.snapshot = slot
        return True

    def take_snapshot_slot(self) -> int | None:
        """A slot to write a snapshot to: a free one, else that of the snapshot worth least; None in a pool of none.

        Worth, after Marconi (arXiv 2411.19379, section 4.2): how recently it was used, plus the tokens it saves beyond the next
        snapshot above it, each scaled to the largest among those held (every snapshot has the same bytes).
        """
        if self.ssm is None:
            return None
        slot = self.ssm.alloc_snapshot()
        if slot is not None:
            return slot
        held = [node for node in self._nodes.values() if node.snapshot is not None]
        if not held:
            return None
        saved = [_tokens_saved(node) for node in held]
        newest, most, oldest = max(node.used for node in held), max(saved), min(node.used for node in held)

        def worth(index: int) -> float:
            recency = (held[index].used - oldest) / (newest - oldest) if newest > oldest else 1.0
            return recency + saved[index] / most

        victim = held[min(range(len(held)), key=worth)]
        slot, victim.snapshot = victim.snapshot, None
        return slot

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
        if node.snapshot is not None and self.ssm is not None:
            self.ssm.free_snapshot(node.snapshot)
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


def _tokens_saved(node: _Node) -> int:
    """Blocks between a node's snapshot and the next one above it, or the root."""
    above = node.parent
    while above is not None and above.snapshot is None:
        above = above.parent
    return node.depth - (above.depth if above is not None else 0)
