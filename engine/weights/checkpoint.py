"""Checkpoint: a model's file or directory, opened and validated; its tensors are read by name.

Formats are GGUF files and safetensors directories. Pickled checkpoints are refused: unpickling runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.weights.formats import FORMATS
from engine.weights.gguf import read_gguf
from engine.weights.safetensors import open_directory, read_config
from engine.weights.source import SourceFile, TensorInfo, quoted

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

# Tensors are dequantised in slabs of this many elements, a multiple of every block: intermediates stay in the caches and
# the peak stays a MiB above the tensor. It is also torch's grain size, up to which an operation runs on one thread: a
# second thread would save 0.3 s of a 135M model's 0.6 s on two idle cores, and cost 3 to 37 s with one of them busy.
SLAB_ELEMENTS = 1 << 15

_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint:
    """An open checkpoint; made by `open_checkpoint`, closed by `close()` or as a context manager.

    `metadata` holds GGUF's key/values (arrays as lists), or the parsed config.json of a directory.
    """

    def __init__(
        self,
        path: Path,
        kind: Literal["gguf", "safetensors"],
        metadata: Mapping[str, object],
        tensors: Mapping[str, TensorInfo],
        files: Mapping[Path, SourceFile],
    ) -> None:
        self.path = path
        self.kind = kind
        self.metadata: Mapping[str, object] = MappingProxyType(dict(metadata))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self._files = dict(files)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name`, dequantised and converted to the floating `dtype`: a fresh contiguous CPU tensor of `info.shape`.

        Raises `CheckpointError` when there is no such tensor, or its format isn't one of `FORMATS`.
        """
        info = self._info(name)
        stored = FORMATS.get(info.format)
        if stored is None:
            raise CheckpointError(
                f"{info.file}: tensor {quoted(name)} has format {quoted(info.format)}, which can't be read; "
                f"use a checkpoint in one of {', '.join(FORMATS)}."
            )
        if dtype not in _TORCH_DTYPES.values():
            raise CheckpointError(f"{info.file}: weights are read as floats, not as {dtype}; ask for float32 or bfloat16.")
        if _TORCH_DTYPES.get(info.format) == dtype:
            return self._bytes(info).view(dtype).reshape(info.shape)
        out = torch.empty(info.shape, dtype=dtype)
        # By blocks, not rows: a row is a whole number of blocks, and one row may be the whole tensor.
        flat, slab_bytes = out.view(-1), SLAB_ELEMENTS // stored.block_elements * stored.block_bytes
        slab = torch.empty(min(info.nbytes, slab_bytes), dtype=torch.uint8)
        for start in range(0, info.nbytes, slab_bytes):
            part = slab[: info.nbytes - start]
            self._read_into(info, start, part)
            first = start // stored.block_bytes * stored.block_elements
            flat[first : first + SLAB_ELEMENTS] = stored.dequantise(part.view(1, -1))[0]
        return out

    def raw(self, name: str) -> Tensor:
        """The tensor's bytes as they are stored: `uint8 [rows, bytes_per_row]`, rows being all dimensions but the last.

        Raises `CheckpointError` when there is no such tensor, or its rows don't end on a byte.
        """
        info = self._info(name)
        rows = _rows(info)
        if not info.nbytes:
            return torch.empty(rows, 0, dtype=torch.uint8)
        if info.nbytes % rows:
            raise CheckpointError(f"{info.file}: tensor {quoted(name)} of format {quoted(info.format)} has no whole bytes a row.")
        return self._bytes(info).view(rows, -1)

    def close(self) -> None:
        """Close the files; tensors already read stay valid. Closing twice is fine."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.path}: has no tensor {quoted(name)}; it is incomplete or of another architecture than its metadata says."
            )
        return info

    def _bytes(self, info: TensorInfo) -> Tensor:
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        self._read_into(info, 0, data)
        return data

    def _read_into(self, info: TensorInfo, offset: int, part: Tensor) -> None:
        self._files[info.file].read_into(info.offset + offset, part.numpy().data)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file, or a directory with config.json and safetensors (or with a single .gguf).

    Only headers are read. Raises `CheckpointError` when the path is missing, or the files are damaged, lying, pickled
    or of an unknown kind.
    """
    try:
        directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be opened ({error.strerror}); check the path and its permissions.") from error
    if directory:
        return _open_directory(path)
    if not exists:
        raise CheckpointError(f"{path}: doesn't exist; give a checkpoint directory or a .gguf file.")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: pickled weights are refused, because loading them runs code; use the model's safetensors or GGUF files."
        )
    if path.suffix.lower() == ".safetensors":
        raise CheckpointError(f"{path}: is one file of a checkpoint; give its directory, which holds config.json too.")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = SourceFile(path)
    try:
        metadata, tensors = read_gguf(file)
    except BaseException:
        file.close()
        raise
    return Checkpoint(path, "gguf", metadata, tensors, {path: file})


def _open_directory(path: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path}: can't be listed ({error.strerror}); check its permissions.") from error
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        metadata = read_config(path)
        tensors, files = open_directory(path)
        return Checkpoint(path, "safetensors", metadata, tensors, files)
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return _open_gguf(path / ggufs[0])
    if ggufs:
        raise CheckpointError(f"{path}: holds {len(ggufs)} .gguf files; give the path of one, such as {path / ggufs[0]}.")
    pickles = [name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        raise CheckpointError(
            f"{path}: holds pickled weights only ({quoted(pickles[0])}), which are refused because loading them runs code; "
            "get the model's safetensors or GGUF files."
        )
    if "adapter_config.json" in names:
        raise CheckpointError(f"{path}: holds a LoRA adapter, not a model; give its base model here and load the adapter onto it.")
    raise CheckpointError(
        f"{path}: holds neither model.safetensors, model.safetensors.index.json nor a .gguf file; give a checkpoint directory."
    )


def _rows(info: TensorInfo) -> int:
    return prod(info.shape[:-1])
