"""Stages of any model against the model itself, in one process and float64: results, every gradient, modes, other shapes, names."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten

from arclight.parallel import PlanError
from arclight.parallel.pipeline import Pipe, split


def outcome(
    model: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Tensor]]:
    """Return the result of ``function``, its leaves, and all gradients for a fixed random direction."""
    model.zero_grad()
    torch.manual_seed(1)
    result = function(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    leaves = [leaf if isinstance(leaf, Tensor) else hash(leaf) for leaf in tree_flatten(result)[0]]
    torch.manual_seed(2)
    sum((x * torch.randn_like(x)).sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return result, leaves, gradients


def shape_of(model: nn.Module) -> Any:
    """All that splitting must leave alone."""
    modules = {name: (id(m), {k: _seen(v) for k, v in vars(m).items()}) for name, m in model.named_modules()}
    return modules, list(model.state_dict())


def _seen(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: id(v) if isinstance(v, (Tensor, nn.Module)) else repr(type(v)) for k, v in value.items()}
    return id(value) if isinstance(value, (Tensor, nn.Module)) else repr(value)


def same(
    model: nn.Module, *calls: tuple[tuple[Any, ...], dict[str, Any]], evaluate: bool = True, bound: float = 0.0, **options: Any
) -> Pipe:  # fmt: skip
    """A pipe of ``model`` (float64), made with the first call as the example, that does what the model does for all of them."""
    model = model.double()
    before, mode = shape_of(model), model.training
    pipe = split(model, calls[0], **options)
    assert shape_of(model) == before
    for training in (True, False) if evaluate else (True,):
        model.train(training)
        pipe.train(training)
        for args, kwargs in calls:
            state = copy.deepcopy(model.state_dict())
            expected, wanted, gradients = outcome(model, model, args, kwargs)
            changed = copy.deepcopy(model.state_dict())
            model.load_state_dict(state)
            result, got, found = outcome(model, pipe, args, kwargs)
            assert type(result) is type(expected)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            torch.testing.assert_close(found, gradients, rtol=bound, atol=bound)
            torch.testing.assert_close(dict(model.state_dict()), dict(changed), rtol=0, atol=0)
    model.train(mode)
    pipe.train(mode)
    names_are_right(model, pipe)
    assert shape_of(model) == before
    return pipe


def names_are_right(model: nn.Module, pipe: Pipe) -> None:
    """Each stage's state is a part of the model's, and together they are all of it; buffers are in one stage each."""
    whole, everything = model.state_dict(), {}
    original = dict(model.named_parameters(remove_duplicate=False))
    first = dict(model.named_parameters())
    users: dict[str, list[int]] = {}
    for stage in pipe.stages:
        for name, tensor in stage.state_dict().items():
            torch.testing.assert_close(tensor, whole[name])
            assert name in original or name not in everything or _called_twice(pipe, name)
            everything[name] = tensor
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            assert parameter is original[name]
            assert first[pipe.remap_qualname(name)] is parameter
        for name, _ in stage.named_parameters():
            users.setdefault(name, []).append(stage.number)
    assert set(everything) == set(whole)
    assert set(users) == set(first)
    assert {name: tuple(stages) for name, stages in users.items() if len(stages) > 1} == pipe.shared


def _called_twice(pipe: Pipe, name: str) -> bool:
    return len({s.number for s in pipe.stages for path in s.parts if name.startswith(path + ".")}) > 1


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_a_sequence_whose_first_module_is_also_its_last() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), first)
    pipe = same(model, ((floats(3, 4),), {}), ((floats(5, 7, 4),), {}), stages=4)
    assert pipe.shared == {"0.weight": (0, 3), "0.bias": (0, 3)}
    assert list(dict(pipe.stages[3].named_parameters())) == ["0.weight", "0.bias"]
    assert list(pipe.stages[3].state_dict()) == ["0.weight", "0.bias", "5.weight", "5.bias"]
    assert pipe.remap_qualname("5.weight") == "0.weight"
    assert [call.name for call in pipe.graph.calls] == ["0", "2", "4", "5"]


class Skips(nn.Module):
    """A U-Net in one dimension: what goes down is added on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.middle = nn.Linear(6, 6)
        self.up = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        held = []
        for layer in self.down:
            x = layer(x).relu()
            held.append(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat((x, held.pop()), -1)).tanh()
        return x


def test_values_that_skip_stages_are_carried() -> None:
    pipe = same(Skips(), ((floats(3, 6),), {}), ((floats(2, 5, 6),), {}), stages=7)
    assert [len(stage.receives) for stage in pipe.stages] == [0, 1, 2, 3, 4, 3, 2]
    for before, after in zip(pipe.stages, pipe.stages[1:], strict=False):
        assert before.sends == after.receives


class Rich(nn.Module):
    """Keyword arguments, arguments that are no tensors, results in a dict and a tuple; batch norm; a parameter and a buffer of glue."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.randn(6))
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("hidden", torch.randn(6), persistent=False)
        self.one = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.two = nn.Linear(6, 6)
        self.three = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.rate = 0.3

    def forward(self, x: Tensor, *, kind: str, other: Tensor | None = None, times: int = 1) -> dict[str, Any]:
        x = self.one(x + self.place + self.hidden)
        if other is not None:
            x = x + other
        x = functional.dropout(x * times, self.rate, self.training)
        y = self.two(x) if kind == "plain" else self.two(x.relu())
        z = self.three(y) * self.scale + self.shift
        return {"out": z, "both": (y.mean(), z[:, :2]), "kind": kind, "none": None}


def test_arguments_and_results_of_all_kinds() -> None:
    calls = [
        ((floats(4, 6),), {"kind": "plain"}),
        ((floats(7, 6),), {"kind": "other", "other": floats(7, 6), "times": 2}),
    ]
    pipe = same(Rich(), *calls, at=["two", "three"])
    assert "place" in dict(pipe.stages[0].named_parameters())
    assert "scale" in dict(pipe.stages[2].named_parameters())
    assert [("shift" in stage.state_dict(), "shift" in dict(stage.named_buffers())) for stage in pipe.stages] == [
        (True, True), (False, True), (False, True),
    ]  # fmt: skip
    assert all("hidden" not in stage.state_dict() for stage in pipe.stages)
    assert [set(stage.parts) for stage in pipe.stages] == [{"one"}, {"two"}, {"three"}]
    other = Rich().double()
    other.hidden = pipe.stages[0].hidden
    for number, stage in enumerate(split(Rich().double(), calls[0], at=["two", "three"]).stages):
        missing, unexpected = stage.load_state_dict(other.state_dict(), strict=False)
        assert not missing
        assert "shift" not in unexpected
        torch.testing.assert_close(stage.get_buffer("shift"), other.shift)
        pipe.stages[number] = stage
    pipe.stages[0].hidden = other.hidden
    torch.manual_seed(3)
    wanted = other.eval()(*calls[1][0], **calls[1][1])
    torch.testing.assert_close(pipe.eval()(*calls[1][0], **calls[1][1])["out"], wanted["out"], rtol=0, atol=0)


class Tied(nn.Module):
    """Weights of the embedding are those of the output, by sharing the parameter or by using it."""

    def __init__(self, by_use: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.output = None if by_use else nn.Linear(8, 11, bias=False)
        if self.output is not None:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu_()
        return functional.linear(x, self.embedding.weight) if self.output is None else self.output(x)


@pytest.mark.parametrize("by_use", [True, False])
@pytest.mark.parametrize("multi_use", ["replicate", "transmit"])
def test_tied_embeddings(by_use: bool, multi_use: Any) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    calls = (((tokens,), {}), ((tokens[:2, :4],), {}))
    if multi_use == "replicate":
        pipe = same(Tied(by_use), *calls, at=["layers.1", "layers.2"])
        assert pipe.shared == {"embedding.weight": (0, 2)}
        return
    model = Tied(by_use).double()
    pipe = split(model, calls[0], at=["layers.1", "layers.2"], multi_use="transmit")
    assert pipe.shared == {}
    assert [sorted(dict(stage.named_parameters())) for stage in pipe.stages[1:]] == [
        ["layers.1.bias", "layers.1.weight"],
        ["layers.2.bias", "layers.2.weight", "layers.3.bias", "layers.3.weight"],
    ]
    for args, kwargs in calls:
        _, wanted, gradients = outcome(model, model, args, kwargs)
        _, got, found = outcome(model, pipe, args, kwargs)
        torch.testing.assert_close((got, found), (wanted, gradients), rtol=0, atol=1e-13)


def test_invalid_settings_of_shared_parameters_name_them() -> None:
    example = (torch.zeros(1, 2, dtype=torch.int64),)
    for setting, message in (
        ({"embedding.weight": "copy"}, "embedding.weight is 'copy'"),
        ({"layers.0.weight": "transmit"}, "layers.0.weight"),
        ("both", "both"),
    ):
        with pytest.raises(PlanError, match=message):
            split(Tied(False), example, stages=2, multi_use=setting)  # type: ignore[arg-type]


def test_invalid_splits_are_refused_with_the_fix() -> None:
    example = (torch.zeros(1, 2, dtype=torch.int64),)
    model = Tied(True)
    for options, message in (
        ({"stages": 9}, "9 stages are more than the 5 parts"),
        ({"at": ["layers.9"]}, "did you mean layers"),
        ({"at": ["layers.2", "layers.1"]}, "in the order"),
        ({"at": ["embedding"]}, "begins with it"),
        ({}, "stages = 4"),
    ):
        with pytest.raises(PlanError, match=message):
            split(model, example, **options)
    model.unused = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"unused\.weight, unused\.bias"):
        split(model, example, stages=2)
    model.unused.requires_grad_(False)
    assert "unused.weight" in split(model, example, stages=2).stages[1].state_dict()
    with pytest.raises(KeyError, match="nowhere"):
        split(Tied(True), example, stages=2).remap_qualname("nowhere")


class Counts(nn.Module):
    """Code between parts counts in a buffer, and changes an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x += self.steps
        for layer in self.layers:
            x = layer(x)
        return x * self.steps


def test_state_changed_between_parts_changes_once() -> None:
    pipe = same(Counts(), ((floats(2, 4),), {}), stages=3)
    assert [("steps" in stage.state_dict()) for stage in pipe.stages] == [True, False, False]
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"0 changes in place a tensor .*an argument"):
        split(model, (torch.randn(2, 4),), at=["0", "1"], frontend="slice")


class Branches(nn.Module):
    """Goes another way for other values of what a part returns, or draws in place for two parts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        if self.how == "branch" and first.sum() > 0:
            first = -first
        if self.how == "number":
            first = first * first.abs().max().item()
        if self.how == "noise":
            first = first + torch.rand_like(first)
        if self.how == "fill":
            filled = torch.zeros(x.shape, dtype=x.dtype)
            filled[:] = first
            first = filled
        second = self.layers[1](first)
        return self.layers[2](first + second)


@pytest.mark.parametrize(("how", "message"), [
    ("branch", "data-dependent control flow on what another stage computes: layers.0"),
    ("number", "data-dependent control flow on what another stage computes: layers.0"),
    ("noise", "random numbers .* stage 1 .* stage 2"),
    ("fill", "writes what another stage computes .layers.0."),
])  # fmt: skip
def test_code_between_parts_that_needs_data_is_refused(how: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split(Branches(how), (torch.randn(2, 4),), stages=3, frontend="slice")


def test_models_that_cannot_be_sliced_are_traced_with_a_warning() -> None:
    model = Branches("fill").double()
    example = (floats(2, 4),)
    with pytest.warns(UserWarning, match="writes what another stage computes"):
        pipe = split(model, example, stages=3)
    _, wanted, gradients = outcome(model, model, example, {})
    _, got, found = outcome(model, pipe, example, {})
    torch.testing.assert_close((got, found), (wanted, gradients), rtol=0, atol=1e-13)
    with pytest.raises(PlanError, match=r"layers\.0.*Nor can the model be traced"):
        split(Branches("branch"), (torch.randn(2, 4),), stages=3)


class Glued(nn.Module):
    """Code between its parts asks for the device and type of whatever parameter comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((), 2.0, dtype=next(self.parameters()).dtype, device=next(self.parameters()).device)
        x = x + self.start
        for layer in self.layers:
            x = x + layer(x) * scale.to(self.layers[0].weight.device)
            assert x.dtype == self.layers[0].weight.dtype
        assert self.end.dtype == x.dtype
        return x * self.end


def test_stages_of_a_model_without_memory_get_it_and_change_their_type() -> None:
    with torch.device("meta"):
        model = Glued()
    pipe = split(model, (torch.randn(2, 4),), stages=4)
    whole = Glued().double()
    for stage in pipe.stages:
        stage.to_empty(device="cpu").double()
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    x = floats(3, 4)
    torch.testing.assert_close(pipe(x), whole(x), rtol=0, atol=0)
    for stage in pipe.stages:
        stage.bfloat16()
    torch.testing.assert_close(pipe(x.bfloat16()), whole.bfloat16()(x.bfloat16()), rtol=0, atol=0)


def test_tied_parameters_of_a_stage_stay_tied_when_it_gets_memory() -> None:
    with torch.device("meta"):
        model = Tied(False)
    stage = split(model, (torch.zeros(1, 2, dtype=torch.int64),), stages=2).stages[1].to_empty(device="cpu")
    assert stage.get_parameter("output.weight") is stage.get_parameter("embedding.weight")


def test_parts_may_be_checkpointed_afterwards() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Tied(False).double()
    example = (torch.randint(0, 11, (3, 5)),)
    _, wanted, gradients = outcome(model, model, example, {})
    for multi_use in ("replicate", "transmit"):
        pipe = split(model, example, at=["layers.1", "layers.3"], multi_use=multi_use)
        for stage in pipe.stages:
            for path, part in stage.parts.items():
                parent, _, name = path.rpartition(".")
                setattr(stage.get_submodule(parent), name, checkpoint_wrapper(part))
        _, got, found = outcome(model, pipe, example, {})
        torch.testing.assert_close((got, found), (wanted, gradients), rtol=0, atol=1e-13)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def test_parts_may_be_compiled_afterwards() -> None:
    model, example = nn.Sequential(*(Block() for _ in range(4))).double(), (floats(3, 4),)
    _, wanted, gradients = outcome(model, model, example, {})
    pipe = split(model, example, stages=2)
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    for stage in pipe.stages:
        for part in stage.parts.values():
            part.compile(backend=backend)
    _, got, found = outcome(model, pipe, example, {})
    torch.testing.assert_close((got, found), (wanted, gradients), rtol=0, atol=1e-13)
    assert seen
    with pytest.raises(PlanError, match="2 is compiled already"):
        split(nn.Sequential(Block(), Block(), torch.compile(Block(), backend=backend)), example, stages=2)


def test_stages_do_not_keep_the_model() -> None:
    model = Skips()
    pipe = split(model, (torch.randn(2, 6),), stages=3)
    gone = [
        weakref.ref(p) for name, p in model.named_parameters() if name not in dict(pipe.stages[1].named_parameters())
    ]
    kept = [weakref.ref(p) for p in pipe.stages[1].parameters()]
    pipe.stages[:] = [pipe.stages[1]]
    del model
    gc.collect()
    assert gone
    assert all(parameter() is None for parameter in gone)
    assert kept
    assert all(parameter() is not None for parameter in kept)


def test_modules_with_parametrizations_and_modules_of_torch_are_parts() -> None:
    normed = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(4)))
    pipe = same(normed, ((floats(3, 4),), {}), stages=2)
    assert [call.name for call in pipe.graph.calls] == ["0", "1", "2", "3"]
    attending = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    )
    pipe = same(attending, ((floats(2, 5, 8),), {}), ((floats(3, 4, 8),), {}), stages=3)
    assert [call.name for call in pipe.graph.calls] == ["layers.0", "layers.1", "layers.2"]
