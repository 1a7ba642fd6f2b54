"""Files of earlier versions find classes that have moved or were renamed since."""

from __future__ import annotations

import ast
import importlib.util

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
    module, _, name = former.partition(":")
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    assert isinstance(getattr(found, RENAMED[former]), type)


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


def test_hyper_parameters_may_name_a_dataclass_where_it_was() -> None:
    pytest.importorskip("cv2")
    from arclight.trainer.hparams import decode, encode
    from arclight.vision import Detector
    from arclight.vision.tasks import settings

    saved = encode({"augment": settings.Augment()})
    text = repr(saved)
    assert "arclight.vision.tasks.settings:Augment" in text
    former = ast.literal_eval(text.replace("arclight.vision.tasks.settings", "arclight.vision.settings"))
    assert decode(former, Detector) == {"augment": settings.Augment()}
