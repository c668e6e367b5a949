"""WeightStore: the ledger of the tensors a model holds, and how many bytes each kind of them takes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import InvariantBroken


@dataclass(frozen=True, slots=True)
class Held:
    """One entry: what a tensor is for (`kind`), the format it is held in, and how many parameters it stands for."""

    tensor: Tensor
    kind: str
    format: str
    num_parameters: int


class WeightStore:
    """The owner of a model's weights. Tensors enter once, in load order, and leave together by `teardown`."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._torn_down = False
        self._digest: str | None = None

    def add(self, name: str, tensor: Tensor, kind: str, format: str, num_parameters: int | None = None) -> Tensor:
        """Enter `tensor` and return it.

        `kind` says what it is for ("embedding", "attention", "mlp", "norm", "head", "moe", "gated_delta", …), `format`
        how its elements are held. `num_parameters` is given where it isn't one per element (packed blocks, scales).
        Raises `InvariantBroken` for a name entered before, or after `teardown`.
        """
        if self._torn_down:
            raise InvariantBroken(f"weight {name!r} was added after teardown; load the model into a new store.")
        if name in self._held:
            raise InvariantBroken(f"weight {name!r} was added twice; give each tensor its own name.")
        self._held[name] = Held(tensor, kind, format, tensor.numel() if num_parameters is None else num_parameters)
        return tensor

    def get(self, name: str) -> Tensor:
        """The tensor entered as `name`. Raises `KeyError` if there is none."""
        return self._held[name].tensor

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, by the name it was entered as."""
        return {name: held.tensor for name, held in self._held.items()}

    @property
    def bytes_total(self) -> int:
        """Bytes of all storages, each counted once however many tensors share it."""
        return sum(self.bytes_by_kind().values())

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes per kind, in load order; a storage that several tensors share counts for the first of them."""
        totals: dict[str, int] = {}
        seen: set[tuple[str, int]] = set()
        for held in self._held.values():
            storage = held.tensor.untyped_storage()
            key = (str(held.tensor.device), storage.data_ptr())
            fresh = storage.nbytes() if key not in seen else 0
            seen.add(key)
            totals[held.kind] = totals.get(held.kind, 0) + fresh
        return totals

    @property
    def num_parameters(self) -> int:
        """Parameters of all tensors; one tensor entered under two names (tied embeddings) counts once."""
        # By elements, not by storage: q, k and v may be views of one fused storage and are all counted.
        distinct = {
            (str(held.tensor.device), held.tensor.data_ptr(), held.tensor.numel()): held.num_parameters
            for held in self._held.values()
        }
        return sum(distinct.values())

    def digest(self) -> str:
        """SHA-256 in hex over every tensor's name, dtype, shape and bytes; worked out once and kept."""
        if self._digest is None:
            digest = hashlib.sha256()
            for name, held in self._held.items():
                digest.update(f"{name}\0{held.tensor.dtype}\0{tuple(held.tensor.shape)}\0".encode())
                digest.update(held.tensor.cpu().contiguous().view(torch.uint8).reshape(-1).numpy().data)
            self._digest = digest.hexdigest()
        return self._digest

    def teardown(self) -> None:
        """Release the tensors, newest first; the second call does nothing."""
        self._torn_down = True
        while self._held:
            self._held.popitem()
