"""Mixtures of experts beside a loop over tokens, and the balance of their loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from arclight.parallel import initialize
from arclight.text.model.balance import scale_balance_loss, update_expert_bias, weigh_balance_loss
from arclight.text.model.moe import Experts, MoE, MoEConfig

WIDTH = 16


def mixture(**settings: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**{"experts": 8, "top_k": 3, "hidden": 24} | settings), WIDTH, 0.3, 0.3)


def one_by_one(moe: MoE, x_BTD: Tensor) -> Tensor:
    """The same sum, token by token in float64, written from the papers' formulas."""
    config, out = moe.config, []
    w1, w2, w3 = (w.double() for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
    for x in x_BTD.double().flatten(0, 1):
        logits = moe.router.weight.double() @ x
        scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
        choice = scores if moe.router.expert_bias is None else scores + moe.router.expert_bias
        size = config.experts // config.groups
        group_scores = [sum(sorted(group.tolist())[-config.group_best :]) for group in choice.split(size)]
        best = sorted(range(config.groups), key=lambda group: -group_scores[group])[: config.top_groups]
        allowed = [expert for group in best for expert in range(group * size, (group + 1) * size)]
        chosen = sorted(allowed, key=lambda expert: -choice[expert])[: config.top_k]
        total = sum(scores[expert] for expert in chosen) if config.route_norm else 1.0
        y = torch.zeros_like(x)
        for expert in chosen:
            weight = scores[expert] / total * config.route_scale
            z, after = (x * weight, 1.0) if config.score_before else (x, weight)
            y = y + after * (w2[expert] @ (F.silu(w1[expert] @ z) * (w3[expert] @ z)))
        if moe.shared is not None:
            a, b, c = (layer.weight.double() for layer in (moe.shared.w1, moe.shared.w2, moe.shared.w3))
            y = y + b @ (F.silu(a @ x) * (c @ x))
        out.append(y)
    return torch.stack(out).view_as(x_BTD)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"score": "sigmoid", "route_norm": True, "route_scale": 2.5, "shared": 2, "groups": 4, "top_groups": 2, "bias_rate": 0.0},
        {"groups": 2, "group_best": 1, "route_scale": 16.0},
        {"score": "sigmoid", "top_k": 1, "score_before": True, "shared": 1},
        {"top_k": 8, "experts": 8},
    ],
    ids=["softmax", "deepseek-v3", "deepseek-v2", "llama4", "all"],
)  # fmt: skip
@pytest.mark.parametrize(("alignment", "dtype"), [(1, torch.float32), (16, torch.float32), (1, torch.float64)])
def test_outputs_and_gradients_are_those_of_a_loop(
    settings: dict[str, Any], alignment: int, dtype: torch.dtype
) -> None:
    moe = mixture(**settings).to(dtype)
    moe.experts.alignment = alignment
    if moe.router.expert_bias is not None:
        moe.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    x = torch.randn(2, 7, WIDTH, dtype=dtype, requires_grad=True)
    inputs = [x, *moe.parameters()]
    expected = one_by_one(moe, x)
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(moe(x), expected.to(dtype), **bounds)
    shared = 0 if moe.shared is None else moe.shared(x)
    torch.testing.assert_close(moe.dense(x) + shared, expected.to(dtype), **bounds)
    expected_grads = torch.autograd.grad(expected.square().mean(), inputs)
    grads = torch.autograd.grad(moe(x).square().mean(), inputs)
    bounds = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else bounds
    torch.testing.assert_close(grads, expected_grads, **bounds)


@pytest.mark.parametrize("settings", [{}, {"score": "sigmoid", "top_k": 1, "score_before": True, "bias_rate": 0.0}])
def test_captured_graphs_hold_the_dense_reference(settings: dict[str, Any]) -> None:
    moe = mixture(**settings).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=1)
    graph = torch.export.export(moe, (torch.randn(2, 5, WIDTH),), dynamic_shapes=({1: tokens},)).module()
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not any("grouped_mm" in target or "sort" in target for target in targets)
    for length in (1, 9):
        x = torch.randn(2, length, WIDTH)
        torch.testing.assert_close(graph(x), moe(x), rtol=1e-5, atol=1e-5)


def test_experts_without_tokens_and_layers_without_tokens() -> None:
    experts = Experts(MoEConfig(experts=4, top_k=1, hidden=8), WIDTH, 0.3, 0.3)
    x = torch.randn(5, WIDTH, requires_grad=True)
    y = experts(x, torch.tensor([0, 5, 0, 0]))
    y.square().sum().backward()
    w1, w2, w3 = experts.w1[1], experts.w2[1], experts.w3[1]
    torch.testing.assert_close(y, (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
    assert experts.w1.grad is not None
    assert experts.w1.grad.flatten(1).any(1).tolist() == [False, True, False, False]
    nothing = experts(torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(4, dtype=torch.long))
    experts.zero_grad()
    nothing.sum().backward()
    assert nothing.shape == (0, WIDTH)
    assert experts.w2.grad is not None
    assert not experts.w2.grad.any()


def test_scores_are_float32_under_autocast_and_the_bias_in_a_bfloat16_model() -> None:
    moe, x = mixture(bias_rate=1e-3, score="sigmoid"), torch.randn(1, 64, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, chosen, _ = moe.router(x)
        assert moe(x).dtype == torch.bfloat16
    plain, plain_chosen, _ = moe.router(x)
    assert torch.equal(weights, plain)
    assert torch.equal(chosen, plain_chosen)
    assert moe.router.expert_bias is not None
    moe.router.expert_bias.fill_(1 + 1e-3)
    moe.bfloat16()
    assert moe.router.weight.dtype == torch.bfloat16
    assert moe.router.expert_bias.dtype == torch.float32
    assert moe.router.expert_bias[0] == torch.tensor(1 + 1e-3)


def test_a_model_from_the_meta_device_begins_without_bias() -> None:
    with torch.device("meta"):
        moe = MoE(MoEConfig(experts=4, top_k=1, hidden=8, bias_rate=1e-3), WIDTH, 0.3, 0.3)
    moe.to_empty(device="cpu")
    assert moe.router.expert_bias is not None
    moe.router.expert_bias.fill_(float("nan"))
    initialize(moe, seed=0)
    assert moe.router.expert_bias.tolist() == [0.0] * 4
    assert 0.25 < moe.experts.w1.std() < 0.35


def test_recomputed_layers_count_once_and_validation_counts_nothing() -> None:
    moe, x = mixture(bias_rate=1e-3), torch.randn(2, 9, WIDTH, requires_grad=True)
    for reentrant in (False, True):
        for _ in range(2):
            checkpoint(moe, x, use_reentrant=reentrant).sum().backward()
        assert moe.router.counts.sum() == 2 * 18 * 3
        moe.router.counts.zero_()
    with torch.no_grad():
        moe(x)
    moe(x)
    assert not moe.router.counts.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_is_one_graph_and_trains_as_an_uncompiled_one(dtype: torch.dtype) -> None:
    """Also where two passes wait for their backward, in which the loss's own gradient decides how balance counts."""
    found = []
    for compiled in (False, True):
        moe = mixture(bias_rate=1e-3, balance_loss=0.1).to(dtype)
        layer = torch.compile(moe, backend="aot_eager", fullgraph=True) if compiled else moe
        x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
        for _ in range(2):
            losses = [weigh_balance_loss(layer(part).square().sum(), moe) for part in (x, 2 * x)]
            for loss, scale in zip(losses, (2.0, 5.0), strict=True):
                (loss * scale).backward()
        found.append(([p.grad for p in moe.parameters()], moe.router.counts.tolist()))
    (plain, counts), (gradients, others) = found
    assert sum(counts) == 4 * 18 * 3
    assert counts == others
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients, strict=True))


def test_the_bias_balances_a_skewed_router() -> None:
    """The choice is skewed to some experts by more than twice the mean; steps of the bias alone bring it within a tenth."""
    torch.manual_seed(0)
    moe = MoE(MoEConfig(experts=16, top_k=2, hidden=8, score="sigmoid", bias_rate=5e-3), WIDTH, 0.3, 0.3)
    with torch.no_grad():
        moe.router.weight += torch.linspace(-0.15, 0.15, 16)[:, None]
    x = torch.randn(1, 2048, WIDTH) + 0.3
    history = []
    for _ in range(150):
        moe(x).sum().backward()
        history.append(update_expert_bias(moe))
    assert history[0]["max_violation"] > 1
    assert history[-1]["max_violation"] < 0.1
    assert history[0]["entropy"] < 0.95
    assert 0.999 < history[-1]["entropy"] <= 1
    assert moe.router.expert_bias is not None
    assert abs(moe.router.expert_bias.mean()) < 1e-6
    assert moe.router.expert_bias[0] > moe.router.expert_bias[-1]


def test_the_balance_loss_is_the_papers() -> None:
    weight, x = 0.01, torch.randn(3, 11, WIDTH)
    moe = mixture(score="sigmoid", balance_loss=weight)
    scores = (x @ moe.router.weight.T).sigmoid()
    loss = torch.zeros(())
    for sequence in scores:
        normalised = sequence / sequence.sum(-1, keepdim=True)
        chosen = F.one_hot(sequence.topk(3).indices, 8).sum(1)
        frequency = 8 / (3 * 11) * chosen.sum(0)
        loss = loss + weight * (frequency * normalised.mean(0)).sum() / 3
    (expected,) = torch.autograd.grad(loss, moe.router.weight)
    weights, _, _ = moe.router(x)
    (3 * weigh_balance_loss((weights * 0).sum(), moe)).backward()
    torch.testing.assert_close(moe.router.weight.grad, 3 * expected, rtol=1e-4, atol=1e-7)
    moe.zero_grad()
    scale_balance_loss(moe, 2.0, per_token=True)
    weights, _, _ = moe.router(x)
    (weights * 0).sum().backward()
    torch.testing.assert_close(moe.router.weight.grad, 2 * 33 * expected, rtol=1e-4, atol=1e-6)


def test_forced_balance_gives_every_expert_the_same() -> None:
    moe = mixture(force_balance=True)
    _, chosen, counts = moe.router(torch.randn(1, 16, WIDTH))
    assert counts.tolist() == [6] * 8
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="8 experts do not divide into 3 groups"):
        MoEConfig(experts=8, top_k=1, hidden=4, groups=3)
    with pytest.raises(ValueError, match="top_k = 3 must lie between 1 and the 2 experts"):
        MoEConfig(experts=8, top_k=3, hidden=4, groups=4, top_groups=1)
