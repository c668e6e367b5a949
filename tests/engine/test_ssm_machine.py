"""Any order of calls on the pools, the prefix tree and the lifecycle of a hybrid model, against a model that keeps no pools.

The forward pass is the real one but for its arithmetic: a "state" is a number that names the tokens it is of, and so is what a
KV block's slot holds. A sequence that reads a state or a block of other tokens than its own is therefore caught at once.
"""

from __future__ import annotations

import zlib

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from engine.batch import BatchBuilder, PlanRow, StepPlan
from engine.cache.blocks import BlockPool
from engine.cache.ssm_layout import SsmShape, SsmSizes
from engine.cache.ssm_pool import SsmPool
from engine.errors import BatchRefused
from engine.model.base import ModelStreams
from engine.model.forward import Forward
from engine.model.lifecycle import Lifecycle
from engine.model.logits import Logits
from engine.model.state_files import StateFiles
from engine.model.verify import Verify
from engine.sequence import Sequence

BLOCK, NUM_BLOCKS, MAX_BATCH, DRAFTS, SNAPSHOTS, VOCAB = 4, 40, 3, 5, 4, 2
CPU = torch.device("cpu")


def name_of(tokens: list[int]) -> float:
    """A number for these tokens that fp32 holds exactly; 0 for none, as a zeroed slot has it."""
    return float(zlib.crc32(bytes(tokens)) >> 9) + 1.0 if tokens else 0.0


class NamedForward(Forward):
    """The real pass without layers: it checks that each state is that of the computed tokens, and moves it on."""

    def __init__(self, builder: BatchBuilder, lifecycle: Lifecycle, pool: SsmPool, kv: list[tuple[int, ...]]) -> None:
        self.builder = builder
        self.lifecycle = lifecycle
        self.vocab_size = VOCAB
        self.pool = pool
        self.kv = kv
        self.fail = False

    def _compute(self, plan: StepPlan, row_base: int) -> Tensor | None:
        for part in plan.rows:
            seq, first = part.seq, part.seq.num_computed_tokens
            known = seq.token_ids[:first]
            assert float(self.pool.h[0, seq.ssm_slot]) == float(self.pool.conv[0, seq.ssm_slot]) == name_of(known), (
                "another's state"
            )
            for at in range(first):
                assert self.kv[seq.block_table[at // BLOCK] * BLOCK + at % BLOCK] == tuple(known[: at + 1]), "another's block"
            for at in range(first, first + part.q_len):
                self.kv[seq.block_table[at // BLOCK] * BLOCK + at % BLOCK] = tuple(seq.token_ids[: at + 1])
            self._write(seq.ssm_slot, seq.token_ids[: first + part.q_len])
            if part.q_len > 1:  # a single row goes through the recurrent step, which writes the live slot alone
                for row, slot in enumerate(part.row_slots):
                    self._write(slot, seq.token_ids[: first + row + 1])
                for offset, slot in part.snapshots:
                    self._write(slot, seq.token_ids[: first + offset])
        if self.fail:
            raise RuntimeError("a kernel failed")
        return torch.zeros(plan.num_logits, VOCAB) if plan.num_logits else None

    def _write(self, slot: int, tokens: list[int]) -> None:
        self.pool.h[0, slot] = self.pool.conv[0, slot] = name_of(tokens)


tokens_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=26)
pick = st.integers(0, 10**6)


class Pools(RuleBasedStateMachine):
    """`running`: sequences with the tokens that the plain model says they hold; `chats`: what was cached at some time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SsmPool(SsmShape(1, 1, 1, 1, 1, 1), SsmSizes(MAX_BATCH, DRAFTS, SNAPSHOTS), CPU, torch.float32)
        self.pool.h.fill_(torch.nan)
        self.pool.conv.fill_(torch.nan)
        blocks = BlockPool(NUM_BLOCKS, BLOCK)
        builder = BatchBuilder(MAX_BATCH, 64, MAX_BATCH * (DRAFTS + 1), 16, BLOCK, NUM_BLOCKS * BLOCK, CPU)
        states = StateFiles(torch.zeros(1, 2, 1, 1, 1), self.pool, lambda: "", BLOCK, VOCAB)
        self.lifecycle = Lifecycle(blocks, builder, MAX_BATCH, 60, 1, states, None, ModelStreams(), self.pool, 8)
        self.kv: list[tuple[int, ...]] = [()] * (NUM_BLOCKS * BLOCK)
        self.forward = NamedForward(builder, self.lifecycle, self.pool, self.kv)
        self.verify = Verify(self.forward, self.lifecycle, Logits(MAX_BATCH * (DRAFTS + 1), VOCAB, 1, CPU, torch.float32))
        self.running: list[tuple[Sequence, list[int]]] = []
        self.chats: list[list[int]] = []

    @property
    def ssm(self):  # type: ignore[no-untyped-def]  # the state of a hybrid, never None here
        assert self.lifecycle.ssm is not None
        return self.lifecycle.ssm

    def chosen(self, which: int) -> tuple[Sequence, list[int]]:
        return self.running[which % len(self.running)]

    def computed(self) -> list[tuple[Sequence, list[int]]]:
        return [(seq, ids) for seq, ids in self.running if seq.num_tokens == seq.num_computed_tokens]

    def gone(self, seq: Sequence) -> None:
        self.running = [(each, ids) for each, ids in self.running if each is not seq]

    def room(self, seq: Sequence, count: int) -> bool:
        missing = self.lifecycle.blocks_needed(seq, seq.num_computed_tokens + count) - self.lifecycle.num_free_blocks
        return missing <= 0 or self.lifecycle.reclaim_prefix_blocks(missing) >= missing

    # A prompt comes, is computed, is answered

    @precondition(lambda self: len(self.running) < MAX_BATCH)
    @rule(fresh=tokens_of, chat=pick, keep=st.integers(0, 60), chunk=st.sampled_from([0, 3, 4, 7, 50, 50]))
    def start(self, fresh: list[int], chat: int, keep: int, chunk: int) -> None:
        """A prompt that begins like an earlier chat, as far as `keep`; computed at once, in chunks, but for a chunk of 0."""
        before = self.chats[chat % len(self.chats)][:keep] if self.chats else []
        prompt = [*before, *fresh][:50]
        keys = self.lifecycle.prompt_keys(prompt)
        cached = [index for index, key in enumerate(keys) if self.lifecycle.prefix.has(key)]
        with_state = [index for index in cached if self.lifecycle.prefix.has_snapshot(keys[index])]
        usable = (len(prompt) - 1) // BLOCK
        seq = self.lifecycle.alloc_sequence_for(60)
        found = self.lifecycle.adopt_prefix(seq, prompt)
        self.running.append((seq, list(prompt)))
        # The plain model: KV as far as it is cached without a gap, the state at the last snapshot on that way.
        kv = next((i for i in range(usable) if i not in cached), usable)
        assert found.kv_tokens == kv * BLOCK
        assert found.num_tokens == max((i + 1 for i in with_state if i < kv), default=0) * BLOCK
        assert seq.num_computed_tokens == found.num_tokens < len(prompt)
        assert float(self.pool.h[0, seq.ssm_slot]) == name_of(prompt[: found.num_tokens])
        while chunk and seq.num_computed_tokens < seq.num_tokens:
            count = min(chunk, seq.num_tokens - seq.num_computed_tokens)
            if not self.room(seq, count):
                return
            self.forward.run(StepPlan((PlanRow(seq, count, 1),), int(count == 1)))
            self.lifecycle.cache_sequence(seq)

    @precondition(lambda self: self.running)
    @rule(which=pick, count=st.integers(1, 20), fail=st.integers(0, 15))
    def prefill(self, which: int, count: int, fail: int) -> None:
        seq, _ = self.chosen(which)
        count = min(count, seq.num_tokens - seq.num_computed_tokens)
        if not count or not self.room(seq, count):
            return
        self.forward.fail = fail == 0
        try:
            self.forward.run(StepPlan((PlanRow(seq, count, 1),), int(count == 1)))
        except RuntimeError:
            assert self.forward.fail
            self.lifecycle.discard_prefix(seq)
            self.lifecycle.free_sequence(seq)
            self.gone(seq)
        else:
            self.lifecycle.cache_sequence(seq)
        self.forward.fail = False

    @precondition(lambda self: self.computed())
    @rule(which=pick, ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    def decode(self, which: int, ids: list[int]) -> None:
        seq, known = self.computed()[which % len(self.computed())]
        self._decode(seq, known, ids)

    def _decode(self, seq: Sequence, known: list[int], ids: list[int]) -> None:
        for token in ids:
            if seq.num_tokens >= seq.budget_tokens or not self.room(seq, 1):
                return
            seq.append([token])
            self.forward.run(StepPlan((PlanRow(seq, 1, 1),), 1))
            known.append(token)
            self.ssm.decode_marconi_checkpoint(seq)

    @precondition(lambda self: self.computed())
    @rule(which=pick, ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=DRAFTS), accepted=pick)
    def speculate(self, which: int, ids: list[int], accepted: int) -> None:
        seq, known = self.computed()[which % len(self.computed())]
        if seq.num_tokens + len(ids) > seq.budget_tokens or not self.room(seq, len(ids)):
            return
        self.verify.decode_verify(ids, seq)
        count = accepted % (len(ids) + 1)
        self.verify.accept(seq, count, len(ids))
        known += ids[:count]

    @precondition(lambda self: self.computed())
    @rule(which=pick, entry=st.integers(0, 1), ids=st.lists(st.integers(0, VOCAB - 1), max_size=6))
    def rewind(self, which: int, entry: int, ids: list[int]) -> None:
        """Back to a ring entry, where that may be, and on with another answer."""
        seq, known = self.computed()[which % len(self.computed())]
        at = seq.ring_tokens[entry]
        try:
            self.ssm.restore_decode_ssm_snapshot(seq, entry)
        except BatchRefused:
            assert at is None or at < len(seq.block_keys) * BLOCK
            return
        assert at is not None
        seq.take_back(seq.num_tokens - at)
        del known[at:]
        self._decode(seq, known, ids)

    # It ends

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def retire(self, which: int) -> None:
        """Finished, cancelled or preempted: what was computed is cached."""
        seq, ids = self.chosen(which)
        self.chats = [*self.chats, list(ids)][-8:]
        self.lifecycle.retire_sequence(seq)
        self.gone(seq)

    @precondition(lambda self: self.running)
    @rule(which=pick)
    def drop(self, which: int) -> None:
        seq, _ = self.chosen(which)
        self.lifecycle.free_sequence(seq)
        self.lifecycle.free_sequence(seq)
        self.gone(seq)

    @precondition(lambda self: self.computed())
    @rule(which=pick)
    def cache_midway(self, which: int) -> None:
        seq, ids = self.computed()[which % len(self.computed())]
        self.lifecycle.cache_sequence(seq)
        self.chats = [*self.chats, list(ids)][-8:]

    @rule(count=st.integers(1, NUM_BLOCKS))
    def evict(self, count: int) -> None:
        free = self.lifecycle.num_free_blocks
        freed = self.lifecycle.reclaim_prefix_blocks(count)
        assert self.lifecycle.num_free_blocks == free + freed
        assert freed <= count

    @precondition(lambda self: self.running)
    @rule(which=pick, retired=pick)
    def compact(self, which: int, retired: int) -> None:
        """A survivor takes the slot of a sequence that ends, or a free one."""
        seq, _ = self.chosen(which)
        ending, _ = self.chosen(retired)
        if ending is not seq:
            self.lifecycle.compact_sequence(seq, ending.ssm_slot)
            self.lifecycle.detach_slot_for_reuse(ending)
            self.lifecycle.check()
            self.lifecycle.free_sequence(ending)
            self.gone(ending)
        else:
            free = [slot for slot in range(MAX_BATCH) if self.pool.is_free_live(slot)]
            if free:
                self.lifecycle.compact_sequence(seq, free[0])

    # What always holds

    @invariant()
    def books_balance(self) -> None:
        self.lifecycle.check()
        for seq, ids in self.running:
            assert seq.token_ids == ids
            assert float(self.pool.h[0, seq.ssm_slot]) == name_of(ids[: seq.num_computed_tokens])

    @invariant()
    def every_snapshot_and_ring_entry_is_of_its_own_tokens(self) -> None:
        prefix = self.lifecycle.prefix
        for ids in (*self.chats, *(ids for _, ids in self.running)):
            for i, key in enumerate(self.lifecycle.prompt_keys(ids)):
                node = prefix._nodes.get(key)
                if node is not None:
                    slots = self.kv[node.block * BLOCK : (node.block + 1) * BLOCK]
                    assert slots == [tuple(ids[: i * BLOCK + j + 1]) for j in range(BLOCK)]
                    if node.snapshot is not None:
                        assert float(self.pool.h[0, node.snapshot]) == name_of(ids[: (i + 1) * BLOCK])
        for seq, ids in self.running:
            for entry, at in enumerate(seq.ring_tokens):
                assert at is None or float(self.pool.h[0, self.pool.ring_slot(seq.ssm_slot, entry)]) == name_of(ids[:at])
            for slot, at in seq.pending_snapshots:
                assert float(self.pool.h[0, slot]) == name_of(ids[:at])

    @invariant()
    def what_is_free_is_poisoned(self) -> None:
        """Nobody may read it before it is written or zeroed."""
        taken = {slot for seq, _ in self.running for slot in self.pool.slots_of(seq.ssm_slot)}
        free = [slot for live in range(MAX_BATCH) for slot in self.pool.slots_of(live) if slot not in taken]
        for slot in (*free, *self.pool._free_snapshots):
            self.pool.h[0, slot] = self.pool.conv[0, slot] = torch.nan
        for block in self.lifecycle.blocks._free:
            self.kv[block * BLOCK : (block + 1) * BLOCK] = [()] * BLOCK

    def teardown(self) -> None:
        for seq, _ in self.running:
            self.lifecycle.free_sequence(seq)
        self.lifecycle.reclaim_prefix_blocks(NUM_BLOCKS)
        self.lifecycle.check()
        assert self.lifecycle.num_free_blocks == NUM_BLOCKS
        assert self.pool.num_free_live == MAX_BATCH
        assert self.pool.occupancy() == (0, SNAPSHOTS)


Pools.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
TestPools = Pools.TestCase
