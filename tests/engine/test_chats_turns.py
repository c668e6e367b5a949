"""Chats through an engine, with SmolLM2's tokenizer and template: what a second turn, an edited or a rewound message finds in
the prefix cache, stop strings across tokens, and templates that refuse a history.

One token a step, so that the cache oracle (a hit, a flush, the same chat again) can ask for the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from step_spy import PATIENCE_S, assert_quiet
from tiny_engine import tiny_config, watched

from engine import Completion, Engine, SamplingParams
from engine.commands import FlushPrefixCache

Start = Callable[..., Engine]
TinyChat = Callable[..., Path]
Message = Mapping[str, Any]
ONE_BY_ONE = {"max_batch": 1, "max_batch_tokens": 1, "num_kv_blocks": 128}
SYSTEM = {"role": "system", "content": "You mind the signals between Harrow and Wealdstone."}
FIRST = {"role": "user", "content": "Which lever clears the down main home signal, and in what order?"}
SECOND = {"role": "user", "content": "And when the 14:35 is running late?"}


def answer_of(done: Completion) -> Message:
    return {"role": "assistant", "content": done.text, "token_ids": done.token_ids}


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def again_without_the_cache(engine: Engine, messages: list[Message], warm: Completion, params: SamplingParams) -> None:
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    cold = engine.submit(messages=messages, params=params).result(PATIENCE_S)
    assert cold.stats.cached_tokens == 0
    assert cold.prompt_token_ids == warm.prompt_token_ids
    assert cold.token_ids == warm.token_ids
    assert cold.logprobs == warm.logprobs
    engine.command(FlushPrefixCache()).result(PATIENCE_S)


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_second_turn_finds_the_first_one_and_its_answer_by_their_ids(start: Start, tiny_chat: TinyChat, block_size: int) -> None:
    engine = start(tiny_chat(), block_size=block_size, **ONE_BY_ONE)
    params = watched(13, logprobs=20, ignore_eos=True, temperature=1.0, seed=1)
    first = engine.submit(messages=[SYSTEM, FIRST], params=params).result(PATIENCE_S)
    assert engine.tokenizer is not None
    retokenised = tuple(engine.tokenizer.encode(first.text, add_bos=False))
    assert retokenised != first.token_ids, "the answer's text has its ids anyway: nothing would show that they are kept"
    messages = [SYSTEM, FIRST, answer_of(first), SECOND]
    handle = engine.submit(messages=messages, params=params)
    warm = handle.result(PATIENCE_S)
    assert handle.note is None
    known = [*first.prompt_token_ids, *first.token_ids]
    assert list(warm.prompt_token_ids[: len(known)]) == known
    assert warm.stats.cached_tokens == (len(known) - 1) // block_size * block_size
    again_without_the_cache(engine, messages, warm, params)
    assert_quiet(engine)


@pytest.mark.parametrize("block_size", [4, 16])
def test_an_edited_message_reuses_exactly_what_comes_before_the_edit(start: Start, tiny_chat: TinyChat, block_size: int) -> None:
    engine = start(tiny_chat(), block_size=block_size, **ONE_BY_ONE)
    params = watched(5, logprobs=20, ignore_eos=True)
    asked, reused = FIRST["content"] * 2, set()
    for at in range(0, len(asked), 23):
        first = engine.submit(messages=[SYSTEM, {"role": "user", "content": asked}], params=params).result(PATIENCE_S)
        edited = {"role": "user", "content": asked[:at] + "NOT" + asked[at:]}
        messages = [SYSTEM, edited]
        warm = engine.submit(messages=messages, params=params).result(PATIENCE_S)
        same = min(common(warm.prompt_token_ids, first.prompt_token_ids), len(warm.prompt_token_ids) - 1)
        assert warm.stats.cached_tokens == same // block_size * block_size
        reused.add(warm.stats.cached_tokens)
        again_without_the_cache(engine, messages, warm, params)
    assert len(reused) > 1, "every edit fell into one block"


def test_a_rewound_chat_reuses_the_turns_that_are_left_and_a_regenerated_answer_its_prompt(
    start: Start, tiny_chat: TinyChat
) -> None:
    engine = start(tiny_chat(), block_size=4, **ONE_BY_ONE)
    params = watched(9, logprobs=20, ignore_eos=True)
    messages: list[Message] = [SYSTEM, FIRST]
    ends = []
    for question in (SECOND, {"role": "user", "content": "Thanks."}, None):
        done = engine.submit(messages=messages, params=params).result(PATIENCE_S)
        ends.append(done)
        messages += [answer_of(done)] + ([question] if question else [])
    # Back to the second question, asked otherwise: the first turn and its answer are still there.
    other = [*messages[:3], {"role": "user", "content": "What of the up line?"}]
    rewound = engine.submit(messages=other, params=params).result(PATIENCE_S)
    same = common(rewound.prompt_token_ids, ends[1].prompt_token_ids)
    assert same > len(ends[0].prompt_token_ids) + len(ends[0].token_ids)
    assert rewound.stats.cached_tokens == same // 4 * 4
    # The last answer once more: all whole blocks of its prompt.
    last = engine.submit(messages=messages[:-1], params=params).result(PATIENCE_S)
    assert last.stats.cached_tokens == (len(last.prompt_token_ids) - 1) // 4 * 4
    assert last.logprobs == ends[2].logprobs
    again_without_the_cache(engine, other, rewound, params)


def test_an_edited_answer_breaks_the_prefix_there_and_says_so(start: Start, tiny_chat: TinyChat) -> None:
    engine = start(tiny_chat(), block_size=4, **ONE_BY_ONE)
    params = watched(12, logprobs=20, ignore_eos=True)
    first = engine.submit(messages=[SYSTEM, FIRST], params=params).result(PATIENCE_S)
    edited = {**answer_of(first), "content": "Lever twelve."}
    handle = engine.submit(messages=[SYSTEM, FIRST, edited, SECOND], params=params)
    warm = handle.result(PATIENCE_S)
    assert handle.note is not None
    assert "An earlier answer was tokenised again" in handle.note
    assert warm.stats.cached_tokens == common(warm.prompt_token_ids, (*first.prompt_token_ids, *first.token_ids)) // 4 * 4
    assert warm.stats.cached_tokens <= len(first.prompt_token_ids)
    again_without_the_cache(engine, [SYSTEM, FIRST, edited, SECOND], warm, params)


@pytest.fixture(scope="module")
def smollm2_engine(smollm2_gguf: Path) -> Iterator[Engine]:
    config = tiny_config(smollm2_gguf, num_kv_blocks=64, max_seq_len=512, max_batch_tokens=128, max_batch=2)
    with Engine.load(config=config) as engine:
        yield engine
        assert_quiet(engine)


def test_the_real_model_answers_a_second_turn_from_its_cache_as_without(smollm2_engine: Engine) -> None:
    engine = smollm2_engine
    params = SamplingParams(max_tokens=10)
    messages: list[Message] = [{"role": "user", "content": "What is the capital of France? One word."}]
    first = engine.submit(messages=messages, params=params).result(PATIENCE_S)
    assert "Paris" in first.text
    messages += [answer_of(first), {"role": "user", "content": "And of Italy?"}]
    warm = engine.submit(messages=messages, params=params).result(PATIENCE_S)
    assert warm.stats.cached_tokens == (len(first.prompt_token_ids) + len(first.token_ids)) // 16 * 16 > 16
    engine.command(FlushPrefixCache()).result(PATIENCE_S)
    cold = engine.submit(messages=messages, params=params).result(PATIENCE_S)
    assert cold.stats.cached_tokens == 0
    assert (cold.text, cold.token_ids) == (warm.text, warm.token_ids)
    assert "Rome" in warm.text


# Stop strings


def test_a_stop_string_that_lies_across_tokens_ends_the_answer_where_it_is_complete(smollm2_engine: Engine) -> None:
    engine = smollm2_engine
    assert engine.tokenizer is not None
    asked = "The planets in order are Mercury, Venus, Earth,"
    whole = engine.generate(asked, SamplingParams(max_tokens=12))
    words = [engine.tokenizer.decode([token_id]) for token_id in whole.token_ids]
    assert "".join(words) == whole.text
    stop = words[3][-2:] + words[4] + words[5][:2]  # begins inside one token, holds one, and ends inside another
    assert len(stop) > len(words[4]) + 1 and whole.text.count(stop) == 1
    handle = engine.submit(asked, params=SamplingParams(max_tokens=12, stop=(stop,)))
    streamed = "".join(handle)
    done = handle.result()
    assert streamed == done.text == whole.text[: whole.text.index(stop)]
    assert done.finish_reason == "stop"
    assert done.token_ids == whole.token_ids[:6], "it ended at another token than the one that completes the stop string"
    # One that is only begun when the answer ends is text.
    begun = whole.text[-3:] + " and more"
    assert engine.generate(asked, SamplingParams(max_tokens=12, stop=(begun,))).text == whole.text
    # A stopped answer goes on from the cache: what was computed of it is there.
    after = engine.generate([*done.prompt_token_ids, *done.token_ids], SamplingParams(max_tokens=6))
    assert after.token_ids == whole.token_ids[6:]


# Templates that refuse

STRICT = """{% for message in messages %}{% if message['role'] == 'assistant' and not message['content'].strip() %}\
{{ raise_exception('an assistant turn has no text') }}{% endif %}\
{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_after_a_stopped_answer_a_template_that_refuses_the_history_still_gives_a_prompt_and_a_note(
    start: Start, tiny_chat: TinyChat
) -> None:
    engine = start(tiny_chat(STRICT), num_kv_blocks=128)
    assert engine.tokenizer is not None
    plain = engine.submit(messages=[FIRST], params=SamplingParams(max_tokens=2))
    assert plain.note is None
    plain.cancel()
    # The answer was stopped before its first token; a person asks on, twice.
    stopped = engine.submit(messages=[FIRST], params=SamplingParams(max_tokens=200, ignore_eos=True))
    stopped.cancel()
    assert stopped.result(PATIENCE_S).finish_reason == "cancelled"
    history = [FIRST, {"role": "assistant", "content": ""}, SECOND]
    handle = engine.submit(messages=history, params=SamplingParams(max_tokens=4, ignore_eos=True))
    assert handle.note is not None
    assert "refused this conversation" in handle.note and "an assistant turn has no text" in handle.note
    assert "joined" in handle.note
    prompt = engine.tokenizer.decode(handle.prompt_token_ids, skip_special=False)
    assert FIRST["content"] in prompt and SECOND["content"] in prompt
    assert prompt.startswith("<|im_start|>user\n") and prompt.endswith("<|im_start|>assistant\n")
    assert prompt.count("<|im_start|>") == 2
    assert len(handle.result(PATIENCE_S).token_ids) == 4


def test_a_template_without_a_system_role_gets_the_system_text_before_the_first_message_and_a_note(
    start: Start, tiny_chat: TinyChat
) -> None:
    engine = start(tiny_chat(STRICT), num_kv_blocks=128)
    assert engine.tokenizer is not None
    handle = engine.submit(messages=[SYSTEM, FIRST], params=SamplingParams(max_tokens=2, ignore_eos=True))
    assert handle.note is not None
    assert "System role not supported" in handle.note and "system text put before the first" in handle.note
    prompt = engine.tokenizer.decode(handle.prompt_token_ids, skip_special=False)
    assert prompt.index(SYSTEM["content"]) < prompt.index(FIRST["content"])
    assert len(handle.result(PATIENCE_S).token_ids) == 2


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ raise_exception('never') }}", "never"),
        ("{% for message in messages %}{{ message.nothing.there }}{% endfor %}", "nothing"),
        ("{{ 'x' * 3000000 }}", "1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for", ""),
    ],
)
def test_a_template_that_can_t_be_used_at_all_gives_plain_lines_and_a_note(
    start: Start, tiny_chat: TinyChat, template: str, cause: str
) -> None:
    engine = start(tiny_chat(template), num_kv_blocks=128)
    assert engine.tokenizer is not None
    handle = engine.submit(messages=[SYSTEM, FIRST], params=SamplingParams(max_tokens=3, ignore_eos=True))
    assert handle.note is not None
    assert "plain lines" in handle.note and cause in handle.note
    prompt = engine.tokenizer.decode(handle.prompt_token_ids, skip_special=False)
    assert prompt == f"system: {SYSTEM['content']}\nuser: {FIRST['content']}\nassistant:"
    assert len(handle.result(PATIENCE_S).token_ids) == 3
