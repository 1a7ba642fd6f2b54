"""Models whose forward computes with parameters between its modules, cut as a traced graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from arclight.parallel import PlanError
from arclight.parallel.pipeline.tracing import TracedStage, trace


def run(stages: Sequence[TracedStage], *args: Any, **kwargs: Any) -> Any:
    """What the stages give one after another, each being given what the one before it sent."""
    sent: dict[Any, Tensor] = {}
    for stage in stages:
        out = stage(*(sent[value] for value in stage.receives), args=args, kwargs=kwargs)
        sent = dict(zip(stage.sends, out, strict=True)) if stage.sends else {}
    return out


def loss(result: Any) -> Tensor:
    leaves = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack(
        [(leaf.double() * torch.linspace(1, 2, leaf.numel()).view(leaf.shape)).sum() for leaf in leaves]
    ).sum()


def every(graph: Any, stages: int) -> list[int]:
    return [number * len(graph.calls) // stages for number in range(stages)]


def same(
    model: nn.Module, stages: int, *args: Any, cuts: Sequence[int] | None = None, **kwargs: Any
) -> list[TracedStage]:
    """Cut ``model`` and require results, gradients, changed buffers and names to be those of the whole. Gives the stages."""
    whole, before = copy.deepcopy(model), dict(model.named_parameters(remove_duplicate=False))
    traced = trace(model, args, kwargs)
    parts = traced.stages(cuts or every(traced.graph, stages))
    assert len(parts) == stages
    torch.manual_seed(3)
    expected = whole(*args, **kwargs)
    torch.manual_seed(3)
    result = run(parts, *args, **kwargs)
    leaves, structure = tree_flatten(result)
    expected_leaves, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    assert type(result) is type(expected)
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-12, atol=1e-12)
    loss(expected).backward()
    loss(result).backward()
    for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert parameter is before[name]
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, buffer), (_, other) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)
    names = [set(part.state_dict()) for part in parts]
    assert set.union(*names) == set(model.state_dict())
    return parts


@pytest.fixture(autouse=True)
def doubles() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Expression(nn.Module):
    """No modules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 8))
        self.scale, self.third = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (F.gelu(x @ self.first @ self.second) + x * self.scale) @ self.third


class Everything(nn.Module):
    """Statistics, chance, writing in place, gradients switched off, numbers, constants and buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.randn(8))
        self.mix = nn.Parameter(torch.randn(8, 8))
        self.factor = torch.tensor(2.0)
        self.register_buffer("offset", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor, column: int = 3, *, mask: Tensor | None = None) -> dict[str, Any]:
        h = F.relu(self.norm(self.inner(x)), inplace=True)
        h = self.drop(h).clone() * self.factor
        h[:, 0] = column
        with torch.no_grad():
            frozen = self.inner(h)
        q, r = (h @ self.mix).chunk(2, 1)
        y = h * self.gain + self.offset + torch.tensor([0.5] * 8)
        return {"y": y if mask is None else y * mask, "parts": (q, r, None), "frozen": frozen, "column": column}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(5, 8))
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens) + self.places[: tokens.shape[1]])))


def test_one_expression_is_cut_at_its_parameters() -> None:
    model = Expression()
    traced = trace(model, (torch.randn(4, 8),), {})
    assert [call.parameters for call in traced.graph.calls] == [("first",), ("second",), ("scale",), ("third",)]
    assert [call.name for call in traced.graph.calls] == ["first", "second", "scale", "third"]
    # before "scale" only the activation crosses: x itself is an argument, which every stage has
    assert [traced.graph.crossing(at) for at in range(1, 4)] == [4 * 6 * 8, 4 * 8 * 8, 4 * 8 * 8]
    for stages in (1, 2, 4):
        model.zero_grad()
        parts = same(model, stages, torch.randn(4, 8))
    assert [list(part.state_dict()) for part in parts] == [["first"], ["second"], ["scale"], ["third"]]


@pytest.mark.parametrize("training", [True, False])
def test_side_effects_chance_and_structure_are_those_of_the_whole(training: bool) -> None:
    model = Everything().train(training)
    parts = same(model, 3, torch.randn(4, 8), 4, mask=torch.rand(4, 8))
    assert "offset" in dict(parts[2].named_buffers())
    assert "offset" not in parts[2].state_dict()
    assert int(model.norm.num_batches_tracked) == int(training)


def test_a_tied_parameter_is_in_each_stage_that_uses_it_under_all_names() -> None:
    model = Tied()
    traced = trace(model, (torch.randint(11, (2, 5)),), {})
    assert traced.graph.aliases == {"head.weight": "embed.weight"}
    cuts = [0, len(traced.graph.calls) - 1]
    assert traced.graph.users(cuts)["embed.weight"] == (0, 1)
    parts = same(model, 2, torch.randint(11, (2, 5)), cuts=cuts)
    assert [list(dict(part.named_parameters())) for part in parts] == [
        ["places", "embed.weight", "inner.weight", "inner.bias"], ["embed.weight"],
    ]  # fmt: skip
    assert list(parts[1].state_dict()) == ["embed.weight", "head.weight"]


def test_a_value_that_is_used_later_than_next_is_carried() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            first = h = x @ self.weights[0]
            for weight in self.weights[1:]:
                h = torch.tanh(h @ weight)
            return h + first

    parts = same(Skips(), 5, torch.randn(4, 8))
    for part in parts[2:4]:
        assert {value.call for value in part.receives} == {0, part.number - 1}
        assert {value.call for value in part.sends} == {0, part.number}


def test_what_depends_on_inputs_alone_is_computed_where_it_is_needed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            mask.masked_fill_(torch.ones_like(mask).triu_(1).bool(), float("-inf"))
            for weight in self.weights:
                x = torch.softmax(mask, -1) @ x @ weight
            return x

    parts = same(Masked(), 3, torch.randn(2, 6, 8))
    assert [len(part.receives) for part in parts] == [0, 1, 1]


def test_a_tensor_that_is_written_to_is_not_cut_apart_from_its_views() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            row = h[0]
            y = self.b(h)
            row.add_(y[1])
            return self.c(h)

    model = Writes()
    traced = trace(model, (torch.randn(4, 8),), {})
    assert [call.name for call in traced.graph.calls] == ["a", "c"]
    assert "row.add_(y[1])" in traced.calls.inside["b"]
    model = Writes()  # its backward would fail on a tensor that was changed after use: results only
    x = torch.randn(4, 8)
    torch.testing.assert_close(run(trace(model, (x,), {}).stages([0, 1]), x), model(x))


def test_a_batch_norm_that_is_called_twice_counts_in_one_stage() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mid, self.out = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.mid(self.norm(x))))

    model = Twice()
    assert [call.name for call in trace(model, (torch.randn(4, 8),), {}).graph.calls] == ["norm", "out"]
    same(model, 2, torch.randn(4, 8))


def test_sizes_that_depend_on_values_stay_within_a_stage() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(self.b(h) * h[h > 0].sum())

    same(Chosen(), 2, torch.randn(4, 8))


def test_the_model_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Tied()
    tokens = torch.randint(11, (2, 5))
    traced = trace(model, (tokens,), {})
    real = Tied()
    parts = traced.stages(every(traced.graph, 2))
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())
    for part in parts:
        part.load_state_dict({name: real.state_dict()[name] for name in part.state_dict()}, assign=True)
    torch.testing.assert_close(run(parts, tokens), real(tokens))


X = torch.randn(4, 8, dtype=torch.float64)


# -- what is refused -------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if (x @ self.weight).sum() > 0:
            return x @ self.weight
        return x


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounds(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x @ self.weight)


class Overwrites(Branches):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x @ self.weight


class Mistaken(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :4] @ self.weight


class Empty(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Branches, r"test_tracing.py:\d+: if \(x @ self.weight\).sum\(\) > 0:.*torch.where"),
        (Rounds, "Rounded, an autograd function with a backward of its own"),
        (Overwrites, r"writes to x.*x.mul_\(2\).*clone"),
        (Mistaken, r"cannot be traced \(test_tracing.py:\d+: return x\[:, :4\] @ self.weight\)"),
        (Empty, "uses no parameter"),
    ],
)
def test_what_no_graph_can_say_is_refused_with_the_line(kind: type[nn.Module], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        trace(kind(), (torch.randn(4, 8),), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((X[:2], 4), {}, r"args\[0\] of Everything is torch.float64 \(2, 8\).*traced with torch.float64 \(4, 8\)"),
        ((X.float(), 4), {}, r"args\[0\].*torch.float32"),
        ((X, 5), {}, r"args\[1\] of Everything is 5, and it was traced with 4"),
        ((X, 4), {"mask": X}, "structure"),
        ((X,), {"column": 4}, "structure"),
    ],
)  # fmt: skip
def test_arguments_unlike_the_example_are_refused(args: Any, kwargs: Mapping[str, Any], said: str) -> None:
    stage = trace(Everything(), (torch.randn(4, 8), 4), {}).stages([0, 1])[0]
    with pytest.raises(PlanError, match=said):
        stage(args=args, kwargs=kwargs)


def test_another_mode_or_precision_than_the_traced_one_is_refused() -> None:
    x = torch.randn(4, 8)
    stage = trace(Everything(), (x,), {}).stages([0, 1])[0]
    assert stage.training
    assert stage.train() is stage
    with pytest.raises(PlanError, match=r"traced in train mode.*\.eval\(\) cannot change it"):
        stage.eval()
    assert stage.training
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PlanError, match=r"without torch\.autocast and runs under"),
    ):
        stage(args=(x,))
    with pytest.raises(PlanError, match=r"is torch\.float32, and was traced as torch\.float64"):
        stage.float()(args=(x,))
    evaluated = trace(Everything().eval(), (x,), {}).stages([0, 1])[0]
    with pytest.raises(PlanError, match=r"traced in eval mode.*\.train\(\)"):
        evaluated.train()


def test_autocast_at_the_split_is_part_of_the_graph() -> None:
    model, x = Expression().float(), torch.randn(4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        parts = trace(model, (x,), {}).stages([0, 2])
        torch.testing.assert_close(run(parts, x), model(x), rtol=0, atol=0)
        assert run(parts, x).dtype is torch.bfloat16


def test_a_stage_that_is_moved_makes_its_tensors_where_it_is() -> None:
    class Placed(Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            far = torch.arange(tokens.shape[1], device=tokens.device) * torch.tensor([1.0] * 5, device=tokens.device)
            with torch.no_grad():
                near = torch.ones(5, device=tokens.device) * far
            return super().forward(tokens) + (far + near)[:, None]

    tokens = torch.randint(11, (2, 5))
    parts = same(Placed(), 2, tokens)
    for part in parts:
        part.to("meta")
    assert run(parts, tokens.to("meta")).is_meta
    assert run(parts, tokens.to("meta")).shape == (2, 5, 11)
