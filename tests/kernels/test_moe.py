"""The mixture of experts: eager against the reference and against transformers' own blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from engine.layers.linear import Linear
from engine.layers.mlp import GatedMlp
from engine.layers.moe import SharedExpert, SparseMoe
from kernels.moe import eager, reference

EPS = torch.finfo(torch.float32).eps
HIDDEN, INTERMEDIATE, EXPERTS = 32, 16, 8
# Sums of at most 32 products, three GEMMs deep: measured 4 eps of the largest output, and 1e5 times that for a wrong expert.
TOLERANCE = 32 * EPS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are small: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def weights() -> tuple[Tensor, Tensor, Tensor]:
    """(router, gate_up, down), large enough that experts differ and probabilities spread."""
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 0.3
    return torch.randn(EXPERTS, HIDDEN) * 0.3, gate_up, torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) * 0.3


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("norm_topk", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_eager_equals_the_reference(
    weights: tuple[Tensor, Tensor, Tensor], count: int, top_k: int, norm_topk: bool, activation: str
) -> None:
    x = rows(count)
    assert_close(eager.moe(x, *weights, top_k, norm_topk, activation), reference.moe(x, *weights, top_k, norm_topk, activation))


@pytest.mark.parametrize("norm_topk", [False, True])
def test_the_layer_equals_transformers(norm_topk: bool) -> None:
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=norm_topk
    )
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = SparseMoe(block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj, 2, norm_topk, "silu")
    x = rows(33)
    with torch.inference_mode():
        assert_close(layer(x), block(x[None])[0])


def test_the_layer_with_a_shared_expert_equals_transformers() -> None:
    torch.manual_seed(3)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        shared_expert_intermediate_size=48,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    block = Qwen3NextSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mlp = block.shared_expert
    shared = SharedExpert(
        GatedMlp(Linear(mlp.gate_proj.weight), Linear(mlp.up_proj.weight), Linear(mlp.down_proj.weight), "silu"),
        Linear(block.shared_expert_gate.weight),
    )
    layer = SparseMoe(block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj, 2, True, "silu", shared)
    x = rows(33)
    with torch.inference_mode():
        theirs = block(x[None])[0]
        assert_close(layer(x), theirs)
        layer.shared = None
        assert float((layer(x) - theirs).abs().max()) > 0.01, "the shared expert changed nothing"


def test_experts_that_no_row_chose_are_not_read(weights: tuple[Tensor, Tensor, Tensor]) -> None:
    router, gate_up, down = weights
    x = rows(4)
    chosen, _ = eager.route(x, router, 1, False)
    idle = [expert for expert in range(EXPERTS) if expert not in chosen]
    assert idle
    expected = eager.moe(x, router, gate_up, down, 1, False)
    gate_up[idle] = float("nan")
    assert torch.equal(eager.moe(x, router, gate_up, down, 1, False), expected)


def test_weights_are_those_of_the_softmax_over_all_experts_or_sum_to_one(weights: tuple[Tensor, Tensor, Tensor]) -> None:
    x = rows(20)
    probabilities = (x @ weights[0].T).softmax(-1)
    experts, plain = eager.route(x, weights[0], 3, False)
    same, normed = eager.route(x, weights[0], 3, True)
    assert torch.equal(experts, same)
    assert torch.equal(plain, probabilities.gather(1, experts))
    torch.testing.assert_close(normed.sum(-1), torch.ones(20))
    torch.testing.assert_close(normed, plain / plain.sum(-1, keepdim=True))


def test_a_row_is_the_same_whatever_else_is_in_the_batch_but_for_the_rounding_of_gemms(
    weights: tuple[Tensor, Tensor, Tensor],
) -> None:
    x = rows(1)
    alone = eager.moe(x, *weights, 3, True)
    for count in (1, 2, 7, 40):
        others = rows(count, seed=count)
        first, last = eager.moe(torch.cat((x, others)), *weights, 3, True), eager.moe(torch.cat((others, x)), *weights, 3, True)
        assert_close(first[:1], alone)
        assert_close(last[-1:], alone)
    batch = rows(12)
    assert torch.equal(eager.moe(batch, *weights, 3, True), eager.moe(batch, *weights, 3, True))


def test_bfloat16_is_no_further_off_than_transformers_bfloat16() -> None:
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True
    )
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    block = block.bfloat16()
    parameters = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    x = rows(64).bfloat16()
    with torch.inference_mode():
        ours, theirs = SparseMoe(*parameters, 2, True, "silu")(x), block(x[None])[0]
        # Experts chosen by logits rounded to bf16, as both do; all that follows in fp32.
        experts, weights = eager.route(x, parameters[0], 2, True)
        exact = eager.run_experts(x.float(), experts, weights, parameters[1].float(), parameters[2].float())
    assert ours.dtype == torch.bfloat16
    assert float((ours - exact).abs().max()) <= 1.5 * float((theirs - exact).abs().max())
    assert float((ours - exact).abs().max()) <= 4 * 2**-8 * float(exact.abs().max())


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu(weights: tuple[Tensor, Tensor, Tensor]) -> None:
    x = rows(33)
    ours = [eager.moe(x.cuda(), *(y.cuda() for y in weights), 3, True) for _ in range(2)]
    assert_close(ours[0].cpu(), reference.moe(x, *weights, 3, True))
    assert torch.equal(ours[0], ours[1]), "the order of additions isn't fixed"
