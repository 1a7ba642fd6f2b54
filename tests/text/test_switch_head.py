"""Experts of attention beside loops over tokens, heads and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arclight.parallel import initialize
from arclight.text import build_model
from arclight.text.families.deptoe import SwitchHead
from arclight.text.families.mpt import Attention
from arclight.text.model.balance import count_tokens, update_expert_bias, weigh_balance_loss
from arclight.text.model.switch_head import HeadMaps, HeadOutputs, HeadRouter, HeadValues, SwitchHeadConfig

HEADS, EXPERTS, WIDTH, HEAD = 3, 4, 10, 6


def maps(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = SwitchHeadConfig(experts=EXPERTS, **({"top_k": 2, "entropy_loss": 0.0} | settings))
    made: HeadMaps
    if kind == "values":
        made = HeadValues(config, HEADS, WIDTH, HEAD, 0.5)
    else:
        made = HeadOutputs(config, HEADS, WIDTH, HEAD, (0.5, 0.5))
    return made.to(dtype)


def chosen_experts(made: Any, x: Tensor, head: int) -> list[tuple[float | Tensor, Tensor]]:
    """(weight, matrix) of the experts that a head of a token takes, by the paper."""
    rows = slice(head * EXPERTS, (head + 1) * EXPERTS)
    scores = (made.router.weight[rows] @ x).sigmoid()
    best = sorted(range(EXPERTS), key=lambda expert: -float(scores[expert].detach()))[: made.router.choice.top_k]
    return [(scores[expert], made.experts[rows][expert]) for expert in best]


def one_by_one(made: Any, x_BTD: Tensor, heads_BTF: Tensor) -> Tensor:
    out = []
    for x, heads in zip(x_BTD.flatten(0, 1), heads_BTF.flatten(0, 1), strict=True):
        parts = [
            sum(weight * (matrix @ (x if isinstance(made, HeadValues) else heads.view(HEADS, HEAD)[head]))
                for weight, matrix in chosen_experts(made, x, head))
            for head in range(HEADS)
        ]  # fmt: skip
        out.append(torch.cat(parts) if isinstance(made, HeadValues) else sum(parts))
    return torch.stack(out).view(*x_BTD.shape[:2], -1)


@pytest.mark.parametrize("path", ["grouped", "dense"])
@pytest.mark.parametrize(("kind", "top_k"), [("values", 2), ("outputs", 2), ("outputs", 4), ("values", 1)])
def test_outputs_and_gradients_are_those_of_loops(kind: str, top_k: int, path: Any) -> None:
    made = maps(kind, top_k=top_k)
    made.path = path
    x, heads = (torch.randn(2, 5, size, dtype=torch.float64, requires_grad=True) for size in (WIDTH, HEADS * HEAD))
    found = made(x) if kind == "values" else made(heads, x)
    expected = one_by_one(made, x, heads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, *made.parameters(), *([heads] if kind == "outputs" else [])]
    grads, wanted = (torch.autograd.grad(y.square().mean(), inputs) for y in (found, expected))
    torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)


def test_the_entropy_of_each_heads_mean_choice_is_in_the_loss() -> None:
    weight, made, x = 0.05, maps("values", entropy_loss=0.05), torch.randn(3, 7, WIDTH, dtype=torch.float64)
    rows = x.flatten(0, 1).numpy()
    expected = []
    for w in made.router.weight.detach().numpy().reshape(HEADS, EXPERTS, WIDTH):
        logits = rows @ w.T
        chosen = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        d_mean = weight / HEADS * (np.log(chosen.mean(0)) + 1) / len(rows)
        expected.append((chosen * (d_mean - (chosen * d_mean).sum(1, keepdims=True))).T @ rows)
    (2 * weigh_balance_loss((made.router(x)[0] * 0).sum(), made)).backward()
    np.testing.assert_allclose(made.router.weight.grad.numpy(), 2 * np.concatenate(expected), rtol=1e-9)


@pytest.mark.parametrize("recomputed", [False, True])
def test_choices_of_each_pair_are_counted_in_the_backward_pass(recomputed: bool) -> None:
    made, x = maps("values", torch.float32), torch.randn(2, 7, WIDTH, requires_grad=True)
    made.eval()(x.detach()).sum()
    chosen_NHK = made.train().router(x)[1]
    assert not made.router.counts.any()
    expected = np.zeros((HEADS, EXPERTS), dtype=int)
    for token, of_token in enumerate(chosen_NHK.tolist()):
        for head, experts in enumerate(of_token):
            for expert in experts:
                expected[head, expert] += token != 3
    count_tokens(made, torch.arange(14).view(2, 7) != 3)
    out = checkpoint(made, x, use_reentrant=False) if recomputed else made(x)
    out.sum().backward()
    assert made.router.counts.view(HEADS, EXPERTS).tolist() == expected.tolist()
    found = update_expert_bias(made)
    violations = expected.max(1) / expected.mean(1) - 1
    assert float(found["max_violation"]) == pytest.approx(violations.mean())
    assert float(found["max_violation_of_worst"]) == pytest.approx(violations.max())
    assert not made.router.counts.any()


def test_dropped_experts_are_not_chosen_in_training_and_recomputed_ones_are_the_same() -> None:
    made = maps("values", torch.float32, top_k=1, expert_dropout=0.4)
    x, seen = torch.randn(1, 3000, WIDTH, requires_grad=True), []
    made.router.register_forward_hook(lambda _, __, out: seen.append(out[1]))
    made.eval()(x)
    checkpoint(made.train(), x, use_reentrant=False).sum().backward()
    plain, first, again = seen
    assert torch.equal(first, again)
    assert 0.55 < (first == plain).float().mean() < 0.65


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_made_in_autocasts_type_and_choices_in_float32(dtype: torch.dtype) -> None:
    made = maps("outputs", torch.float32)
    x, heads = torch.randn(2, 5, WIDTH), torch.randn(2, 5, HEADS * HEAD)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        weights, chosen = made.router(x)
        out = made(heads, x)
    assert (weights.dtype, out.dtype) == (torch.float32, dtype)
    assert torch.equal(chosen, made.router(x)[1])
    torch.testing.assert_close(out.float(), made(heads, x), rtol=0, atol=0.1)


def test_one_expert_with_a_sure_router_is_plain_attention() -> None:
    """Beside MPT's own attention, with the same matrices: scores of the only expert are 1/2 for values and for outputs."""
    sizes = {"layers": 1, "dim": 32, "heads": 4, "vocab_size": 64}
    mixed: Any = build_model("switch-head-debug", **sizes, switch_head={"experts": 1, "top_k": 1})
    initialize(mixed, 0)
    plain: Any = build_model("mpt-debug", **sizes, position="rotary")
    initialize(plain, 0)
    one, other = mixed.layers["0"].attention, plain.layers["0"].attention
    assert (type(one), type(other)) == (SwitchHead, Attention)
    with torch.no_grad():
        for router in (one.wv.router, one.wo.router):
            router.weight.zero_()
        one.wq.weight.copy_(other.wq.weight)
        one.wk.weight.copy_(other.wk.weight)
        one.wv.experts.copy_(2 * other.wv.weight.view(4, 8, 32))
        one.wo.experts.copy_(2 * other.wo.weight.view(32, 4, 8).transpose(0, 1))
    x = torch.randn(2, 9, 32)
    context = plain.block_context(9, torch.device("cpu"), None, None, None)
    torch.testing.assert_close(one(x, context), other(x, context), rtol=0, atol=1e-6)


def test_captured_graphs_hold_the_dense_reference() -> None:
    made = maps("values", torch.float32).eval().requires_grad_(False)
    graph = torch.export.export(
        made, (torch.randn(2, 5, WIDTH),), dynamic_shapes=({1: torch.export.Dim("t")},)
    ).module()
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not any("grouped_mm" in target or "sort" in target for target in targets)
    x = torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(graph(x), made(x), rtol=1e-5, atol=1e-5)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"switch_head.top_k = 5 must lie between 1 and the 4 experts of a head"):
        SwitchHeadConfig(experts=4, top_k=5)
    with pytest.raises(ValueError, match=r"switch_head.expert_dropout: need .* in \[0, 1\)"):
        SwitchHeadConfig(experts=4, expert_dropout=1.0)
    with pytest.raises(ValueError, match=r"switch_head has no 'expert' to set; did you mean experts"):
        build_model("switch-head-debug", switch_head={"expert": 2})


def test_a_router_is_of_its_heads() -> None:
    router = HeadRouter(SwitchHeadConfig(experts=4), 3, WIDTH, 0.1)
    assert router.weight.shape == (12, WIDTH)
    assert router(torch.randn(2, 5, WIDTH))[0].shape == (10, 3, 2)
