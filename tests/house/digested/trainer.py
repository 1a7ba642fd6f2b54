"""Digest the training loop in one process: losses, rates, metrics and weights.

`digests` runs `values`: callbacks that average or accumulate, schedules, optimizers, precisions, limits, runs that were resumed, optimizers that the
module steps, and Fabric. `ranks` and `checkpoints` take `Classifier` and `fit` from here: a change there changes their digests, too.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import arclight as al
from arclight.optim import cosine, decay_groups, lambda_schedule, wsd
from arclight.trainer import callbacks as c


class NoisyRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows augmented with all three random generators."""

    def __init__(self, count: int = 44) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * (random.random() + np.random.rand() + torch.rand(8)), self.y[index]


class Rows(al.DataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyRows(), 4, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyRows(12), 5)

    test_dataloader = predict_dataloader = val_dataloader


class Classifier(al.Module):
    """Classifier with batch normalisation and dropout, and the optimizer and schedule that its arguments name."""

    def __init__(self, width: int = 16, schedule: str = "cosine", optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2)
        )
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0].to(self.net[0].weight.dtype)), batch[1])
        self.losses.append(float(loss.detach()))
        self.rates += [group["lr"] for o in self.trainer.optimizers for group in o.param_groups]
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0].to(self.net[0].weight.dtype))
        self.log("val/loss", nn.functional.cross_entropy(scores, batch[1]))
        self.log("val/accuracy", (scores.argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores: torch.Tensor = self.net(batch[0].to(self.net[0].weight.dtype))
        return scores

    def _optimizer(self) -> torch.optim.Optimizer:
        kind = self.hparams["optimizer"]
        if kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if kind == "groups":
            return torch.optim.AdamW(decay_groups(self.named_parameters(), 0.1), lr=1e-2)
        if kind in ("Muon", "NorMuon", "Mixed", "AdamW", "SGD"):
            import arclight.optim

            settings = {} if kind == "Mixed" else {"lr": 1e-2}
            built: torch.optim.Optimizer = getattr(arclight.optim, kind)(**settings).build(self.named_parameters())
            return built
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> Any:
        optimizer, kind = self._optimizer(), self.hparams["schedule"]
        if kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}
        steps = {
            "none": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            "cosine": lambda: lambda_schedule(optimizer, cosine, total_steps=33, warmup=5, final=0.1),
            "wsd": lambda: lambda_schedule(optimizer, wsd, total_steps=33, warmup=5, decay=9, final=0.1),
            "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40),
        }
        if kind == "epochs":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps[kind](), "interval": "step"}}


class Adversaries(al.Module):
    """Module that steps its two optimizers itself, one of them with accumulation and clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        loss = self.judge(self.maker(batch[0])).square().mean()
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(maker, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            maker.step()
            maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        other = (self.judge(batch[0]) - self.judge(self.maker(batch[0])) - 1).square().mean()
        judge.zero_grad()
        self.manual_backward(other)
        judge.step()
        self.untoggle_optimizer(judge)
        self.lr_schedulers().step()
        self.losses += [float(loss.detach()), float(other.detach())]

    def configure_optimizers(self) -> Any:
        maker, judge = torch.optim.SGD(self.maker.parameters(), 0.1), torch.optim.Adam(self.judge.parameters(), 0.01)
        return [maker, judge], [torch.optim.lr_scheduler.ExponentialLR(maker, 0.9)]


def fit(folder: Path, module: al.Module, *callbacks: Any, ckpt: Any = None, workers: int = 0, **options: Any) -> Any:
    """Train ``module`` on `Rows`, by default for three epochs of eleven batches; return the trainer."""
    settings: dict[str, Any] = {
        "max_epochs": 3, "accelerator": "cpu", "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, "run_name": "run", "enable_checkpointing": False, "logger": False,
    }  # fmt: skip
    trainer = al.Trainer(callbacks=list(callbacks), **settings | options)
    trainer.fit(module, datamodule=Rows(workers), ckpt_path=ckpt)
    return trainer


def outcome(trainer: Any, module: Any) -> dict[str, Any]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "losses": module.losses, "rates": getattr(module, "rates", []), "weights": module.state_dict(), "metrics": metrics,
        "steps": trainer.global_step,
    }  # fmt: skip


def run(folder: Path, *callbacks: Any, module: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    al.seed_everything(11, verbose=False)
    model = Classifier(**(module or {}))
    return outcome(fit(folder, model, *callbacks, **options), model)


def resumed(folder: Path, step: int, **options: Any) -> dict[str, Any]:
    """Train by one trainer up to ``step``, and by a second one from its checkpoint to the end."""
    al.seed_everything(11, verbose=False)
    saver = al.ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=step, save_top_k=-1)
    averages = c.EMAWeightAveraging(decay=0.9)
    fit(folder, Classifier(), averages, saver, enable_checkpointing=True, max_steps=step, **options)
    torch.manual_seed(5)  # nothing depends on it
    (path,) = [p for p in (folder / "saved").iterdir() if f"step={step}" in p.name]
    model = Classifier()
    return outcome(fit(folder, model, c.EMAWeightAveraging(decay=0.9), ckpt=path, **options), model)


def stages(folder: Path) -> dict[str, Any]:
    al.seed_everything(11, verbose=False)
    model = Classifier()
    trainer = fit(folder, model)
    data = Rows()
    return {
        "validated": [dict(row) for row in trainer.validate(model, datamodule=data, verbose=False)],
        "tested": [dict(row) for row in trainer.test(model, datamodule=data, verbose=False)],
        "predicted": trainer.predict(model, datamodule=data),
    }


def own_loop() -> dict[str, Any]:
    fabric = al.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(4, verbose=False)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = []
    for epoch in range(2):
        loader = fabric.setup_dataloaders(DataLoader(NoisyRows(), 4, shuffle=True))
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(float(loss.detach()) + epoch)
    return {"losses": losses, "weights": model.state_dict()}


def rows_of_csv(folder: Path) -> str:
    """Return the text of a run's metrics.csv."""
    al.seed_everything(11, verbose=False)
    trainer = fit(folder, Classifier(), logger=True)
    text: str = (trainer.run_folder.path / "metrics.csv").read_text()
    return text


def values(folder: Path) -> dict[str, Any]:
    averages = {
        "ema": c.EMAWeightAveraging(decay=0.9),
        "swa": c.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
        "micro_batches": c.MicroBatching(2),
        "accumulation_schedule": c.GradientAccumulationScheduler({0: 1, 1: 3}),
    }
    found: dict[str, Any] = {name: run(folder / name, callback) for name, callback in averages.items()}
    found |= {f"schedule-{kind}": run(folder / kind, module={"schedule": kind})
              for kind in ("none", "cosine", "wsd", "onecycle", "epochs", "plateau")}  # fmt: skip
    found |= {f"optimizer-{kind}": run(folder / kind, module={"optimizer": kind, "schedule": "none"})
              for kind in ("sgd", "groups", "AdamW", "SGD", "Muon", "NorMuon", "Mixed")}  # fmt: skip
    ways: dict[str, dict[str, Any]] = {
        "accumulation": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        "bf16": {"precision": "bf16-mixed"},
        "double": {"precision": "64-true"},
        "half_true": {"precision": "bf16-true"},
        "limits": {"limit_train_batches": 0.5, "limit_val_batches": 1, "val_check_interval": 2, "max_steps": 12},
        "workers": {"workers": 2},
        "deterministic": {"deterministic": True},
    }
    found |= {name: run(folder / name, **options) for name, options in ways.items()}
    for step in (4, 11, 18):
        found[f"resumed-{step}"] = resumed(folder / f"resumed-{step}", step)
    found["resumed-accumulating"] = resumed(folder / "resumed-acc", 2, accumulate_grad_batches=3)
    al.seed_everything(11, verbose=False)
    module = Adversaries()
    found["manual"] = outcome(fit(folder / "manual", module), module)
    return found | {"stages": stages(folder / "stages"), "fabric": own_loop(), "csv": rows_of_csv(folder / "csv")}
