"""Sequence: the token ids, lengths, block table and slots of one stream of tokens. It knows no request."""

from __future__ import annotations

from engine.errors import InvariantBroken


class Sequence:
    """The seed's SequenceState. `num_computed_tokens ≤ num_tokens ≤ budget_tokens` always holds.

    token_ids: prompt and generated ids; the first num_computed_tokens have their keys and values in the blocks of
    block_table. row: index of its row in the model's device buffers, −1 when it holds none. adapter_id: part of
    its prefix identity, 0 for the base model. num_cached_tokens: how many of the computed tokens came from the
    prefix cache. block_keys: the prefix keys of its leading full blocks, as far as they were needed.

    Of a hybrid model: ssm_slot is its live recurrent-state slot, −1 without one; ring_tokens the token count each ring entry holds
    the state at; snapshot_points the token counts at which its prefill takes snapshots; pending_snapshots (slot, token count)
    those written but not yet tied to a cached block.
    """

    __slots__ = (
        "adapter_id",
        "block_keys",
        "block_table",
        "budget_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "owner",
        "pending_snapshots",
        "ring_tokens",
        "row",
        "snapshot_points",
        "ssm_slot",
        "token_ids",
    )

    def __init__(self, budget_tokens: int, row: int, owner: int = -1, adapter_id: int = 0) -> None:
        self.token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.budget_tokens = budget_tokens
        self.block_table: list[int] = []
        self.block_keys: list[bytes] = []
        self.row = row
        self.owner = owner
        self.adapter_id = adapter_id
        self.ssm_slot = -1
        self.ring_tokens: list[int | None] = [None, None]
        self.snapshot_points: list[int] = []
        self.pending_snapshots: list[tuple[int, int]] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def append(self, token_ids: list[int]) -> None:
        """Add ids whose keys and values aren't computed yet."""
        self.token_ids += token_ids
        self._check()

    def advance(self, num_tokens: int) -> None:
        """Note that the next `num_tokens` ids have been computed."""
        self.num_computed_tokens += num_tokens
        self._check()

    def take_back(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` ids; computed ones among them are computed no longer. Their blocks stay, to be
        overwritten."""
        del self.token_ids[len(self.token_ids) - num_tokens :]
        self.num_computed_tokens = min(self.num_computed_tokens, self.num_tokens)
        self._check()

    def _check(self) -> None:
        if not 0 <= self.num_cached_tokens <= self.num_computed_tokens <= self.num_tokens <= self.budget_tokens:
            raise InvariantBroken(
                f"sequence in row {self.row}: cached {self.num_cached_tokens} ≤ computed {self.num_computed_tokens} ≤ "
                f"tokens {self.num_tokens} ≤ budget {self.budget_tokens} does not hold."
            )
