"""Models of many kinds are cut into two and four stages as they are, and compute and learn exactly what they do whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.parallel.pipeline.even_cuts import even_cuts
from tests.parallel.pipeline.zoo import ZOO, Example, Kind
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from arclight.parallel.pipeline import Pipe, split

QUICK = ("sequential", "our-gpt2-tied", "llama-tied", "albert", "t5", "timm-resnet")
"""A chain, tied ends, a block that is called again, an encoder beside a decoder, and statistics."""


def given(kind: Kind, batch: int, length: int) -> Example:
    """Arguments in double precision."""
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, kind.example(batch, length))  # type: ignore[no-any-return]


def outcome(model: nn.Module, run: Any, example: Example) -> tuple[Any, list[Any], dict[str, Tensor]]:
    """Return the result of ``run``, its leaves, and the gradients of ``model`` after it."""
    args, kwargs = example
    model.zero_grad()
    torch.manual_seed(1)
    result = run(*args, **kwargs)
    leaves = tree_flatten(result)[0]
    torch.manual_seed(2)
    torch.stack(
        [(x * torch.randn_like(x)).sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    ).sum().backward()
    return result, leaves, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(whole: nn.Module, model: nn.Module, pipe: Pipe, example: Example) -> None:
    """``pipe``, cut of ``model``, against ``whole``: the result and its type, all gradients, and buffers that change."""
    expected, wanted, gradients = outcome(whole, whole, example)
    result, leaves, found = outcome(model, pipe, example)
    assert type(result) is type(expected)
    torch.testing.assert_close(leaves, wanted, rtol=0, atol=0)
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dict(model.named_buffers()), dict(whole.named_buffers()), rtol=0, atol=0)


def names_are_the_models(model: nn.Module, pipe: Pipe) -> None:
    parameters, live = dict(model.named_parameters(remove_duplicate=False)), dict[str, list[int]]()
    for stage in pipe.stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            assert parameter is parameters[name]
        for name, _ in stage.named_parameters():
            live.setdefault(name, []).append(stage.number)
    assert set(live) == {name for name, _ in model.named_parameters()}
    assert {name: tuple(stages) for name, stages in live.items() if len(stages) > 1} == pipe.shared
    assert set().union(*(stage.state_dict() for stage in pipe.stages)) == set(model.state_dict())


@pytest.mark.parametrize(
    ("name", "stages", "policy"),
    [
        *(pytest.param(name, 4, None, id=f"{name}-4", marks=pytest.mark.slow) for name in ZOO),
        *(pytest.param(name, 2, None, id=f"{name}-2", marks=pytest.mark.slow) for name in QUICK),
        *(pytest.param(name, 4, even_cuts, id=f"{name}-4-even") for name in QUICK),
    ],
)
def test_a_model_is_cut_without_its_authors_help(name: str, stages: int, policy: Any) -> None:
    kind = ZOO[name]
    torch.manual_seed(0)
    model = kind.build().double()
    whole = copy.deepcopy(model)
    pipe = split(model, given(kind, 2, kind.lengths[0]), stages=stages, policy=policy)
    assert len(pipe.stages) == stages
    names_are_the_models(model, pipe)
    alone = range(len(pipe.graph.calls))
    assert kind.shared == any(len(users) > 1 for users in pipe.graph.users(alone).values())
    for training in (True, False):
        whole.train(training)
        pipe.train(training)
        for batch, length in ((2, kind.lengths[0]), (3, kind.lengths[1])):
            if stages > 2 or training == (batch == 2):
                compare(whole, model, pipe, given(kind, batch, length))


def check_graph(name: str, policies: dict[bool, Any]) -> None:
    """policies: where the graph is cut that is traced in training, and in evaluation."""
    kind = ZOO[name]
    torch.manual_seed(0)
    model = kind.build().double()
    whole = copy.deepcopy(model)
    for training, policy in policies.items():
        example = given(kind, 2, kind.lengths[0])
        pipe = split(model.train(training), example, stages=3, policy=policy, frontend="trace")
        names_are_the_models(model, pipe)
        compare(whole.train(training), model, pipe, example)


def test_a_model_is_cut_as_a_graph() -> None:
    check_graph("timm-resnet", {True: even_cuts, False: even_cuts})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm-resnet", "llama-tied", "gpt2", "bert-classifier", "albert", "t5", "timm-vit"])
def test_many_models_are_cut_as_graphs(name: str) -> None:
    """Costs are predicted to be alike in one of the modes; predicting them takes longest."""
    predicted = name in ("timm-resnet", "llama-tied", "t5", "bert-classifier")
    check_graph(name, {predicted: None, not predicted: even_cuts})
