"""A model's life: sequences come and go, its teardown frees what it held, and a CPU's streams run in order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tiny_engine import prompt_of, tiny_config

from engine.device import choose_device
from engine.errors import InvariantBroken
from engine.families import shapes
from engine.model.streams import streams_for
from engine.model.transformer import TransformerModel, load_model, random_model
from engine.weights.checkpoint import open_checkpoint
from engine.weights.store import WeightStore


@pytest.fixture
def model(tiny_llama: Path) -> Iterator[TransformerModel]:
    config = tiny_config(tiny_llama, num_kv_blocks=10, block_size=4, max_batch=3)
    with open_checkpoint(tiny_llama) as checkpoint, load_model(checkpoint, config, choose_device(config)) as model:
        yield model


# Sequences


def test_a_sequence_s_row_and_blocks_come_back(model: TransformerModel) -> None:
    lifecycle = model.lifecycle
    seq = lifecycle.alloc_sequence_for(20, owner=77)
    model.forward.prefill(prompt_of(9), seq)
    assert (lifecycle.num_free_blocks, lifecycle.num_free_rows) == (7, 2)
    view = lifecycle.blocks.view()
    assert memoryview(view.owners).cast("i").tolist().count(77) == 3
    assert list(lifecycle.live()) == [seq]
    lifecycle.check()
    lifecycle.free_sequence(seq)
    assert (lifecycle.num_free_blocks, lifecycle.num_free_rows) == (10, 3)
    assert (seq.row, seq.block_table, seq.num_computed_tokens) == (-1, [], 0)
    lifecycle.free_sequence(seq)
    assert lifecycle.num_free_rows == 3
    assert not lifecycle.live()
    lifecycle.check()


def test_a_budget_is_never_larger_than_the_context(model: TransformerModel) -> None:
    assert model.lifecycle.alloc_sequence().budget_tokens == model.plan.max_seq_len
    assert model.lifecycle.alloc_sequence_for(10**9).budget_tokens == model.plan.max_seq_len
    assert model.lifecycle.alloc_sequence_for(12).budget_tokens == 12


def test_a_sequence_s_lengths_are_asserted_in_order(model: TransformerModel) -> None:
    seq = model.lifecycle.alloc_sequence_for(4)
    seq.append([1, 2, 3])
    seq.advance(3)
    with pytest.raises(InvariantBroken, match="computed 4 ≤ tokens 3"):
        seq.advance(1)
    seq.num_computed_tokens = 3
    with pytest.raises(InvariantBroken, match="tokens 5 ≤ budget 4"):
        seq.append([4, 5])


def test_a_recount_finds_a_block_that_nobody_holds_and_a_row_held_twice(model: TransformerModel) -> None:
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(prompt_of(9), seq)
    lost = seq.block_table.pop()
    with pytest.raises(InvariantBroken, match=f"KV block {lost}: 1 refs in the books, 0 holders"):
        model.lifecycle.check()
    seq.block_table.append(lost)
    model.lifecycle.check()
    model.lifecycle._free_rows.append(seq.row)
    with pytest.raises(InvariantBroken, match="aren't each free or held once"):
        model.lifecycle.check()
    model.lifecycle._free_rows.pop()


def test_a_stranger_can_t_free_another_s_row(model: TransformerModel) -> None:
    from engine.sequence import Sequence

    seq = model.lifecycle.alloc_sequence()
    stranger = Sequence(10, seq.row)
    with pytest.raises(InvariantBroken, match="freed by a sequence that doesn't hold it"):
        model.lifecycle.free_sequence(stranger)


def test_a_row_s_new_owner_reads_no_block_of_the_old_one(model: TransformerModel) -> None:
    first = model.lifecycle.alloc_sequence()
    model.forward.prefill(prompt_of(13, 1), first)
    row, blocks = first.row, list(first.block_table)
    expected = model.forward.decode(5, first).clone()
    model.lifecycle.free_sequence(first)
    second = model.lifecycle.alloc_sequence()
    assert second.row == row
    model.forward.prefill(prompt_of(9, 2), second)
    assert second.block_table[:2] != blocks[:2]
    model.lifecycle.free_sequence(second)
    again = model.lifecycle.alloc_sequence()
    model.forward.prefill(prompt_of(13, 1), again)
    assert torch.equal(model.forward.decode(5, again), expected)


# What the model says of itself


def test_a_model_names_its_sizes_by_the_seed_s_names(model: TransformerModel) -> None:
    block_bytes = 2 * 2 * 16 * 4 * 4 * 4  # k and v, kv heads, head dim, bytes, layers, tokens
    assert model.lifecycle.kv_block_bytes == model.plan.kv_block_bytes == block_bytes
    assert (model.lifecycle.num_total_blocks, model.forward.kv_block_size, model.vocab_size) == (10, 4, 512)
    assert model.config_ref is model.config
    assert model.gpu_backend == torch.device("cpu")
    assert model.kv_cache.nbytes == 11 * block_bytes  # one that is always zero, for padding
    assert (model.forward.is_mla, model.forward.hc_mult, model.forward.supports_beam) == (False, 0, False)
    assert model.circuit.forward_disclosure().name == "legacy"


def test_logits_are_read_one_row_or_many_at_a_time(model: TransformerModel) -> None:
    seqs = [model.lifecycle.alloc_sequence() for _ in range(2)]
    for i, seq in enumerate(seqs):
        model.forward.prefill(prompt_of(6, i), seq)
    rows = model.forward.decode_batch([5, 6], seqs)
    logits = model.logits
    assert logits.decode_logits_fp32
    assert logits.logits_ptr_is_fp32(rows)
    assert rows.data_ptr() == logits.decode_logits_ptr.data_ptr() == logits.logits_buffer_ptr.data_ptr()
    copy = logits.copy_logits_to_host(rows[1])
    assert torch.equal(copy, rows[1])
    assert copy.data_ptr() != rows[1].data_ptr()
    best = rows.argmax(-1).tolist()
    assert [logits.argmax_on_device(rows[i]) for i in range(2)] == logits.argmax_batch(rows, 2) == best
    # The head's input is kept beside its output.
    head = model.store.get("lm_head.weight")
    torch.testing.assert_close(logits.hidden_after_norm[:2] @ head.T, rows, rtol=0, atol=1e-5)


def test_the_memory_items_are_the_tensors_sizes(model: TransformerModel, tiny_llama: Path) -> None:
    items = {item.name: item.bytes for item in model.memory_items()}
    assert items["kv blocks"] == model.kv_cache.nbytes
    with open_checkpoint(tiny_llama) as checkpoint:
        stored = sum(info.nbytes for info in checkpoint.tensors.values())
    assert sum(size for name, size in items.items() if name.startswith("weights: ")) == stored
    assert items["workspace"] > model.logits.num_bytes


# Teardown


def test_teardown_frees_everything_and_a_second_one_nothing(tiny_llama: Path) -> None:
    config = tiny_config(tiny_llama)
    with open_checkpoint(tiny_llama) as checkpoint:
        model = load_model(checkpoint, config, choose_device(config))
    held = [
        weakref.ref(thing)
        for thing in (
            model.kv_cache,
            model.logits.logits_buffer,
            model.forward.builder.block_tables,
            model.store.get("model.layers.0.mlp.up_proj.weight"),
            model.lifecycle,
        )
    ]
    model.teardown()
    gc.collect()
    assert [ref() for ref in held] == [None] * 5
    model.teardown()
    assert model.store.bytes_total == 0
    assert not hasattr(model, "forward")


def test_loading_and_tearing_down_again_and_again_takes_no_more_memory() -> None:
    shape = shapes._dense("llama", "breathing", 256, 512, 4, 2, 64, 4096, 512, 4, 10000.0)
    config = tiny_config(Path("none"), num_kv_blocks=2000)
    process = psutil.Process()

    def breathe() -> tuple[int, int]:
        with random_model(shape, config, choose_device(config)) as model:
            full, held = process.memory_info().rss, sum(item.bytes for item in model.memory_items())
        gc.collect()
        assert full > held  # it really was there
        return held, process.memory_info().rss

    held, first = breathe()
    assert held > 60 * 2**20
    for _ in range(4):
        _, last = breathe()
    assert last - first < held / 2, f"{(last - first) >> 20} MiB more after four loads of {held >> 20} MiB"


def test_a_load_that_fails_in_the_middle_leaves_no_weight_behind(tiny_llama: Path) -> None:
    kept: list[weakref.ref[WeightStore]] = []
    add = WeightStore.add

    def watching_add(store: WeightStore, *args: object, **kwargs: object) -> object:
        kept.append(weakref.ref(store))
        return add(store, *args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    class Interrupted(Exception):
        pass

    def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes / 2:
            raise Interrupted

    config = tiny_config(tiny_llama)
    with pytest.MonkeyPatch.context() as patch, open_checkpoint(tiny_llama) as checkpoint:
        patch.setattr(WeightStore, "add", watching_add)
        with pytest.raises(Interrupted):
            load_model(checkpoint, config, choose_device(config), progress)
    gc.collect()
    assert len(kept) > 10
    assert {ref() for ref in kept} == {None}


# Streams


def test_a_cpu_s_streams_are_stand_ins_that_have_always_completed() -> None:
    streams = streams_for(torch.device("cpu"))
    assert streams.default_stream is None
    stream, event = streams.create_stream(), streams.create_event()
    done: list[int] = []
    done.append(1)
    streams.record_event(event, stream)
    streams.stream_wait_event(streams.default_stream, event)
    assert streams.event_query(event)
    done.append(2)
    streams.event_synchronize(event)
    streams.synchronize(stream)
    streams.synchronize()
    streams.destroy_event(event)
    assert done == [1, 2]


def test_every_forward_method_takes_a_cpu_s_stream(model: TransformerModel) -> None:
    stream = model.streams.create_stream()
    a, b = model.lifecycle.alloc_sequence(), model.lifecycle.alloc_sequence()
    model.forward.prefill(prompt_of(5), a, stream)
    model.forward.prefill_chunk(prompt_of(5), b, 0, 2, False, stream)
    model.forward.decode(7, a, stream)
    result = model.forward.mixed_forward([8], [a], prompt_of(5), b, 2, 3, True, stream)
    assert result.decode_logits is not None
    # In order: what the first left in the arena is overwritten by the last, at once.
    assert torch.equal(result.decode_logits, model.logits.logits_buffer[:1])


def test_binding_a_thread_to_a_cpu_sets_its_thread_count(model: TransformerModel) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model.bind_gpu_to_thread()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
