"""Saved sequences: a chat goes on after a restart, and a file that isn't what it should be gets a sentence and changes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_engine import loaded, poison_free, run, take_turn
from step_spy import PATIENCE_S, assert_quiet, until
from tiny_engine import assert_same, greedy, prompt_of, tiny_config, watched
from tiny_hybrids import make_qwen3_5

from engine import Completion, Engine
from engine.commands import LoadState, SaveState
from engine.errors import BatchRefused, CommandRefused, InvariantBroken, SavedStateError
from engine.model.saved_state import MAGIC, VERSION
from engine.model.transformer import TransformerModel

PROMPT = prompt_of(60, 61)
each_family = pytest.mark.parametrize("family", ["tiny_llama", "tiny_hybrid"])


@pytest.fixture
def path(request: pytest.FixtureRequest, family: str) -> Path:
    found: Path = request.getfixturevalue(family)
    return found


def answer_and_save(path: Path, file: Path, **flags: Any) -> tuple[Completion, int]:
    """The answer to the prompt, by an engine of its own, and how many tokens of the chat that engine saved."""
    with Engine.load(config=tiny_config(path, **flags)) as engine:
        done = engine.generate(PROMPT, watched(30))
        saved = engine.command(SaveState((*PROMPT, *done.token_ids), str(file))).result(PATIENCE_S)
        assert isinstance(saved, int)
        assert_quiet(engine)
        return done, saved


# A restart


@each_family
def test_a_chat_goes_on_after_a_restart(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.state"
    done, saved = answer_and_save(path, file)
    # 89 of the 90 ids were computed: five whole blocks.
    assert saved == 80
    turn = [*PROMPT, *done.token_ids, *prompt_of(12, 5)]
    with Engine.load(config=tiny_config(path)) as fresh:
        expected, plain = fresh.generate(turn, watched(20)), fresh.generate(PROMPT, watched(20))
    with Engine.load(config=tiny_config(path)) as engine:
        assert engine.command(LoadState(str(file))).result(PATIENCE_S) == 80
        with_suffix = engine.generate(turn, watched(20))
        assert with_suffix.stats.cached_tokens == 80
        assert_same(with_suffix, expected)
        assert_same(engine.generate(PROMPT, watched(20)), plain)
        assert_quiet(engine)


@each_family
@pytest.mark.parametrize("length", [79, 80, 81])
def test_exactly_the_saved_tokens_can_be_sent(path: Path, tmp_path: Path, length: int) -> None:
    file = tmp_path / "chat.state"
    done, _ = answer_and_save(path, file)
    ids = [*PROMPT, *done.token_ids][:length]
    with Engine.load(config=tiny_config(path)) as fresh:
        expected = fresh.generate(ids, watched(8))
    with Engine.load(config=tiny_config(path)) as engine:
        engine.command(LoadState(str(file))).result(PATIENCE_S)
        found = engine.generate(ids, watched(8))
        assert_same(found, expected)
        hybrid = engine.view.ssm is not None
        # The last token's logits must be computed; a recurrent state can't go back one.
        assert found.stats.cached_tokens == (80 if length == 81 else 0 if hybrid else 64)
        assert_quiet(engine)


def test_a_save_overwrites_only_with_a_whole_file(tiny_hybrid: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.state"
    file.write_bytes(b"what was there")
    with Engine.load(config=tiny_config(tiny_hybrid)) as engine:
        with pytest.raises(CommandRefused, match="nothing of it can be saved: nothing cached begins like this prompt"):
            engine.command(SaveState(tuple(PROMPT), str(file))).result(PATIENCE_S)
        assert file.read_bytes() == b"what was there"
        done = engine.generate(PROMPT, greedy(30))
        for place, sentence in (
            (tmp_path / "no" / "dir", "No such file"),
            (file / "below", "Not a directory"),
            (tmp_path, "can't be"),
        ):
            with pytest.raises(CommandRefused, match=sentence):
                engine.command(SaveState((*PROMPT, *done.token_ids), str(place))).result(PATIENCE_S)
        assert engine.command(SaveState((*PROMPT, *done.token_ids), str(file))).result(PATIENCE_S) == 80
        assert [each.name for each in tmp_path.iterdir()] == ["chat.state"]
        assert_quiet(engine)


@pytest.mark.parametrize(
    "token_ids",
    [(), (5,), (*PROMPT, 10**9), (-1, *PROMPT), (2**70,) * 20, tuple(PROMPT) * 500],
    ids=["none", "one", "beyond the vocabulary", "negative", "beyond 64 bits", "beyond the context"],
)
def test_token_ids_that_nobody_can_have_sent_are_refused_and_the_engine_goes_on(
    tiny_hybrid: Path, tmp_path: Path, token_ids: tuple[int, ...]
) -> None:
    with Engine.load(config=tiny_config(tiny_hybrid)) as engine:
        with pytest.raises(CommandRefused, match="nothing of it can be saved|isn't in the vocabulary of 512"):
            engine.command(SaveState(token_ids, str(tmp_path / "file"))).result(PATIENCE_S)
        assert len(engine.generate(PROMPT, greedy(3)).token_ids) == 3
        assert not list(tmp_path.iterdir())
        assert_quiet(engine)


def test_a_chat_that_filled_the_context_can_be_saved(tiny_hybrid: Path, tmp_path: Path) -> None:
    with Engine.load(config=tiny_config(tiny_hybrid, max_seq_len=96)) as engine:
        done = engine.generate(PROMPT, greedy(100))
        chat = (*PROMPT, *done.token_ids)
        assert len(chat) == 96
        assert engine.command(SaveState(chat, str(tmp_path / "file"))).result(PATIENCE_S) == 80
        assert_quiet(engine)


def test_what_ends_in_mid_block_is_refused_by_a_hybrid_rather_than_loaded_in_vain(tiny_hybrid: Path, tmp_path: Path) -> None:
    """A recurrent state is reused at a block boundary or not at all."""
    with loaded(tiny_hybrid) as model:
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill(PROMPT[:37], seq)
        with (tmp_path / "file").open("wb") as file:
            model.lifecycle.save_sequence_state(seq, file)
        model.lifecycle.free_sequence(seq)
    with Engine.load(config=tiny_config(tiny_hybrid)) as engine:
        with pytest.raises(CommandRefused, match="37 tokens"):
            engine.command(LoadState(str(tmp_path / "file"))).result(PATIENCE_S)
        assert_quiet(engine)


def test_an_engine_without_snapshots_refuses_a_state_it_could_not_keep(tiny_hybrid: Path, tmp_path: Path) -> None:
    answer_and_save(tiny_hybrid, tmp_path / "file")
    with Engine.load(config=tiny_config(tiny_hybrid, ssm_cache_slots=0)) as engine:
        with pytest.raises(CommandRefused, match="--ssm-cache-slots"):
            engine.command(LoadState(str(tmp_path / "file"))).result(PATIENCE_S)
        assert_quiet(engine)


def test_a_state_is_loaded_into_a_full_cache_by_evicting(tiny_hybrid: Path, tmp_path: Path) -> None:
    done, _ = answer_and_save(tiny_hybrid, tmp_path / "file")
    with Engine.load(config=tiny_config(tiny_hybrid, num_kv_blocks=10, ssm_cache_slots=1)) as engine:
        for seed in range(3):
            engine.generate(prompt_of(100, seed), greedy(2))
        assert engine.command(LoadState(str(tmp_path / "file"))).result(PATIENCE_S) == 80
        assert engine.generate([*PROMPT, *done.token_ids, 3], greedy(3)).stats.cached_tokens == 80
        assert_quiet(engine)


# Files that aren't what they should be


@pytest.fixture(scope="module")
def good(tiny_hybrid: Path) -> bytes:
    """A saved state of 32 tokens."""
    with loaded(tiny_hybrid) as model:
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill(PROMPT[:32], seq)
        buffer = io.BytesIO()
        model.lifecycle.save_sequence_state(seq, buffer)
        model.lifecycle.free_sequence(seq)
        return buffer.getvalue()


@pytest.fixture(scope="module")
def reader(tiny_hybrid: Path) -> Iterator[TransformerModel]:
    with loaded(tiny_hybrid, max_batch=4, max_seq_len=64) as model:
        yield model


def counts(model: TransformerModel) -> tuple[object, ...]:
    lifecycle = model.lifecycle
    lifecycle.check()
    pool = lifecycle.ssm.pool if lifecycle.ssm is not None else None
    slots = (pool.num_free_live, pool.occupancy()) if pool is not None else None
    return lifecycle.num_free_blocks, lifecycle.num_free_rows, len(lifecycle.prefix), slots


def refused(model: TransformerModel, data: bytes, num_blocks: int | None = None) -> str:
    """The sentence with which a restore of these bytes is refused; nothing may change by it."""
    before = counts(model)
    seq = model.lifecycle.alloc_sequence()
    with pytest.raises((SavedStateError, BatchRefused)) as caught:
        model.lifecycle.restore_sequence_state(seq, num_blocks, io.BytesIO(data))
    assert (seq.num_tokens, seq.num_computed_tokens, seq.block_table) == (0, 0, [])
    model.lifecycle.free_sequence(seq)
    assert counts(model) == before
    return str(caught.value)


def restored(model: TransformerModel, data: bytes, num_blocks: int | None = None) -> None:
    """The state goes on as the sequence it was saved of."""
    seq, control = model.lifecycle.alloc_sequence(), model.lifecycle.alloc_sequence()
    model.lifecycle.restore_sequence_state(seq, num_blocks, io.BytesIO(data))
    assert seq.token_ids == PROMPT[:32]
    assert len(seq.block_table) == (num_blocks or 2)
    model.forward.prefill(PROMPT[:32], control)
    poison_free(model.lifecycle, model.kv_cache)
    for token in PROMPT[32:36]:
        assert torch.equal(model.forward.decode(token, seq).clone(), model.forward.decode(token, control).clone())
    model.lifecycle.free_sequence(seq)
    model.lifecycle.free_sequence(control)


def header_end(data: bytes) -> int:
    length: int = struct.unpack("<I", data[12:16])[0]
    return 16 + length


def with_header(data: bytes, **changes: Any) -> bytes:
    """The file with another header and sums that agree with it: a lie that only its claims can give away."""
    end = header_end(data)
    text = json.dumps({**json.loads(data[16:end]), **changes}).encode()
    body = MAGIC + struct.pack("<II", VERSION, len(text)) + text + data[end:-32]
    return body + hashlib.sha256(body).digest()


def test_a_sound_file_is_restored_to_the_bit(reader: TransformerModel, good: bytes) -> None:
    restored(reader, good)
    restored(reader, good, 3)
    restored(reader, with_header(good))


def test_a_file_cut_anywhere_is_refused(reader: TransformerModel, good: bytes) -> None:
    end = header_end(good)
    cuts = [*range(end + 1), *range(end + 1, len(good), 997), *range(len(good) - 40, len(good))]
    sentences = {refused(reader, good[:cut]) for cut in cuts}
    assert all("cut short" in sentence for sentence in sentences), sentences
    restored(reader, good)


def test_a_flipped_bit_anywhere_is_refused(reader: TransformerModel, good: bytes) -> None:
    end = header_end(good)
    for at in [*range(end), *range(end, len(good), 1499), *range(len(good) - 32, len(good))]:
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        assert refused(reader, bytes(damaged)).endswith(".")
    restored(reader, good)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weights": "0" * 64}, "made with other weights"),
        ({"adapter": "0" * 64}, "made with another adapter"),
        ({"dtype": "bfloat16"}, "made with dtype bfloat16"),
        ({"block_size": 32}, "made with block size 32"),
        ({"kv_shape": [1, 2, 31, 2, 32]}, "another KV shape"),
        ({"kv_shape": []}, "another KV shape"),
        ({"h_shape": [2, 4, 16, 17]}, "another recurrent state"),
        ({"h_shape": [], "conv_shape": []}, "another recurrent state"),
        ({"conv_shape": [2, 3, 129]}, "another convolution state"),
        ({"token_ids": [*PROMPT[:31], 512]}, "aren't of this model's vocabulary"),
        ({"token_ids": [*PROMPT[:31], 2**62]}, "aren't of this model's vocabulary"),
        ({"token_ids": []}, "aren't of this model's vocabulary"),
        ({"token_ids": [5] * 65}, "holds 65 tokens, and there is room for 64"),
        ({"token_ids": [5] * 33}, "another KV shape"),
        ({"token_ids": [*PROMPT[:31], -1]}, "values that can't be"),
        ({"token_ids": [*PROMPT[:31], True]}, "values that can't be"),
        ({"token_ids": [*PROMPT[:31], 1.0]}, "values that can't be"),
        ({"token_ids": "abc"}, "values that can't be"),
        ({"token_ids": {"0": 1}}, "values that can't be"),
        ({"block_size": None}, "values that can't be"),
        ({"block_size": 2**63}, "values that can't be"),
        ({"weights": 7}, "values that can't be"),
        ({"payload_bytes": 0xFFFFFFF0}, "4,294,967,280 bytes where this model needs"),
        ({"payload_bytes": 2**62}, "bytes where this model needs"),
        ({"payload_bytes": 0}, "0 bytes where this model needs"),
        ({"payload_bytes": -1}, "values that can't be"),
        ({"payload_sha256": "0" * 64}, "checksum differs"),
        ({"payload_sha256": None}, "values that can't be"),
        ({"of_tomorrow": 1}, "can't be understood"),
    ],
)
def test_a_header_that_lies_is_refused_by_what_is_wrong(
    reader: TransformerModel, good: bytes, changes: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(reader, with_header(good, **changes))
    restored(reader, good)


def test_a_file_s_first_bytes_are_held_to_what_they_claim(reader: TransformerModel, good: bytes) -> None:
    for start, sentence in (
        (b"GGUF\x00\x00\x00\x03", "isn't a saved state of footplate"),
        (MAGIC + struct.pack("<II", VERSION + 1, 10), f"has version {VERSION + 1}; this footplate reads version {VERSION}"),
        (MAGIC + struct.pack("<II", 0, 10), "has version 0"),
        (MAGIC + struct.pack("<II", 0xFFFFFFFF, 10), "has version 4294967295"),
        (MAGIC + struct.pack("<II", VERSION, 0xFFFFFFF0), "header claims 4,294,967,280 bytes"),
        (MAGIC + struct.pack("<II", VERSION, 0), "header claims 0 bytes"),
        (MAGIC + struct.pack("<II", VERSION, 1 << 25), "cut short"),
    ):
        assert sentence in refused(reader, start + good[len(start) :])
    for text in (b"[]", b"77", b'"x"', b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"weights":' + b"9" * 5000 + b"}"):
        assert "damaged" in refused(reader, MAGIC + struct.pack("<II", VERSION, len(text)) + text)
    restored(reader, good)


def test_blocks_too_few_for_it_are_refused(reader: TransformerModel, good: bytes) -> None:
    assert refused(reader, good, 1) == "1 KV blocks don't hold the 32 saved tokens."
    assert "needed" in refused(reader, good, 201)
    seq = reader.lifecycle.alloc_sequence_for(31)
    with pytest.raises(SavedStateError, match="holds 32 tokens, and there is room for 31"):
        reader.lifecycle.restore_sequence_state(seq, None, io.BytesIO(good))
    reader.forward.prefill(PROMPT[:5], seq)
    with pytest.raises(InvariantBroken, match="only be restored into an empty sequence"):
        reader.lifecycle.restore_sequence_state(seq, None, io.BytesIO(good))
    reader.lifecycle.free_sequence(seq)
    restored(reader, good)


def test_a_reader_that_fails_is_a_sentence(reader: TransformerModel, good: bytes) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 100:
                raise OSError(5, "Input/output error")
            return super().read(size)

    seq = reader.lifecycle.alloc_sequence()
    with pytest.raises(SavedStateError, match=r"could not be read: Input/output error\."):
        reader.lifecycle.restore_sequence_state(seq, None, Broken(good))
    reader.lifecycle.free_sequence(seq)
    restored(reader, good)


def test_files_of_other_models_are_refused(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, tiny_hybrid: Path, good: bytes
) -> None:
    other = tmp_path_factory.mktemp("other-hybrid")
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    make_qwen3_5(99, vocab_size=512, num_hidden_layers=3, layer_types=kinds).save_pretrained(other)
    for path, dtype in ((tiny_llama, "float32"), (other, "float32"), (tiny_hybrid, "bfloat16")):
        with loaded(path, dtype=dtype) as model:
            assert "made with other weights than this engine has" in refused(model, good)
    with loaded(tiny_hybrid, block_size=4, num_kv_blocks=400) as model:
        assert "made with block size 16 than this engine has" in refused(model, good)


# The same by an engine's commands


BAD_FILES: dict[str, Callable[[bytes], bytes]] = {
    "cut in the header": lambda data: data[:200],
    "cut in the payload": lambda data: data[:-5000],
    "longer than it says": lambda data: data + b"x",
    "one bit": lambda data: data[:-6000] + bytes([data[-6000] ^ 1]) + data[-5999:],
    "empty": lambda data: b"",
    "another's weights": lambda data: with_header(data, weights="1" * 64),
    "a future version": lambda data: data[:8] + struct.pack("<I", 2) + data[12:],
    "a huge size": lambda data: with_header(data, payload_bytes=0xFFFFFFF0),
    "ids beyond the vocabulary": lambda data: with_header(data, token_ids=[600] * 32),
}


def test_an_engine_refuses_every_bad_file_and_serves_on(tiny_hybrid: Path, tmp_path: Path, good: bytes) -> None:
    file = tmp_path / "chat.state"
    with Engine.load(config=tiny_config(tiny_hybrid)) as engine:
        expected = engine.generate(PROMPT, watched(6))
        for name, spoil in BAD_FILES.items():
            file.write_bytes(spoil(good))
            before = until(engine, lambda view: view.state == "idle" and not view.requests).kv
            with pytest.raises(CommandRefused, match=r"load the state in .*: .*\.") as caught:
                engine.command(LoadState(str(file))).result(PATIENCE_S)
            assert "Error" not in str(caught.value), f"{name}: {caught.value}"
            assert engine.view.kv is not None
            assert before is not None
            assert before.num_cached == 4
            assert (engine.view.kv.num_free, engine.view.kv.num_cached) == (before.num_free, before.num_cached), name
            assert_same(engine.generate(PROMPT, watched(6)), expected)
        for place in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(CommandRefused, match="can't be read"):
                engine.command(LoadState(str(place))).result(PATIENCE_S)
        file.write_bytes(good)
        assert engine.command(LoadState(str(file))).result(PATIENCE_S) == 32
        assert_quiet(engine)


def test_a_state_longer_than_the_context_or_the_pool_is_refused_with_the_figures(tiny_hybrid: Path, tmp_path: Path) -> None:
    answer_and_save(tiny_hybrid, tmp_path / "file")
    for flags, room in (({"max_seq_len": 64}, 64), ({"num_kv_blocks": 4}, 64)):
        with Engine.load(config=tiny_config(tiny_hybrid, **flags)) as engine:
            with pytest.raises(CommandRefused, match=f"holds 80 tokens, and there is room for {room}"):
                engine.command(LoadState(str(tmp_path / "file"))).result(PATIENCE_S)
            assert len(engine.generate(PROMPT[:20], greedy(3)).token_ids) == 3
            assert_quiet(engine)


# Full disks and kills


def test_a_full_disk_is_a_sentence_and_the_sequence_goes_on(tiny_hybrid: Path) -> None:
    with loaded(tiny_hybrid) as model:
        seq = model.lifecycle.alloc_sequence()
        seq.append(PROMPT[:32])
        run(model, seq, 32)
        before = counts(model)
        with (
            pytest.raises(SavedStateError, match=r"could not be written: No space left on device\. Free some space"),
            open("/dev/full", "wb", buffering=0) as full,
        ):
            model.lifecycle.save_sequence_state(seq, full)
        assert counts(model) == before
        seq.append([5])
        assert run(model, seq, 1) is not None
        model.lifecycle.free_sequence(seq)
        take_turn(model, PROMPT, 3)


SMALL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tiny_engine import greedy, prompt_of, tiny_config
from engine import Engine
from engine.commands import SaveState
from engine.errors import CommandRefused
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Engine.load(config=tiny_config(Path(sys.argv[1]))) as engine:
    prompt = prompt_of(60, 61)
    done = engine.generate(prompt, greedy(30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    try:
        engine.command(SaveState((*prompt, *done.token_ids), sys.argv[2])).result(30)
    except CommandRefused as error:
        print(error)
    assert engine.generate(prompt, greedy(30)).token_ids == done.token_ids
    print("served on")
"""


def python(code: str, *args: object) -> subprocess.Popen[str]:
    """A process of its own that runs `code`."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, *map(str, args), str(here)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here.parent.parent)


def test_a_disk_that_fills_up_leaves_the_old_file_and_no_other(tiny_hybrid: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.state"
    file.write_bytes(b"what was there")
    out, errors = python(SMALL_DISK, tiny_hybrid, file).communicate(timeout=120)
    assert "could not be written: File too large" in out, errors
    assert out.endswith("served on\n")
    assert [each.name for each in tmp_path.iterdir()] == ["chat.state"]
    assert file.read_bytes() == b"what was there"


SAVE_AND_WAIT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tiny_engine import greedy, prompt_of, tiny_config
from engine import Engine
from engine.commands import SaveState
engine = Engine.load(config=tiny_config(Path(sys.argv[1])))
prompt = prompt_of(60, 61)
done = engine.generate(prompt, greedy(30))
assert engine.command(SaveState((*prompt, *done.token_ids), sys.argv[2])).result(30) == 80
engine.submit(prompt, params=greedy(900))
print(*done.token_ids, flush=True)
time.sleep(120)
"""


def test_a_process_killed_after_a_save_has_lost_nothing_of_it(tiny_hybrid: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.state"
    process = python(SAVE_AND_WAIT, tiny_hybrid, file)
    assert process.stdout is not None
    answer = [int(word) for word in process.stdout.readline().split()]
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.communicate()
    assert len(answer) == 30
    turn = [*PROMPT, *answer, *prompt_of(12, 5)]
    with Engine.load(config=tiny_config(tiny_hybrid)) as engine:
        expected = engine.generate(turn, watched(10))
    with Engine.load(config=tiny_config(tiny_hybrid)) as engine:
        assert engine.command(LoadState(str(file))).result(PATIENCE_S) == 80
        found = engine.generate(turn, watched(10))
        assert found.stats.cached_tokens == 80
        assert_same(found, expected)
