"""A batch that can't run is refused before anything is touched: every sequence, the pool, the cache and the arena stay as they
were, to the byte, and the next batch works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_engine import prompt_of, tiny_config

from engine.batch import PlanRow, StepPlan
from engine.device import choose_device
from engine.errors import BatchRefused
from engine.model.base import PrefillSlice
from engine.model.transformer import TransformerModel, load_model
from engine.sequence import Sequence
from engine.weights.checkpoint import open_checkpoint

PROMPT = prompt_of(40)


@dataclass
class Scene:
    """Four sequences on six blocks of four tokens: `a` has computed 5 tokens, `b` 4 and may take one more, `c` none and may
    take four, `d` none and may take 40; three blocks are free. A step takes at most 12 tokens and has 4 rows of logits."""

    model: TransformerModel
    a: Sequence
    b: Sequence
    c: Sequence
    d: Sequence

    def picture(self) -> tuple[object, ...]:
        model = self.model
        seqs = [
            (
                list(seq.token_ids),
                seq.num_computed_tokens,
                seq.num_cached_tokens,
                list(seq.block_table),
                list(seq.block_keys),
                seq.row,
                seq.budget_tokens,
            )
            for seq in (self.a, self.b, self.c, self.d)
        ]
        arrays = [
            tensor.numpy().tobytes() for tensor in (model.kv_cache, model.logits.logits_buffer, model.logits.hidden_after_norm)
        ]
        return seqs, arrays, model.lifecycle.num_free_blocks, model.lifecycle.num_free_rows, model.lifecycle.blocks.view()


@pytest.fixture
def scene(tiny_llama: Path) -> Iterator[Scene]:
    config = tiny_config(tiny_llama, num_kv_blocks=6, block_size=4, max_batch=4, max_batch_tokens=12)
    device = choose_device(config)
    with open_checkpoint(tiny_llama) as checkpoint, load_model(checkpoint, config, device) as model:
        seqs = [model.lifecycle.alloc_sequence_for(budget) for budget in (40, 5, 4, 40)]
        model.forward.prefill(PROMPT[:5], seqs[0])
        model.forward.prefill(PROMPT[:4], seqs[1])
        assert model.lifecycle.num_free_blocks == 3
        yield Scene(model, *seqs)
        model.lifecycle.check()


def piece(tokens: list[int], seq: Sequence, start: int, length: int, last: bool = True) -> PrefillSlice:
    return PrefillSlice(tokens, seq, start, length, last)


REFUSALS: dict[str, tuple[Callable[[Scene], object], str]] = {
    "an empty plan": (lambda s: s.model.forward.run(StepPlan(())), "the batch is empty"),
    "no sequences": (lambda s: s.model.forward.decode_batch([], []), "the batch is empty"),
    "an empty prompt": (lambda s: s.model.forward.prefill([], s.c), "an empty prompt"),
    "more sequences than tokens": (lambda s: s.model.forward.decode_batch([5], [s.a, s.b]), "1 tokens for 2 sequences"),
    "more tokens than a step takes": (
        lambda s: s.model.forward.prefill_chunk(PROMPT, s.a, 5, 13, True),
        "has 13 tokens; --max-batch-tokens is 12",
    ),
    "a row base behind the arena": (
        lambda s: s.model.forward.prefill_batch_chunk_rows([piece(PROMPT, s.a, 5, 3)], None, 4),
        "1 rows of logits from row 4 on don't fit an arena of 4 rows",
    ),
    "the last row over the arena": (
        lambda s: s.model.forward.prefill_batch_chunk_rows([piece(PROMPT, s.a, 5, 3), piece(PROMPT, s.b, 4, 1)], None, 3),
        "2 rows of logits from row 3 on",
    ),
    "a row base below zero": (
        lambda s: s.model.forward.prefill_batch_chunk_rows([piece(PROMPT, s.a, 5, 3)], None, -1),
        "from row -1 on",
    ),
    "a sequence twice": (lambda s: s.model.forward.decode_batch([5, 6], [s.a, s.a]), "appears twice"),
    "a sequence twice whose budget ends between": (
        lambda s: s.model.forward.decode_batch([5, 6], [s.b, s.b]),
        "appears twice",
    ),
    "a sequence that decodes and prefills": (
        lambda s: s.model.forward.mixed_forward([5], [s.a], PROMPT, s.a, 5, 2, True),
        "appears twice",
    ),
    "an id above the vocabulary": (lambda s: s.model.forward.decode_batch([5, 512], [s.b, s.a]), "token id 512 isn't"),
    "an id below zero": (lambda s: s.model.forward.decode(-1, s.a), "token id -1 isn't"),
    "a wrong id in the last of several chunks": (
        lambda s: s.model.forward.mixed_forward_batch([5], [s.b], [piece(PROMPT, s.a, 5, 2), piece([1, 2, 999], s.c, 0, 3)]),
        "token id 999 isn't",
    ),
    "a chunk that starts too late": (
        lambda s: s.model.forward.prefill_chunk(PROMPT, s.a, 6, 2, True),
        "starts at 6, but 5 tokens are computed",
    ),
    "a chunk that starts too early": (
        lambda s: s.model.forward.prefill_chunk(PROMPT, s.a, 0, 2, True),
        "starts at 0, but 5 tokens are computed",
    ),
    "a chunk of nothing": (lambda s: s.model.forward.prefill_chunk(PROMPT, s.a, 5, 0, True), "isn't within the 40"),
    "a chunk beyond its prompt": (lambda s: s.model.forward.prefill_chunk(PROMPT, s.a, 5, 36, True), "5.36 isn't within the 40"),
    "a chunk beyond its budget": (lambda s: s.model.forward.prefill_chunk(PROMPT, s.c, 0, 5, True), "budget of 4 tokens"),
    "too few blocks for all together": (
        lambda s: s.model.forward.mixed_forward_batch([5], [s.b], [piece(PROMPT, s.a, 5, 8), piece(PROMPT, s.c, 0, 3)]),
        "needs 4 more KV blocks and 3 are free; raise --num-kv-blocks",
    ),
    "a plan of a sequence's missing tokens": (
        lambda s: s.model.forward.run(StepPlan((PlanRow(s.a, 1, 1),))),
        "asks for 1 rows of a sequence with 5 tokens",
    ),
    "a plan with more logits than rows": (
        lambda s: s.model.forward.run(StepPlan((PlanRow(s.a, 0, 1),))),
        "asks for 0 rows",
    ),
    "a prompt the blocks don't suffice for, in chunks": (
        lambda s: s.model.forward.prefill_twophase(PROMPT[:17], s.d, 4),
        "needs 5 more KV blocks and 3 are free",
    ),
    "a prompt over its budget, in chunks": (
        lambda s: s.model.forward.prefill_twophase(PROMPT[:6], s.c, 2),
        "budget of 4 tokens",
    ),
    "a prompt with a wrong id in its last chunk": (
        lambda s: s.model.forward.prefill_twophase([5, 6, 7, 512], s.c, 2),
        "token id 512 isn't",
    ),
    "chunks of nothing": (lambda s: s.model.forward.prefill_twophase(PROMPT[:3], s.c, 0), "a chunk of 0 tokens"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_batch_touches_nothing_and_the_next_one_works(scene: Scene, name: str) -> None:
    send, sentence = REFUSALS[name]
    before = scene.picture()
    with pytest.raises(BatchRefused, match=sentence):
        send(scene)
    assert scene.picture() == before
    scene.model.lifecycle.check()
    result = scene.model.forward.mixed_forward([PROMPT[4]], [scene.b], PROMPT, scene.a, 5, 3, True)
    assert result.decode_logits is not None
    assert result.prefill_logits is not None
    # a and b hold the same text: what one says after 5 tokens, the other said before.
    assert torch.isfinite(result.decode_logits).all()
    assert scene.a.num_computed_tokens == 8
    assert scene.b.num_computed_tokens == 5


def test_a_freed_sequence_is_refused(scene: Scene) -> None:
    lifecycle = scene.model.lifecycle
    lifecycle.free_sequence(scene.c)
    before = scene.picture()
    with pytest.raises(BatchRefused, match="was freed"):
        scene.model.forward.prefill(PROMPT[:2], scene.c)
    with pytest.raises(BatchRefused, match="was freed"):
        scene.model.forward.decode_batch([5, 6], [scene.a, scene.c])
    assert scene.picture() == before
    lifecycle.free_sequence(scene.c)  # freeing twice is freeing once
    assert scene.picture() == before


def test_a_sequence_with_ids_of_its_own_is_not_appended_to(scene: Scene) -> None:
    scene.a.append([7, 8])
    before = scene.picture()
    with pytest.raises(BatchRefused, match="tokens that aren't computed yet"):
        scene.model.forward.decode_batch([5, 6], [scene.b, scene.a])
    assert scene.picture() == before
    assert scene.model.forward.run(StepPlan((PlanRow(scene.a, 2, 2),))) is not None


def test_sequences_run_out_where_the_rows_do(scene: Scene) -> None:
    before = scene.picture()
    with pytest.raises(BatchRefused, match=r"all 4 sequence rows are taken; .*--max-batch"):
        scene.model.lifecycle.alloc_sequence()
    assert scene.picture() == before
    scene.model.lifecycle.free_sequence(scene.b)
    assert scene.model.lifecycle.alloc_sequence().row == 1


def test_an_error_in_an_admitted_batch_is_raised_and_not_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.layers.decoder import DecoderLayer

    calls = []

    def failing(layer: DecoderLayer, *_: object) -> torch.Tensor:
        calls.append(layer)
        raise RuntimeError("struck")

    monkeypatch.setattr(DecoderLayer, "__call__", failing)
    with pytest.raises(RuntimeError, match="struck"):
        scene.model.forward.mixed_forward([PROMPT[4]], [scene.b], PROMPT, scene.a, 5, 3, True)
    assert len(calls) == 1
    assert (scene.a.num_computed_tokens, scene.b.num_computed_tokens) == (5, 4), "tokens count as computed that aren't"
    monkeypatch.undo()
    for seq in (scene.a, scene.b, scene.c, scene.d):
        scene.model.lifecycle.free_sequence(seq)
    assert scene.model.lifecycle.num_free_blocks == 6
