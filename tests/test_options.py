"""Every option does something: what nothing reads is a promise that nobody keeps."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import typing
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.house.facts import PACKAGE
from torch import nn

import arclight
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.deploy.settings import Quantization
from arclight.federated.simulation.fleet import Fleet
from arclight.federated.transports.settings import Listening
from arclight.optim import ADOPT, QHADOPT, SGD, WSD, AdamW, Constant, Cosine, InverseSqrt, Linear, Muon, NorMuon
from arclight.trainer.callbacks.settings import (
    EMA,
    Activations,
    Checkpointing,
    Curvature,
    Diloco,
    Guard,
    Stopping,
    Timeline,
)

SOURCE = Path(arclight.__file__).parent
ROOMS = (
    "arclight", "arclight.checkpoint", "arclight.data", "arclight.deploy", "arclight.fabric.environments", "arclight.fabric.precision",
    "arclight.fabric.strategies", "arclight.federated", "arclight.optim", "arclight.parallel", "arclight.text", "arclight.trainer",
    "arclight.trainer.callbacks", "arclight.trainer.loggers", "arclight.trainer.profilers", "arclight.vision",
)  # fmt: skip
IGNORED = {
    "LearningRateFinder.weights_only": "as Lightning has it; nothing is unpickled, whatever it says",
}
"""Arguments that do nothing on purpose, and why."""
BY_STAGE = dict.fromkeys(
    (f"TrainerSettings.limit_{stage}_batches" for stage in ("val", "test", "predict")),
    "read by the name of the stage",
)
"""Fields whose names are put together where they are read."""


@cache
def reads() -> set[str]:
    """Names of attributes that are read somewhere, and of arguments that their functions read."""
    found = {node.attr for _, node in PACKAGE.nodes(ast.Attribute) if isinstance(node.ctx, ast.Load)}
    for _, node in PACKAGE.nodes(ast.FunctionDef):
        if new := arguments(node) - found:
            found |= new & loaded(node)
    return found


def arguments(function: ast.FunctionDef) -> set[str]:
    taken = function.args
    return {argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)} - {"self", "cls"}


def loaded(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def settings() -> list[type]:
    """Every dataclass that a recipe or one of the other settings can hold."""
    found: dict[type, None] = {}
    waiting: list[Any] = [FederatedRecipe, Fleet, Listening, Quantization]
    while waiting:
        hint = waiting.pop(0)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in found:
            found[hint] = None
            hints = typing.get_type_hints(hint)
            waiting += [hints[field.name] for field in dataclasses.fields(hint)]
        waiting += [part for part in typing.get_args(hint) if not isinstance(part, str | int | float)]
    return list(found)


def unread_fields(classes: list[type], found: set[str]) -> list[str]:
    return [
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.name not in found
    ]


def test_every_field_of_settings_is_read() -> None:
    classes = settings()
    assert len(classes) > 50
    assert unread_fields(classes, reads()) == list(BY_STAGE), "mend or remove these"


def test_a_field_that_nothing_reads_is_found() -> None:
    made = dataclasses.make_dataclass(
        "Made", [("nobody_reads_this", int, 0)], namespace={"__module__": "arclight.optim.made"}
    )
    assert unread_fields([made], reads()) == ["Made.nobody_reads_this"]


def definition(made: Any) -> ast.FunctionDef | None:
    """The function, or the constructor of its own, that a public name stands for."""
    function = made.__dict__.get("__init__") if isinstance(made, type) else inspect.unwrap(made)
    if not inspect.isfunction(function) or dataclasses.is_dataclass(made):
        return None
    path = Path(inspect.getfile(function))
    if not path.is_relative_to(SOURCE):
        return None
    nodes = PACKAGE.of(PACKAGE.name_of(path), ast.FunctionDef)
    first = function.__code__.co_firstlineno
    return next((n for n in nodes if first in (n.lineno, *(d.lineno for d in n.decorator_list))), None)


def kept_only(function: ast.FunctionDef) -> dict[str, str]:
    """Arguments that a constructor does nothing with but keep, and the attributes that they are kept in."""
    kept: dict[str, str] = {}
    uses: dict[str, int] = defaultdict(int)
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses[node.id] += 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if both else [(target, value)]  # type: ignore[attr-defined]
            kept |= {v.id: t.attr for t, v in pairs if isinstance(t, ast.Attribute) and isinstance(v, ast.Name)}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "check":  # a check is no use
            for name in loaded(node):
                uses[name] -= 1
    return {name: attribute for name, attribute in kept.items() if uses[name] == 1}


def public() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            made = getattr(module, name)
            if callable(made):
                found[name] = made
    return found


def test_every_argument_of_public_constructors_and_functions_is_read() -> None:
    found, seen = [], 0
    for name, made in public().items():
        function = definition(made)
        if function is None or ast.unparse(function.body[-1]).startswith(("raise NotImplementedError", "...")):
            continue
        read, kept, texts = loaded(function), kept_only(function), ast.unparse(function)
        for argument in arguments(function):
            seen += 1
            if (argument not in read and "locals()" not in texts) or (
                argument in kept and kept[argument] not in reads()
            ):
                found.append(f"{name}.{argument}")
    assert seen > 400
    assert sorted(found) == sorted(IGNORED), "mend or remove these, or say why they do nothing"


# ---------------------------------------------------------------------------------------- another value, another result


def other(cls: type, name: str, value: Any) -> Any:
    """Another value of a field."""
    hint = typing.get_type_hints(cls)[name]
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is typing.Literal and isinstance(value, str):
            return next(choice for choice in typing.get_args(part) if choice != value)
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 if value else 0.5
        case tuple():
            return tuple(item / 2 for item in value)
        case None:
            return {
                "monitor": "loss",
                "folder": "somewhere",
                "every_n_steps": 3,
                "asynchronous": True,
                "sigma": 3.0,
                "tokens": 80,
                "seconds": 60.0,
            }[name]
    raise AssertionError(f"{cls.__name__}.{name} = {value!r} needs another value here")


SPECIAL: dict[tuple[type, str], Any] = {
    (Muon, "others"): AdamW(lr=0.5), (Muon, "not_hidden"): "^blocks", (Muon, "stacks"): "^none$", (Stopping, "monitor"): "val/other",
    (NorMuon, "others"): AdamW(lr=0.5), (NorMuon, "not_hidden"): "^blocks", (NorMuon, "stacks"): "^none$",
    (WSD, "shape"): "1-sqrt", (Constant, "warmup"): 0.4, (Guard, "policy"): "stop", (EMA, "decay"): 0.5, (Checkpointing, "save_top_k"): -1,
    (Activations, "modules"): "model",
}  # fmt: skip


def changes(*classes: type) -> list[Any]:
    return [
        pytest.param(cls, field.name, id=f"{cls.__name__}-{field.name}")
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.init and field.name != "pattern"
    ]


def variant(cls: Any, name: str) -> Any:
    usual = cls()
    return dataclasses.replace(usual, **{name: SPECIAL.get((cls, name)) or other(cls, name, getattr(usual, name))})


def trained(settings: Any) -> dict[str, torch.Tensor]:
    """Weights and states after a few steps, in bfloat16, where rounding matters."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"blocks.w": (6, 4), "blocks.b": (6,), "embed.w": (5, 4), "experts.w": (2, 4, 4)}
    weights = {name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for name, shape in shapes.items()}
    optimizer = settings.build(weights.items())
    for _ in range(4):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16() * 1e-3
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(("cls", "name"), changes(SGD, AdamW, ADOPT, QHADOPT, Muon, NorMuon))
def test_every_option_of_an_optimizer_changes_the_weights(cls: Any, name: str) -> None:
    usual = cls(weight_decay=0.1)
    if issubclass(cls, AdamW):
        usual = (
            cls(weight_decay=0.1, eps=1e-4, lr=0.1)
            if cls is AdamW
            else cls(weight_decay=0.1, eps=3e-3, lr=0.5, betas=(0.5, 0.9))
        )
    if issubclass(cls, AdamW) and name in ("stochastic_rounding", "seed"):
        usual = dataclasses.replace(usual, state_dtype="bfloat16")
    value = SPECIAL.get((cls, name)) or other(cls, name, getattr(usual, name))
    before, after = trained(usual), trained(dataclasses.replace(usual, **{name: value}))
    assert any(not torch.equal(before[key], after[key]) for key in before)


def rates(settings: Any) -> list[float]:
    """Rates of a run that stops in the middle and is taken up."""
    found, state = [], None
    for _ in range(2):
        optimizer = SGD(lr=1.0).build([("w", nn.Parameter(torch.ones(2)))])
        schedule = settings.build(optimizer, 40, counts_tokens=True)
        if state is not None:
            optimizer.load_state_dict(state[0])
            schedule.load_state_dict(state[1])
        for _ in range(20):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.advance(3)
            schedule.step()
        state = optimizer.state_dict(), schedule.state_dict()
    return found


@pytest.mark.parametrize(("cls", "name"), changes(Cosine, Linear, WSD, InverseSqrt, Constant))
def test_every_option_of_a_schedule_changes_the_rates(cls: Any, name: str) -> None:
    warmup = {"warmup": 0.5} if name in ("tokens", "seconds") else {}  # without one a constant has no length
    assert rates(cls(**warmup)) != rates(dataclasses.replace(variant(cls, name), **warmup))


def plain(value: Any, depth: int = 3) -> Any:
    """Return an object's comparable values: its numbers and texts, and those that it holds."""
    if value is None or isinstance(value, str | int | float | bool | Path):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, depth) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth) for item in value]
    if depth and hasattr(value, "__dict__"):
        return {name: plain(item, depth - 1) for name, item in vars(value).items()}
    return type(value).__name__


@pytest.mark.parametrize(
    ("cls", "name"), changes(Checkpointing, Stopping, EMA, Guard, Timeline, Diloco, Activations, Curvature)
)
def test_every_option_of_a_callbacks_settings_reaches_it(cls: Any, name: str) -> None:
    def made(settings: Any) -> Any:
        stepwise = settings.build_stepwise() if cls is Checkpointing else None
        return plain([settings.build(), stepwise])

    usual = cls(monitor="loss") if cls is Checkpointing and name == "mode" else cls()
    given = dataclasses.replace(variant(cls, name), **({"monitor": "loss"} if usual != cls() else {}))
    assert made(usual) == made(usual)
    assert made(usual) != made(given)
