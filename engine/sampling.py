"""SamplingParams: how one request's tokens are chosen. Pure data; the tensors live in `engine.sampler`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    temperature: 0 is greedy; top_k 0, top_p 1 and min_p 0 switch the filter off (order: temperature,
    top-k, top-p, min-p). seed: the same seed gives the same tokens whatever else is in the batch;
    `None` draws one at submit. stop: strings that end the answer and are cut from it. stop_token_ids: ids that
    end it, as the model's own end tokens do unless `ignore_eos`. Penalties as in the OpenAI API
    (frequency, presence: over the generated tokens) and CTRL, arXiv 1909.05858 (repetition: over prompt and generated).
    logit_bias: id → added to that logit. min_tokens: end tokens are masked until so many were generated.
    logprobs: `None` for none, else how many top alternatives come with each token's own logprob.
    Raises `RequestError` naming the field for anything non-finite or out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}.")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 (1 switches it off), not 0.")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower the first.")
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty must be above 0 (1 switches it off), not 0.")
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, 100)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken.")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, not {text!r}.")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias (token id)", token_id, 0, 2**31 - 1)
            _number(f"logit_bias[{token_id}]", bias, -1e6, 1e6)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` for a token id the model doesn't have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise RequestError(f"{name} names token id {token_id}, but the vocabulary ends at {vocab_size - 1}.")


def _items(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} must hold several values, not be {value!r}.")
    return tuple(value)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}.")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be a finite number from {low:g} to {high:g}, not {value!r}.")
