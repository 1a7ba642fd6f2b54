"""Models whose forward computes with parameters between its modules, cut as a traced graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optim.processes import run
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from arclight.parallel import PlanError
from arclight.parallel.pipeline import Pipe, split


def traced(model: nn.Module, stages: int | Sequence[int], *args: Any, **kwargs: Any) -> Pipe:
    """``model`` cut as a graph into so many stages, or from these calls on."""
    if isinstance(stages, int):
        return split(model, (args, kwargs), stages=stages, policy=even_cuts, frontend="trace")
    return split(model, (args, kwargs), stages=len(stages), policy=lambda *_: stages, frontend="trace")


def loss(result: Any) -> Tensor:
    leaves = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack(
        [(leaf.double() * torch.linspace(1, 2, leaf.numel()).view(leaf.shape)).sum() for leaf in leaves]
    ).sum()


def same(model: nn.Module, stages: int | Sequence[int], *args: Any, **kwargs: Any) -> Pipe:
    """Cut ``model`` and require results, gradients, changed buffers and names to be those of the whole."""
    whole, before = copy.deepcopy(model), dict(model.named_parameters(remove_duplicate=False))
    pipe = traced(model, stages, *args, **kwargs)
    assert len(pipe.stages) == (stages if isinstance(stages, int) else len(stages))
    torch.manual_seed(3)
    expected = whole(*args, **kwargs)
    torch.manual_seed(3)
    result = pipe(*args, **kwargs)
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
    names = [set(part.state_dict()) for part in pipe.stages]
    assert set.union(*names) == set(model.state_dict())
    return pipe


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
    graph = traced(model, 1, torch.randn(4, 8)).graph
    assert [call.parameters for call in graph.calls] == [("first",), ("second",), ("scale",), ("third",)]
    assert [call.name for call in graph.calls] == ["first", "second", "scale", "third"]
    # before "scale" only the activation crosses: x itself is an argument, which every stage has
    assert [graph.crossing(at) for at in range(1, 4)] == [4 * 6 * 8, 4 * 8 * 8, 4 * 8 * 8]
    for stages in (1, 2, 4):
        model.zero_grad()
        pipe = same(model, stages, torch.randn(4, 8))
    assert [list(stage.state_dict()) for stage in pipe.stages] == [["first"], ["second"], ["scale"], ["third"]]


@pytest.mark.parametrize("training", [True, False])
def test_side_effects_chance_and_structure_are_those_of_the_whole(training: bool) -> None:
    model = Everything().train(training)
    stages = same(model, 3, torch.randn(4, 8), 4, mask=torch.rand(4, 8)).stages
    assert "offset" in dict(stages[2].named_buffers())
    assert "offset" not in stages[2].state_dict()
    assert int(model.norm.num_batches_tracked) == int(training)


def test_a_tied_parameter_is_in_each_stage_that_uses_it_under_all_names() -> None:
    model = Tied()
    graph = traced(model, 1, torch.randint(11, (2, 5))).graph
    assert graph.aliases == {"head.weight": "embed.weight"}
    cuts = [0, len(graph.calls) - 1]
    assert graph.users(cuts)["embed.weight"] == (0, 1)
    pipe = same(model, cuts, torch.randint(11, (2, 5)))
    assert pipe.shared == {"embed.weight": (0, 1)}
    assert [list(dict(part.named_parameters())) for part in pipe.stages] == [
        ["places", "embed.weight", "inner.weight", "inner.bias"], ["embed.weight"],
    ]  # fmt: skip
    assert list(pipe.stages[1].state_dict()) == ["embed.weight", "head.weight"]


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

    pipe = same(Skips(), 5, torch.randn(4, 8))
    for part in pipe.stages[2:4]:
        assert {value.call for value in part.receives} == {0, part.number - 1}
        assert {value.call for value in part.sends} == {0, part.number}


def test_values_of_inputs_alone_are_recomputed_on_each_stage() -> None:
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

    pipe = same(Masked(), 3, torch.randn(2, 6, 8))
    assert [len(part.receives) for part in pipe.stages] == [0, 1, 1]


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
    assert [call.name for call in traced(model, 1, torch.randn(4, 8)).graph.calls] == ["a", "c"]
    with pytest.raises(
        PlanError, match=r"no stage can begin with b: a tensor is written to in place.*row.add_\(y\[1\]\)"
    ):
        split(model, (torch.randn(4, 8),), at=["b"], frontend="trace")
    model = Writes()  # its backward would fail on a tensor that was changed after use: results only
    x = torch.randn(4, 8)
    torch.testing.assert_close(traced(model, 2, x)(x), model(x))


def test_a_batch_norm_that_is_called_twice_counts_in_one_stage() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mid, self.out = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.mid(self.norm(x))))

    model = Twice()
    assert [call.name for call in traced(model, 1, torch.randn(4, 8)).graph.calls] == ["norm", "out"]
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
    real = Tied()
    pipe = traced(model, 2, tokens)
    assert all(parameter.is_meta for stage in pipe.stages for parameter in stage.parameters())
    for part in pipe.stages:
        part.load_state_dict({name: real.state_dict()[name] for name in part.state_dict()}, assign=True)
    torch.testing.assert_close(pipe(tokens), real(tokens))


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
        (Branches, r"test_traced.py:\d+: if \(x @ self.weight\).sum\(\) > 0:.*torch.where"),
        (Rounds, "Rounded, an autograd function with a backward of its own"),
        (Overwrites, r"writes to x.*x.mul_\(2\).*clone"),
        (Mistaken, r"cannot be traced \(test_traced.py:\d+: return x\[:, :4\] @ self.weight\)"),
        (Empty, "uses no parameter"),
    ],
)
def test_untraceable_code_is_refused_with_its_line(kind: type[nn.Module], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        traced(kind(), 1, torch.randn(4, 8))


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
    stage = traced(Everything(), 2, torch.randn(4, 8), 4).stages[0]
    with pytest.raises(PlanError, match=said):
        stage(args=args, kwargs=kwargs)


def test_another_mode_or_precision_than_the_traced_one_is_refused() -> None:
    x = torch.randn(4, 8)
    stage = traced(Everything(), 2, x).stages[0]
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
    evaluated = traced(Everything().eval(), 2, x).stages[0]
    with pytest.raises(PlanError, match=r"traced in eval mode.*\.train\(\)"):
        evaluated.train()


def test_autocast_at_the_split_is_part_of_the_graph() -> None:
    model, x = Expression().float(), torch.randn(4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        pipe = traced(model, 2, x)
        torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=0)
        assert pipe(x).dtype is torch.bfloat16


def test_a_stage_that_is_moved_makes_its_tensors_where_it_is() -> None:
    class Placed(Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            far = torch.arange(tokens.shape[1], device=tokens.device) * torch.tensor([1.0] * 5, device=tokens.device)
            with torch.no_grad():
                near = torch.ones(5, device=tokens.device) * far
            return super().forward(tokens) + (far + near)[:, None]

    tokens = torch.randint(11, (2, 5))
    pipe = same(Placed(), 2, tokens)
    for part in pipe.stages:
        part.to("meta")
    assert pipe(tokens.to("meta")).is_meta
    assert pipe(tokens.to("meta")).shape == (2, 5, 11)


# -- which way is taken ----------------------------------------------------------------------------------------------


def test_models_that_cannot_be_sliced_are_traced_with_a_warning() -> None:
    x = torch.randn(4, 8)
    with pytest.warns(
        UserWarning, match=r"cut as a traced graph.*3 stages are more than the 0 parts.*computes with first"
    ):
        pipe = split(Expression(), (x,), stages=3)
    assert len(pipe.stages) == 3
    with pytest.raises(PlanError, match="more than the 0 parts"):
        split(Expression(), (x,), stages=3, frontend="slice")
    with pytest.raises(
        PlanError,
        match=r"5 stages are more than the 0 parts.*Nor can the model be traced: 5 stages are more than the 4",
    ):
        split(Expression(), (x,), stages=5)
    with pytest.raises(PlanError, match="9 stages are more than the 2 parts"):  # nothing that a graph would help with
        split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (x,), stages=9)
    with pytest.raises(PlanError, match="say 'auto', 'slice' or 'trace'"):
        split(Expression(), (x,), stages=2, frontend="both")  # type: ignore[arg-type]


def test_chance_between_parts_is_drawn_once_in_a_graph() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn_like(x)
            for layer in self.layers:
                x = layer(x + noise)
            return x

    model, x = Noisy(), torch.randn(4, 8)
    with pytest.raises(PlanError, match="random numbers"):
        split(model, (x,), stages=3, frontend="slice")
    with pytest.warns(UserWarning, match=r"traced graph.*random numbers"):
        pipe = split(model, (x,), stages=3)
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(pipe(x), expected, rtol=0, atol=0)


def test_parameters_that_are_sent_come_back_with_their_gradients() -> None:
    model, tokens = Tied(), torch.randint(11, (2, 5))
    whole = copy.deepcopy(model)
    pipe = split(model, (tokens,), stages=3, frontend="trace", multi_use="transmit")
    assert pipe.shared == {}
    assert sum("embed.weight" in dict(stage.named_parameters()) for stage in pipe.stages) == 1
    loss(whole(tokens)).backward()
    loss(pipe(tokens)).backward()
    for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


def test_a_graph_is_cut_where_little_crosses() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(8),
                nn.Parameter(torch.randn(8, 32)),
                nn.Parameter(torch.randn(32, 8)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.relu(self.norm(x) @ self.up) @ self.down

    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(2, 8)
    same(model, 4, x)
    pipe = split(model, (x,), stages=4, frontend="trace")
    assert [call.name for call in (pipe.graph.calls[at] for at in pipe.cuts)] == [
        f"{number}.norm" for number in range(4)
    ]
    assert [len(stage.receives) for stage in pipe.stages] == [0, 1, 1, 1]


# -- over processes --------------------------------------------------------------------------------------------------


class Mixed(Tied):
    """A tied parameter, a value that skips stages, and one that has no gradient."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = h = self.embed(tokens) + self.places
        with torch.no_grad():
            level = self.inner(h).abs().amax(-1, keepdim=True)
        h = torch.tanh(self.inner(h)) / level
        return self.head(self.inner(h) + first * level)


def summed(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def train_over_processes(rank: int) -> None:
    torch.manual_seed(0)
    whole, tokens = Mixed(), torch.randint(11, (8, 5))
    loss = summed(whole(tokens), tokens)[0] / tokens.numel()
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for schedule, stages in (("1F1B", 2), ("InterleavedZeroBubble", 4), ("ZBVZeroBubble", 4)):
        model = copy.deepcopy(whole)
        model.zero_grad()
        pipe = split(model, (tokens[:2],), stages=stages, policy=even_cuts, frontend="trace")
        assert "embed.weight" in pipe.shared
        runner = pipe.on(schedule=schedule, micro_batches=4, loss=summed)
        for turn in (1, 2):
            result = runner.step(tokens, targets=tokens)
            torch.testing.assert_close(result.loss, loss.detach())
            for number in runner.stages:
                for name, parameter in pipe.stages[number].named_parameters():
                    torch.testing.assert_close(parameter.grad, turn * wanted[name], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(runner.evaluate(tokens, targets=tokens).loss, loss.detach())


def test_stages_of_a_graph_train_over_processes(tmp_path: Path) -> None:
    run(2, tmp_path, train_over_processes)
