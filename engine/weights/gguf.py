"""read_gguf: the header of a GGUF file, versions 2 and 3, little-endian.

The header is untrusted. Every count, length and offset is checked against the real file size and against fixed limits
before anything is allocated for it. Layout: docs/gguf.md in ggml, and gguf.cpp there for what is refused.
"""

from __future__ import annotations

import struct
from math import prod

import numpy as np

from engine.errors import CheckpointError
from engine.weights.source import SourceFile, TensorInfo, quoted

# The values below are those of the gguf package (tests compare them); importing it would pull in tokenizers and yaml.
UINT32, STRING, ARRAY = 4, 8, 9
SCALARS = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    UINT32: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<?"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}

# GGML type id → (name, elements per block, bytes per block).
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with the closing NUL
MAX_KEY_BYTES = 65535
MAX_STRING_BYTES = 16 << 20
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_ELEMENTS = 1 << 23  # of all arrays together: as Python lists they take up to 40 bytes an element

_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_CHUNK_BYTES = 4 << 20
_U64 = struct.Struct("<Q")


def read_gguf(file: SourceFile) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    """The key/values (numbers, bools, strings, lists) and the tensors of a GGUF file.

    Raises `CheckpointError` for anything that isn't a whole, consistent GGUF model in a single file.
    """
    return _Header(file).parse()


class _Header:
    """A cursor over the header; `_buffer` is the file's start, grown as it is needed."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._buffer = bytearray()
        self._position = 0
        self._elements_left = MAX_ARRAY_ELEMENTS

    def parse(self) -> tuple[dict[str, object], dict[str, TensorInfo]]:
        self._magic_and_version()
        num_tensors = self._count("tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
        num_keys = self._count("key-value pairs", MAX_KEYS, _MIN_KEY_BYTES)
        metadata: dict[str, object] = {}
        for index in range(num_keys):
            self._key_value(index, metadata)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment}, which is not a power of two")
        splits = metadata.get("split.count", 0)
        if isinstance(splits, int) and splits > 1:
            raise self._fault(
                f"is one of {splits} parts of a split model", "join them with `llama-gguf-split --merge` and give the result."
            )
        found: dict[str, TensorInfo] = {}
        for index in range(num_tensors):
            self._tensor(index, alignment, found)
        return metadata, self._placed(found, alignment)

    def _magic_and_version(self) -> None:
        start = self._take(4, "the magic")
        magic = bytes(self._buffer[start : start + 4])
        if magic == b"FUGG":
            raise self._fault("is a big-endian GGUF file, which is not supported", "convert it to little-endian.")
        if magic != b"GGUF":
            raise self._fault(f"is not a GGUF file: its magic is {magic.decode('latin-1')!a}", "give a .gguf model file.")
        version = int(self._number("<I", "the version"))
        if version & 0xFFFF == 0 and version:
            raise self._fault("is a big-endian GGUF file, which is not supported", "convert it to little-endian.")
        if version not in (2, 3):
            raise self._fault(f"has GGUF version {version}; versions 2 and 3 are supported", "convert the model again.")

    def _count(self, what: str, limit: int, min_bytes: int) -> int:
        count = self._number("<q", f"the number of {what}")
        if count < 0 or count > limit:
            raise self._fault(f"declares {count} {what}; 0 to {limit} are possible")
        if count * min_bytes > self._file.size_bytes - self._position:
            raise self._fault(f"declares {count} {what}, more than a file of {self._file.size_bytes} bytes can hold")
        return int(count)

    def _key_value(self, index: int, metadata: dict[str, object]) -> None:
        key = self._name(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise self._fault(f"has the duplicate key {quoted(key)}")
        kind = self._number("<i", f"the type of key {quoted(key)}")
        if key == "general.alignment" and kind != UINT32:
            raise self._fault(f"general.alignment has type {_type_name(kind)}; it must be uint32")
        metadata[key] = self._array(key) if kind == ARRAY else self._value(key, int(kind))

    def _value(self, key: str, kind: int) -> object:
        if kind == STRING:
            return self._strings(key, 1)[0]
        if kind not in SCALARS:
            raise self._fault(f"key {quoted(key)} has the invalid value type {kind}")
        return self._number(SCALARS[kind][1], f"the value of {quoted(key)}")

    def _array(self, key: str) -> list[object]:
        kind = int(self._number("<i", f"the element type of {quoted(key)}"))
        if kind == ARRAY:
            raise self._fault(f"key {quoted(key)} holds nested arrays, which are not supported")
        if kind != STRING and kind not in SCALARS:
            raise self._fault(f"key {quoted(key)} has the invalid array type {kind}")
        count = int(self._number("<Q", f"the length of {quoted(key)}"))
        item_bytes = 8 if kind == STRING else struct.calcsize(SCALARS[kind][1])
        if count * item_bytes > self._file.size_bytes - self._position:
            raise self._fault(f"key {quoted(key)} declares an array of {count} elements, more than the file can hold")
        if count > self._elements_left:
            raise self._fault(f"key {quoted(key)} declares an array of {count} elements; {MAX_ARRAY_ELEMENTS} in all are read")
        self._elements_left -= count
        if kind == STRING:
            return list(self._strings(key, count))
        start = self._take(count * item_bytes, f"the array {quoted(key)}")
        values = np.frombuffer(self._buffer, dtype=SCALARS[kind][1], count=count, offset=start)
        listed: list[object] = values.tolist()
        return listed

    def _strings(self, key: str, count: int) -> list[str]:
        # One loop without calls: a vocabulary and its merges are some 100,000 strings.
        buffer, position, loaded = self._buffer, self._position, len(self._buffer)
        unpack = _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            if start > loaded:
                loaded = self._load(start, f"a string of {quoted(key)}")
            (length,) = unpack(buffer, position)
            if length > MAX_STRING_BYTES:
                raise self._fault(f"key {quoted(key)} has a string of {length} bytes; {MAX_STRING_BYTES} is the most")
            position = start + length
            if position > loaded:
                loaded = self._load(position, f"a string of {quoted(key)}")
            try:
                strings.append(buffer[start:position].decode())
            except UnicodeDecodeError:
                strings.append(self._repaired(key, bytes(buffer[start:position])))
        self._position = position
        return strings

    def _repaired(self, key: str, text: bytes) -> str:
        # llama.cpp takes strings as bytes. A token that isn't UTF-8 never matches text and shows as U+FFFD; a model's
        # title does no harm either. In a template or a merge a changed character would silently change the prompt.
        if key == "tokenizer.ggml.tokens" or key.startswith("general."):
            return text.decode(errors="replace")
        raise self._fault(f"key {quoted(key)} has a string that is not valid UTF-8")

    def _tensor(self, index: int, alignment: int, found: dict[str, TensorInfo]) -> None:
        name = self._name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if name in found:
            raise self._fault(f"has the duplicate tensor name {quoted(name)}")
        named = f"tensor {quoted(name)}"
        num_dims = int(self._number("<I", f"the dimensions of {named}"))
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._fault(f"{named} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        start = self._take(8 * num_dims, f"the shape of {named}")
        dims: tuple[int, ...] = struct.unpack_from(f"<{num_dims}q", self._buffer, start)
        if min(dims) < 1:
            raise self._fault(f"{named} has a dimension of {min(dims)} in its shape {dims}; each must be at least 1")
        kind = int(self._number("<i", f"the type of {named}"))
        if kind not in TENSOR_TYPES:
            raise self._fault(f"{named} has the unknown tensor type {kind}", "convert the model to a known type, such as Q8_0.")
        form, block_elements, block_bytes = TENSOR_TYPES[kind]
        if dims[0] % block_elements:
            raise self._fault(f"{named} has rows of {dims[0]} elements, not a multiple of the {form} block of {block_elements}")
        offset = int(self._number("<Q", f"the offset of {named}"))
        # Python integers don't wrap, so a product past 64 bits is simply larger than the file.
        nbytes = prod(dims) // block_elements * block_bytes
        if nbytes > self._file.size_bytes:
            raise self._fault(f"{named} with shape {dims} takes {nbytes} bytes, more than the file's {self._file.size_bytes}")
        if offset % alignment:
            raise self._fault(f"{named} has the offset {offset}, which breaks the alignment of {alignment}")
        found[name] = TensorInfo(name, tuple(reversed(dims)), form, offset, nbytes, self._file.path)

    def _placed(self, found: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors with absolute offsets: the data begins at the next aligned byte behind the header."""
        data_start = (self._position + alignment - 1) // alignment * alignment
        placed = {
            name: TensorInfo(name, info.shape, info.format, data_start + info.offset, info.nbytes, info.file)
            for name, info in found.items()
        }
        end = data_start
        for info in sorted(placed.values(), key=lambda each: each.offset):
            if info.offset + info.nbytes > self._file.size_bytes:
                raise self._fault(
                    f"tensor {quoted(info.name)} lies outside the file: it ends at byte {info.offset + info.nbytes} of "
                    f"{self._file.size_bytes}, so the data is truncated or its offset wrong"
                )
            if info.offset < end:
                raise self._fault(f"tensor {quoted(info.name)} overlaps the tensor before it at byte {info.offset}")
            end = info.offset + info.nbytes
        return placed

    def _name(self, what: str, limit: int) -> str:
        length = int(self._number("<Q", f"the length of {what}"))
        if not 1 <= length <= limit:
            fault = "is empty" if length == 0 else f"is too long: {length} bytes, {limit} is the most"
            raise self._fault(f"{what} {fault}")
        start = self._take(length, what)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._fault(f"{what} is not valid UTF-8") from None

    def _number(self, form: str, what: str) -> int | float:
        start = self._take(struct.calcsize(form), what)
        value: int | float = struct.unpack_from(form, self._buffer, start)[0]
        return value

    def _take(self, nbytes: int, what: str) -> int:
        """Move past the next `nbytes` bytes and return where they start in the buffer."""
        start = self._position
        if start + nbytes > len(self._buffer):
            self._load(start + nbytes, what)
        self._position = start + nbytes
        return start

    def _load(self, end: int, what: str) -> int:
        """Have the header's bytes up to `end` in the buffer; returns how many there are."""
        if end > self._file.size_bytes:
            raise self._fault(f"is truncated: {what} runs past the end of the file ({end} of {self._file.size_bytes} bytes)")
        if end > MAX_HEADER_BYTES:
            raise self._fault(f"has a header of over {MAX_HEADER_BYTES} bytes: {what} ends at byte {end}")
        have = len(self._buffer)
        until = min(self._file.size_bytes, MAX_HEADER_BYTES, max(end, have + _CHUNK_BYTES))
        self._buffer += self._file.read(have, until - have)
        return until

    def _fault(self, what: str, advice: str = "the file is damaged; download it again.") -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {what}; {advice}")


def _type_name(kind: int | float) -> str:
    names = {STRING: "string", ARRAY: "array"} | {number: name for number, (name, _) in SCALARS.items()}
    return names.get(int(kind), str(kind))
