"""The survivor oracle: whatever is refused while an answer streams, the stream's tokens are those of an undisturbed run, and so
are a greedy canary's afterwards."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from step_spy import PATIENCE_S, assert_quiet
from tiny_engine import prompt_of, tiny_config, watched

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import CheckpointError, FootplateError, RequestError

sys.path.append(str(Path(__file__).parent / "weights"))  # the header faults are listed once, beside the parsers' own tests

from test_gguf_header import FAULTS as GGUF_FAULTS
from test_safetensors_header import FAULTS as SAFETENSORS_FAULTS

STREAM = watched(300, ignore_eos=True)
CANARY = watched(12, ignore_eos=True)


class Survivor:
    """An engine with an answer streaming; begun anew when it ends, so that there always is one."""

    def __init__(self, engine: Engine, prompt: tuple[int, ...], canary_prompt: tuple[int, ...]) -> None:
        self.engine = engine
        for _ in range(2):  # the second time the prompts are cached, as they are from then on: every run is alike
            self.expected = engine.generate(prompt, STREAM)
            self.canary = engine.generate(canary_prompt, CANARY)
        self.streams = [engine.submit(prompt, params=STREAM)]
        self.tokens_seen = 0

    def streams_on(self) -> None:
        """An answer is under way: it has begun, and more of it comes."""
        stream = self.streams[-1]
        stream.poll()
        if stream.done:
            stream = self.engine.submit(self.expected.prompt_token_ids, params=STREAM)
            self.streams.append(stream)
        at, deadline = len(stream.token_ids), time.monotonic() + PATIENCE_S
        while len(stream.token_ids) <= at and not stream.done:
            assert time.monotonic() < deadline, "the stream stands still"
            stream.poll()
            time.sleep(0.0002)
        self.tokens_seen += len(stream.token_ids) - at

    def check(self) -> None:
        """Every stream has said what it says undisturbed, bit for bit: nothing else shared its batches."""
        for stream in self.streams:
            done = stream.result(PATIENCE_S)
            assert (done.token_ids, done.logprobs) == (self.expected.token_ids, self.expected.logprobs)
        again = self.engine.generate(self.canary.prompt_token_ids, CANARY)
        assert (again.token_ids, again.logprobs) == (self.canary.token_ids, self.canary.logprobs)
        assert self.tokens_seen > 0
        assert_quiet(self.engine)


@pytest.fixture
def survivor(tiny_llama: Path) -> Iterator[Survivor]:
    with Engine.load(config=tiny_config(tiny_llama)) as engine:
        survivor = Survivor(engine, tuple(prompt_of(20, 5)), tuple(prompt_of(21, 77)))
        yield survivor
        survivor.check()


def refused_load(path: Path) -> str:
    """The sentence with which an engine refuses to load this."""
    with pytest.raises(CheckpointError) as raised:
        Engine.load(config=EngineConfig(model=str(path), device="cpu", threads=1))
    return str(raised.value)


def test_gguf_files_with_any_header_fault_are_refused_while_a_stream_goes_on(survivor: Survivor, tmp_path: Path) -> None:
    assert len(GGUF_FAULTS) >= 25
    path = tmp_path / "model.gguf"
    for fault, (data, word) in GGUF_FAULTS.items():
        path.write_bytes(data)
        survivor.streams_on()
        message = refused_load(path)
        assert word in message and message.endswith("."), (fault, message)
    survivor.streams_on()
    assert survivor.tokens_seen > len(GGUF_FAULTS)


def test_safetensors_files_with_any_header_fault_are_refused_while_a_stream_goes_on(survivor: Survivor, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for fault, (data, word) in SAFETENSORS_FAULTS.items():
        (tmp_path / "model.safetensors").write_bytes(data)
        survivor.streams_on()
        message = refused_load(tmp_path)
        assert word in message and message.endswith("."), (fault, message)
    survivor.streams_on()


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        config.update(changes)
        (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))

    return change


def _cut_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _pickled(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(200))


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


CHECKPOINT_FAULTS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "weights cut short": (_cut_weights, "truncated"),
    "pickled weights": (_pickled, "pickle"),
    "no weights": (_no_weights, "safetensors"),
    "another architecture": (_config(architectures=["FooForCausalLM"]), "FooForCausalLM"),
    "no architecture": (_config(architectures="gone"), "architecture"),
    "a layer more than the weights have": (_config(num_hidden_layers=5), "layers.4"),
    "a layer fewer than the weights have": (_config(num_hidden_layers=3), "isn't understood"),
    "a billion layers": (_config(num_hidden_layers=10**9), "layers are possible"),
    "a hidden size of 0": (_config(hidden_size=0), "hidden_size"),
    "a hidden size of 2^40": (_config(hidden_size=2**40), "hidden_size"),
    "a vocabulary of 513": (_config(vocab_size=513), "embed_tokens"),
    "heads that don't divide": (_config(num_attention_heads=3), "heads"),
    "a head of an odd size": (_config(head_dim=15), "rotary"),
    "no epsilon that works": (_config(rms_norm_eps=-1.0), "epsilon"),
    "an epsilon of text": (_config(rms_norm_eps="small"), "rms_norm_eps"),
    "rope of another kind": (_config(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "yarn"),
    "a quantisation": (_config(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "a key nobody knows": (_config(residual_multiplier=0.22), "residual_multiplier"),
}


def test_checkpoints_that_lie_are_refused_while_a_stream_goes_on(survivor: Survivor, tiny_llama: Path, tmp_path: Path) -> None:
    for number, (fault, (spoil, word)) in enumerate(CHECKPOINT_FAULTS.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        for file in tiny_llama.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        spoil(directory)
        survivor.streams_on()
        message = refused_load(directory)
        assert word in message and message.endswith("."), (fault, message)
    survivor.streams_on()


def test_settings_that_can_t_work_are_refused_while_a_stream_goes_on(survivor: Survivor, tiny_llama: Path, tmp_path: Path) -> None:
    for flags, word in (
        ({"max_seq_len": 10**6}, "--max-seq-len"),
        ({"num_kv_blocks": 10**9}, "--num-kv-blocks"),
        ({"device": "tpu"}, "--device"),
        ({"dtype": "int8"}, "--dtype"),
        ({"block_size": 0}, "--block-size"),
        ({"max_batch": 8, "max_batch_tokens": 4}, "--max-batch-tokens"),
        ({"model": str(tmp_path / "absent.gguf")}, "no such file"),
        ({"model": ""}, "--model"),
    ):
        survivor.streams_on()
        with pytest.raises(FootplateError, match=word):
            Engine.load(config=tiny_config(tiny_llama, **flags))
    survivor.streams_on()


BAD_PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"max_tokens": "9"}, {"max_tokens": True}, {"max_tokens": 2**40},
    {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": "hot"},
    {"top_k": -1}, {"top_k": 2.5}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": float("nan")}, {"min_p": -0.5}, {"min_p": 2.0},
    {"seed": -1}, {"seed": 2**63}, {"seed": 1.0}, {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0},
    {"repetition_penalty": float("inf")}, {"frequency_penalty": float("-inf")}, {"presence_penalty": float("nan")},
    {"presence_penalty": 1e9}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: float("nan")}}, {"logit_bias": {1: float("inf")}},
    {"logit_bias": {"1": 1.0}}, {"logit_bias": [1, 2]}, {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8},
    {"logprobs": -1}, {"logprobs": 101}, {"stop": ("",)}, {"stop": (3,)}, {"stop": ("x",) * 65}, {"stop": 3},
    {"stop_token_ids": (-1,)}, {"stop_token_ids": (1.0,)}, {"stop_token_ids": 5},
]  # fmt: skip
BAD_SUBMITS: list[dict[str, Any]] = [
    {"prompt": []}, {"prompt": ""}, {"prompt": None}, {"prompt": [5, 49152]}, {"prompt": [-1]}, {"prompt": [True]},
    {"prompt": [1.0]}, {"prompt": ["5"]}, {"prompt": [None]}, {"prompt": [2**70]}, {"prompt": [5] * 5000},
    {"prompt": "word " * 5000}, {"prompt": b"bytes"},
    {"prompt": "half a pair \ud800"}, {"prompt": "\udfff"}, {"messages": []}, {"prompt": "x", "messages": []},
    {"messages": [{"role": "user", "content": "\ud83d alone"}]}, {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user"}]}, {"messages": [{"content": "x"}]}, {"messages": [{}]},
    {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": ["x"]}]}, {"messages": [{"role": ["user"], "content": "x"}]},
    {"messages": [{"role": "user", "content": "x" * 200_000}]},
    {"messages": [{"role": "assistant", "content": "x", "token_ids": [-1]}]},
    {"messages": [{"role": "assistant", "content": "x", "token_ids": ["1"]}]},
    {"messages": [{"role": "assistant", "content": "x", "token_ids": 5}]},
    {"messages": [{"role": "assistant", "content": "x", "token_ids": 0}]},
    {"messages": [{"role": "assistant", "content": "x", "token_ids": "120"}]},
    {"messages": [{"role": "assistant", "content": "x", "token_ids": [True]}]},
    {"messages": ["hello"]}, {"messages": "hello"}, {"messages": [None]}, {"messages": 5}, {"prompt": 5},
    {"params": SamplingParams(logit_bias={49152: 1.0})}, {"params": SamplingParams(stop_token_ids=(60000,))},
]  # fmt: skip


def test_bad_submits_are_each_refused_in_a_sentence_while_a_stream_goes_on(tiny_chat: Callable[..., Path]) -> None:
    with Engine.load(config=tiny_config(tiny_chat(), num_kv_blocks=64)) as engine:
        assert engine.tokenizer is not None
        prompt, canary = (tuple(engine.tokenizer.encode(text)) for text in ("The down main home signal", "On the up line"))
        survivor = Survivor(engine, prompt, canary)
        for bad in BAD_PARAMS:
            survivor.streams_on()
            with pytest.raises(RequestError) as raised:
                engine.submit(prompt, params=SamplingParams(**bad))
            assert next(iter(bad)) in str(raised.value) and str(raised.value).endswith("."), (bad, raised.value)
        for bad in BAD_SUBMITS:
            survivor.streams_on()
            with pytest.raises(RequestError) as raised:
                engine.submit(**({"prompt": "x", **bad} if "params" in bad else bad))
            assert str(raised.value).endswith("."), (bad, raised.value)
        with pytest.raises(RequestError, match="number of samples"):
            engine.sample(0, prompt)
        assert survivor.tokens_seen >= len(BAD_PARAMS) + len(BAD_SUBMITS)
        survivor.check()
        # Two to warm up with its canaries, the streams, and the last canary: none of what was refused was queued.
        assert engine.view.totals.requests == 4 + len(survivor.streams) + 1
