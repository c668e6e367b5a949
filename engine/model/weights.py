"""ModelWeights: the two forms a model's weights can take, dense and packed, and how the one it wasn't loaded in is borrowed.

A model holds one form from its load to its end: packed where its circuit computes from packed blocks, else dense. A circuit that
needs the other form reads it from the checkpoint's files again, when it is selected, and lets it go when it is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.circuit.packed_weights import PackedGroup, read_packed
from engine.errors import CheckpointError, Unsupported
from engine.families.base import TensorSpec
from engine.weights.checkpoint import open_checkpoint
from engine.weights.store import WeightStore
from kernels.packed_linear.packing import PackedWeight

Packed = dict[tuple[str, ...], PackedWeight]


class ModelWeights:
    """A model's weights in the form it was loaded in (`store`, and `packed` if that is packed), and the other form while it is
    borrowed. `groups`: the weights that can be packed; empty where none can, and then there is one form only."""

    def __init__(
        self,
        store: WeightStore,
        groups: Sequence[PackedGroup] = (),
        packed: Packed | None = None,
        path: Path | None = None,
        read_dense: Callable[[Path, Sequence[TensorSpec], WeightStore], None] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.store = store
        self.groups = tuple(groups)
        self.loaded_packed = packed is not None
        self._packed = packed or {}
        self._path = path
        self._stamp = _stamp(path)
        self._read_dense = read_dense
        self._dtype = dtype
        self._borrowed: WeightStore | None = None

    @property
    def packed(self) -> Packed:
        """The packed weights that are held now, by the names of the rows in them."""
        return self._packed

    @property
    def num_borrowed_bytes(self) -> int:
        return self._borrowed.bytes_total if self._borrowed is not None else 0

    def dense_tensors(self) -> Mapping[str, Tensor]:
        """Every dense tensor that is held now, by name."""
        found = self.store.tensors()
        return found if self._borrowed is None or not self.loaded_packed else {**found, **self._borrowed.tensors()}

    def borrow(self, packed: bool, available_bytes: int) -> None:
        """Hold the form that is `packed` or not, beside the one that was loaded. Raises `Unsupported` where memory or the file
        doesn't allow it, and leaves everything as it was."""
        if not self.groups or packed == self.loaded_packed or self._borrowed is not None:
            return
        needed = sum(g.num_bytes if packed else _elements(g) * self._dtype.itemsize for g in self.groups)
        if needed > available_bytes:
            raise Unsupported(
                f"its weights would take {needed / 2**20:,.0f} MiB more in the form it computes from, and "
                f"{available_bytes / 2**20:,.0f} MiB are available; start the engine with --circuit instead."
            )
        if self._path is None or _stamp(self._path) != self._stamp:
            raise Unsupported(f"its weights must be read again, and {self._path} isn't the file it was; start the engine anew.")
        store = WeightStore()
        try:
            if packed:
                with open_checkpoint(self._path) as checkpoint:
                    self._packed = read_packed(self.groups, checkpoint, store)
            else:
                assert self._read_dense is not None
                self._read_dense(self._path, [spec for group in self.groups for spec in group.specs], store)
        except CheckpointError as error:
            store.teardown()
            raise Unsupported(f"its weights can't be read again: {error}") from error
        self._borrowed = store

    def give_back(self) -> None:
        """Let the borrowed form go, if there is one."""
        if self._borrowed is None:
            return
        if not self.loaded_packed:
            self._packed = {}
        self._borrowed.teardown()
        self._borrowed = None


def _elements(group: PackedGroup) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in group.specs)


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
