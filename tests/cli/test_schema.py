"""The schema of recipes, and the recipes that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from arclight.cli.schema import Recipe
from arclight.recipe import MISSING, RecipeError, Setting, explain, read, write

shipped = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))
settings = explain(Recipe)
tables = {setting.path.rpartition(".")[0] for setting in settings}
fields = [setting for setting in settings if setting.path not in tables and not setting.path.endswith(".kind")]


@pytest.mark.parametrize("path", shipped, ids=lambda path: path.stem)
def test_shipped_recipes_read_without_errors(path: Path) -> None:
    recipe = read(Recipe, path)
    assert recipe.name == path.stem
    assert recipe.task.image_size % 32 == 0


def test_there_are_shipped_recipes() -> None:
    assert "detect-qris" in [path.stem for path in shipped]


def test_a_recipe_is_written_and_read(tmp_path: Path) -> None:
    recipe = read(Recipe, shipped[0], ["--stopping.patience", "3", "--ema", "none", "--task.optimizer", "sgd"])
    (tmp_path / "r.toml").write_text(write(recipe))
    assert read(Recipe, tmp_path / "r.toml") == recipe


@pytest.mark.parametrize("setting", fields, ids=lambda setting: f"{setting.path}-{setting.kind}")
def test_every_field_refuses_what_it_cannot_be(setting: Setting) -> None:
    """A nested list is no value of any field; its default, typed as a flag, is one of each."""
    parents = setting.path.split(".")
    table: dict[str, object] = {"task": {"data": "x"}}
    inner = table
    for name in parents[:-1]:
        inner = inner.setdefault(name, {})  # type: ignore[assignment]
    if setting.kind:
        inner["kind"] = setting.kind
    inner[parents[-1]] = [[[]]]
    with pytest.raises(RecipeError) as caught:
        read(Recipe, table)
    assert caught.value.problems == [f"{setting.path}: need {setting.type}, got [[[]]]"]


@pytest.mark.parametrize("setting", fields, ids=lambda setting: f"{setting.path}-{setting.kind}")
def test_every_default_may_be_typed(setting: Setting) -> None:
    from arclight.cli.help import shown

    if setting.default is MISSING:
        return
    table = setting.path.rpartition(".")[0]
    kind = [f"--{table}.kind", setting.kind] if setting.kind else []
    typed: object = read(Recipe, {"task": {"data": "x"}}, [*kind, f"--{setting.path}={shown(setting.default)}"])
    for name in setting.path.split("."):
        typed = getattr(typed, name)
    assert typed == setting.default


def test_a_task_must_be_able_to_build(folder: Path, tiny: Path) -> None:
    import sys

    sys.path.append(str(folder))
    with pytest.raises(RecipeError, match=r"^Recipe: NotATask has no method build\(\)"):
        read(Recipe, tiny, ["--task.kind", "tiny_task:NotATask"])
