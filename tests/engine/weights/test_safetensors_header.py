"""Safetensors directories: equal to the library's reading when they are sound, a sentence when they are not."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine.errors import CheckpointError
from engine.weights.checkpoint import open_checkpoint
from engine.weights.safetensors import DTYPE_BITS

F32_ENTRY = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
SECOND = {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]}


def packed(header: object, data: bytes = bytes(32), length: int | None = None) -> bytes:
    """A safetensors file; `header` is JSON-ready or bytes, `length` what its length field says if that isn't the truth."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def one(**changes: object) -> bytes:
    """A file of one tensor whose entry differs from a sound one by `changes`."""
    return packed({"weight": F32_ENTRY | changes})


FAULTS = {
    "an empty file": (b"", "too few"),
    "7 bytes": (bytes(7), "too few"),
    "a header length of 2^64-1": (packed({}, length=(1 << 64) - 1), "header of"),
    "a header length past the end": (packed({}, b"", length=3), "header of"),
    "a header that is no JSON": (packed(b"{weight"), "JSON"),
    "an empty header": (packed(b""), "JSON"),
    "a header that is no UTF-8": (packed(b'{"caf\xe9": 1}'), "JSON"),
    "a header that is a list": (packed([1]), "not an object"),
    "a header nested 100,000 deep": (packed(b"[" * 100_000), "JSON"),
    "a number of 10,000 digits": (packed(b'{"weight": ' + b"9" * 10_000 + b"}"), "JSON"),
    "a duplicate name": (packed(b'{"w": %s, "w": %s}' % ((json.dumps(F32_ENTRY).encode(),) * 2)), "duplicate key 'w'"),
    "metadata that is no map of strings": (packed({"__metadata__": {"format": 1}, "weight": F32_ENTRY}), "__metadata__"),
    "an entry that is no object": (packed({"weight": [0, 32]}), "described by"),
    "an entry without offsets": (packed({"weight": {"dtype": "F32", "shape": [2, 4]}}), "described by"),
    "a dtype that is a number": (one(dtype=7), "dtype"),
    "a dtype that doesn't fit": (one(dtype="F16"), "doesn't fit"),
    "a shape that doesn't fit": (one(shape=[2, 5]), "doesn't fit"),
    "a shape that wraps 64 bits to the right size": (one(shape=[8, (1 << 61) + 1]), "63 bits"),
    "a shape beyond 63 bits with a zero in it": (one(shape=[0, 1 << 63], data_offsets=[0, 0]), "63 bits"),
    "a negative dimension": (one(shape=[-2, -4]), "whole numbers"),
    "a dimension that is true": (one(shape=[True, 8]), "whole numbers"),
    "a dimension of 2.0": (one(shape=[2.0, 4]), "whole numbers"),
    "65 dimensions": (one(shape=[1] * 64 + [8]), "64 whole numbers"),
    "a shape that is a string": (one(shape="24"), "whole numbers"),
    "three offsets": (one(data_offsets=[0, 16, 32]), "data_offsets"),
    "offsets in reverse": (one(data_offsets=[32, 0]), "data_offsets"),
    "a negative offset": (one(data_offsets=[-32, 0]), "data_offsets"),
    "an offset outside the file": (one(data_offsets=[1 << 40, (1 << 40) + 32]), "outside"),
    "an unknown dtype outside the file": (one(dtype="F2", data_offsets=[0, 1 << 50]), "outside"),
    "data of one byte too few": (packed({"weight": F32_ENTRY}, bytes(31)), "truncated"),
    "overlapping tensors": (packed({"weight": F32_ENTRY, "b": SECOND | {"data_offsets": [28, 36]}}, bytes(36)), "overlaps"),
    "two tensors in one place": (packed({"weight": F32_ENTRY, "b": F32_ENTRY}), "overlaps"),
    "uncovered bytes between": (packed({"weight": F32_ENTRY, "b": SECOND | {"data_offsets": [36, 44]}}, bytes(44)), "uncovered"),
    "uncovered bytes before": (packed({"weight": F32_ENTRY | {"data_offsets": [4, 36]}}, bytes(36)), "uncovered"),
    "uncovered bytes after": (packed({"weight": F32_ENTRY}, bytes(33)), "uncovered"),
}


@pytest.fixture
def directory(tmp_path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def shard(directory: Path, weight_map: object, **shards: bytes) -> Path:
    """Write an index and shards (`a=…` is written to a.safetensors) into the directory; returns it."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, data in shards.items():
        (directory / f"{name}.safetensors").write_bytes(data)
    return directory


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_in_a_sentence_that_names_the_fault(fault, directory):
    data, word = FAULTS[fault]
    path = directory / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(directory)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000, "memory was allocated for a size that the file only claims"
    finally:
        tracemalloc.stop()
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert word in message
    assert message.endswith(".")


def test_a_header_over_100_mb_is_refused_though_the_file_holds_it(directory):
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)  # sparse: takes no space
    with pytest.raises(CheckpointError, match="100000000 is the most"):
        open_checkpoint(directory)


def test_a_config_over_the_limit_is_refused_before_it_is_read(directory):
    (directory / "model.safetensors").write_bytes(one())
    with (directory / "config.json").open("wb") as file:
        file.truncate(1 << 30)  # sparse: takes no space
    with pytest.raises(CheckpointError, match="is the most"):
        open_checkpoint(directory)


def test_a_file_cut_at_any_byte_is_refused(directory):
    whole = packed({"__metadata__": {"format": "pt"}, "weight": F32_ENTRY, "b": SECOND}, bytes(40))
    path = directory / "model.safetensors"
    path.write_bytes(whole)
    open_checkpoint(directory).close()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(directory)


def test_a_single_file_reads_as_the_library_reads_it(directory):
    torch.manual_seed(3)
    stored = {
        "f64": torch.randn(3, 5, dtype=torch.float64),
        "f32": torch.randn(2, 3, 4),
        "f16": torch.randn(7).half(),
        "bf16": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    safetensors.torch.save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.kind == "safetensors"
        assert checkpoint.metadata["model_type"] == "llama"
        assert set(checkpoint.tensors) == set(stored)
        for name, tensor in stored.items():
            assert checkpoint.tensors[name].format == name.upper() or name in ("scalar", "none")
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)
            for dtype in (torch.float32, torch.bfloat16, tensor.dtype):
                read = checkpoint.read(name, dtype)
                # Through float32, as every format is: from F64 to BF16 that rounds twice.
                expected = tensor.to(torch.float32).to(dtype) if dtype != tensor.dtype else tensor
                assert torch.equal(read, expected)
                assert read.dtype == dtype
                assert read.is_contiguous()


def test_shards_read_as_the_library_reads_them(directory):
    torch.manual_seed(4)
    parts = {f"model-0000{n}-of-00003.safetensors": {f"layer.{n}.{m}": torch.randn(4, 8) for m in range(3)} for n in (1, 2, 3)}
    for name, tensors in parts.items():
        safetensors.torch.save_file(tensors, directory / name)
    shard(directory, {tensor: name for name, tensors in parts.items() for tensor in tensors})
    with open_checkpoint(directory) as checkpoint:
        expected = {}
        for name in parts:
            expected |= safetensors.torch.load_file(directory / name)
        assert set(checkpoint.tensors) == set(expected)
        assert len({info.file for info in checkpoint.tensors.values()}) == 3
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name, torch.float32), tensor)


def test_raw_gives_the_stored_bytes_by_row(directory):
    values = torch.arange(24, dtype=torch.float32).view(2, 3, 4).bfloat16()
    safetensors.torch.save_file({"weight": values}, directory / "model.safetensors")
    with open_checkpoint(directory) as checkpoint:
        raw = checkpoint.raw("weight")
    assert raw.dtype == torch.uint8
    assert raw.shape == (6, 8)
    assert torch.equal(raw.view(torch.bfloat16).view(2, 3, 4), values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool])
def test_formats_that_are_no_plain_floats_are_listed_and_refused_by_name_on_read(dtype, directory):
    safetensors.torch.save_file({"weight": torch.ones(2, 4).to(dtype)}, directory / "model.safetensors")
    with open_checkpoint(directory) as checkpoint:
        form = checkpoint.tensors["weight"].format
        assert form in ("F8_E4M3", "I64", "BOOL")
        assert checkpoint.raw("weight").shape == (2, 4 * dtype.itemsize)
        with pytest.raises(CheckpointError, match=form):
            checkpoint.read("weight", torch.float32)


def test_a_dtype_of_the_future_is_listed_under_its_name(directory):
    (directory / "model.safetensors").write_bytes(one(dtype="F3_NEW"))
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.tensors["weight"].format == "F3_NEW"
        with pytest.raises(CheckpointError, match="F3_NEW"):
            checkpoint.read("weight", torch.float32)


def test_rows_of_half_bytes_have_no_raw_form(directory):
    (directory / "model.safetensors").write_bytes(one(dtype="F4", shape=[64, 1]))
    with open_checkpoint(directory) as checkpoint, pytest.raises(CheckpointError, match="whole bytes a row"):
        checkpoint.raw("weight")


def test_dtype_sizes_are_the_librarys():
    for dtype, torch_dtype in safetensors.torch._TYPES.items():
        if dtype != "F4":  # torch's is a pair of elements in a byte
            assert DTYPE_BITS[dtype] == torch_dtype.itemsize * 8


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b", "C:secret", "a\0b", "\ud800", "x" * 300],
)
def test_a_shard_name_that_is_no_plain_file_name_is_refused(name, directory):
    (directory.parent / "secret.safetensors").write_bytes(one())
    shard(directory, {"weight": name})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_checkpoint(directory)


@pytest.mark.parametrize("link", ["a.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_link_that_leads_outside_the_directory_is_refused(link, directory):
    shard(directory, {"weight": "a.safetensors"}, a=one())
    open_checkpoint(directory).close()
    (directory / link).rename(directory.parent / "outside")
    (directory / link).symlink_to(directory.parent / "outside")
    with pytest.raises(CheckpointError, match="leads outside"):
        open_checkpoint(directory)


def test_links_in_a_circle_are_refused(directory):
    shard(directory, {"weight": "a.safetensors"})
    (directory / "a.safetensors").symlink_to("b.safetensors")
    (directory / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint(directory)


def test_links_inside_a_hugging_face_cache_are_followed(tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "c").write_text("{}")
    (blobs / "w").write_bytes(one())
    (snapshot / "config.json").symlink_to("../../blobs/c")
    (snapshot / "model.safetensors").symlink_to("../../blobs/w")
    with open_checkpoint(snapshot) as checkpoint:
        assert checkpoint.read("weight", torch.float32).shape == (2, 4)


@pytest.mark.parametrize(
    ("weight_map", "word"),
    [
        ({"weight": "a.safetensors", "b": "gone.safetensors"}, "missing"),
        ({"weight": "a.safetensors", "lost": "a.safetensors"}, "'lost' is missing from the shard"),
        ({"weight": "a.safetensors", "other": "b.safetensors"}, "'other' is missing from the shard"),
        ({"weight": 1}, "weight_map"),
        ({}, "weight_map"),
        (["a.safetensors"], "weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map, word, directory):
    shard(directory, weight_map, a=one(), b=packed({"b": F32_ENTRY}))
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(directory)


def test_a_tensor_in_two_shards_is_refused(directory):
    shard(
        directory,
        {"weight": "a.safetensors", "b": "b.safetensors"},
        a=one(),
        b=packed({"b": F32_ENTRY, "weight": SECOND}, bytes(40)),
    )
    with pytest.raises(CheckpointError, match="'weight' lies in two shards"):
        open_checkpoint(directory)


def test_a_refused_directory_leaves_no_file_open(directory):
    shard(directory, {"weight": "a.safetensors", "lost": "a.safetensors"}, a=one())
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        with pytest.raises(CheckpointError):
            open_checkpoint(directory)
    assert (len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0) == before


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff"])
def test_a_config_that_is_no_json_object_is_refused(content, directory):
    (directory / "model.safetensors").write_bytes(one())
    (directory / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: its"):
        open_checkpoint(directory)
