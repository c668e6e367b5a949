"""Builds GGUF files byte by byte, so that a test can lie in any field."""

from __future__ import annotations

import struct
from dataclasses import dataclass

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
F32, F16, Q8_0, Q2_K = 0, 1, 8, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value & 0xFFFFFFFF)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value & 0xFFFFFFFFFFFFFFFF)


def text(value: bytes | str, length: int | None = None) -> bytes:
    """A GGUF string; `length` is what its length field says where that isn't the truth."""
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data) if length is None else length) + data


def pair(key: bytes | str, kind: int, value: bytes, key_length: int | None = None) -> bytes:
    return text(key, key_length) + u32(kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return u32(kind) + u64(count) + items


@dataclass
class Tensor:
    """A tensor's entry; `dims` in GGUF order (columns first)."""

    name: bytes | str = "weight"
    dims: tuple[int, ...] = (8, 4)
    kind: int = F32
    offset: int = 0
    num_dims: int | None = None

    def entry(self) -> bytes:
        num_dims = len(self.dims) if self.num_dims is None else self.num_dims
        return text(self.name) + u32(num_dims) + b"".join(u64(dim) for dim in self.dims) + u32(self.kind) + u64(self.offset)


def gguf(
    pairs: tuple[bytes, ...] = (pair("general.architecture", STRING, text("llama")),),
    tensors: tuple[Tensor, ...] = (Tensor(),),
    data: bytes = bytes(range(128)),
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; without arguments a sound one, of one float32 tensor of shape [4, 8]."""
    head = magic + version
    head += u64(len(tensors) if num_tensors is None else num_tensors) + u64(len(pairs) if num_pairs is None else num_pairs)
    head += b"".join(pairs) + b"".join(tensor.entry() for tensor in tensors)
    return head + bytes(-len(head) % alignment) + data
