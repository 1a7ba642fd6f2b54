"""Tells three kinds of bars in noisy images apart: a module, a data module, callbacks, the best checkpoint."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight.compat.lightning as L
from arclight.compat.lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from arclight.compat.lightning.pytorch.loggers import CSVLogger


def draw(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(samples, 1, 12, 12, generator=generator)
    kinds = torch.randint(3, (samples,), generator=generator)
    places = torch.randint(2, 10, (samples,), generator=generator)
    for image, kind, place in zip(images, kinds.tolist(), places.tolist(), strict=True):
        if kind == 0:
            image[0, place] += 1
        elif kind == 1:
            image[0, :, place] += 1
        else:
            image[0].diagonal().add_(1)
    return TensorDataset(images, kinds)


class Bars(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        if stage == "fit":
            self.train, self.val = draw(320, seed=0), draw(96, seed=1)
        if stage == "test":
            self.unseen = draw(96, seed=2)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.unseen, batch_size=self.hparams.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, width=8, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * width, 3),
        )  # fmt: skip

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, kinds = batch
        loss = F.cross_entropy(self(images), kinds)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._measure(batch, "val")

    def test_step(self, batch, batch_idx):
        self._measure(batch, "test")

    def _measure(self, batch, name):
        images, kinds = batch
        scores = self(images)
        self.log(f"{name}_loss", F.cross_entropy(scores, kinds))
        self.log(f"{name}_acc", (scores.argmax(1) == kinds).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)]


def main(folder):
    L.seed_everything(1)
    best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.2f}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=12,
        log_every_n_steps=5,
        callbacks=[best, EarlyStopping("val_loss", patience=6), LearningRateMonitor("epoch")],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), datamodule=Bars())
    (result,) = trainer.test(datamodule=Bars(), ckpt_path="best")
    assert result["test_acc"] > 0.85, result
    assert best.best_model_path.endswith(".ckpt"), best.best_model_path

    again = Classifier.load_from_checkpoint(best.best_model_path)
    (same,) = trainer.test(again, datamodule=Bars())
    assert same == result, (same, result)


if __name__ == "__main__":
    main(sys.argv[1])
