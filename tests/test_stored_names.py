"""Files of earlier versions find classes that have moved or were renamed since."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from arclight import recipe
from arclight._stored_names import MOVED, RENAMED, current
from arclight.deploy.programs.processing import resolve


@pytest.mark.parametrize("former", MOVED)
def test_a_former_module_is_gone_and_its_successor_is_there(former: str) -> None:
    parent = former.rpartition(".")[0]
    if importlib.util.find_spec(parent) is not None:
        assert importlib.util.find_spec(former) is None
    assert importlib.util.find_spec(MOVED[former]) is not None


@pytest.mark.parametrize("former", RENAMED)
def test_a_renamed_class_is_there(former: str) -> None:
    module, _, name = RENAMED[former].partition(":")
    assert isinstance(getattr(importlib.import_module(module), name), type)
    assert RENAMED[former] not in RENAMED


def test_names_that_never_changed_stay() -> None:
    assert current("arclight.optim.settings:AdamW") == "arclight.optim.settings:AdamW"
    assert current("my_package.task:Task.Inner") == "my_package.task:Task.Inner"
    assert current("arclight.text.watching:Speed") == "arclight.text.language_model:TokenThroughput"


def test_a_recipe_may_name_a_callback_where_it_was() -> None:
    from arclight.trainer.callbacks import LearningRateMonitor

    assert recipe.imported("arclight.trainer.callbacks.lr_monitor:LearningRateMonitor") is LearningRateMonitor


def test_a_program_may_name_its_processing_where_it_was() -> None:
    pytest.importorskip("cv2")
    made = resolve("arclight.vision.processing:DetectionProcessing", {"image_size": 64, "names": ["code"]})
    assert type(made).__name__ == "DetectionProcessing"


def test_hyper_parameters_may_name_dataclasses_where_they_were() -> None:
    pytest.importorskip("cv2")
    from arclight.text import LanguageModel
    from arclight.text.settings import LanguageTask
    from arclight.trainer.hparams import decode, encode
    from arclight.vision import Detector
    from arclight.vision.tasks.settings import DetectionTask

    modules = {now: before for before, now in MOVED.items()}
    classes = {now: before for before, now in RENAMED.items()}

    def as_it_was(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_it_was(item) for key, item in value.items()}
        if not isinstance(value, str) or ":" not in value:
            return value
        module, _, name = classes.get(value, value).partition(":")
        return f"{modules.get(module, module)}:{name}"

    for owner, settings in ((Detector, DetectionTask(data=Path("data.yaml"))), (LanguageModel, LanguageTask())):
        stored = as_it_was(encode(settings))
        assert stored != encode(settings)
        assert decode(stored, owner) == settings


def test_a_recipe_names_tasks_as_it_always_did() -> None:
    from arclight.cli import Recipe
    from arclight.vision.tasks.settings import DetectionTask

    for kind in ("detection", "arclight.vision.settings:Detection"):
        made = recipe.read(Recipe, {"task": {"kind": kind, "data": "data.yaml"}})
        assert made.task == DetectionTask(data=Path("data.yaml"))
        assert 'kind = "detection"' in recipe.write(made)
    language = recipe.read(Recipe, {"task": "language"})
    assert language == recipe.read(Recipe, {"task": "arclight.text.settings:Language"})
