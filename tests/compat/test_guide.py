"""The page for people who come from Lightning is complete, and what it names exists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest
from tests.compat import guide_table
from tests.compat.guide_table import BEGIN, GUIDE, REPOSITORY

import arclight as al
import arclight.compat.lightning as L
from arclight.compat.lightning.trainer import LIGHTNING
from arclight.trainer.settings import TrainerBehavior

ROWS = guide_table.rows()
TEXT = GUIDE.read_text(encoding="utf-8")
AGAIN = "run tests/compat/guide_table.py to write the table anew"


def test_the_table_is_that_of_the_code() -> None:
    assert TEXT.partition(f"{BEGIN}\n")[2] == guide_table.render(), AGAIN


def test_the_flags_are_those_of_the_trainer() -> None:
    listed = {row.name for row in ROWS if row.section == "Trainer's flags"}
    ours = set(inspect.signature(al.Trainer).parameters) - {"unknown", "run_name", "run_folder"}
    assert inspect.signature(L.Trainer).parameters.keys() == inspect.signature(al.Trainer).parameters.keys()
    assert listed == ours == set(guide_table.flags())


@pytest.mark.parametrize(
    "name", ["EarlyStopping", "LightningModule", "max_epochs", "on_train_batch_end", "ddp", "Timer"]
)
def test_a_name_is_found_on_the_page(name: str) -> None:
    assert f"`{name}`" in TEXT.partition(BEGIN)[2]


def test_paths_can_be_imported() -> None:
    for row in ROWS:
        if row.section.startswith("Names of") or ".cli." in row.ours:
            continue  # strings, or names that need jsonargparse
        parts = row.ours.split(".")
        start = next(n for n in range(len(parts) - 1, 0, -1) if is_module(".".join(parts[:n])))
        thing = importlib.import_module(".".join(parts[:start]))
        for part in parts[start:]:
            # flags are arguments and some members are set when a trainer is made
            thing = getattr(thing, part, None) if thing is not al.Trainer else getattr(L.Trainer, part, thing)
        assert thing is not None or row.name.isupper(), row


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_members_of_a_trainer_are_there() -> None:
    run = L.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
    missing = [row.name for row in ROWS if row.section == "Trainer's members" and row.name not in dir(run)]
    assert missing == []


def test_each_difference_between_the_two_trainers_is_documented() -> None:
    native = TrainerBehavior()
    differences = [f.name for f in dataclasses.fields(native) if getattr(native, f.name) != getattr(LIGHTNING, f.name)]
    table = TEXT.partition("## Two trainers")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| (?!\|)[^|`]*[`a-zA-Z]", table, re.MULTILINE)) == len(differences)


def test_files_that_the_text_names_exist() -> None:
    paths = set(re.findall(r"`((?:docs|tests|src|benchmarks)/[\w./-]+)`", TEXT))
    assert paths
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []


def test_every_refusal_is_listed() -> None:
    listed = TEXT.partition("### Not offered")[2]
    assert [name for name, reason in guide_table.refused() if f"| `{name}` | {reason} |" not in listed] == [], AGAIN
