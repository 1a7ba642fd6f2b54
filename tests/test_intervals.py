"""Every number that a recipe or a settings object takes has an interval, and is refused beyond it in one sentence."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import arclight as al
from arclight._intervals import Interval, describe, fits
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.cli.schema import Recipe
from arclight.data.sites import IID, Dirichlet, Size
from arclight.deploy.quantizing.training_settings import LowBitTraining, WeightOnlyTraining
from arclight.deploy.settings import Int8
from arclight.federated.privacy.settings import Noise
from arclight.federated.simulation.fleet import Fleet
from arclight.federated.transports.settings import Listening
from arclight.optim.outer import Outer
from arclight.optim.settings import ADOPT, QHADOPT, AdamW
from arclight.recipe import RecipeError, explain, read
from arclight.text.data.data_settings import Pretrained
from arclight.text.heads.head_settings import AnswerTask, SequenceTask, TokenTask
from arclight.text.settings import LanguageTask
from arclight.trainer.settings import TrainerSettings
from arclight.vision.data.mix import MixedData
from arclight.vision.tasks.settings import (
    ClassificationTask,
    CornersTask,
    DetectionTask,
    OrientedDetectionTask,
    PoseTask,
    SegmentationTask,
)

ROOTS = (FederatedRecipe, Fleet, Listening, Int8, Outer)
WHOLE_LINE = {
    (WeightOnlyTraining, "bits"): "one of two, which its recipe says: 8 or 4",
    (WeightOnlyTraining, "group_size"): "one of the sizes of kernels, which its recipe says",
    (LowBitTraining, "activation_bits"): "one of two, which its recipe says: 8 or 4",
    (LowBitTraining, "group_size"): "one of the sizes of kernels, which its recipe says",
    (IID, "seed"): "any integer names another division",
    (Dirichlet, "seed"): "any integer names another division",
    (Size, "seed"): "any integer names another division",
    (AdamW, "seed"): "any integer names another sequence of draws",
    (ADOPT, "seed"): "any integer names another sequence of draws",
    (QHADOPT, "seed"): "any integer names another sequence of draws",
}
"""Numbers without an interval, and why."""
REQUIRED: dict[type, dict[str, Any]] = {
    Noise: {"clip": 1.0, "multiplier": 1.0}, Pretrained: {"path": Path("tok")},
    **{
        task: {"data": Path("data.yaml")}
        for task in (DetectionTask, SegmentationTask, PoseTask, CornersTask, OrientedDetectionTask, ClassificationTask)
    },
    **{task: {"train": Path("a.jsonl"), "val": Path("b.jsonl")} for task in (SequenceTask, TokenTask, AnswerTask)},
    MixedData: {"data": Path("more.yaml")}, Recipe: {"task": LanguageTask()}, FederatedRecipe: {"task": LanguageTask()},
}  # fmt: skip
Member = tuple[type, tuple[Interval, ...]]


def members(hint: Any, bounds: tuple[Interval, ...] = ()) -> Iterator[Member]:
    """Every number in a type, however deep, with the intervals around it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        yield hint, bounds
    elif origin is typing.Annotated:
        yield from members(inner[0], (*bounds, *(x for x in inner[1:] if isinstance(x, Interval))))
    elif origin is not typing.Literal:
        for part in inner:
            yield from members(part)


def hints_of(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def reachable(*roots: Any) -> dict[type, None]:
    """Every dataclass that can be part of another, unions by kind included."""
    found: dict[type, None] = {}
    waiting = list(roots)
    while waiting:
        hint = waiting.pop(0)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint not in found:
            found[hint] = None
            waiting += hints_of(hint).values()
        waiting += [part for part in typing.get_args(hint) if not isinstance(part, str | int | float | Interval)]
    return found


CLASSES = list(reachable(*ROOTS))
NUMBERS = [(cls, name, hint) for cls in CLASSES for name, hint in hints_of(cls).items() if any(members(hint))]
BOUNDED = [case for case in NUMBERS if case[:2] not in WHOLE_LINE]


def name_of(case: Any) -> str:
    return getattr(case, "__name__", case if isinstance(case, str) else "")


def holds(member: Member, value: Any) -> bool:
    """Return True if a type holds a number, from its bounds and independently of the tested code."""
    kind, (bound,) = member
    if (kind is int) != isinstance(value, int) and not (kind is float and isinstance(value, int)):
        return False
    low = -math.inf if bound.ge is None and bound.gt is None else bound.ge if bound.gt is None else bound.gt
    high = math.inf if bound.le is None and bound.lt is None else bound.le if bound.lt is None else bound.lt
    assert low is not None
    assert high is not None
    above = value > low if bound.gt is not None else value >= low
    below = value < high if bound.lt is not None else value <= high
    return above and below


def around(member: Member) -> tuple[list[Any], list[Any]]:
    """Numbers just within a type's bounds, and just beyond them."""
    kind, (bound,) = member
    within: list[Any] = []
    beyond: list[Any] = [math.nan, math.inf, -math.inf] if kind is float else []
    for name, away in (("ge", -1), ("gt", -1), ("le", 1), ("lt", 1)):
        edge = getattr(bound, name)
        if edge is None or math.isinf(edge):
            continue
        step = kind(edge + away) if kind is int else math.nextafter(edge, away * math.inf)
        back = kind(edge - away) if kind is int else math.nextafter(edge, -away * math.inf)
        closed = name in ("ge", "le")
        within.append(kind(edge) if closed else back)
        beyond += [step if closed else kind(edge), kind(edge + 2 * away)]
    return within, beyond


def shaped(hint: Any, value: Any) -> Any:
    """A number as a field has it: alone, or in the tuple or table that holds it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return (value,) * (1 if inner[-1] is ... else len(inner))
    return {"first": value} if origin is dict else value


def made(cls: type, **fields: Any) -> Any:
    return cls(**REQUIRED.get(cls, {}) | fields)


def problem(cls: type, **fields: Any) -> str:
    """Return the reason why settings are refused, also beside other fields' defaults; empty if accepted."""
    try:
        made(cls, **fields)
    except ValueError as error:
        return str(error)
    return ""


def test_every_number_has_one_interval() -> None:
    assert len(CLASSES) > 50
    assert len(NUMBERS) > 150
    without = [(cls, name) for cls, name, hint in NUMBERS if any(len(bounds) != 1 for _, bounds in members(hint))]
    assert without == list(WHOLE_LINE), "give these an interval, as arclight/_intervals.py has them"


@pytest.mark.parametrize(("cls", "name", "hint"), BOUNDED, ids=name_of)
def test_a_number_is_taken_at_the_edge_and_refused_beyond(cls: Any, name: str, hint: Any) -> None:
    options = list(members(hint))
    refused = 0
    for member in options:
        within, beyond = around(member)
        for value in within:
            assert holds(member, value)
            assert fits(hint, shaped(hint, value)), value
            assert not (said := problem(cls, **{name: shaped(hint, value)})).startswith(f"{name}: need"), said
        for value in beyond:
            if any(holds(other, value) for other in options) or fits_literal(hint, value):
                continue
            given = shaped(hint, value)
            with pytest.raises(ValueError, match=r"need ") as caught:
                made(cls, **{name: given})
            assert str(caught.value) == f"{name}: need {describe(hint)}, got {given!r}"
            with pytest.raises(RecipeError) as from_recipe:
                read(cls, {name: list(given) if isinstance(given, tuple) else given})
            place, wanted = (f"{name}.first", typing.get_args(hint)[1]) if isinstance(given, dict) else (name, hint)
            assert any(line.startswith(f"{place}: need {describe(wanted)}, got") for line in from_recipe.value.problems)
            refused += 1
    assert refused


def fits_literal(hint: Any, value: Any) -> bool:
    """Return True if a number is a literal of the type, as -1 for no limit."""
    return any(
        value in typing.get_args(part)
        for part in (hint, *typing.get_args(hint))
        if typing.get_origin(part) is typing.Literal
    )


@pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _, _ in BOUNDED), ids=name_of)
def test_texts_and_truth_values_are_no_numbers(cls: Any) -> None:
    """Of all fields of a class: a test for each of five hundred would take longer to set up than to run."""
    for owner, name, hint in BOUNDED:
        if owner is not cls:
            continue
        parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        for wrong in ("many", True):
            if type(wrong) not in parts:
                with pytest.raises(ValueError, match=f"^{name}: need "):
                    made(cls, **{name: shaped(hint, wrong)})


def test_the_help_shows_every_interval() -> None:
    types_of = {(setting.path, setting.kind): setting.type for setting in explain(FederatedRecipe)}
    assert types_of["task.augment.mosaic", "augment"] == "number in [0, 1]"
    assert types_of["task.optimizer.lr", "adamw"] == "number >= 0"
    assert types_of["task.optimizer.betas", "adamw"] == "[number in [0, 1), number in [0, 1)]"
    assert types_of["trainer.max_steps", ""] == "int >= 0 | -1"
    assert types_of["seed", ""] == "int in [0, 4,294,967,295]"


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    assert AdamW(lr=np.float32(0.5)).lr == 0.5
    with pytest.raises(ValueError, match=r"^lr: need number >= 0, got np.float64\(nan\)$"):
        AdamW(lr=np.float64("nan"))
    assert Int8(calibration_batches=np.int64(3)).calibration_batches == 3


TAKEN_BY_TRAINERS: list[dict[str, Any]] = [
    {"num_sanity_val_steps": -1}, {"devices": "1"}, {"val_check_interval": timedelta(minutes=1)}, {"val_check_interval": {"minutes": 1}},
    {"max_time": timedelta(minutes=1)}, {"limit_val_batches": 2.0}, {"max_epochs": -1}, {"gradient_clip_val": 0}, {"min_steps": 0},
]  # fmt: skip
REFUSED_BY_TRAINERS: dict[str, list[Any]] = {
    "gradient_clip_val": [-1, -0.5, math.nan, math.inf], "min_epochs": [-1], "min_steps": [-1], "max_epochs": [-2], "max_steps": [-2],
    "num_nodes": [0, -1], "devices": [0, -2], "fast_dev_run": [-1], "overfit_batches": [-1, 1.5, math.nan], "num_sanity_val_steps": [-2],
    "limit_train_batches": [-1, 1.5, math.nan], "limit_val_batches": [-1, 1.5, math.nan], "limit_test_batches": [-1, 1.5, math.nan],
    "limit_predict_batches": [-1, 1.5, math.nan], "val_check_interval": [-1, 0, 1.5, math.nan], "check_val_every_n_epoch": [0, -1],
    "log_every_n_steps": [-1], "accumulate_grad_batches": [0, -1], "reload_dataloaders_every_n_epochs": [-1],
}  # fmt: skip
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}


@pytest.mark.parametrize("arguments", TAKEN_BY_TRAINERS, ids=lambda arguments: next(iter(arguments)))
def test_a_trainer_takes_times_and_no_limit(arguments: dict[str, Any]) -> None:
    assert al.Trainer(**QUIET | arguments)


@pytest.mark.parametrize("name", REFUSED_BY_TRAINERS)
def test_a_trainer_refuses_numbers_beyond_their_interval(name: str) -> None:
    for value in REFUSED_BY_TRAINERS[name]:
        with pytest.raises((ValueError, TypeError), match=f"{name}.*{value}|{value}.*{name}"):
            al.Trainer(**QUIET | {name: value})


def test_the_trainers_numbers_are_all_tried() -> None:
    numbers = {name for cls, name, _ in NUMBERS if cls is TrainerSettings}
    assert numbers == set(REFUSED_BY_TRAINERS)
