"""Every name of Lightning that is offered can be imported from where its users import it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from unittest import mock

import pytest
from tests.compat import write_stubs

import arclight as al
import arclight.compat.lightning as L
import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.modules import ROOT
from arclight.compat.lightning.names import NAMES, REFUSED


def name_of(path: str) -> str:
    return f"{ROOT}.{path}" if path else ROOT


@pytest.mark.parametrize("path", sorted(NAMES))
def test_every_name_of_the_table_is_there(path: str) -> None:
    module = importlib.import_module(name_of(path))
    if path == "pytorch.cli":
        pytest.importorskip("jsonargparse", reason="the command line's names need jsonargparse: make setup installs it")
    for name, origin in NAMES[path].items():
        home, _, own = origin.partition(":")
        assert getattr(module, name) is getattr(importlib.import_module(home), own), f"{name_of(path)}.{name}"
        assert (name in module.__all__) == (name in dir(module)) == (name == "__version__" or not name.startswith("_"))


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_refused_names_raise_with_a_reason(path: str) -> None:
    module = importlib.import_module(name_of(path))
    for name, reason in REFUSED[path].items():
        refused = getattr(module, name)
        assert not isinstance(object(), refused)
        with pytest.raises(NotImplementedError, match=f"{name}.*not offered") as error:
            refused(anything=1)
        assert reason in str(error.value)
        with pytest.raises(NotImplementedError, match=name):
            type("Own", (refused,), {})


def test_classes_are_ours_and_not_copies() -> None:
    assert L.LightningModule is al.Module
    assert L.LightningDataModule is al.DataModule
    assert L.Callback is al.Callback
    assert L.Fabric is al.Fabric
    assert pl.callbacks.early_stopping.EarlyStopping is al.EarlyStopping
    assert L.pytorch.callbacks is pl.callbacks
    assert L.Trainer is pl.Trainer
    assert issubclass(L.Trainer, al.Trainer)


def test_star_import_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec(f"from {ROOT}.pytorch.callbacks import *", names)
    assert names["ModelCheckpoint"] is al.ModelCheckpoint


def test_a_mistyped_name_suggests_the_nearest() -> None:
    with pytest.raises(
        AttributeError, match=r"callbacks' has no attribute 'EarlyStoping'; did you mean 'EarlyStopping'"
    ):
        _ = pl.callbacks.EarlyStoping
    with pytest.raises(ModuleNotFoundError, match="callback_s"):
        importlib.import_module(f"{ROOT}.pytorch.callback_s")


def test_replacing_a_name_for_a_while_leaves_our_rooms_alone() -> None:
    from arclight.fabric.environments import clusters

    first, second = f"{ROOT}.fabric.utilities.seed", f"{ROOT}.fabric"
    modules = [importlib.import_module(name) for name in (first, second)]
    ours = al.seed_everything
    with (
        mock.patch(f"{first}.seed_everything", return_value=3),
        mock.patch(f"{second}.seed_everything", return_value=4),
    ):
        assert [module.seed_everything() for module in modules] == [3, 4]
        assert importlib.import_module("arclight.fabric.seeding").seed_everything is ours
    assert [module.seed_everything for module in modules] == [ours, ours]
    before = clusters.find_free_network_port
    with (
        pytest.raises(ZeroDivisionError),
        mock.patch(f"{ROOT}.fabric.plugins.environments.lightning.find_free_network_port"),
    ):
        _ = 1 / 0
    assert clusters.find_free_network_port is before


def test_stubs_are_those_of_the_table() -> None:
    expected, found = write_stubs.stubs(), write_stubs.written()
    again = "run tests/compat/write_stubs.py"
    assert sorted(map(str, expected.keys() ^ found.keys())) == [], again
    assert [str(file) for file, text in expected.items() if found[file] != text] == [], again


def test_a_module_that_stands_for_one_of_ours_shows_what_else_is_in_it() -> None:
    from arclight.trainer.callbacks import timer

    assert pl.callbacks.timer.time is timer.time


def test_importing_the_names_imports_no_torch() -> None:
    program = f"import sys, {ROOT} as L, {ROOT}.pytorch.callbacks, {ROOT}.fabric.plugins; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
