"""A sequence's KV and recurrent state as a file: written, checked and read back.

Layout, little-endian: 8 bytes magic, uint32 version, uint32 length of the header, the header as JSON, the payload. The header names
everything the payload depends on (weights, adapter, dtype, shapes, token ids) and carries the payload's size and SHA-256, and
the file ends with the SHA-256 of all before it: nothing is used of a file that was cut, changed, or made for another model.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from engine.errors import SavedStateError

MAGIC = b"fpseqst\n"
VERSION = 1
MAX_HEADER_BYTES = 1 << 26
PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StateHeader:
    """What a saved state is of. weights, adapter: SHA-256 in hex of the tensors it was computed with ("" for no adapter).
    kv_shape: `[layers, 2, tokens, kv_heads, head_dim]`; h_shape, conv_shape: of one slot over all layers, empty without."""

    weights: str
    adapter: str
    dtype: str
    block_size: int
    token_ids: tuple[int, ...]
    kv_shape: tuple[int, ...]
    h_shape: tuple[int, ...] = ()
    conv_shape: tuple[int, ...] = ()


def write_state(writer: BinaryIO, header: StateHeader, tensors: list[Tensor]) -> None:
    """Write a state: the tensors' bytes in order. Raises `SavedStateError` when the disk is full or the writer fails otherwise."""
    payload = hashlib.sha256()
    size = 0
    for piece in _pieces(tensors):
        payload.update(piece)
        size += len(piece)
    text = json.dumps({**asdict(header), "payload_bytes": size, "payload_sha256": payload.hexdigest()}).encode()
    digest = hashlib.sha256()
    try:
        start = MAGIC + struct.pack("<II", VERSION, len(text)) + text
        digest.update(start)
        writer.write(start)
        for piece in _pieces(tensors):
            digest.update(piece)
            writer.write(piece)
        writer.write(digest.digest())
        writer.flush()
    except OSError as error:
        raise SavedStateError(
            f"the state could not be written: {error.strerror or error}. Free some space or choose another place."
        ) from error


def _pieces(tensors: list[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        raw = tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data
        for start in range(0, len(raw), PIECE_BYTES):
            yield raw[start : start + PIECE_BYTES]


class StateReader:
    """Reads a saved state in two steps, so that nothing large is allocated before the header was checked."""

    def __init__(self, reader: BinaryIO, file_bytes: int | None = None) -> None:
        self._reader = reader
        self._file_bytes = file_bytes
        self._digest = hashlib.sha256()
        self.header, self._payload_bytes, self._payload_sha256 = self._read_header()

    def _take(self, count: int, what: str) -> bytes:
        try:
            data = self._reader.read(count)
        except OSError as error:
            raise SavedStateError(f"the saved state could not be read: {error.strerror or error}.") from error
        if len(data) != count:
            raise SavedStateError(f"the saved state ends within its {what}; it was cut short. Save it again.")
        self._digest.update(data)
        return data

    def _read_header(self) -> tuple[StateHeader, int, str]:
        if self._take(len(MAGIC), "first bytes") != MAGIC:
            raise SavedStateError("this isn't a saved state of footplate.")
        version, length = struct.unpack("<II", self._take(8, "first bytes"))
        if version != VERSION:
            raise SavedStateError(f"the saved state has version {version}; this footplate reads version {VERSION}. Save it again.")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise SavedStateError(f"the saved state's header claims {length:,} bytes; at most {MAX_HEADER_BYTES:,} are possible.")
        try:
            fields: dict[str, Any] = json.loads(self._take(length, "header"))
            size, sha256 = fields.pop("payload_bytes"), fields.pop("payload_sha256")
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
            header = StateHeader(**values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SavedStateError("the saved state's header can't be understood; the file is damaged. Save it again.") from error
        if not _sound(header, size, sha256):
            raise SavedStateError("the saved state's header holds values that can't be; the file is damaged. Save it again.")
        whole = len(MAGIC) + 8 + length + size + hashlib.sha256().digest_size
        if self._file_bytes is not None and self._file_bytes != whole:
            raise SavedStateError(
                f"the saved state should have {whole:,} bytes and has {self._file_bytes:,}; it is damaged. Save it again."
            )
        return header, size, sha256

    def read(self, like: list[Tensor]) -> list[Tensor]:
        """The tensors, in the dtypes and shapes of `like` (meta tensors), which the caller derived from its own model and the
        header's token count. Raises `SavedStateError` unless sizes and both checksums agree."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        if sum(sizes) != self._payload_bytes:
            raise SavedStateError(f"the saved state holds {self._payload_bytes:,} bytes where this model needs {sum(sizes):,}.")
        payload = hashlib.sha256()
        out: list[Tensor] = []
        for tensor, size in zip(like, sizes, strict=True):
            raw = torch.empty(size, dtype=torch.uint8)
            numbers = raw.numpy().data
            for start in range(0, size, PIECE_BYTES):
                piece = self._take(min(PIECE_BYTES, size - start), "payload")
                payload.update(piece)
                numbers[start : start + len(piece)] = piece
            out.append(raw.view(tensor.dtype).reshape(tensor.shape))
        digest = self._digest.digest()
        if self._take(len(digest), "checksum") != digest or payload.hexdigest() != self._payload_sha256:
            raise SavedStateError("the saved state's checksum differs from its contents; the file is damaged. Save it again.")
        return out


def _sound(header: StateHeader, size: object, sha256: object) -> bool:
    def whole(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63

    texts = (header.weights, header.adapter, header.dtype, sha256)
    numbers = (header.token_ids, header.kv_shape, header.h_shape, header.conv_shape)
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(values, tuple) and all(map(whole, values)) for values in numbers)
        and whole(header.block_size)
        and whole(size)
    )
