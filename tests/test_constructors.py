"""Numbers of public constructors beyond their interval are refused in one sentence that names the argument."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import arclight as al
from arclight.data import ResumableLoader
from arclight.fabric import strategies
from arclight.optim import decay_groups
from arclight.trainer import callbacks, loggers, profilers

NAN, INF = math.nan, math.inf
WEIGHT = [("w", torch.nn.Parameter(torch.ones(2, 2)))]
Values = tuple[list[Any], list[Any]]
NUMBERS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, Values]]] = {
    callbacks.BackboneFinetuning: ({}, {
        "unfreeze_backbone_at_epoch": ([0, 5], [-1]), "backbone_initial_ratio_lr": ([0, 0.1], [-1, NAN, INF]),
        "backbone_initial_lr": ([None, 0.0], [-1, NAN, INF]), "initial_denom_lr": ([0.5], [0, -1, NAN, INF]), "rounding": ([0], [-1]),
    }),
    callbacks.BatchSizeFinder: ({}, {
        "steps_per_trial": ([1], [0, -1]), "init_val": ([1], [0, -1]), "max_trials": ([1], [0, -1]), "margin": ([0, 0.99], [-0.1, 1, NAN]),
        "max_val": ([1], [0, -1]),
    }),
    callbacks.DiLoCo: ({"sync_every": 4}, {
        "sync_every": ([1], [0, -1]), "outer_lr": ([1e-9, 1], [0, -1, NAN, INF]), "outer_momentum": ([0, 0.99], [-0.1, 1, NAN]),
        "fragments": ([1, 4], [0, -1, 5]),
    }),
    callbacks.EMAWeightAveraging: ({}, {
        "decay": ([0, 0.999], [-0.1, 1, 1.5, NAN]), "update_every_n_steps": ([0, 1], [-1]), "update_starting_at_step": ([None, 0], [-1]),
        "update_starting_at_epoch": ([None, 0], [-1]), "update_every_n_epochs": ([None, 1], [0, -1]), "ramp_steps": ([0, 0.5], [-1, NAN, INF]),
    }),
    callbacks.EarlyStopping: ({"monitor": "loss"}, {
        "min_delta": ([-1, 0, 1], [NAN, INF]), "patience": ([0], [-1]), "stopping_threshold": ([None, -3.0], [NAN, INF]),
        "divergence_threshold": ([None, 1e9], [NAN, -INF]),
    }),
    callbacks.LearningRateFinder: ({}, {
        "min_lr": ([1e-12], [0, -1, NAN]), "max_lr": ([10], [0, -1, NAN, INF, 1e-9]), "num_training_steps": ([1], [0, -1]),
        "early_stop_threshold": ([None, 0.1], [0, -1, NAN]),
    }),
    callbacks.LossGuard: ({}, {
        "sigma": ([None, 0.1], [0, -1, NAN, INF]), "window": ([20], [0, -1, 19]), "warmup": ([2], [0, 1, -1]), "patience": ([1], [0, -1]),
        "margin": ([0], [-1]),
    }),
    callbacks.MicroBatching: ({}, {"micro_batch_size": ([None, 1], [0, -1])}),
    callbacks.ModelCheckpoint: ({"dirpath": "somewhere"}, {
        "save_top_k": ([-1, 0], [-2]), "every_n_train_steps": ([None, 0, 1], [-1]), "every_n_epochs": ([None, 0, 1], [-1]),
    }),
    callbacks.ModelPruning: ({"pruning_fn": "l1_unstructured"}, {
        "amount": ([0, 3, 0.5, 1.0], [-1, -0.5, 1.5, NAN]), "verbose": ([0, 2], [-1, 3]),
    }),
    callbacks.ModelSummary: ({}, {"max_depth": ([-1, 0, 5], [-2])}),
    callbacks.RichModelSummary: ({}, {"max_depth": ([-1, 0, 5], [-2])}),
    callbacks.PipelineTimeline: ({}, {"after": ([0], [-1]), "steps": ([1], [0, -1])}),
    callbacks.RichProgressBar: ({}, {"refresh_rate": ([0, 0.5, INF], [-1, NAN])}),
    callbacks.TQDMProgressBar: ({}, {"refresh_rate": ([0, 1], [-1]), "process_position": ([0], [-1])}),
    callbacks.SpikeDetection: ({}, {
        "window": ([1], [0, -1]), "warmup": ([0], [-1]), "atol": ([None, 0.0], [-1, NAN, INF]), "rtol": ([None, 0.1], [0, -1, NAN, INF]),
    }),
    callbacks.StochasticWeightAveraging: ({"swa_lrs": 0.1}, {
        "swa_lrs": ([0.1, [0.1, 0.2]], [0.0, -1.0, NAN, INF, [0.1, INF]]), "swa_epoch_start": ([1, 0.0, 1.0], [0, -1, 1.5, -0.5, NAN]),
        "annealing_epochs": ([0], [-1]),
    }),
    loggers.CSVLogger: ({"save_dir": "somewhere"}, {"flush_logs_every_n_steps": ([1], [0, -1])}),
    profilers.AdvancedProfiler: ({}, {"line_count_restriction": ([0, 20, 0.5], [-1, 1.5, NAN])}),
    profilers.PyTorchProfiler: ({}, {"row_limit": ([-1, 0], [-2])}),
    ResumableLoader: ({"loader": DataLoader([1, 2])}, {"rank": ([0], [-1, 1]), "world_size": ([1, 3], [0, -1])}),
    strategies.DDPStrategy: ({}, {"model_averaging_period": ([None, 1], [0, -1])}),
    strategies.ModelParallelStrategy: ({}, {
        "data_parallel_size": (["auto", 1], [0, -1]), "tensor_parallel_size": (["auto", 1], [0, -1]),
    }),
    decay_groups: ({"parameters": WEIGHT}, {"weight_decay": ([0, 0.1], [-1, NAN, INF])}),
    al.Fabric: ({"accelerator": "cpu"}, {"num_nodes": ([1], [0, -1])}),
}  # fmt: skip
"""Constructor -> arguments that it needs -> number -> (taken, refused)."""
ROOMS = (callbacks, loggers, profilers, strategies, importlib.import_module("arclight.data"))
WITHOUT: dict[str, str] = {
    "GradientAccumulationScheduler.scheduling": "its keys and values are tried in test_accumulation_schedule.py",
    "BackboneFinetuning.lambda_func": "a function", "ThroughputMonitor.batch_size_fn": "a function", "ThroughputMonitor.length_fn": "a function",
    "ModelPruning.apply_pruning": "a switch", "ModelPruning.use_lottery_ticket_hypothesis": "a switch",
    "ModelPruning.pruning_dim": "torch checks it against each parameter", "ModelPruning.pruning_norm": "torch takes any order of norm",
    "EMAWeightAveraging.device": "a device, which torch checks", "WeightAveraging.device": "a device, which torch checks",
    "Timer.duration": "a duration, whose forms are tried in test_durations.py",
    "CSVLogger.version": "any number is a name", "TensorBoardLogger.version": "any number is a name",
    "ResumableLoader.seed": "any integer names another order", "derive_seed.parts": "any integers", "isolated_rng.seed": "any integer",
}  # fmt: skip
"""Arguments with int or float in their types that have no interval, and why."""


def public() -> Iterator[tuple[Any, str]]:
    """Constructors and functions of the rooms, with the names of their arguments that may be numbers."""
    for room in ROOMS:
        for name in room.__all__:
            made = getattr(room, name)
            if not callable(made) or is_dataclass(made) or (isinstance(made, type) and issubclass(made, Exception)):
                continue
            try:
                parameters = inspect.signature(made).parameters.values()
            except ValueError:
                continue
            for parameter in parameters:
                if re.search(r"\b(int|float)\b|Amount", str(parameter.annotation)):
                    yield made, parameter.name


CASES = [(make, name) for make, (_, numbers) in NUMBERS.items() for name in numbers]


@pytest.mark.parametrize(("make", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_number_is_taken_at_the_edge_and_refused_beyond(
    make: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, numbers = NUMBERS[make]
    taken, refused = numbers[name]
    for value in taken:
        assert make(**base | {name: value}) is not None
    for value in refused:
        with pytest.raises((ValueError, TypeError)) as caught:
            make(**base | {name: value})
        said = str(caught.value)
        assert len(said.splitlines()) == 1, said
        assert name in said, said
        assert str(value[-1] if isinstance(value, list) else value) in said, said


def test_every_number_of_a_public_constructor_is_tried() -> None:
    found = {f"{made.__name__}.{name}": made for made, name in public()}
    assert len(found) > 60
    tried = {f"{make.__name__}.{name}" for make, name in CASES}
    assert sorted(found.keys() - tried) == sorted(WITHOUT), "give these an interval and try it here, or say why not"


@pytest.mark.parametrize("duration", [{"seconds": -5}, {"days": -1}])
def test_negative_durations_are_refused(duration: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is negative"):
        callbacks.Timer(duration)
