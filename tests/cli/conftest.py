"""A folder to type commands in, and a task so small that it trains in a second."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arclight.cli.command import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty; modules found in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def typed(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """``typed("train x.toml")`` runs the command and gives its status, standard output and standard error."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(line.split())
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def tiny(folder: Path) -> Iterator[Path]:
    """A recipe for a person's own task: a line fitted to eight points."""
    (folder / "tiny_task.py").write_text(
        textwrap.dedent('''
        from dataclasses import dataclass

        import torch
        from torch.utils.data import DataLoader, TensorDataset

        import arclight as al


        class Line(al.Module):
            def __init__(self, lr):
                super().__init__()
                self.layer, self.lr = torch.nn.Linear(1, 1), lr

            def training_step(self, batch, batch_idx):
                loss = (self.layer(batch[0]) - batch[1]).square().mean()
                self.log("train/loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("val/loss", (self.layer(batch[0]) - batch[1]).square().mean())

            def test_step(self, batch, batch_idx):
                self.log("test/loss", (self.layer(batch[0]) - batch[1]).square().mean())

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), self.lr)


        class Points(al.DataModule):
            def train_dataloader(self):
                x = torch.arange(8.0)[:, None] / 8
                return DataLoader(TensorDataset(x, 2 * x), batch_size=2, shuffle=True)

            val_dataloader = test_dataloader = train_dataloader


        @dataclass(frozen=True, kw_only=True)
        class Fit:
            """Fit a line."""

            lr: float = 0.1

            def build(self):
                return Line(self.lr), Points()


        @dataclass(frozen=True, kw_only=True)
        class Wrong:
            lr: float = 0.1

            def build(self):
                raise ValueError(f"lr = {self.lr} is too small to learn")


        @dataclass(frozen=True, kw_only=True)
        class NotATask:
            lr: float = 0.1
        ''')
    )
    recipe = folder / "tiny.toml"
    recipe.write_text(
        'name = "tiny"\nseed = 3\ntask = "tiny_task:Fit"\n'
        '[trainer]\nmax_epochs = 3\naccelerator = "cpu"\nenable_progress_bar = false\nlog_every_n_steps = 1\n'
    )
    yield recipe
    sys.modules.pop("tiny_task", None)


@pytest.fixture
def detector(folder: Path) -> Path:
    """A run of a detector that has learned nothing, and photos."""
    pytest.importorskip("cv2")
    import torch
    from tests.vision.conftest import SMALL

    from arclight import Trainer
    from arclight.trainer.run.folder import RunFolder
    from arclight.vision import Detector
    from arclight.vision.tasks.settings import DetectionTask

    run = RunFolder("runs", "detector")
    (folder / "small.yaml").write_text(SMALL)
    task = DetectionTask(
        data=Path("none.yaml"), model=str(folder / "small.yaml"), image_size=64, memory_format="contiguous"
    )
    torch.manual_seed(3)  # of both classes about alike: some weights find no dog at all
    detector = Detector(task, names=["cat", "dog"])
    trainer = Trainer(max_epochs=0, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(detector, torch.utils.data.DataLoader([0]))
    trainer.save_checkpoint(run.checkpoints / "last.ckpt")
    return run.path
