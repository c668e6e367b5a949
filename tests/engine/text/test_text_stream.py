"""TextStream: the deltas together are the decoded answer, whatever the ids and however they arrive."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import TextStream
from engine.tokenizer import Tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """The deltas of `ids` pushed `sizes` at a time (cycled), finish() last."""
    stream = TextStream(tokenizer, stop)
    deltas, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(ids):
            break
        deltas.append(stream.push(ids[at : at + size]))
        at += size
    return [*deltas, stream.finish()], stream


def cut_at_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` before the stop string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(each) for each in stop if text[:end].endswith(each)]
        if lengths:
            return text[: end - max(lengths)]
    return text


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_deltas_together_are_the_decoded_text(smollm2: Tokenizer, spm: Tokenizer, data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([smollm2, spm]))
    # Byte tokens, and words that end or begin inside a character, are what a stream can get wrong.
    awkward = [n for n in range(600) if b"\xff" in tokenizer.token_bytes(n) or "\ufffd" in tokenizer.token_text(n)]
    token_id = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(awkward))
    ids = data.draw(st.lists(token_id, max_size=40))
    deltas, _ = streamed(tokenizer, ids, data.draw(SIZES))
    assert "".join(deltas) == tokenizer.decode(ids)


@given(st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4), st.text(alphabet="ab\nc", max_size=30), SIZES)
@settings(max_examples=200, deadline=None)
def test_the_first_stop_string_cuts_the_answer(smollm2: Tokenizer, stop: list[str], text: str, sizes: list[int]) -> None:
    ids = smollm2.encode(text)
    deltas, stream = streamed(smollm2, ids, sizes, tuple(stop))
    assert "".join(deltas) == cut_at_first_stop(text, tuple(stop))
    assert stream.stopped == (cut_at_first_stop(text, tuple(stop)) != text or any(text.endswith(each) for each in stop))
    assert stream.push(ids) == stream.finish() == ""


def test_emoji_is_never_split_wherever_the_bytes_are(spm: Tokenizer) -> None:
    byte_id = {spm.token_bytes(n): n for n in range(3, 259)}
    text = "a\U0001f469\u200d\U0001f4bb\u2764\ufe0f字\u00e9!"
    ids = [byte_id[bytes([byte])] for byte in text.encode()]
    for cut in range(len(ids) + 1):
        stream = TextStream(spm)
        parts = [stream.push(ids[:cut]), stream.push(ids[cut:]), stream.finish()]
        assert "".join(parts) == text
        assert "\ufffd" not in parts[0]
    stream = TextStream(spm)
    one_by_one = [stream.push([token_id]) for token_id in ids]
    assert one_by_one.count("") == len(ids) - len(text)  # a character comes with the last of its bytes
    assert stream.finish() == ""


def test_bytes_that_are_no_character_are_shown_as_such(spm: Tokenizer) -> None:
    byte_id = {spm.token_bytes(n): n for n in range(3, 259)}
    for data in (b"\xf0\x9f\x98", b"\xf0\x9f!", b"\xff\xfe", b"\xe5\xe5\x8f\xaf", b"\x80a\xc3", b"\xed\xa0\x80"):
        ids = [byte_id[bytes([byte])] for byte in data]
        for sizes in ([1], [2], [3, 1]):
            deltas, _ = streamed(spm, ids, sizes)
            assert "".join(deltas) == data.decode("utf-8", errors="replace") == spm.decode(ids)


def test_control_tokens_in_an_answer_are_skipped_even_inside_a_character(smollm2: Tokenizer) -> None:
    first, *rest = smollm2.encode("\U0001f9ff")
    assert rest
    ids = [1, first, 0, *rest, 2]
    deltas, _ = streamed(smollm2, ids, [1])
    assert "".join(deltas) == smollm2.decode(ids) == "\U0001f9ff"


def test_only_the_very_first_space_is_dropped(spm: Tokenizer) -> None:
    ids = spm.encode("the and the", add_bos=True)
    assert spm.token_bytes(ids[1]).startswith(b" ")
    for sizes in ([1], [2], [9]):
        deltas, _ = streamed(spm, ids, sizes)
        assert "".join(deltas) == "the and the"


def test_text_that_may_begin_a_stop_string_is_held_back(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2, ("\nUser:",))
    assert stream.push(smollm2.encode("Yes.\nUse")) == "Yes."
    assert not stream.stopped
    assert stream.push(smollm2.encode(" it")) == "\nUse it"  # it wasn't one
    assert stream.push(smollm2.encode(" so\nUser: and more")) == " so"
    assert stream.stopped
    assert stream.push(smollm2.encode("more")) == "" and stream.finish() == ""


def test_what_is_held_back_comes_at_the_end(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2, ("###",))
    assert stream.push(smollm2.encode("a##")) == "a"
    assert stream.finish() == "##"
    assert stream.finish() == ""


def test_two_streams_agree_however_the_ids_are_divided(smollm2: Tokenizer) -> None:
    stop = ("abcd", "bc", "d\n")
    for text in ("xabcdy", "abd\nabc", "ababab", "aabcabcd"):
        ids = smollm2.encode(text)
        one_by_one, first = streamed(smollm2, ids, [1], stop)
        at_once, second = streamed(smollm2, ids, [len(ids)], stop)
        assert "".join(one_by_one) == "".join(at_once)
        assert first.stopped == second.stopped


def test_the_time_per_token_does_not_grow_with_the_answer(smollm2: Tokenizer) -> None:
    ids = (smollm2.encode((Path(__file__).parents[2] / "fixtures/llama_cpp/text_512.txt").read_text()) * 40)[:20_000]
    seconds = []
    for num_tokens in (2_000, 20_000):
        stream = TextStream(smollm2, ("<end of the answer>", "\n\n\n\n"))
        begin = time.perf_counter()
        parts = [stream.push((token_id,)) for token_id in ids[:num_tokens]]
        seconds.append(time.perf_counter() - begin)
        assert "".join([*parts, stream.finish()]) == smollm2.decode(ids[:num_tokens])
    assert seconds[1] < 3.0  # about 0.1 s; decoding the answer anew for each token takes minutes
    assert seconds[1] < 40 * seconds[0] + 0.2


@pytest.mark.parametrize("stop", [("a" * 5000,), tuple("a" * n + "b" for n in range(1, 64))])
def test_long_and_many_stop_strings_stay_cheap(smollm2: Tokenizer, stop: tuple[str, ...]) -> None:
    ids = smollm2.encode("a" * 4990 + "c") * 3
    stream = TextStream(smollm2, stop)
    begin = time.perf_counter()
    text = "".join([stream.push((token_id,)) for token_id in ids]) + stream.finish()
    assert text == smollm2.decode(ids)
    assert time.perf_counter() - begin < 3.0
