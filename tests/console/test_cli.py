"""The command line as a person meets it: real processes, the real small model, exit codes and sentences."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from console.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--threads", "1", "--num-kv-blocks", "64", "--max-seq-len", "512"]
FIGURES = re.compile(
    r"ttft [\d,]+ ms · prefill [\d,.]+ tok/s, (?P<prompt>[\d,]+) tokens, (?P<cached>[\d,]+) cached"
    r" · decode [\d,.]+ tok/s, (?P<output>[\d,]+) tokens · (?P<finish>\w+)\n"
)


def footplate(*arguments: str | bytes, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """One real process of the command line, its stdout and stderr pipes."""
    return subprocess.run(
        [sys.executable, "-m", "console.cli", *arguments], input=stdin, capture_output=True, cwd=ROOT, timeout=120
    )


@pytest.fixture(scope="module")
def answered(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[bytes], Path]:
    """`run` of a templated prompt into a pipe, and the view it wrote."""
    view = tmp_path_factory.mktemp("run") / "view.json"
    done = footplate("run", "What is the capital of France?", "--max-tokens", "24", "--view-json", str(view), *SMALL)
    assert done.returncode == 0, done.stderr.decode()
    return done, view


def test_run_answers_on_stdout_and_says_its_figures_on_stderr(answered: tuple[subprocess.CompletedProcess[bytes], Path]) -> None:
    done, _ = answered
    assert "Paris" in done.stdout.decode()
    figures = FIGURES.fullmatch(done.stderr.decode())
    assert figures is not None, done.stderr.decode()
    assert figures["cached"] == "0"
    assert int(figures["prompt"]) > 15  # the template adds its own tokens to the question's seven
    assert 1 <= int(figures["output"]) <= 24


def test_view_json_is_the_last_view(answered: tuple[subprocess.CompletedProcess[bytes], Path]) -> None:
    done, path = answered
    view = json.loads(path.read_text())
    figures = FIGURES.fullmatch(done.stderr.decode())
    assert figures is not None
    assert (view["totals"]["requests"], view["totals"]["finished"], view["requests"]) == (1, 1, [])
    assert view["totals"]["output_tokens"] >= int(figures["output"])
    assert view["kv"]["num_blocks"] == len(view["kv"]["states"]) == 64
    assert view["model"]["threads"] == 1
    assert sum(item["bytes"] for item in view["memory"]["items"]) == view["memory"]["total_bytes"]


def test_raw_json_from_stdin_has_every_field_of_the_completion(smollm2_gguf: Path) -> None:
    prompt = b"The capital of France is\n"
    done = footplate("run", "-", "--raw", "--json", "--max-tokens", "6", *SMALL, stdin=prompt)
    assert done.returncode == 0, done.stderr.decode()
    answer = json.loads(done.stdout)
    assert answer["text"].startswith(" Paris")
    assert len(answer["prompt_token_ids"]) == 5  # no template, no newline
    assert (len(answer["token_ids"]), answer["finish_reason"], answer["logprobs"], answer["error"]) == (6, "length", None, None)
    stats = answer["stats"]
    assert set(stats) == {"prompt_tokens", "cached_tokens", "ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (5, 0)
    assert min(stats["ttft_ms"], stats["prefill_tokens_per_s"], stats["decode_tokens_per_s"]) > 0
    assert set(answer["forward"]) == {"name", "digest", "launches_per_step"}
    assert answer["forward"]["name"] in ("circuit", "legacy"), "the circuit where the CPU computes in bfloat16"


def test_a_prompt_over_the_context_is_refused_with_the_figures(smollm2_gguf: Path) -> None:
    done = footplate("run", "word " * 600, "--raw", *SMALL)
    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(r"footplate: .*\b60\d\b.*\b512\b.*\n", done.stderr.decode())


def test_a_reader_that_leaves_early_ends_the_run_quietly(smollm2_gguf: Path) -> None:
    command = [sys.executable, "-m", "console.cli", "run", "Count from one to a thousand.", "--max-tokens", "400", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0


BAD_FILE = "bad.gguf"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", ""], "the prompt is empty"),
        (["run", "a\udcffb"], "the prompt isn't valid text: at character 1"),
        (["run", "hi", "--system", "\ud800"], "--system isn't valid text"),
        (["run", "hi", "--temperature", "nan"], "temperature must be a finite number"),
        (["run", "hi", "--max-tokens", "0"], "max_tokens must be a whole number"),
        (["run", "hi", "--threads", "0"], "--threads must be a whole number of at least 1, not 0"),
        (["run", "hi", "--view-json", "gone/view.json"], "its directory does not exist"),
        (["run", "hi", "--model", "no-such-model"], "model 'no-such-model' is unknown: .*smollm2-135m-instruct"),
        (["run", "hi", "--model", BAD_FILE], "bad.gguf"),
        (["inspect", BAD_FILE], "bad.gguf"),
        (["inspect", "org/none"], "HF_HUB_OFFLINE is set"),
        (["pull", "no-such-model"], "unknown"),
        (["bench", "--batch", "20", "--max-batch", "4"], "--batch 20 is above --max-batch 4"),
        (["bench", "--new-tokens", "1"], "--new-tokens must be at least 2"),
        (["bench", "--shape", "huge"], "--shape 'huge' is unknown; choose one of smollm2-135m"),
        ([], "the console needs a terminal"),
    ],
)
def test_what_is_refused_gets_one_sentence_and_exit_code_1(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(BAD_FILE).write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    assert main(arguments) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(rf"footplate: .*{sentence}.*\n", err), err


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["run"],
        ["run", "a", "b"],
        ["run", "a", "--max-tokens", "many"],
        ["run", "a", "--device", "tpu"],
        ["run", "a", "--max-tok", "3"],
        ["run", "a", "--raw", "--system", "b"],
        ["pull"],
    ],
)
def test_what_can_not_be_understood_gets_the_usage_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: footplate")


def test_stdin_that_is_not_utf_8_is_refused_by_byte() -> None:
    done = footplate("run", "-", stdin=b"abc\xff")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"footplate: the prompt from stdin isn't UTF-8: byte 3 is 0xff; convert it first.\n"


def test_an_unexpected_error_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise ValueError("odd \x1b]0;title\x07")

    monkeypatch.delenv("FOOTPLATE_TRACEBACK", raising=False)
    monkeypatch.setattr("engine.weights.locate.pull", fail)
    assert main(["pull", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("footplate: stopped by an unexpected ValueError: odd")
    assert err.count("\n") == 1


def test_engine_flags_may_stand_before_the_command_or_after_it() -> None:
    from console.cli import build_parser, engine_config

    before = build_parser().parse_args(["--threads", "3", "run", "hi"])
    after = build_parser().parse_args(["run", "hi", "--threads", "3"])
    assert engine_config(before) == engine_config(after)
    assert engine_config(before).threads == 3


def test_every_field_of_the_config_is_a_flag() -> None:
    import dataclasses

    from console.cli import build_parser, engine_config
    from engine.config import EngineConfig

    texts = {"model": "m", "device": "cpu", "dtype": "float32", "circuit": "legacy", "spill_dir": "d"}
    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    given = {name: texts.get(name, number) for number, name in enumerate(fields, start=10)}
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert dataclasses.asdict(engine_config(build_parser().parse_args(flags))) == given


def test_pull_says_where_the_model_lies(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smollm2-135m-instruct"]) == 0
    assert capsys.readouterr().out == f"{smollm2_gguf}\n"


def test_inspect_json_is_the_inspection(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_llama), "--json", "--num-kv-blocks", "7", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["layers"], found["plan"]["figures"]["num_kv_blocks"]) == ("llama", {"attention": 4}, 7)
    figures = found["plan"]["figures"]
    assert figures["total_bytes"] == sum(figures[f"{part}_bytes"] for part in ("weights", "kv", "ssm", "workspace"))
    assert main(["inspect", str(tiny_llama), "--device", "cpu"]) == 0
    assert "memory plan (cpu" in capsys.readouterr().out


def test_bench_reports_medians_and_what_they_were_measured_on(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--batch", "2", "--prompt-tokens", "16", "--new-tokens", "48", "--repeats", "2"]
    assert main(["bench", "--model", str(tiny_llama), *workload, "--json", "--device", "cpu", "--threads", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["runs"]) == 2
    assert (report["device"], report["threads"], report["workload"]["batch"]) == ("cpu", 1, 2)
    assert set(report["versions"]) == {"footplate", "torch", "python"}
    median = report["median"]
    assert min(median["ttft_ms"], median["prefill_tokens_per_s"], median["decode_tokens_per_s"], median["step_ms"]) > 0
    # Two requests that decode in the same steps: together twice what each gets, as measured by another clock.
    assert median["decode_tokens_per_s_total"] == pytest.approx(2 * median["decode_tokens_per_s"], rel=0.5)


def test_bench_runs_a_real_shape_of_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1", "--max-seq-len", "64", "--num-kv-blocks", "16"]
    assert main(["bench", "--shape", "smollm2-135m", *workload, "--device", "cpu", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "134,515,008 parameters" in out
    assert re.search(r"decode, each +[\d.,]+ tok/s", out)
