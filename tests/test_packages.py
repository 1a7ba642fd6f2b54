"""The distribution: its name in messages, what a wheel holds, and `make setup` in a checkout that has an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import arclight
from arclight import _installed
from arclight.fabric.extras import MissingExtraError, require

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))


class Command:
    """A console script in installed metadata."""

    def __init__(self, distribution: str, value: str = "arclight.cli:main") -> None:
        self.value, self.dist = value, SimpleNamespace(name=distribution)


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ([Command("arclight-torch")], "arclight-torch"),
        ([Command("our-fork")], "our-fork"),
        ([Command("arclight", "arclight.main:run"), Command("our-fork")], "our-fork"),  # a stranger's command
        ([Command("arclight"), Command("arclight-torch")], "arclight-torch"),
        ([], "arclight-torch"),
    ],
)
def test_messages_name_the_distribution_that_is_installed(
    installed: list[Command], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_installed, "entry_points", lambda **_: installed)
    assert _installed.distribution() == named
    with pytest.raises(MissingExtraError) as raised:
        require("no_such_package", extra="vision")
    assert str(raised.value).endswith(f'pip install "{named}[vision]"')


def test_the_project_has_the_name_that_is_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == _installed.NAME
    assert project["scripts"] == {"arclight": "arclight.cli:main"}


def test_no_text_sends_people_to_another_project() -> None:
    texts = [path for kind in ("py", "md") for path in ROOT.glob(f"*/**/*.{kind}") if ".venv" not in path.parts]
    wrong = [
        path
        for path in (*texts, ROOT / "README.md")
        if "install" in (text := path.read_text()) and f"arclight{'['}" in text
    ]
    assert wrong == []


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel holds, built here without a network."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds wheels: make setup")
    folder = tmp_path_factory.mktemp("wheel")
    builder = wheel.WheelBuilder(str(ROOT))
    (built,) = builder.build(directory=str(folder / "dist"), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run_from(unpacked: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-m", "arclight.cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_wheel_brings_the_recipes(unpacked: Path, tmp_path: Path) -> None:
    assert sorted(path.stem for path in (unpacked / "arclight" / "recipes").iterdir()) == RECIPES
    assert sorted(path.name for path in unpacked.iterdir()) == [
        "arclight",
        f"arclight_torch-{arclight.__version__}.dist-info",
    ]
    for recipe in ("detect-qris", "recipes/detect-qris.toml"):  # by its name, and as the README has it
        done = run_from(unpacked, tmp_path, "train", recipe, "--trainer.max_epochs", "much")
        assert done.returncode == 2
        assert done.stderr.startswith("arclight: --trainer.max_epochs: need int"), done.stderr


def test_an_editable_installation_brings_the_sources_only(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds wheels: make setup")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])
    with zipfile.ZipFile(built) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        (pointer,) = files
        assert archive.read(pointer).decode().split() == [str(ROOT / "src")]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("linked", [False, True])
def test_make_setup_uses_an_environment_that_is_there(tmp_path: Path, linked: bool) -> None:
    checkout, environment = tmp_path / "checkout", tmp_path / ("environment" if linked else "checkout/.venv")
    checkout.mkdir()
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, checkout)
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    if linked:
        (checkout / ".venv").symlink_to(environment)
    for _ in range(2):  # the second time nothing is to be done
        subprocess.run(["make", "setup", "PYTHON=false"], cwd=checkout, check=True, capture_output=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-1].startswith("-m pip install --quiet --editable")
    assert len(asked) == len(set(asked))
