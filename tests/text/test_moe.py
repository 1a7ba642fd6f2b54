"""Mixtures of experts beside a loop over tokens, and the balance of their loads."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.text.test_language_model import fit
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from arclight.parallel import initialize
from arclight.parallel.layers import expert_parallel
from arclight.text.model import balance
from arclight.text.model.balance import count_tokens, scale_balance_loss, update_expert_bias, weigh_balance_loss
from arclight.text.model.moe import Experts, MoE, MoEConfig
from arclight.text.settings import LanguageTask

WIDTH = 16


def mixture(**settings: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**{"experts": 8, "top_k": 3, "hidden": 24} | settings), WIDTH, 0.3, 0.3)


def one_by_one(moe: MoE, x_BTD: Tensor) -> Tensor:
    """The same sum, token by token in float64, written from the papers' formulas."""
    config, out = moe.config, []
    w1, w2 = moe.experts.w1.double(), moe.experts.w2.double()
    act = {"swiglu": F.silu, "gelu": F.gelu, "relu": F.relu}[config.activation]
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
            gate = 1.0 if moe.experts.w3 is None else moe.experts.w3[expert].double() @ z
            y = y + after * (w2[expert] @ (act(w1[expert] @ z) * gate))
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
        {"score": "sigmoid", "activation": "relu"},
        {"score": "sigmoid", "activation": "gelu", "score_before": True},
    ],
    ids=["softmax", "deepseek-v3", "deepseek-v2", "llama4", "all", "sigma-moe", "gelu"],
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"score": "sigmoid", "top_k": 1, "score_before": True, "bias_rate": 0.0},
        {"score": "sigmoid", "activation": "relu", "entropy_loss": 0.01, "expert_dropout": 0.5},
    ],
)
def test_captured_graphs_hold_the_dense_reference(settings: dict[str, Any]) -> None:
    moe = mixture(**settings).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=1)
    graph = torch.export.export(moe, (torch.randn(2, 5, WIDTH),), dynamic_shapes=({1: tokens},)).module()
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not any("grouped_mm" in target or "sort" in target for target in targets)
    for length in (1, 9):
        x = torch.randn(2, length, WIDTH)
        torch.testing.assert_close(graph(x), moe(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "hidden"), [(13, 24), (16, 9), (7, 5)])
def test_widths_that_no_kernel_takes_are_computed(width: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(experts=4, top_k=2, hidden=hidden, activation="gelu"), width, 0.3, 0.3).to(dtype)
    x = torch.randn(2, 7, width, dtype=dtype, requires_grad=True)
    inputs = [x, moe.experts.w1, moe.experts.w2]
    found, expected = moe(x), moe.dense(x)
    bounds = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(found, expected, **bounds)
    grads, wanted = (torch.autograd.grad(y.square().mean(), inputs) for y in (found, expected))
    torch.testing.assert_close(grads, wanted, **bounds)


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


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
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


def test_the_entropy_of_the_mean_choice_is_in_the_loss() -> None:
    """Beside the derivative written out in float64: of g sum p log p, with p the mean over tokens of softmax(W x)."""
    weight, x = 0.05, torch.randn(3, 11, WIDTH)
    moe = mixture(score="sigmoid", activation="relu", entropy_loss=weight)
    w, rows = moe.router.weight.detach().double().numpy(), x.double().flatten(0, 1).numpy()
    logits = rows @ w.T
    chosen = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    d_mean = weight * (np.log(chosen.mean(0)) + 1) / len(rows)
    d_logits = chosen * (d_mean - (chosen * d_mean).sum(1, keepdims=True))
    weights, _, _ = moe.router(x)
    (3 * weigh_balance_loss((weights * 0).sum(), moe)).backward()
    assert moe.router.weight.grad is not None
    np.testing.assert_allclose(moe.router.weight.grad.double().numpy(), 3 * d_logits.T @ rows, rtol=1e-4, atol=1e-8)
    moe.zero_grad()
    with torch.no_grad():  # validation has no loss of its own
        moe.router(x)
    assert moe.router.weight.grad is None


def router_gradient(moe: MoE, x: Tensor) -> Tensor:
    moe.zero_grad()
    weights, _, _ = moe.router(x)
    weigh_balance_loss((weights * 0).sum(), moe).backward()
    assert moe.router.weight.grad is not None
    return moe.router.weight.grad.clone()


def test_tokens_that_do_not_count_are_in_no_loss_and_no_load() -> None:
    x, valid = torch.randn(2, 6, WIDTH), torch.tensor([6, 2])[:, None] > torch.arange(6)
    moe = mixture(entropy_loss=0.5)
    expected = router_gradient(moe, x[valid][None])
    counts = moe.router.counts.clone()
    moe.router.counts.zero_()
    count_tokens(moe, valid)
    torch.testing.assert_close(router_gradient(moe, x), expected)
    assert torch.equal(moe.router.counts, counts)
    assert counts.sum() == 8 * 3
    with pytest.raises(ValueError, match=r"valid has \(2, 6\) tokens, and the pass 10"):
        router_gradient(moe, x[:, :5])

    moe = mixture(balance_loss=0.5)
    expected = (router_gradient(moe, x[:1]) + router_gradient(moe, x[1:, :2])) / 2
    count_tokens(moe, valid)
    torch.testing.assert_close(router_gradient(moe, x), expected)
    count_tokens(moe, None)
    assert not torch.equal(router_gradient(moe, x), expected)


def test_the_mean_choice_of_ranks_weighs_each_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has three times the tokens of this one: the mean is that over all tokens."""
    ours, theirs = torch.rand(2, 4), torch.rand(2, 4)
    sent = torch.cat(((3 * theirs).flatten(), torch.tensor([3.0])))
    monkeypatch.setattr(expert_parallel, "all_reduce", lambda own, kind, group: own + sent)
    monkeypatch.setattr(expert_parallel, "wait_tensor", lambda done: done)
    groups = expert_parallel.TokenGroups(others=object())  # type: ignore[arg-type]
    torch.testing.assert_close(groups.mean(ours, torch.tensor(1)), (ours + 3 * theirs) / 4)
    assert expert_parallel.TokenGroups().mean(ours, torch.tensor(5)) is ours


def test_the_mean_choice_is_that_of_all_processes_of_a_strategy_without_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of strategy="ddp", which places no experts."""
    everyone, asked = object(), list[object]()
    monkeypatch.setattr(balance, "balance_group", lambda strategy: everyone)
    monkeypatch.setattr(expert_parallel, "all_reduce", lambda own, kind, group: asked.append(group) or own)
    monkeypatch.setattr(expert_parallel, "wait_tensor", lambda done: done)
    sizes: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 2, "moe": {"hidden": 16, "entropy_loss": 0.01}}
    task = LanguageTask(model="sigma-moe-debug", sampling=None, overrides=sizes)
    _, model = fit(tmp_path, steps=1, batch_size=2, settings=task, val_check_interval=None)
    assert asked
    assert set(asked) == {everyone}
    assert all(router.groups.others is everyone for router in balance.loss_routers(copy.deepcopy(model.model)))
    monkeypatch.undo()
    balance.share_tokens(model.model, SimpleNamespace(world_size=1))
    assert all(router.groups.others is None for router in balance.loss_routers(model.model))


def test_the_loss_of_the_mean_choice_spreads_it() -> None:
    moe = mixture(score="sigmoid", top_k=1, entropy_loss=1.0)
    x = torch.randn(1, 256, WIDTH, generator=torch.Generator().manual_seed(1)) + 3

    def entropy() -> float:
        mean = (x @ moe.router.weight.T).softmax(-1).mean((0, 1))
        return float(torch.special.entr(mean).sum().detach())

    before, optimizer = entropy(), torch.optim.SGD(moe.router.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        (moe.router(x)[0] * 0).sum().backward()
        optimizer.step()
    assert before < 1.3 < 2 < entropy() <= math.log(8)


def test_dropped_experts_are_not_chosen_in_training_and_keep_their_weights() -> None:
    moe, x = mixture(score="sigmoid", expert_dropout=0.4), torch.randn(1, 2000, WIDTH)
    _, plain, _ = moe.eval().router(x)
    assert torch.equal(moe.router(x)[1], plain)
    weights, chosen, _ = moe.train().router(x)
    scores = (x[0] @ moe.router.weight.T).sigmoid()
    torch.testing.assert_close(weights, scores.gather(1, chosen))
    best = (chosen == plain[:, :1]).any(1).float().mean()  # of each token's best expert: as often as it is not dropped
    assert 0.55 < best < 0.65
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_dropped_experts_come_before_those_of_closed_groups() -> None:
    moe, x = mixture(score="sigmoid", groups=4, top_groups=2, expert_dropout=0.6), torch.randn(1, 2000, WIDTH)
    _, chosen, _ = moe.train().router(x)
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert all(len({expert // 2 for expert in row}) <= 2 for row in chosen.tolist())


def test_a_recomputed_layer_drops_the_same_experts() -> None:
    moe, x = mixture(score="sigmoid", expert_dropout=0.5, bias_rate=0.0), torch.randn(2, 9, WIDTH, requires_grad=True)
    seen: list[Tensor] = []
    moe.router.register_forward_hook(lambda _, __, out: seen.append(out[1]))
    checkpoint(moe, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


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
    with pytest.raises(ValueError, match=r"moe.top_groups = 3 is more than the 2 groups"):
        MoEConfig(experts=8, top_k=3, hidden=4, groups=2, top_groups=3)
    with pytest.raises(ValueError, match="top_k = 9 must lie between 1 and the 8 experts"):
        MoEConfig(experts=8, top_k=9, hidden=4)
    with pytest.raises(ValueError, match=r"moe.activation = 'silu' is not known; choose swiglu, gelu, relu"):
        mixture(activation="silu")
    for name, value, needed in (
        ("experts", 0, ">= 1"), ("expert_dropout", 1.0, r"in \[0, 1\)"), ("entropy_loss", float("nan"), ">= 0"),
        ("top_k", 0, ">= 1"), ("top_groups", 0, ">= 1"), ("group_best", 0, ">= 1"), ("shared", -1, ">= 0"), ("bias_rate", -1e-3, ">= 0"),
        ("bias_rate", float("nan"), ">= 0"), ("route_scale", float("nan"), "> 0"), ("route_scale", -1.0, "> 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"moe.{name}: need .*{needed}"):
            mixture(**{name: value})
