"""What a person asks of an engine: answers, cancels at every stage, many at once, and refusals by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from step_spy import PATIENCE_S, Step, StepSpy, assert_quiet, until
from tiny_engine import assert_same, greedy, prompt_of, watched

from engine import Completion, Engine, SamplingParams
from engine.commands import FlushPrefixCache
from engine.errors import RequestError

Start = Callable[..., Engine]


# Answers


def test_a_greedy_answer_is_transformers_own(shared_engine: Engine, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    for length, seed in ((5, 1), (33, 2), (100, 3)):
        prompt = prompt_of(length, seed)
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, length), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        done = shared_engine.generate(prompt, greedy(24))
        assert list(done.token_ids) == theirs[0, length:].tolist()
        assert done.prompt_token_ids == tuple(prompt)
        assert (done.finish_reason, done.error, done.logprobs, done.text) == ("length", None, None, "")


def test_an_answer_s_stats_count_its_tokens_and_times(shared_engine: Engine) -> None:
    stats = shared_engine.generate(prompt_of(40, 4), greedy(12)).stats
    assert (stats.prompt_tokens, stats.cached_tokens) == (40, 0)
    assert stats.ttft_ms is not None and 0 < stats.ttft_ms < PATIENCE_S * 1e3
    assert stats.prefill_tokens_per_s is not None and stats.prefill_tokens_per_s > 0
    assert stats.decode_tokens_per_s is not None and stats.decode_tokens_per_s > 0
    # The rate is that of all prompt tokens over the time to the first token, or less time: the wait in the queue isn't prefill.
    assert stats.prefill_tokens_per_s >= 40 / (stats.ttft_ms / 1e3) * 0.99
    assert shared_engine.generate(prompt_of(9, 5), greedy(1)).stats.decode_tokens_per_s is None


def test_a_handle_shows_ids_as_they_come_and_the_same_ones_at_the_end(start: Start, spy: StepSpy) -> None:
    engine = start()
    spy.hold()
    handle = engine.submit(prompt_of(10), params=greedy(6))
    spy.wait()
    seen = [handle.token_ids]
    for _ in range(5):
        spy.step()
        assert handle.poll() == ""  # no tokenizer, no text
        seen.append(handle.token_ids)
    assert [len(ids) for ids in seen] == [0, 1, 2, 3, 4, 5]
    assert not handle.done
    spy.open()
    done = handle.result(PATIENCE_S)
    assert handle.done
    assert len(done.token_ids) == 6
    assert all(done.token_ids[: len(ids)] == ids for ids in seen)
    assert handle.result() == done, "the result can be had again"


def test_text_deltas_add_up_to_the_text_and_the_text_to_the_ids(start: Start, tiny_llama_with_text: Path) -> None:
    engine = start(tiny_llama_with_text)
    handle = engine.submit("the driver stands", params=SamplingParams(max_tokens=40, ignore_eos=True))
    deltas = list(handle)
    done = handle.result()
    assert engine.tokenizer is not None
    assert "".join(deltas) == done.text == engine.tokenizer.decode(done.token_ids)
    assert len(deltas) > 5
    assert done.prompt_token_ids[0] == 1, "BOS stands first"
    assert engine.tokenizer.decode(done.prompt_token_ids) == "the driver stands"


def test_a_result_that_does_not_come_in_time_is_a_timeout_and_comes_later(start: Start, spy: StepSpy) -> None:
    engine = start()
    spy.hold()
    handle = engine.submit(prompt_of(10), params=greedy(2))
    spy.wait()
    with pytest.raises(TimeoutError, match=r"had not ended after 0\.05 s"):
        handle.result(0.05)
    spy.open()
    assert len(handle.result(PATIENCE_S).token_ids) == 2


# Ends


def test_max_tokens_ends_an_answer_and_so_does_the_context(start: Start, spy: StepSpy) -> None:
    engine = start(max_seq_len=32)
    for max_tokens in (1, 2, 7):
        assert len(engine.generate(prompt_of(10), greedy(max_tokens)).token_ids) == max_tokens
    long = engine.generate(prompt_of(20), greedy(1000))
    assert len(long.token_ids) == 12, "prompt and answer fill the context to the last token"
    assert long.finish_reason == "length"
    one = engine.generate(prompt_of(31), greedy(1000))
    assert len(one.token_ids) == 1
    assert max(row.computed + row.q_len for step in spy.steps for row in step.rows) == 31  # the last one isn't computed


def test_an_answer_fills_the_kv_pool_to_the_last_block_and_ends(start: Start) -> None:
    engine = start(num_kv_blocks=3, block_size=4)
    done = engine.generate(prompt_of(5), greedy(1000))
    assert (len(done.token_ids), done.finish_reason) == (7, "length")
    assert_quiet(engine)


def test_a_stop_id_ends_an_answer_and_is_left_out(shared_engine: Engine) -> None:
    prompt = prompt_of(12, 6)
    whole = shared_engine.generate(prompt, greedy(20)).token_ids
    at = max(whole.index(token_id) for token_id in whole)  # the latest first occurrence
    assert at > 0
    done = shared_engine.generate(prompt, SamplingParams(max_tokens=20, stop_token_ids=(whole[at],)))
    assert (done.token_ids, done.finish_reason) == (whole[:at], "stop")
    absent = next(token_id for token_id in range(512) if token_id not in whole)
    done = shared_engine.generate(prompt, SamplingParams(max_tokens=20, stop_token_ids=(absent,)))
    assert (done.token_ids, done.finish_reason) == (whole, "length")


def test_min_tokens_holds_stop_ids_back(shared_engine: Engine) -> None:
    prompt = prompt_of(12, 6)
    whole = shared_engine.generate(prompt, greedy(20)).token_ids
    done = shared_engine.generate(prompt, SamplingParams(max_tokens=20, min_tokens=8, stop_token_ids=(whole[0],)))
    assert len(done.token_ids) >= 8
    assert whole[0] not in done.token_ids[:8]
    # At the moment they are allowed again, one that is certain ends the answer.
    forced = SamplingParams(max_tokens=20, min_tokens=8, stop_token_ids=(7,), logit_bias={7: 1000.0})
    done = shared_engine.generate(prompt, forced)
    assert (len(done.token_ids), done.finish_reason) == (8, "stop")


def test_the_model_s_end_token_ends_an_answer_unless_it_is_ignored(start: Start, tiny_llama_with_text: Path) -> None:
    engine = start(tiny_llama_with_text)
    certain = {"max_tokens": 5, "logit_bias": {2: 1000.0}}
    done = engine.generate("the", SamplingParams(**certain))
    assert (done.token_ids, done.finish_reason, done.text) == ((), "stop", "")
    done = engine.generate("the", SamplingParams(**certain, ignore_eos=True))
    assert (done.token_ids, done.finish_reason, done.text) == ((2,) * 5, "length", "")
    done = engine.generate("the", SamplingParams(**certain, min_tokens=3))
    assert (len(done.token_ids), done.finish_reason) == (3, "stop")
    assert 2 not in done.token_ids
    # A stop id of the request's own still ends it.
    done = engine.generate("the", SamplingParams(max_tokens=5, logit_bias={9: 1000.0}, ignore_eos=True, stop_token_ids=(9,)))
    assert (done.token_ids, done.finish_reason) == ((), "stop")


def test_a_stop_string_ends_an_answer_and_is_cut_from_its_text(start: Start, tiny_llama_with_text: Path) -> None:
    engine = start(tiny_llama_with_text)
    whole = engine.generate("the driver", SamplingParams(max_tokens=30, ignore_eos=True)).text
    stop = next(
        whole[i : i + 4] for i in range(6, len(whole)) if whole.index(whole[i : i + 4]) == i and "\ufffd" not in whole[i : i + 4]
    )
    handle = engine.submit("the driver", params=SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop, "never there")))
    streamed = "".join(handle)
    done = handle.result()
    assert streamed == done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    assert len(done.token_ids) < 30
    assert_quiet(engine)


# Cancels


def test_a_queued_request_can_be_cancelled(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=1)
    alone = engine.generate(prompt_of(20, 1), watched(8))
    spy.hold()
    first = engine.submit(prompt_of(20, 1), params=watched(8))
    spy.wait()
    second = engine.submit(prompt_of(20, 2), params=greedy(8))
    spy.step()
    spy.step()
    states = {request.request_id: request.state for request in engine.view.requests}
    assert states == {first.request_id: "decode", second.request_id: "queued"}
    second.cancel()
    spy.open()
    done = second.result(PATIENCE_S)
    assert (done.finish_reason, done.token_ids) == ("cancelled", ())
    assert done.stats.ttft_ms is None
    assert not spy.rows_of(second.request_id), "it was computed all the same"
    assert_same(first.result(PATIENCE_S), alone)
    assert_quiet(engine)


def test_a_request_can_be_cancelled_in_the_middle_of_its_prompt(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch_tokens=16)
    spy.hold()
    handle = engine.submit(prompt_of(60), params=greedy(8))
    spy.wait()
    spy.step()
    assert [row.q_len for row in spy.rows_of(handle.request_id)] == [16]
    handle.cancel()
    spy.open()
    done = handle.result(PATIENCE_S)
    assert (done.finish_reason, done.token_ids) == ("cancelled", ())
    assert sum(row.q_len for row in spy.rows_of(handle.request_id)) == 32, "it was computed on after the cancel"
    assert_quiet(engine)


def test_a_request_can_be_cancelled_in_the_middle_of_its_answer(start: Start, spy: StepSpy) -> None:
    engine = start()
    whole = engine.generate(prompt_of(20), greedy(40)).token_ids
    spy.hold()
    handle = engine.submit(prompt_of(20), params=greedy(40))
    spy.wait()
    for _ in range(5):
        spy.step()
    handle.cancel()
    handle.cancel()  # twice is once
    spy.open()
    done = handle.result(PATIENCE_S)
    assert done.finish_reason == "cancelled"
    assert done.token_ids == whole[:6]
    assert_quiet(engine)


def test_a_preempted_request_can_be_cancelled(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=12, block_size=4)
    spy.hold()
    handles = [engine.submit(prompt_of(8, seed), params=greedy(24)) for seed in range(3)]
    spy.wait()
    seen: set[int] = set()
    cancelled_at: dict[int, int] = {}

    def cancel_what_was_preempted(step: Step) -> None:
        here = step.decoding | step.prefilling
        for handle in handles:
            if handle.request_id in seen - here and not cancelled_at:
                handle.cancel()
                cancelled_at[handle.request_id] = len(spy.steps)
        seen.update(here)

    spy.before = cancel_what_was_preempted
    spy.open()
    done = {handle.request_id: handle.result(PATIENCE_S) for handle in handles}
    [(request_id, at)] = cancelled_at.items()
    assert done[request_id].finish_reason == "cancelled"
    assert 0 < len(done[request_id].token_ids) < 24, "it hadn't begun its answer, or had ended it"
    assert all(request_id not in step.decoding | step.prefilling for step in spy.steps[at:]), "it was computed after the cancel"
    assert [d.finish_reason for other, d in done.items() if other != request_id] == ["length", "length"]
    assert_quiet(engine)
    assert engine.view.totals.preemptions >= 1


def test_a_cancel_after_the_end_changes_nothing(shared_engine: Engine) -> None:
    handle = shared_engine.submit(prompt_of(5), params=greedy(2))
    done = handle.result(PATIENCE_S)
    handle.cancel()
    assert handle.result() == done
    assert done.finish_reason == "length"


# Many at once


def test_prompts_join_running_answers_without_holding_them_up(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch_tokens=16)
    prompts = {"early": prompt_of(10, 1), "late": prompt_of(60, 2)}
    alone = {name: engine.generate(prompt, watched(30)) for name, prompt in prompts.items()}
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    spy.hold()
    early = engine.submit(prompts["early"], params=watched(30))
    spy.wait()
    spy.step()
    spy.step()
    late = engine.submit(prompts["late"], params=watched(30))
    del spy.steps[:]
    spy.open()
    assert_same(early.result(PATIENCE_S), alone["early"])
    assert_same(late.result(PATIENCE_S), alone["late"])
    mixed = [step for step in spy.steps if late.request_id in step.prefilling]
    assert len(mixed) == 4, "60 tokens beside one decode row take four chunks of 15"
    assert all(step.decoding == {early.request_id} for step in mixed), "the prompt held the answer up"
    assert all(sum(row.q_len for row in step.rows) <= 16 for step in spy.steps)
    assert [step.rows[-1].num_logits for step in mixed] == [0, 0, 0, 1]
    together = [step for step in spy.steps if step.decoding == {early.request_id, late.request_id}]
    assert len(together) > 10, "the two answers weren't decoded in one batch"


def test_many_requests_from_many_threads_get_the_answers_they_get_alone(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=200)
    jobs = [(prompt_of(3 + 7 * i % 50, i), 5 + i % 9) for i in range(24)]
    alone = [engine.generate(prompt, watched(count)) for prompt, count in jobs]
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    found: dict[int, Completion] = {}

    def ask(index: int) -> None:
        prompt, count = jobs[index]
        found[index] = engine.generate(prompt, watched(count))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for index, expected in enumerate(alone):
        assert_same(found[index], expected)
    assert max(len(step.rows) for step in spy.steps) == 8, "max_batch was never reached"
    assert_quiet(engine)


def test_requests_start_in_the_order_they_came(start: Start, spy: StepSpy) -> None:
    engine = start(max_batch=2)
    spy.hold()
    handles = [engine.submit(prompt_of(6, i), params=greedy(4)) for i in range(6)]
    spy.wait()
    spy.open()
    for handle in handles:
        handle.result(PATIENCE_S)
    first_seen = list(dict.fromkeys(row.request_id for step in spy.steps for row in step.rows))
    assert first_seen == [handle.request_id for handle in handles]
    assert max(len(step.rows) for step in spy.steps) == 2


# Refusals


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "the prompt is empty"),
        ((), "the prompt is empty"),
        ([5, 512], "token id 512 isn't in the vocabulary of 512"),
        ([-1], "token id -1 isn't in the vocabulary"),
        ([True], "token id True isn't in the vocabulary"),
        ([1.0], r"token id 1\.0 isn't in the vocabulary"),
        (["5"], "token id '5' isn't in the vocabulary"),
        ("text", r"has no tokenizer\.json"),
        (None, "either a prompt or messages"),
    ],
)
def test_a_prompt_that_can_t_be_served_is_refused_in_a_sentence(shared_engine: Engine, prompt: object, sentence: str) -> None:
    before = shared_engine.view.totals.requests
    with pytest.raises(RequestError, match=sentence):
        shared_engine.submit(prompt)  # type: ignore[arg-type]  # what a script may pass
    assert len(shared_engine.generate([5, 6], greedy(2)).token_ids) == 2
    assert until(shared_engine, lambda view: view.totals.requests > before).totals.requests == before + 1


def test_an_empty_text_is_refused_where_the_model_adds_no_bos(start: Start, tiny_llama_with_text: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_llama_with_text, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    engine = start(tmp_path)
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.submit("")
    with pytest.raises(RequestError, match="no chat template"):
        engine.submit(messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        engine.submit("a\ud800b")
    with pytest.raises(RequestError, match="either a prompt or messages"):
        engine.submit("a", messages=[])
    assert len(engine.generate("the", greedy(2)).token_ids) == 2


def test_a_prompt_over_the_context_is_refused_at_once_with_the_figures(start: Start) -> None:
    engine = start(max_seq_len=48)
    for length in (48, 49, 1200):
        with pytest.raises(RequestError, match=rf"has {length:,} tokens, but the context holds 48 .*--max-seq-len"):
            engine.submit(prompt_of(length))
    assert len(engine.generate(prompt_of(47), greedy(5)).token_ids) == 1


def test_a_prompt_over_the_kv_pool_is_refused_at_once_with_the_figures_and_holds_nobody_up(start: Start, spy: StepSpy) -> None:
    engine = start(num_kv_blocks=10, block_size=4)
    spy.hold()
    running = engine.submit(prompt_of(8), params=greedy(4))
    spy.wait()
    for length in (40, 41, 500):
        with pytest.raises(RequestError, match=rf"has {length} tokens, but the 10 KV blocks hold 40 .*--num-kv-blocks"):
            engine.submit(prompt_of(length))
    behind = engine.submit(prompt_of(9), params=greedy(4))
    spy.open()
    assert len(running.result(PATIENCE_S).token_ids) == 4
    assert len(behind.result(PATIENCE_S).token_ids) == 4
    assert len(engine.generate(prompt_of(39), greedy(5)).token_ids) == 1


def test_ids_of_the_params_outside_the_vocabulary_are_refused_by_name(shared_engine: Engine) -> None:
    for params, field in (
        (SamplingParams(stop_token_ids=(3, 512)), "stop_token_ids names token id 512"),
        (SamplingParams(logit_bias={600: 1.0}), "logit_bias names token id 600"),
        (SamplingParams(stop=("x",)), "stop strings need text"),
    ):
        with pytest.raises(RequestError, match=field):
            shared_engine.submit([5], params=params)
