"""open_checkpoint: which paths are models, what is said of the others, and what read and raw hand out."""

import dataclasses
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_builder import Q8_0, Tensor, gguf

from engine.errors import CheckpointError
from engine.weights.checkpoint import SLAB_ELEMENTS, open_checkpoint
from engine.weights.formats import FORMATS


@pytest.fixture
def tiny_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf())
    return path


def test_a_path_that_doesnt_exist_is_said_to_be_missing(tmp_path):
    with pytest.raises(CheckpointError, match="doesn't exist"):
        open_checkpoint(tmp_path / "nowhere.gguf")


def test_a_path_too_long_for_the_system_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "MODEL.PKL"])
def test_pickles_are_refused_by_name_as_files_and_in_directories(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError, match="pickled weights") as raised:
            open_checkpoint(path)
        assert name in str(raised.value)


def test_pickles_beside_safetensors_do_no_harm(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["weight"]


def test_a_directory_with_one_gguf_opens_it(tiny_gguf):
    with open_checkpoint(tiny_gguf.parent) as checkpoint:
        assert checkpoint.kind == "gguf"
        assert checkpoint.path == tiny_gguf


def test_a_directory_with_several_ggufs_asks_which(tiny_gguf):
    (tiny_gguf.parent / "other.gguf").write_bytes(gguf())
    with pytest.raises(CheckpointError, match="2 .gguf files"):
        open_checkpoint(tiny_gguf.parent)


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ((), "holds neither"),
        (("model.safetensors",), "has no config.json"),
        (("adapter_config.json", "adapter_model.safetensors"), "LoRA adapter"),
    ],
)
def test_a_directory_that_is_no_model_is_refused_with_what_it_lacks(files, word, tmp_path):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(tmp_path)


def test_a_safetensors_file_is_answered_with_its_directory(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="give its directory"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="regular file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_gguf_needs_no_suffix(tiny_gguf):
    bare = tiny_gguf.rename(tiny_gguf.with_name("sha256-0123abcd"))
    with open_checkpoint(bare) as checkpoint:
        assert checkpoint.kind == "gguf"


def test_read_hands_out_a_tensor_of_its_own(tiny_gguf):
    with open_checkpoint(tiny_gguf) as checkpoint:
        first = checkpoint.read("weight", torch.float32)
        before = first.clone()
        checkpoint.read("weight", torch.float32).zero_()
        checkpoint.raw("weight").zero_()
        assert torch.equal(checkpoint.read("weight", torch.float32).nan_to_num(), before.nan_to_num())
    tiny_gguf.write_bytes(bytes(400))
    assert torch.equal(first.nan_to_num(), before.nan_to_num())
    assert first.untyped_storage().nbytes() == first.nbytes


def test_a_tensor_of_several_slabs_equals_the_oracles_in_every_row(tmp_path, monkeypatch):
    # The last slab is shorter than the others, and rows differ from each other.
    rows, cols = SLAB_ELEMENTS // 64 * 2 + 77, 64
    raw = quantize(np.random.default_rng(5).standard_normal((rows, cols), dtype=np.float32), GGMLQuantizationType.Q8_0)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(tensors=(Tensor("weight", (cols, rows), Q8_0),), data=raw.tobytes()))
    taken = []

    def unpack(blocks):
        taken.append(len(blocks) * 32)
        return FORMATS["Q8_0"].unpack(blocks)

    counting = {"Q8_0": dataclasses.replace(FORMATS["Q8_0"], unpack=unpack)}
    monkeypatch.setattr("engine.weights.checkpoint.FORMATS", counting)
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(checkpoint.raw("weight").numpy(), raw)
        expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType.Q8_0))
        assert torch.equal(checkpoint.read("weight", torch.float32), expected)
        assert taken == [SLAB_ELEMENTS, SLAB_ELEMENTS, 77 * 64]
        assert torch.equal(checkpoint.read("weight", torch.bfloat16), expected.bfloat16())


def test_a_missing_tensor_and_a_dtype_that_is_no_float_are_refused(tiny_gguf):
    with open_checkpoint(tiny_gguf) as checkpoint:
        for read in (lambda: checkpoint.read("nothing", torch.float32), lambda: checkpoint.raw("nothing")):
            with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
                read()
        with pytest.raises(CheckpointError, match=r"torch\.int8"):
            checkpoint.read("weight", torch.int8)


def test_a_closed_checkpoint_reads_nothing_and_closes_twice(tiny_gguf):
    checkpoint = open_checkpoint(tiny_gguf)
    with checkpoint:
        checkpoint.raw("weight")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.raw("weight")
    with pytest.raises(CheckpointError, match="was closed"):
        checkpoint.read("weight", torch.float32)
    assert "weight" in checkpoint.tensors


def test_metadata_and_tensors_cant_be_changed(tiny_gguf):
    with open_checkpoint(tiny_gguf) as checkpoint:
        with pytest.raises(TypeError):
            checkpoint.metadata["general.architecture"] = "other"
        with pytest.raises(TypeError):
            del checkpoint.tensors["weight"]


def test_a_hostile_tensor_name_is_escaped_in_messages(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(tensors=(Tensor(name="\x1b[2Jgone", dims=(8, 0)),)))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert "\x1b" not in str(raised.value)
    assert "gone" in str(raised.value)
