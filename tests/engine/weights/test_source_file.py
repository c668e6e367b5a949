"""SourceFile: reads that end inside the file, and sentences for everything else."""

import tracemalloc

import pytest

from engine.errors import CheckpointError
from engine.weights.source import SourceFile, quoted


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(100)))
    file = SourceFile(path)
    yield file
    file.close()


def test_a_read_returns_exactly_the_bytes_asked_for(source):
    assert source.size_bytes == 100
    assert source.read(10, 3) == b"\x0a\x0b\x0c"
    assert source.read(0, 100) == bytes(range(100))
    assert source.read(100, 0) == b""


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (1 << 70, 1), (-1, 1), (0, 1 << 40)])
def test_a_read_outside_the_file_is_refused_before_memory_is_taken(source, offset, nbytes):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="truncated"):
            source.read(offset, nbytes)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone: can't be opened \(No such file"):
        SourceFile(tmp_path / "gone")


def test_a_directory_is_no_weight_file(tmp_path):
    with pytest.raises(CheckpointError, match="not a regular file"):
        SourceFile(tmp_path)


def test_a_quoted_name_is_escaped_and_short():
    assert quoted("a\x1b[2J\n\ud800") == "'a\\x1b[2J\\n\\ud800'"
    assert len(quoted("x" * 5000)) < 90
