"""The ledger of a model's weights."""

import weakref

import pytest
import torch

from engine.errors import InvariantBroken
from engine.weights.store import WeightStore


def test_bytes_are_counted_by_kind_and_add_up():
    store = WeightStore()
    store.add("embed", torch.zeros(10, 4), "embedding", "F32")
    store.add("q", torch.zeros(4, 4, dtype=torch.bfloat16), "attention", "BF16")
    store.add("k", torch.zeros(2, 4, dtype=torch.bfloat16), "attention", "BF16")
    store.add("norm", torch.zeros(4), "norm", "F32")
    assert store.bytes_by_kind() == {"embedding": 160, "attention": 48, "norm": 16}
    assert store.bytes_total == 224
    assert store.num_parameters == 40 + 16 + 8 + 4


def test_a_tied_head_counts_once():
    store = WeightStore()
    embedding = store.add("embed", torch.zeros(10, 4), "embedding", "F32")
    store.add("head", embedding, "head", "F32")
    assert store.bytes_by_kind() == {"embedding": 160, "head": 0}
    assert store.bytes_total == 160
    assert store.num_parameters == 40


def test_views_of_a_fused_storage_share_its_bytes_and_each_has_its_parameters():
    store = WeightStore()
    fused = torch.zeros(12, 4)
    for name, part in zip("qkv", fused.split([8, 2, 2]), strict=True):
        store.add(name, part, "attention", "F32")
    assert store.bytes_total == 12 * 4 * 4
    assert store.num_parameters == 48


def test_packed_tensors_count_the_parameters_they_stand_for():
    store = WeightStore()
    store.add("packed", torch.zeros(2, 34, dtype=torch.uint8), "mlp", "Q8_0", num_parameters=64)
    assert (store.bytes_total, store.num_parameters) == (68, 64)


def test_add_returns_the_tensor_and_get_finds_it():
    store = WeightStore()
    tensor = torch.zeros(3)
    assert store.add("norm", tensor, "norm", "F32") is tensor
    assert store.get("norm") is tensor
    with pytest.raises(KeyError):
        store.get("other")


def test_a_name_is_taken_once():
    store = WeightStore()
    store.add("norm", torch.zeros(3), "norm", "F32")
    with pytest.raises(InvariantBroken, match="twice"):
        store.add("norm", torch.zeros(3), "norm", "F32")


def test_teardown_releases_newest_first_and_for_good():
    store = WeightStore()
    released = []
    for name in ("first", "second", "third"):
        weakref.finalize(store.add(name, torch.zeros(3), "norm", "F32"), released.append, name)
    store.teardown()
    assert released == ["third", "second", "first"]
    assert (store.bytes_total, store.num_parameters) == (0, 0)
    store.teardown()
    with pytest.raises(InvariantBroken, match="after teardown"):
        store.add("fourth", torch.zeros(3), "norm", "F32")
