"""The schema of recipes, and the recipes that are shipped."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from arclight.cli.federate.recipe import FederatedRecipe
from arclight.cli.schema import Recipe
from arclight.recipe import MISSING, RecipeError, Setting, explain, read, write
from arclight.text.heads.head_settings import AnswerTask, SequenceTask, TokenTask
from arclight.text.settings import LanguageTask
from arclight.vision.tasks.settings import (
    ClassificationTask,
    CornersTask,
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
    "corners": CornersTask,
    "obb": OrientedDetectionTask,
    "classification": ClassificationTask,
    "language": LanguageTask,
    "sequence-classification": SequenceTask,
    "token-classification": TokenTask,
    "extractive-qa": AnswerTask,
}
BASE: dict[str, dict[str, object]] = {
    **{
        kind: {"kind": kind, "data": "x"}
        for kind in ("detection", "segmentation", "pose", "corners", "obb", "classification")
    },
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
FIELDS: dict[str, list[tuple[str, Setting]]] = defaultdict(list)
"""The fields of each task, and of each table that all tasks share: well over a thousand, so a test takes a table."""
for task, setting in settings:
    if setting.path in tables or setting.path.endswith(".kind"):
        continue
    if not any(
        name in setting.path for name in ("groups", ".mix", "loggers", "monitors")
    ):  # lists of tables have tests of their own
        first = setting.path.partition(".")[0]
        FIELDS[task if first == "task" else first].append((task, setting))


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


def test_there_are_fields_of_every_table() -> None:
    assert {*TASKS, "trainer", "stopping", "seed"} <= set(FIELDS)
    assert sum(map(len, FIELDS.values())) > 1500


@pytest.mark.parametrize("table", FIELDS)
def test_every_field_refuses_what_it_cannot_be(table: str) -> None:
    """A nested list is no value of any field; its default, typed as a flag, is one of each."""
    wrong = []
    for task, setting in FIELDS[table]:
        with pytest.raises(RecipeError) as caught:
            read(Recipe, recipe_with(task, setting, [[[]]]))
        if caught.value.problems != [f"{setting.path}: need {setting.type}, got [[[]]]"]:
            wrong.append((task, setting.path, setting.kind, caught.value.problems))
    assert not wrong


def recipe_with(task: str, setting: Setting, value: object) -> dict[str, object]:
    """A recipe of this task that sets one field."""
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
    inner[parents[-1]] = value
    return table


@pytest.mark.parametrize("table", FIELDS)
def test_every_default_may_be_typed(table: str) -> None:
    wrong = []
    for task, setting in FIELDS[table]:
        if setting.default is not MISSING and (typed := typed_default(task, setting)) != setting.default:
            wrong.append((task, setting.path, setting.kind, typed))
    assert not wrong


def typed_default(task: str, setting: Setting) -> object:
    """The field of a recipe whose default was typed as a flag."""
    from arclight.cli.help import default_text

    table = setting.path.rpartition(".")[0]
    kind = [f"--{table}.kind", setting.kind] if setting.kind else []
    kind += [word for holder, chosen in holders(setting) for word in (f"--{holder}.kind", chosen)]
    typed: object = read(Recipe, {"task": BASE[task]}, [*kind, f"--{setting.path}={default_text(setting.default)}"])
    for name in setting.path.split("."):
        typed = getattr(typed, name)
    return typed


def test_a_task_must_be_able_to_build(folder: Path, tiny: Path) -> None:
    import sys

    sys.path.append(str(folder))
    with pytest.raises(RecipeError, match=r"^Recipe: NotATask has no method build\(\)"):
        read(Recipe, tiny, ["--task.kind", "tiny_task:NotATask"])


def test_federated_recipes_refuse_monitors() -> None:
    with pytest.raises(RecipeError, match=r"\[\[monitors\]\] are not used in a federated run"):
        read(FederatedRecipe, {"task": {"kind": "language"}, "monitors": [{"kind": "curvature"}]})
