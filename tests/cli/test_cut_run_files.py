"""Every file of a training run, cut or overwritten anywhere: the next start goes on, or says in one sentence why it cannot."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.cli.arguments import UsageError, read_recipe, recipe_parser
from arclight.cli.command import is_fault_of_use, sentence
from arclight.cli.run_record import RunRecord
from arclight.recipe import RecipeError
from arclight.trainer import RunFolder
from arclight.trainer.callbacks import RunReport
from arclight.trainer.run import folder as folder_module
from arclight.trainer.run.report import write_report

RECIPE = """name = "cut"

[trainer]
max_epochs = 3

[task]
kind = "language"
model = "llama3-debug"
"""


READ = {"recipe.toml", "environment.json", "metrics.csv", "captions.json"}
"""Files of a run that the next start or its report reads, beside checkpoints."""


@pytest.fixture(autouse=True)
def known_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git and all packages takes longer than all else here."""
    facts = {"cpu": "a processor", "accelerators": [], "packages": {"torch": "2"}, "git_commit": None}
    monkeypatch.setattr(folder_module, "environment", lambda: dict(facts))


class Line(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(root: Path, epochs: int, start: str | None = None) -> al.Trainer:
    saving = al.ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    trainer = al.Trainer(
        accelerator="cpu", max_epochs=epochs, default_root_dir=root, run_name="cut", enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
        callbacks=[saving, RunRecord(RECIPE), RunReport()],
    )  # fmt: skip
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    trainer.fit(Line(), DataLoader(TensorDataset(x), 4), ckpt_path=start)
    return trainer


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The runs of somebody whose newest one was stopped after two epochs."""
    root = tmp_path / "stopped" / "runs"
    run = train(root, 2).run_folder
    run.log.write_text("a line of the log\n")
    (run.plots / "captions.json").write_text(json.dumps({"one.png": "a plot"}))
    (run.plots / "one.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(8) + (640).to_bytes(4) + bytes(20))
    return root


def damaged(data: bytes) -> Iterator[bytes | None]:
    """Yield damaged versions of a file: missing, cut, parts zeroed or overwritten, repeated."""
    lines = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")][:-1]
    yield None
    half = len(data) // 2
    for place in sorted({0, half, len(data) - 1, *lines[:1]}):
        yield data[:place]
    yield data[:half] + bytes(len(data) - half)
    yield data[:half] + b"\xff" * (len(data) - half)
    yield data + data[len(data) // 2 :]
    if data.startswith(b"{"):
        yield from (b"[]", b"{}", b"5", b"null", b'"text"', b'{"a": ' * 5000)


def goes_on(root: Path) -> None:
    """Continue as a person would: resume training, open the report, read the recipe."""
    trainer = train(root, 3, "last")
    assert trainer.global_step == 6, "two batches in each of three epochs"
    run = RunFolder.newest(root, "cut")
    assert run is not None
    write_report(run.path)


def recipe_is_read(root: Path) -> None:
    read_recipe(recipe_parser("train", ""), [str(root / "cut" / "1")])


def damages(stopped: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Each file of the runs with each damage, in a copy of its own."""
    files = sorted(path.relative_to(stopped) for path in stopped.rglob("*") if path.is_file())
    for name in files:
        whole = (stopped / name).read_bytes()
        if "checkpoints" in name.parts and name.parts[-2:] != ("epoch=1.ckpt", "state.json"):
            continue  # see tests/checkpoint/test_hostile_files.py
        read = name.name in READ
        for number, left in enumerate(damaged(whole) if read else (whole[:-1],)):
            root = tmp_path / "runs"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(stopped, root, symlinks=True)
            (root / name).unlink()
            if left is not None:
                (root / name).write_bytes(left)
            yield f"{name} ({'gone' if left is None else f'{number}: {left[:20]!r}... of {len(left)} bytes'})", root


@pytest.mark.parametrize("what", [recipe_is_read, pytest.param(goes_on, marks=pytest.mark.slow)])
def test_each_file_of_a_run_may_be_cut_at_any_boundary(
    stopped: Path, tmp_path: Path, what: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    names = {path.name for path in stopped.rglob("*") if path.is_file()}
    assert {"metrics.csv", "environment.json", "recipe.toml", "log.txt", "report.html", "captions.json"} <= names
    wrong, went_on = list[str](), 0
    for about, root in damages(stopped, tmp_path):
        if (what is recipe_is_read) != ("recipe.toml" in about):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                what(root)
                went_on += 1
            except Exception as error:
                told = sentence(error)
                lines = told.splitlines()
                short = len(lines) == 1 or isinstance(error, RecipeError | UsageError)
                if not lines or not short or not is_fault_of_use(error):
                    wrong.append(f"{about}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert went_on
