"""A script written for Lightning runs unchanged but for its import lines, and leaves the same files where they were."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from tests import warm

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning as L
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import STEP_OUTPUT


class Spirals(L.LightningDataModule):
    def __init__(self, samples: int = 96, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        angle = torch.linspace(0, 6, self.hparams.samples)
        points = torch.stack((angle * angle.cos(), angle * angle.sin()), 1)
        data = TensorDataset(torch.cat((points, -points)), torch.arange(2).repeat_interleave(len(angle)))
        self.train, self.val = random_split(data, [0.75, 0.25], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Classifier(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)

    def _shared(self, batch, name):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict({f"{name}_loss": loss, f"{name}_acc": (logits.argmax(1) == y).float().mean()}, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        return self._shared(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._shared(batch, "val")

    def test_step(self, batch, batch_idx):
        self._shared(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches in (30 * 9, 31 * 9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Epochs(pl.Callback):
    seen = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen += 1


L.seed_everything(1, workers=True)
epochs, checkpoint = Epochs(), ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.2f}", save_last=True)
trainer = L.Trainer(
    max_epochs=30, accelerator="cpu", devices=1, log_every_n_steps=2, enable_progress_bar=False, gradient_clip_val=1.0,
    callbacks=[epochs, checkpoint, EarlyStopping("val_loss", patience=30), LearningRateMonitor("step")],
    logger=CSVLogger("lightning_logs", name=""),
)
model = Classifier()
trainer.fit(model, datamodule=Spirals())
assert trainer.callback_metrics["val_loss"] >= 0
(result,) = trainer.test(ckpt_path="best", datamodule=Spirals())
assert result["test_acc"] > 0.8, result
predictions = torch.cat(trainer.predict(datamodule=Spirals()))
assert len(predictions) == 48
again = Classifier.load_from_checkpoint(checkpoint.best_model_path)
assert again.hparams.width == 32
assert trainer.global_step == 30 * 9 and trainer.current_epoch == 30 and epochs.seen == 30
more = L.Trainer(max_epochs=31, logger=False, enable_progress_bar=False, enable_model_summary=False)
more.fit(Classifier(), datamodule=Spirals(), ckpt_path=checkpoint.last_model_path)
assert more.global_step == 31 * 9
try:
    L.Trainer(gradient_clip_algorithm="max")
except MisconfigurationException:
    print("all as it was")
"""


def test_only_the_import_lines_change(tmp_path: Path) -> None:
    ours = SCRIPT.replace("import lightning", "import arclight.compat.lightning").replace(
        "from lightning", "from arclight.compat.lightning"
    )
    (tmp_path / "train.py").write_text(ours)
    run = warm.run("train.py", cwd=tmp_path, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip().endswith("all as it was")
    folder = tmp_path / "lightning_logs" / "version_0"
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints[-1] == "last.ckpt"
    assert checkpoints[0].startswith("epoch=")
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {
        "state_dict",
        "optimizer_states",
        "lr_schedulers",
        "callbacks",
        "loops",
        "epoch",
        "global_step",
    } <= saved.keys()
    assert saved["hyper_parameters"] == {"width": 32, "lr": 1e-2}
    assert saved["datamodule_hyper_parameters"] == {"samples": 96, "batch_size": 16}
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"epoch", "step", "train_loss", "val_acc", "lr-AdamW"} <= rows[0].keys()
    assert (folder / "hparams.yaml").exists()
