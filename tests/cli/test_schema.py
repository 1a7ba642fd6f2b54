"""The schema of recipes, and the recipes that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from arclight.cli.federate.recipe import FederatedRecipe
from arclight.cli.schema import Recipe
from arclight.recipe import MISSING, RecipeError, Setting, explain, read, write
from arclight.text.heads.head_settings import AnswerTask, SequenceTask, TokenTask
from arclight.text.settings import LanguageTask
from arclight.vision.tasks.settings import (
    ClassificationTask,
    DetectionTask,
    OrientedDetectionTask,
    PoseTask,
    SegmentationTask,
)

shipped = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))
TASKS = {
    "detection": DetectionTask,
    "segmentation": SegmentationTask,
    "pose": PoseTask,
    "obb": OrientedDetectionTask,
    "classification": ClassificationTask,
    "language": LanguageTask,
    "sequence-classification": SequenceTask,
    "token-classification": TokenTask,
    "extractive-qa": AnswerTask,
}
BASE: dict[str, dict[str, object]] = {
    **{kind: {"kind": kind, "data": "x"} for kind in ("detection", "segmentation", "pose", "obb", "classification")},
    "language": {"kind": "language"},
    **{
        kind: {"kind": kind, "train": "x", "val": "x"}
        for kind in ("sequence-classification", "token-classification", "extractive-qa")
    },
}
settings = [("detection", setting) for setting in explain(Recipe) if not setting.path.startswith("task")]
settings += [(task, setting) for task, schema in TASKS.items() for setting in explain(schema, "task")]
HOLDERS = {
    "task.optimizer.others": ("task.optimizer", "muon"),
    "task.optimizer.default": ("task.optimizer", "mixed"),
    "task.optimizer.default.others": ("task.optimizer.default", "muon"),
}
"""Tables that only one kind of the table above them has."""
tables = {setting.path.rpartition(".")[0] for _, setting in settings}
fields = [
    pytest.param(task, setting, id=f"{task}-{setting.path}-{setting.kind}")
    for task, setting in settings
    if setting.path not in tables and not setting.path.endswith(".kind")
    if not any(
        name in setting.path for name in ("groups", ".mix", "loggers")
    )  # lists of tables have tests of their own
]


def holders(setting: Setting) -> list[tuple[str, str]]:
    """The kinds that tables above a field must be of."""
    return [above for table, above in HOLDERS.items() if setting.path.startswith(f"{table}.")]


@pytest.mark.parametrize("path", shipped, ids=lambda path: path.stem)
def test_shipped_recipes_read_without_errors(path: Path) -> None:
    recipe = read(FederatedRecipe if path.stem.startswith("fed-") else Recipe, path)
    assert recipe.name == path.stem
    assert type(recipe.task) in TASKS.values()


def test_there_are_shipped_recipes() -> None:
    assert "detect-qris" in [path.stem for path in shipped]


def test_a_recipe_is_written_and_read(tmp_path: Path) -> None:
    recipe = read(Recipe, shipped[0], ["--stopping.patience", "3", "--ema", "none", "--task.optimizer", "sgd"])
    (tmp_path / "r.toml").write_text(write(recipe))
    assert read(Recipe, tmp_path / "r.toml") == recipe


@pytest.mark.parametrize(("task", "setting"), fields)
def test_every_field_refuses_what_it_cannot_be(task: str, setting: Setting) -> None:
    """A nested list is no value of any field; its default, typed as a flag, is one of each."""
    parents = setting.path.split(".")
    table: dict[str, object] = {"task": dict(BASE[task])}
    inner = table
    for depth, name in enumerate(parents[:-1], 1):
        inner = inner.setdefault(name, {})  # type: ignore[assignment]
        for holder, kind in holders(setting):
            if holder == ".".join(parents[:depth]):
                inner["kind"] = kind
    if setting.kind:
        inner["kind"] = setting.kind
    inner[parents[-1]] = [[[]]]
    with pytest.raises(RecipeError) as caught:
        read(Recipe, table)
    assert caught.value.problems == [f"{setting.path}: need {setting.type}, got [[[]]]"]


@pytest.mark.parametrize(("task", "setting"), fields)
def test_every_default_may_be_typed(task: str, setting: Setting) -> None:
    from arclight.cli.help import shown

    if setting.default is MISSING:
        return
    table = setting.path.rpartition(".")[0]
    kind = [f"--{table}.kind", setting.kind] if setting.kind else []
    kind += [word for holder, chosen in holders(setting) for word in (f"--{holder}.kind", chosen)]
    typed: object = read(Recipe, {"task": BASE[task]}, [*kind, f"--{setting.path}={shown(setting.default)}"])
    for name in setting.path.split("."):
        typed = getattr(typed, name)
    assert typed == setting.default


def test_a_task_must_be_able_to_build(folder: Path, tiny: Path) -> None:
    import sys

    sys.path.append(str(folder))
    with pytest.raises(RecipeError, match=r"^Recipe: NotATask has no method build\(\)"):
        read(Recipe, tiny, ["--task.kind", "tiny_task:NotATask"])
