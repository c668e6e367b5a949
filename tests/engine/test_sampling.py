"""Sampling parameters: refused by name when they can't be, and each shown to change what it is there to change."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from step_spy import PATIENCE_S
from tiny_engine import greedy, prompt_of

from engine import Engine, SamplingParams
from engine.errors import RequestError
from engine.sampling import MAX_SEED

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [NAN, INF, -INF, "1", None, True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (*NO_NUMBERS, -0.1, 101)],
        *[("top_p", value) for value in (*NO_NUMBERS, -0.1, 0, 0.0, 1.1)],
        *[("min_p", value) for value in (*NO_NUMBERS, -0.1, 1.1)],
        *[("repetition_penalty", value) for value in (*NO_NUMBERS, -1, 0, 0.0, 101)],
        *[("frequency_penalty", value) for value in (*NO_NUMBERS, -101, 101)],
        *[("presence_penalty", value) for value in (*NO_NUMBERS, -101, 101)],
        *[("max_tokens", value) for value in (NAN, "5", None, True, 1.0, 0, -1, 2**31)],
        *[("min_tokens", value) for value in (NAN, "5", None, True, 1.0, -1, 257)],
        *[("top_k", value) for value in (NAN, "5", None, True, 1.0, -1, 2**31)],
        *[("seed", value) for value in (NAN, "5", True, 1.0, -1, MAX_SEED + 1)],
        *[("logprobs", value) for value in (NAN, "5", True, 1.0, -1, 101)],
        *[("stop", value) for value in ("", ("a", ""), (5,), (None,), ("a",) * 65, 5, None)],
        *[("stop_token_ids", value) for value in ((-1,), (1.0,), ("5",), (True,), (None,), 5, None)],
        *[("logit_bias", value) for value in ({-1: 1.0}, {"5": 1.0}, {5: NAN}, {5: INF}, {5: "1"}, {5: 1e9}, 5, None, [5])],
    ],
)
def test_a_value_that_can_t_be_is_refused_by_the_field_s_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]  # what a script may pass


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 0.0, 1, 100.0)),
        ("top_p", (1, 1.0, 1e-9)),
        ("min_p", (0, 1.0)),
        ("seed", (None, 0, MAX_SEED)),
        ("max_tokens", (1, 2**31 - 1)),
        ("logprobs", (None, 0, 100)),
        ("stop", ((), ["a", "b"])),
        ("stop_token_ids", ([1, 2], ())),
        ("logit_bias", ({}, {0: -1e6, 1: 1})),
    ],
)
def test_the_values_at_the_edges_are_taken(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        taken = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]  # one of several types
        assert taken == (tuple(value) if isinstance(value, list) else value)


def test_params_are_frozen_and_don_t_change_with_what_they_were_made_of() -> None:
    bias, stops = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)  # type: ignore[arg-type]  # a list is taken too
    bias[6], stops[0] = 2.0, "b"
    assert dict(params.logit_bias) == {5: 1.0}
    assert params.stop == ("a",)
    assert SamplingParams(stop="end").stop == ("end",), "a string is one stop string, not its letters"
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]  # that is what is tested


# Each changes the output


def ids_of(engine: Engine, prompt: list[int], **params: object) -> tuple[int, ...]:
    return engine.generate(prompt, SamplingParams(**{"max_tokens": 24, **params})).token_ids  # type: ignore[arg-type]  # of many types


def test_temperature_and_seed_change_the_draw(shared_engine: Engine) -> None:
    prompt = prompt_of(20)
    plain = ids_of(shared_engine, prompt)
    warm = [ids_of(shared_engine, prompt, temperature=1.0, seed=seed) for seed in range(4)]
    assert len({plain, *warm}) == 5
    assert ids_of(shared_engine, prompt, temperature=1.0, seed=2) == warm[2]
    assert ids_of(shared_engine, prompt, temperature=1e-4, seed=2) == plain
    # Without a seed each request draws its own.
    assert ids_of(shared_engine, prompt, temperature=1.0) != ids_of(shared_engine, prompt, temperature=1.0)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda narrow: next(iter(narrow)))
def test_a_filter_narrowed_to_one_id_is_greedy_at_any_temperature(shared_engine: Engine, narrow: dict[str, float]) -> None:
    prompt = prompt_of(20)
    wide = ids_of(shared_engine, prompt, temperature=5.0, seed=3)
    assert ids_of(shared_engine, prompt, temperature=5.0, seed=3, **narrow) == ids_of(shared_engine, prompt) != wide


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.05}, {"min_p": 0.7}], ids=lambda filters: next(iter(filters)))
def test_a_filter_keeps_every_id_within_the_set_it_leaves(shared_engine: Engine, filters: dict[str, float]) -> None:
    prompt = prompt_of(20)
    done = shared_engine.generate(prompt, SamplingParams(max_tokens=40, temperature=2.0, seed=5, logprobs=100, **filters))  # type: ignore[arg-type]  # as above
    assert done.logprobs is not None
    ranks = []
    for entry in done.logprobs:
        # The model's own distribution, at temperature 2.
        weights = {token_id: math.exp(value / 2.0) for token_id, value in entry.top}
        ranks.append([token_id for token_id, _ in entry.top].index(entry.token_id))
        if "top_k" in filters:
            assert ranks[-1] < 3
        elif "min_p" in filters:
            assert weights[entry.token_id] >= 0.7 * max(weights.values()) * (1 - 1e-5)
    assert 0 < max(ranks) < 60, "only the best ids were ever drawn, or the filter did nothing"


def test_a_logit_bias_forces_and_forbids_ids(shared_engine: Engine) -> None:
    prompt = prompt_of(20)
    plain = ids_of(shared_engine, prompt)
    assert ids_of(shared_engine, prompt, logit_bias={77: 1000.0}) == (77,) * 24
    without = ids_of(shared_engine, prompt, logit_bias={plain[0]: -1000.0})
    assert plain[0] not in without
    assert without[0] != plain[0]


# Logits of the tiny model lie within ±3: biases 20 apart decide everything by themselves.
LADDER = {10: 100.0, 11: 80.0, 12: 60.0, 13: 40.0}


def test_a_frequency_penalty_grows_with_every_occurrence(shared_engine: Engine) -> None:
    prompt = prompt_of(20)
    assert ids_of(shared_engine, prompt, logit_bias=LADDER) == (10,) * 24
    found = ids_of(shared_engine, prompt, logit_bias=LADDER, frequency_penalty=30.0, max_tokens=5)
    assert found == (10, 11, 10, 12, 11)  # 100 80 60 40 → 70 80 60 40 → 70 50 60 40 → 40 50 60 40 → 40 50 30 40
    [clinging] = set(ids_of(shared_engine, prompt, frequency_penalty=-20.0))
    assert clinging == ids_of(shared_engine, prompt, max_tokens=1)[0]


def test_a_presence_penalty_counts_once(shared_engine: Engine) -> None:
    prompt = prompt_of(20)
    found = ids_of(shared_engine, prompt, logit_bias=LADDER, presence_penalty=30.0, max_tokens=5)
    assert found == (10, 11, 10, 10, 10)  # 100 80 60 40 → 70 80 60 40 → 70 50 60 40, and so it stays
    # The prompt's own ids don't count for it: they are all still free.
    ladder_in_prompt = [*prompt, 10, 11, 12, 13]
    assert ids_of(shared_engine, ladder_in_prompt, logit_bias=LADDER, presence_penalty=100.0, max_tokens=4) == (10, 11, 12, 13)


def test_a_repetition_penalty_counts_prompt_and_answer(shared_engine: Engine) -> None:
    prompt = prompt_of(20)
    plain = ids_of(shared_engine, prompt, max_tokens=60)
    assert len(set(plain)) < 60, "the model doesn't repeat itself: nothing would be tested"
    penalised = ids_of(shared_engine, prompt, max_tokens=60, repetition_penalty=100.0)
    assert len(set(penalised)) == 60
    assert not set(penalised) & set(prompt)
    # With the answer's beginning in the prompt, the next id is one of the prompt's, and no longer with the penalty.
    longer = [*prompt, *plain[:10]]
    assert ids_of(shared_engine, longer, max_tokens=1)[0] in longer
    assert ids_of(shared_engine, longer, max_tokens=1, repetition_penalty=100.0)[0] not in longer


def test_logprobs_are_the_model_s_own_whatever_else_is_asked(shared_engine: Engine, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = prompt_of(20)
    params = SamplingParams(max_tokens=8, temperature=1.5, top_k=50, seed=6, logprobs=5, presence_penalty=2.0, logit_bias={9: 2.0})
    done = shared_engine.generate(prompt, params)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_llama)(torch.tensor([[*prompt, *done.token_ids]])).logits[0]
    theirs = logits[len(prompt) - 1 : -1].log_softmax(-1)
    assert done.logprobs is not None
    assert len(done.logprobs) == 8
    for i, entry in enumerate(done.logprobs):
        assert entry.token_id == done.token_ids[i]
        assert entry.logprob == pytest.approx(float(theirs[i, entry.token_id]), abs=1e-5)
        best = theirs[i].topk(5)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert shared_engine.generate(prompt, greedy(3)).logprobs is None
    none = shared_engine.generate(prompt, SamplingParams(max_tokens=3, logprobs=0)).logprobs
    assert none is not None
    assert [entry.top for entry in none] == [(), (), ()]


# Rows of one batch


def test_a_seed_gives_the_same_answer_in_any_batch(shared_engine: Engine) -> None:
    prompts = [prompt_of(5 + 3 * i, i) for i in range(8)]
    filters = [{}, {"top_k": 40}, {"min_p": 0.01}, {"top_p": 0.9}]
    params = [SamplingParams(max_tokens=20, temperature=0.5 + i / 4, seed=i, **filters[i % 4]) for i in range(8)]  # type: ignore[arg-type]  # as above
    alone = [shared_engine.generate(prompt, each).token_ids for prompt, each in zip(prompts, params, strict=True)]
    together = [shared_engine.submit(prompt, params=each) for prompt, each in zip(prompts, params, strict=True)]
    assert [handle.result(PATIENCE_S).token_ids for handle in together] == alone
    others = [shared_engine.submit(prompt_of(30, 50 + i), params=SamplingParams(max_tokens=30, temperature=1.0)) for i in range(4)]
    again = [shared_engine.submit(prompts[i], params=params[i]) for i in (6, 2)]
    assert [handle.result(PATIENCE_S).token_ids for handle in again] == [alone[6], alone[2]]
    for handle in others:
        handle.result(PATIENCE_S)


def test_rows_with_all_kinds_of_params_don_t_touch_each_other(shared_engine: Engine) -> None:
    prompt = prompt_of(24, 3)
    kinds = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_p": 0.8, "seed": 2},
        {"frequency_penalty": 3.0, "logit_bias": LADDER},
        {"repetition_penalty": 100.0},
        {"min_tokens": 10, "stop_token_ids": (10,), "logit_bias": LADDER},
        {"logprobs": 3},
        {"logit_bias": {77: 1000.0}},
    ]
    alone = [ids_of(shared_engine, prompt, **kind) for kind in kinds]
    assert len(set(alone)) == 7, "all but the one with logprobs alone should differ"
    handles = [shared_engine.submit(prompt, params=SamplingParams(**{"max_tokens": 24, **kind})) for kind in kinds]  # type: ignore[arg-type]  # of many types
    assert [handle.result(PATIENCE_S).token_ids for handle in handles] == alone
