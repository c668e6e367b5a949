"""Safetensors checkpoints: one model.safetensors, or shards named by model.safetensors.index.json.

The headers are untrusted: lengths, shapes and offsets are checked against the real file size, and names of shards are
plain file names inside the directory. Layout: the "Format" section of the safetensors README.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import prod
from pathlib import Path

from engine.errors import CheckpointError
from engine.weights.source import SourceFile, TensorInfo, quoted

MAX_HEADER_BYTES = 100_000_000
MAX_CONFIG_BYTES = 16 << 20
MAX_DIMS = 64
MAX_ELEMENTS = (1 << 63) - 1

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# Dtype → bits an element. A dtype that is missing here is listed under its name, and refused when it is read.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_PLAIN_NAME = re.compile(r"[A-Za-z0-9._+=@ -]{1,255}")
_AGAIN = "the file is damaged; download it again."


def open_directory(directory: Path) -> tuple[dict[str, TensorInfo], dict[Path, SourceFile]]:
    """The tensors of a directory's safetensors and the open files they lie in; the caller closes the files.

    Raises `CheckpointError` when a file is missing, damaged, lying or outside the directory.
    """
    files: dict[Path, SourceFile] = {}
    try:
        if (directory / SINGLE_NAME).exists():
            return _open_shard(directory, SINGLE_NAME, files), files
        return _open_shards(directory, files), files
    except BaseException:
        for file in files.values():
            file.close()
        raise


def read_config(directory: Path) -> dict[str, object]:
    """The parsed config.json of a checkpoint directory. Raises `CheckpointError` when it is missing or no JSON object."""
    if not (directory / "config.json").exists():
        raise CheckpointError(f"{directory}: has no config.json, which says what the model is; copy it from the model's page.")
    return _read_json(directory, "config.json", MAX_CONFIG_BYTES)


def contained(directory: Path, name: str) -> Path:
    """The path of the file `name` in `directory`, for a name that came from a file.

    Raises `CheckpointError` unless it is a plain file name whose target, links followed, stays in the directory (or in
    the blobs of a Hugging Face cache, where a snapshot's files are links).
    """
    if name in (".", "..") or not _PLAIN_NAME.fullmatch(name):
        raise CheckpointError(
            f"{directory}: names the file {quoted(name)}, which is not a plain file name inside the directory; {_AGAIN}"
        )
    try:
        home, target = directory.resolve(), (directory / name).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{directory}: the file {quoted(name)} can't be followed; put the file itself there.") from error
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(each) for each in homes):
        raise CheckpointError(
            f"{directory}: the file {quoted(name)} is a link that leads outside the directory; put the file itself there."
        )
    return directory / name


def read_header(file: SourceFile) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises `CheckpointError` unless they cover its data exactly once."""
    if file.size_bytes < 8:
        raise CheckpointError(f"{file.path}: is truncated: {file.size_bytes} bytes are too few for a safetensors header; {_AGAIN}")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES or length > file.size_bytes - 8:
        raise CheckpointError(
            f"{file.path}: declares a header of {length} bytes in a file of {file.size_bytes}; "
            f"{MAX_HEADER_BYTES} is the most, and {_AGAIN}"
        )
    header = _parse_object(file.path, bytes(file.read(8, length)), "header")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                raise CheckpointError(f"{file.path}: its __metadata__ is not a map of strings; {_AGAIN}")
            continue
        tensors[name] = _tensor(file, name, entry, 8 + length)
    _check_cover(file, tensors, 8 + length)
    return tensors


def _open_shard(directory: Path, name: str, files: dict[Path, SourceFile]) -> dict[str, TensorInfo]:
    path = contained(directory, name)
    if not path.exists():
        raise CheckpointError(f"{directory}: the shard {quoted(name)} is missing; download it.")
    files[path] = SourceFile(path)
    return read_header(files[path])


def _open_shards(directory: Path, files: dict[Path, SourceFile]) -> dict[str, TensorInfo]:
    index = _read_json(directory, INDEX_NAME, MAX_HEADER_BYTES)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(f"{directory / INDEX_NAME}: has no weight_map of tensor names to file names; {_AGAIN}")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(where.values())):
        for name, info in _open_shard(directory, shard, files).items():
            if name in tensors:
                raise CheckpointError(
                    f"{directory}: tensor {quoted(name)} lies in two shards, "
                    f"{quoted(tensors[name].file.name)} and {quoted(shard)}; {_AGAIN}"
                )
            tensors[name] = info
    for name, shard in where.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{directory}: tensor {quoted(name)} is missing from the shard {quoted(shard)}; download it again."
            )
    return tensors


def _tensor(file: SourceFile, name: str, entry: object, data_start: int) -> TensorInfo:
    named = f"{file.path}: tensor {quoted(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{named} is not described by dtype, shape and data_offsets; {_AGAIN}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not dtype:
        raise CheckpointError(f"{named} has no dtype name; {_AGAIN}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{named} has a shape that is not a list of at most {MAX_DIMS} whole numbers; {_AGAIN}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{named} has data_offsets that are not a begin and an end; {_AGAIN}")
    begin, end = offsets
    if data_start + end > file.size_bytes:
        raise CheckpointError(
            f"{named} lies outside the file: it ends at byte {data_start + end} of {file.size_bytes}; "
            "the file is truncated, download it again."
        )
    # Also with a zero dimension: the others must still be sizes that a tensor can have.
    if prod(max(1, size) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{named} has a shape of more elements than 63 bits can count; {_AGAIN}")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and prod(shape) * bits != (end - begin) * 8:
        raise CheckpointError(f"{named} of dtype {dtype} and shape {shape} doesn't fit its {end - begin} bytes; {_AGAIN}")
    return TensorInfo(name, tuple(shape), dtype, data_start + begin, end - begin, file.path)


def _check_cover(file: SourceFile, tensors: dict[str, TensorInfo], data_start: int) -> None:
    end = data_start
    for info in sorted(tensors.values(), key=lambda each: (each.offset, each.nbytes)):
        if info.offset < end:
            raise CheckpointError(f"{file.path}: tensor {quoted(info.name)} overlaps the tensor before it; {_AGAIN}")
        if info.offset > end:
            raise CheckpointError(
                f"{file.path}: {info.offset - end} bytes before tensor {quoted(info.name)} are uncovered by any tensor; {_AGAIN}"
            )
        end = info.offset + info.nbytes
    if end != file.size_bytes:
        raise CheckpointError(f"{file.path}: its last {file.size_bytes - end} bytes are uncovered by any tensor; {_AGAIN}")


def _read_json(directory: Path, name: str, limit: int) -> dict[str, object]:
    file = SourceFile(contained(directory, name))
    try:
        if file.size_bytes > limit:
            raise CheckpointError(f"{file.path}: has {file.size_bytes} bytes, and {limit} is the most; {_AGAIN}")
        return _parse_object(file.path, bytes(file.read(0, file.size_bytes)), "content")
    finally:
        file.close()


def _parse_object(path: Path, data: bytes, what: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path}: its JSON {what} has the duplicate key {quoted(twice)}; {_AGAIN}")
        return parsed

    try:
        parsed = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {what} is not valid JSON ({type(error).__name__}); {_AGAIN}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: its JSON {what} is not an object; {_AGAIN}")
    return parsed


def _are_counts(values: object) -> bool:
    # bool is an int to Python: `true` is no count.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
