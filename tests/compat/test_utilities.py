"""The small functions that Lightning's users call."""

from __future__ import annotations

import inspect
import logging
import random
import subprocess
import sys
import threading
import warnings
from functools import partial, wraps
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import arclight.compat.lightning as L
import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, convert_to_tensors
from arclight.compat.lightning.fabric.utilities.data import has_iterable_dataset, has_len, sized_len
from arclight.compat.lightning.fabric.utilities.seed import isolate_rng, pl_worker_init_function, reset_seed
from arclight.compat.lightning.fabric.utilities.warnings import PossibleUserWarning, disable_possible_user_warnings
from arclight.compat.lightning.pytorch.demos.boring_classes import BoringModel, RandomIterableDatasetWithLen
from arclight.compat.lightning.pytorch.utilities import (
    GradClipAlgorithmType,
    LightningEnum,
    find_shared_parameters,
    grad_norm,
    set_shared_parameters,
    suggested_max_num_workers,
)
from arclight.compat.lightning.pytorch.utilities.memory import is_oom_error, recursive_detach
from arclight.compat.lightning.pytorch.utilities.model_helpers import is_overridden
from arclight.compat.lightning.pytorch.utilities.parsing import (
    clean_namespace,
    collect_init_args,
    is_picklable,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
    parse_class_init_keys,
)
from arclight.compat.lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_deprecation
from arclight.compat.lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


class Colour(LightningEnum):
    DARK_RED = "dark-red"
    BLUE = "blue"


def test_enums_compare_without_case_and_are_found_by_name_or_value() -> None:
    assert Colour.BLUE == "Blue"
    assert Colour.BLUE in {"blue": 1}
    assert Colour.BLUE != Colour.DARK_RED
    assert Colour.from_str("dark_red") is Colour.from_str("DARK-RED", source="value") is Colour.DARK_RED
    assert Colour.try_from_str("green") is None
    with pytest.raises(ValueError, match=r"expected one of \['DARK_RED', 'BLUE'\], but got green"):
        Colour.from_str("green")
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert not GradClipAlgorithmType.supported_type("max")


def test_is_overridden() -> None:
    class Own(BoringModel):
        def on_fit_start(self) -> None: ...

    assert is_overridden("on_fit_start", Own())
    assert not is_overridden("on_fit_start", BoringModel())
    assert not is_overridden("no_such_hook", BoringModel())
    assert not is_overridden("on_fit_start", None)
    replaced = BoringModel()
    replaced.on_fit_end = Mock()  # type: ignore[method-assign]
    assert is_overridden("on_fit_end", replaced)
    replaced.on_train_end = partial(BoringModel.on_train_end, replaced)  # type: ignore[method-assign]
    assert not is_overridden("on_train_end", replaced)
    with pytest.raises(ValueError, match="Expected a parent"):
        is_overridden("x", object())
    with pytest.raises(ValueError, match="parent should define"):
        is_overridden("step", BoringModel(), parent=L.LightningDataModule)


def test_a_hook_takes_an_argument_by_name_or_by_star() -> None:
    class Hooks:
        def named(self, batch_idx: int) -> None: ...
        def starred(self, *args: Any) -> None: ...
        @staticmethod
        def bare() -> None: ...

    assert is_param_in_hook_signature(Hooks.named, "batch_idx")
    assert is_param_in_hook_signature(Hooks.starred, "batch_idx")
    assert not is_param_in_hook_signature(Hooks.starred, "batch_idx", explicit=True)
    assert is_param_in_hook_signature(Hooks.named, "other", min_args=1)
    assert not is_param_in_hook_signature(wraps(Hooks.named)(Hooks.starred), "other")


def test_constructor_arguments() -> None:
    class Parent:
        def __init__(self, a: int, b: int = 2, **rest: Any) -> None:
            super().__init__()
            frame = inspect.currentframe()
            assert frame is not None
            self.found = collect_init_args(frame, [])

    class Child(Parent):
        def __init__(me, *values: Any, c: int = 3, **more: Any) -> None:
            super().__init__(*values, **more)

    found = Child(1, d=4).found
    assert found[:2] == [{"a": 1, "b": 2, "d": 4}, {"c": 3, "d": 4}]
    assert parse_class_init_keys(Child) == ("me", "values", "more")
    assert parse_class_init_keys(Parent) == ("self", None, "rest")


def test_unpicklable_values_are_removed_with_a_warning() -> None:
    values = {"good": 1, "bad": threading.Lock()}
    assert is_picklable(values["good"])
    assert not is_picklable(values["bad"])
    with pytest.warns(UserWarning, match=r"'bad' removed from hparams.*ignore=\['bad'\]"):
        clean_namespace(values)
    assert values == {"good": 1}


def test_settings_are_found_on_module_hparams_and_data() -> None:
    model, trainer = BoringModel(), pl.Trainer(logger=False, enable_checkpointing=False)
    model.rate, model.hparams.size = 1, 2  # type: ignore[assignment]
    assert lightning_getattr(model, "rate") == 1
    assert lightning_getattr(model, "size") == 2
    assert not lightning_hasattr(model, "folder")
    model.trainer, trainer.datamodule = trainer, L.LightningDataModule()
    trainer.datamodule.rate, trainer.datamodule.hparams.folder = 3, "f"
    assert lightning_getattr(model, "rate") == 3
    lightning_setattr(model, "rate", 5)
    lightning_setattr(model, "folder", "g")
    assert (model.rate, trainer.datamodule.rate, trainer.datamodule.hparams.folder) == (5, 5, "g")
    with pytest.raises(AttributeError, match="nothing is neither stored in the model namespace"):
        lightning_setattr(model, "nothing", 0)


@pytest.mark.parametrize("order", [1, 2, 3.5, "inf"])
def test_gradient_norms_agree_with_numpy(order: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert grad_norm(model, order) == {}
    model(torch.randn(5, 3)).square().sum().backward()
    norms, power = grad_norm(model, order, "."), float(order)
    gradients = {name: p.grad.flatten().double().numpy() for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        assert float(norms[f"grad_{power}_norm.{name}"]) == pytest.approx(np.linalg.norm(gradient, power), rel=1e-5)
    total = np.linalg.norm(np.concatenate(list(gradients.values())), power)
    assert float(norms[f"grad_{power}_norm_total"]) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("order", [0, -1])
def test_a_norm_must_be_positive(order: int) -> None:
    with pytest.raises(ValueError, match="`norm_type` must be a positive number or 'inf'"):
        grad_norm(nn.Linear(1, 1), order)


def test_shared_parameters_are_found_and_tied_again() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3, bias=False)})
    assert find_shared_parameters(model) == []
    model["c"].weight = model["a"].weight
    shared = find_shared_parameters(model)
    assert shared == [["a.weight", "c.weight"]]
    model["c"].weight = nn.Parameter(torch.zeros(3, 3))
    assert set_shared_parameters(model, shared)["c"].weight is model["a"].weight


def test_out_of_memory_errors_are_distinguished_from_others() -> None:
    assert is_oom_error(RuntimeError("CUDA error: out of memory"))
    assert is_oom_error(torch.OutOfMemoryError("of any kind"))
    assert is_oom_error(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"))
    assert is_oom_error(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_oom_error(RuntimeError("CUDA error: device-side assert"))
    assert not is_oom_error(ValueError("CUDA out of memory"))


def test_collections_are_converted_leaf_by_leaf() -> None:
    assert not recursive_detach({"a": [torch.ones(1, requires_grad=True) * 2]})["a"][0].requires_grad
    tensors = convert_to_tensors({"b": True, "i": [1], "f": (0.5,), "n": np.arange(2), "s": "text"}, "cpu")
    assert [tensors["b"].dtype, tensors["i"][0].dtype, tensors["f"][0].dtype] == [torch.uint8, torch.int, torch.float]
    assert tensors["n"].tolist() == [0, 1]
    assert tensors["s"] == "text"
    assert convert_tensors_to_scalars({"a": [torch.tensor(2), 3]}) == {"a": [2, 3]}
    with pytest.raises(ValueError, match="does not contain a single element"):
        convert_tensors_to_scalars(torch.ones(2))


def test_lengths_of_loaders() -> None:
    stream = DataLoader(RandomIterableDatasetWithLen(1, 3))
    assert sized_len(stream) == 3
    assert sized_len(iter([1])) is None
    assert has_iterable_dataset(stream)
    with pytest.warns(UserWarning, match="Your `IterableDataset` has `__len__` defined"):
        assert has_len(stream)
    with pytest.warns(UserWarning, match="`list` returned 0 length"):
        assert has_len([])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert has_len(DataLoader([1, 2]))
        assert not has_len(iter([1]))


def test_workers_leave_a_cpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(12), raising=False)
    assert [suggested_max_num_workers(processes) for processes in (1, 2, 4, 12)] == [11, 5, 2, 1]
    with pytest.raises(ValueError, match="should be >= 1"):
        suggested_max_num_workers(0)


def test_seeding_again_repeats_what_was_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    before = torch.initial_seed()
    reset_seed()
    assert torch.initial_seed() == before
    monkeypatch.setattr(logging.getLogger("arclight"), "propagate", True)
    with caplog.at_level(logging.INFO, "arclight"):
        assert L.seed_everything(123) == 123
    assert "Seed set to 123" in caplog.text
    drawn = (torch.rand(1), np.random.rand(), random.random())
    with isolate_rng():
        assert torch.rand(1) != drawn[0]
    reset_seed()
    assert (torch.rand(1), np.random.rand(), random.random()) == drawn
    with pytest.raises(ValueError, match="is not in bounds"):
        L.seed_everything(2**32)
    monkeypatch.setenv("PL_GLOBAL_SEED", "many")
    with pytest.raises(ValueError, match="Invalid seed specified via PL_GLOBAL_SEED: 'many'"):
        L.seed_everything()


def test_loader_workers_of_all_ranks_draw_differently() -> None:
    drawn = set()
    for rank in range(4):
        for worker in range(4):
            torch.manual_seed(7 + worker)  # as a DataLoader seeds its worker
            pl_worker_init_function(worker, rank)
            drawn |= {(torch.rand(4).tolist()[0]), random.random(), float(np.random.rand())}
    assert len(drawn) == 3 * 16


def test_warnings_have_categories_and_are_given_once() -> None:
    cache = WarningCache()
    with pytest.warns(UserWarning, match="once") as caught:
        [cache.warn("once") for _ in range(2)]
    assert len(caught) == 1
    with pytest.warns(DeprecationWarning, match="old"):
        rank_zero_deprecation("old")
    with warnings.catch_warnings(record=True) as silent:
        warnings.simplefilter("always")
        disable_possible_user_warnings()
        warnings.warn("maybe", PossibleUserWarning)
    assert not silent


def test_messages_are_shown_unless_the_script_set_up_logging() -> None:
    program = (
        "import logging, sys; {}import arclight.compat.lightning as L; ours = logging.getLogger('arclight'); "
        "print(len(ours.handlers), ours.propagate, ours.level == logging.INFO)"
    )
    for before, shown in (("", "1 False True"), ("logging.basicConfig(); ", "0 True True")):
        run = subprocess.run([sys.executable, "-c", program.format(before)], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == shown
