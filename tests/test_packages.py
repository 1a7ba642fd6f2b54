"""The distribution: its name in messages, what a wheel holds, and `make setup` in a checkout that has an environment."""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import arclight
from arclight import _installed
from arclight.compat.lightning.names import NAMES
from arclight.fabric.extras import MissingExtraError, require

ROOT = Path(__file__).resolve().parents[1]
APACHE_2_0 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of the licence's text as its authors publish it."""
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


def test_the_project_has_the_documented_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == _installed.NAME
    assert project["scripts"] == {"arclight": "arclight.cli:main"}


def test_no_text_sends_people_to_another_project() -> None:
    folders = [folder for folder in ROOT.iterdir() if folder.name != ".venv"]  # it has fifty thousand files
    texts = [path for folder in folders for kind in ("py", "md") for path in folder.glob(f"**/*.{kind}")]
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


@pytest.mark.slow
def test_wheel_and_sdist_carry_the_licence(unpacked: Path, tmp_path: Path) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(licence).hexdigest() == APACHE_2_0
    metadata = unpacked / f"arclight_torch-{arclight.__version__}.dist-info"
    assert (metadata / "licenses" / "LICENSE").read_bytes() == licence
    lines = (metadata / "METADATA").read_text().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "License-File: LICENSE" in lines

    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling builds sdists: make setup")
    (built,) = sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(built) as archive:
        top = f"arclight_torch-{arclight.__version__}"
        packed = archive.extractfile(f"{top}/LICENSE")
        assert packed is not None
        assert packed.read() == licence
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
        assert folders <= {"src", "recipes", "docs", "tests", "benchmarks", "examples", ".ci"}


def test_project_files_agree_with_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (arclight.__version__, project["license"])
    assert project["version"] == arclight.__version__


def test_commit_hooks_run_the_tools_of_the_environment() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in settings["repos"]] == ["local"]
    tools = [hook["entry"].split()[0] for hook in settings["repos"][0]["hooks"]]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    scripts = {"lint-imports": "import-linter"}
    for tool in tools:
        folder, _, name = tool.rpartition("/")
        assert folder == ".venv/bin"
        assert any(line.startswith(scripts.get(name, name)) for line in extras), name


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


USER = """
import torch
import arclight as al
import arclight.compat.lightning as L
import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.fabric import Fabric
from arclight.compat.lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from arclight.compat.lightning.pytorch.loggers import CSVLogger
from arclight.compat.lightning.pytorch.utilities.rank_zero import rank_zero_only


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> list[torch.Tensor]:
        return [torch.zeros(1, 2)]


class Noting(pl.callbacks.Callback):
    def on_train_start(self, trainer: al.Trainer, pl_module: al.Module) -> None:
        print(trainer.global_step)


trainer = L.Trainer(max_epochs=1, callbacks=[Noting(), EarlyStopping("loss"), ModelCheckpoint()], logger=CSVLogger("logs"))
trainer.fit(Model(), datamodule=Data())
reveal_type(pl.Trainer(max_steps=1).global_step)
reveal_type(Fabric(devices=1).world_size)
reveal_type(al.Trainer.fit)
wrong: str = trainer.global_step
missing = pl.callbacks.EarlyStoping
"""


def public_imports() -> list[str]:
    """Statements that import every public name of every package, and every name of Lightning's, each under a name of its own."""
    packages = [module.name for module in pkgutil.walk_packages(arclight.__path__, "arclight.") if module.ispkg]
    statements = []
    for name in ["arclight", *packages]:
        path = name.replace(".", "_")
        listed = getattr(importlib.import_module(name), "__all__", [])
        statements += [f"from {name} import {item} as {path}_{item}" for item in listed]
    for path, names in NAMES.items():
        module = ".".join(filter(None, ("arclight.compat.lightning", path)))
        statements += [f"from {module} import {item} as {module.replace('.', '_')}_{item}" for item in names]
    return statements


@pytest.mark.slow
def test_type_checkers_know_every_public_name_of_a_wheel(
    unpacked: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """``mypy --strict`` on a user's file, in an environment with the wheel and what it needs. A minute with an empty cache."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "paths.pth").write_text(f"{unpacked}\n{sysconfig.get_path('purelib')}\n")
    statements = public_imports()
    assert len(statements) > 700
    file = tmp_path / "user.py"
    file.write_text("\n".join(statements) + "\n" + USER)
    cache = pytestconfig.cache.mkdir("mypy") if pytestconfig.cache is not None else tmp_path / "cache"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(cache),
        "--no-error-summary",
    ]
    done = subprocess.run(
        [*command, "--python-executable", str(tmp_path / "env" / "bin" / "python"), str(file)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    revealed = [line for line in said if line.startswith("note: Revealed type")]
    assert [kind for kind in ("int", "int", "def (") if not any(kind in line for line in revealed)] == [], done.stdout
    errors = [line for line in said if line.startswith("error")]
    assert len(errors) == 2, done.stdout + done.stderr
    assert "Incompatible types in assignment" in errors[0]
    assert 'Module has no attribute "EarlyStoping"' in errors[1]
