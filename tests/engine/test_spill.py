"""Spilled states: what a disk does to them, and that nothing is lost by it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import Tensor

from engine.cache.spill import Spill
from engine.errors import FootplateError
from engine.model.saved_state import StateHeader, StateReader, write_state

PATIENCE_S = 10.0


def write(file: BinaryIO, token_ids: tuple[int, ...], tensors: list[Tensor]) -> None:
    [tensor] = tensors
    write_state(file, StateHeader("w", "", "float32", 16, token_ids, tuple(tensor.shape)), tensors)


def read(file: BinaryIO, file_bytes: int) -> tuple[tuple[int, ...], list[Tensor]]:
    state = StateReader(file, file_bytes)
    return state.header.token_ids, state.read([torch.empty(state.header.kv_shape, device="meta")])


def state(seed: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[Spill]:
    spill = Spill(tmp_path, write, read)
    yield spill
    spill.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def folder(tmp_path: Path) -> Path:
    [found] = tmp_path.iterdir()
    return found


def on_disk(spill: Spill, key: int) -> bool:
    return spill._entries[key].where == "disk"


def taken(spill: Spill, key: int) -> tuple[tuple[int, ...], list[Tensor]] | None:
    until(lambda: spill.ready(key))
    return spill.take(key)


def test_a_state_goes_to_disk_and_comes_back_to_the_bit(spill: Spill, tmp_path: Path) -> None:
    keys = [spill.put((i, i + 1), [state(i)]) for i in range(5)]
    for key in keys:
        until(lambda key=key: on_disk(spill, key))  # type: ignore[misc]  # bound in each turn
    assert all(spill._entries[key].tensors is None for key in keys), "the states are in memory still"
    assert len(list(folder(tmp_path).iterdir())) == 5
    for i, key in reversed(list(enumerate(keys))):
        found = taken(spill, key)
        assert found is not None
        assert found[0] == (i, i + 1)
        assert torch.equal(found[1][0], state(i))
    assert len(spill) == 0
    until(lambda: not list(folder(tmp_path).iterdir()))


def test_a_state_is_ready_before_it_was_written(tmp_path: Path) -> None:
    gate = __import__("threading").Event()

    def slow(file: BinaryIO, token_ids: tuple[int, ...], tensors: list[Tensor]) -> None:
        gate.wait(PATIENCE_S)
        write(file, token_ids, tensors)

    spill = Spill(tmp_path, slow, read)
    key = spill.put((1,), [state(1)])
    assert spill.ready(key)
    found = spill.take(key)
    assert found is not None and torch.equal(found[1][0], state(1))
    gate.set()
    other = spill.put((2,), [state(2)])
    until(lambda: on_disk(spill, other))
    assert [path.name for path in folder(tmp_path).iterdir()] == [f"{other}.state"], "a taken state was left on disk"
    spill.close()


def test_a_dropped_state_leaves_no_file(spill: Spill, tmp_path: Path) -> None:
    key = spill.put((1,), [state(1)])
    until(lambda: on_disk(spill, key))
    spill.drop(key)
    spill.drop(key)
    assert len(spill) == 0
    until(lambda: not list(folder(tmp_path).iterdir()))


def test_a_full_disk_leaves_the_state_in_memory(spill: Spill, tmp_path: Path) -> None:
    (folder(tmp_path) / "1.state").symlink_to("/dev/full")
    key = spill.put((1,), [state(1)])
    other = spill.put((2,), [state(2)])
    until(lambda: on_disk(spill, other))  # the first one's turn is over
    assert not on_disk(spill, key)
    found = taken(spill, key)
    assert found is not None and torch.equal(found[1][0], state(1))


def test_a_folder_that_vanishes_leaves_new_states_in_memory_and_loses_only_what_it_held(spill: Spill, tmp_path: Path) -> None:
    lost = spill.put((1,), [state(1)])
    until(lambda: on_disk(spill, lost))
    shutil.rmtree(folder(tmp_path))
    key = spill.put((2,), [state(2)])
    assert taken(spill, lost) is None
    found = taken(spill, key)
    assert found is not None and torch.equal(found[1][0], state(2))
    assert len(spill) == 0


def test_a_file_in_the_folder_s_place_stops_nothing(spill: Spill, tmp_path: Path) -> None:
    """Neither writing, nor reading, nor even removing works any more; the thread goes on."""
    lost = spill.put((1,), [state(1)])
    until(lambda: on_disk(spill, lost))
    place = folder(tmp_path)
    shutil.rmtree(place)
    place.write_text("not a folder")
    spill.drop(lost)
    keys = [spill.put((i,), [state(i)]) for i in range(2, 6)]
    for i, key in enumerate(keys, 2):
        found = taken(spill, key)
        assert found is not None and torch.equal(found[1][0], state(i))
    place.unlink()
    place.mkdir()
    key = spill.put((7,), [state(7)])
    until(lambda: on_disk(spill, key))
    assert taken(spill, key) is not None


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _remove(path: Path) -> None:
    path.unlink()


def _replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap(path: Path) -> None:
    """Another sequence's state, whole and sound."""
    with path.open("wb") as file:
        write(file, (9, 9), [state(9)])


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _grow, _remove, _replace_by_a_folder, _swap])
def test_a_damaged_file_is_a_lost_state_and_the_next_one_works(
    spill: Spill, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    key = spill.put((1, 2), [state(1)])
    until(lambda: on_disk(spill, key))
    damage(folder(tmp_path) / f"{key}.state")
    assert taken(spill, key) is None
    other = spill.put((3,), [state(3)])
    until(lambda: on_disk(spill, other))
    found = taken(spill, other)
    assert found is not None and torch.equal(found[1][0], state(3))


def test_a_place_that_cannot_be_written_is_refused_at_the_start_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below", Path("/proc/footplate-spill")):
        with pytest.raises(FootplateError, match=r"--spill-dir .*: .*; choose a directory that can be written\."):
            Spill(place, write, read)


def test_closing_removes_the_folder_and_ends_the_thread_twice_over(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "made" / "on the way", write, read)
    spill.put((1,), [state(1)])
    spill.close()
    spill.close()
    assert not spill._thread.is_alive()
    assert not list((tmp_path / "made" / "on the way").iterdir())


def test_closing_after_the_folder_was_taken_away_raises_nothing(tmp_path: Path) -> None:
    spill = Spill(tmp_path, write, read)
    place = folder(tmp_path)
    shutil.rmtree(place)
    place.write_text("not a folder")
    spill.close()
