"""Hyper-parameters: what is kept of a constructor's arguments, and what a checkpoint rebuilds."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.checkpoint import CheckpointError
from arclight.trainer.hparams import (
    TAG,
    Hyperparameters,
    arguments_for,
    checkpoint_entries,
    given_hyperparameters,
    hyperparameters_to_log,
    rebuild,
)


class Base(al.Module):
    def __init__(self, width: int, rate: float = 0.1, **rest: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Derived(Base):
    def __init__(self, *args: Any, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_hyperparameters(ignore="rate")


class Config(al.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


class Data(al.DataModule):
    def __init__(self, rate: float = 0.1, folder: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()


def test_all_arguments_of_all_constructors_are_kept() -> None:
    assert Base(3, extra="e").hparams == {"width": 3, "rate": 0.1, "extra": "e"}
    model = Derived(3, depth=5)
    assert model.hparams == {"width": 3, "depth": 5}
    assert model.hparams.depth == 5


def test_initial_values_stay_when_a_script_changes_them() -> None:
    model = Base(3)
    model.hparams.width = 9
    assert model.hparams_initial.width == 3
    model.hparams_initial.width = 7
    assert model.hparams_initial.width == 3


@pytest.mark.parametrize("config", [{"a": 1}, Namespace(a=1)])
def test_a_container_stands_for_its_items_and_is_rebuilt_as_one_argument(config: Any) -> None:
    model = Config(config)
    assert model.hparams == {"a": 1}
    arguments = arguments_for(Config, checkpoint_entries(model), {})
    assert arguments == {"config": {"a": 1}}
    assert Config(**arguments).hparams.a == 1
    assert Config({}).hparams == {}


@pytest.mark.parametrize("given", [42, 3.5, True])
def test_a_plain_value_is_no_container(given: Any) -> None:
    with pytest.raises(ValueError, match="Primitives"):
        Config(given)


def test_a_name_that_is_no_argument_is_refused() -> None:
    class Wrong(al.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    with pytest.raises(ValueError, match="'widht' is not an argument of Wrong; it has width"):
        Wrong(1)


def test_a_dataclass_module_keeps_its_fields() -> None:
    @dataclass(eq=False)
    class Model(al.Module):
        width: int
        note: str = "n"

        def __post_init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=("note",))

    assert Model(4).hparams == {"width": 4}


def test_a_layer_among_the_arguments_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'layer' is an instance of `nn.Module`.*ignore=\['layer'\]"):
        Base(3, layer=nn.Linear(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Base(3, layer="linear")


def test_a_checkpoint_gives_what_the_constructor_takes_and_overrides_win() -> None:
    entries = {"hyper_parameters": {"rate": 0.5, "folder": "y", "old": 1}}
    data = {"datamodule_" + key: value for key, value in entries.items()}
    assert arguments_for(Data, data, {"rate": 0.7, "unknown": 3}) == {"rate": 0.7, "folder": "y"}
    assert arguments_for(Base, {"hyper_parameters": {"width": 3}}, {"more": 1}) == {"width": 3, "more": 1}


def test_loggers_get_both_sets_unless_they_disagree() -> None:
    assert hyperparameters_to_log(Base(3, rate=0.1), Data()) == {"width": 3, "rate": 0.1, "folder": "x"}
    assert hyperparameters_to_log(al.Module(), None) is None
    with pytest.raises(RuntimeError, match=r"keys \['rate'\] are present in both"):
        hyperparameters_to_log(Base(3, rate=0.2), Data())


def test_given_values_stand_in_for_the_arguments() -> None:
    with given_hyperparameters({"width": "as written"}):
        assert Base(3).hparams == {"width": "as written"}


def test_a_missing_one_names_those_that_are_there() -> None:
    values = Hyperparameters(a=1, long_name="b")
    with pytest.raises(AttributeError, match="no attribute 'x'; there are: a, long_name"):
        _ = values.x
    del values.a
    assert repr(values) == '"long_name": b'


# -- what a checkpoint holds of them -------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


@dataclass(frozen=True)
class Size:
    width: int = 1
    folder: Path = Path("/here")
    path: Any = None
    area: int = field(init=False, default=0)


class Anything(al.Module):
    def __init__(self, value: Any = None, **rest: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class OnlyPath(al.Module):
    def __init__(self, path: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class OnlyPathData(al.DataModule):
    def __init__(self, path: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


AWKWARD = [
    {"path": "/data"},
    {"enum": "focal", "name": "x"},
    {"enum": "tests:Focal", "name": "x"},
    {"dataclass": "a", "fields": ["b"]},
    {"dataclass": "os:PathLike", "fields": {}},
    {"omegaconf": {"a": 1}},
    {"__arclight__": "path", "path": "/data"},
    {"items": {"__arclight__": {"__arclight__": "dict"}}},
    [{"path": "/data"}, ({"enum": "a", "name": "b"},)],
]


@pytest.mark.parametrize("value", AWKWARD, ids=str)
def test_dicts_that_look_like_encoded_objects_stay_dicts(value: Any) -> None:
    for given in (value, {"inner": value}):
        arguments = arguments_for(Anything, checkpoint_entries(Anything(given)), {})
        assert arguments == {"value": given}
        assert type(arguments["value"]) is type(given)


@pytest.mark.parametrize(
    ("owner", "key"), [(OnlyPath, "hyper_parameters"), (OnlyPathData, "datamodule_hyper_parameters")]
)
def test_an_owner_whose_only_hyperparameter_is_a_path_is_rebuilt(owner: Any, key: str) -> None:
    entries = checkpoint_entries(owner("/data"))
    assert entries[key] == {"path": "/data"}
    assert rebuild(owner, entries, {}).hparams == {"path": "/data"}


def test_a_module_with_a_path_loads_from_a_checkpoint_file(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, **checkpoint_entries(OnlyPath("/data"))}, tmp_path / "module.ckpt")
    with pytest.warns(UserWarning, match="no parameters"):
        assert OnlyPath.load_from_checkpoint(tmp_path / "module.ckpt").hparams.path == "/data"


def test_objects_come_back_as_what_they_were() -> None:
    size = Size(3, Path("/there"), {"path": "/data"})
    object.__setattr__(size, "area", 9)
    given = {"size": size, "colour": Colour.RED, "sizes": (Size(),)}
    arguments = arguments_for(Anything, checkpoint_entries(Anything(given)), {})
    assert arguments == {"value": given}


def test_hyperparameters_of_the_layout_without_tags_are_read() -> None:
    size = {"dataclass": f"{__name__}:Size", "fields": {"width": 3, "folder": {"path": "/there"}, "gone": 1}}
    old = {"value": {"size": size, "colour": {"enum": f"{__name__}:Colour", "name": "RED"}, "source": {"path": "/d"}}}
    arguments = arguments_for(Anything, {"hyper_parameters": old}, {})
    assert arguments["value"] == {"size": Size(3, Path("/there")), "colour": Colour.RED, "source": {"path": "/d"}}


def test_fields_of_a_visible_dataclass_may_be_dataclasses_of_its_module() -> None:
    """A script imports the settings of a package, and not each type that they are made of."""
    settings, parts, script = (ModuleType(f"a_package_{name}") for name in ("settings", "parts", "script"))
    rate = make_dataclass("Rate", [("lr", float)], namespace={"__module__": parts.__name__})
    whole = make_dataclass("Settings", [("rate", rate)], namespace={"__module__": settings.__name__})
    parts.Rate, settings.Rate, settings.Settings, script.Settings = rate, rate, whole, whole  # type: ignore[attr-defined]
    owner: Any = type("Net", (Anything,), {"__module__": script.__name__})
    sys.modules.update({module.__name__: module for module in (settings, parts, script)})
    try:
        given = whole(rate(0.5))
        kept = checkpoint_entries(Anything(given))
        assert arguments_for(owner, kept, {}) == {"value": given}
        with pytest.raises(CheckpointError, match="neither defines nor imports"):
            arguments_for(Anything, kept, {})
    finally:
        for module in (settings, parts, script):
            del sys.modules[module.__name__]


def test_a_file_does_not_choose_which_dataclass_is_built_or_which_module_is_imported() -> None:
    hidden = ModuleType("a_module_nobody_named")
    hidden.Trap = make_dataclass("Trap", [("x", int)], namespace={"__module__": hidden.__name__})  # type: ignore[attr-defined]
    sys.modules[hidden.__name__] = hidden
    try:
        kept = {"value": {TAG: "dataclass", "class": "a_module_nobody_named:Trap", "fields": {"x": 1}}}
        with pytest.raises(CheckpointError, match="neither defines nor imports"):
            arguments_for(Anything, {"hyper_parameters": kept}, {})
        assert arguments_for(Anything, {"hyper_parameters": kept}, {"value": 2}) == {"value": 2}
    finally:
        del sys.modules[hidden.__name__]
    for place in ("arclight.cli.__main__:Settings", "arclight.trainer.__main__:X", "antigravity:Fly"):
        name = place.partition(":")[0]
        assert name not in sys.modules
        kept = {"value": {TAG: "dataclass", "class": place, "fields": {}}}
        with pytest.raises(CheckpointError, match="before loading it"):
            arguments_for(Anything, {"hyper_parameters": kept}, {})
        assert name not in sys.modules
    with pytest.raises(CheckpointError, match="kind 'later'"):
        arguments_for(Anything, {"hyper_parameters": {"value": {TAG: "later"}}}, {})
