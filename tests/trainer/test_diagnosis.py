"""A loss of NaN or infinity is traced to its step, samples and module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.trainer import NonFiniteLossError


class Roots(al.Module):
    """Its square root has no value for the one sample below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.root = Root()
        nn.init.constant_(self.scale.weight, 1.0)
        nn.init.zeros_(self.scale.bias)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.root(self.scale(batch[0])).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def test_the_first_bad_step_is_found_by_running_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    al.seed_everything(3)
    values = torch.rand(40, 1) + 1
    values[23] = -1
    trainer = al.Trainer(
        max_epochs=4, log_every_n_steps=10, enable_progress_bar=False, default_root_dir=tmp_path, accelerator="cpu",
        callbacks=[al.ModelCheckpoint(every_n_train_steps=2, save_last=True)],
    )  # fmt: skip
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.fit(Roots(), DataLoader(TensorDataset(values), batch_size=2, shuffle=True))
    text = str(caught.value)
    assert "first in module 'root' (Root)" in text
    found = text.partition("samples [")[2].partition("]")[0]
    assert "23" in found.split(", ")
    assert "is from before" in text


def test_without_a_checkpoint_the_step_of_the_alarm_is_named(tmp_path: Path) -> None:
    trainer = al.Trainer(
        max_epochs=1, log_every_n_steps=1, enable_progress_bar=False, enable_checkpointing=False, logger=False
    )
    with pytest.raises(NonFiniteLossError, match="the loss is nan at step 1"):
        trainer.fit(Roots(), DataLoader(TensorDataset(-torch.ones(4, 1)), batch_size=2))


def test_samples_and_tokens_are_counted_beside_the_steps() -> None:
    class Counted(Roots):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            ids = batch["input_ids"] if isinstance(batch, dict) else batch[0]
            loss: torch.Tensor = self.scale(ids.float().reshape(-1, 1)).mean()
            return loss

    trainer = al.Trainer(max_epochs=1, enable_progress_bar=False, enable_checkpointing=False, logger=False)
    trainer.fit(Counted(), [{"input_ids": torch.ones(3, 5, dtype=torch.long)}, (torch.ones(2, 4, dtype=torch.long),)])
    assert (trainer.progress.samples, trainer.progress.tokens, trainer.progress.batches) == (5, 23, 2)


class Counting(al.Callback):
    """Counts its hooks within a step, and notes what it finds when the run has failed."""

    def __init__(self) -> None:
        self.calls = {"before_backward": 0, "after_backward": 0, "before_step": 0, "before_zero_grad": 0}
        self.end: tuple[int, int, bool] | None = None

    def on_before_backward(self, *_: Any) -> None:
        self.calls["before_backward"] += 1

    def on_after_backward(self, *_: Any) -> None:
        self.calls["after_backward"] += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls["before_step"] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls["before_zero_grad"] += 1

    def on_exception(self, trainer: al.Trainer, *_: Any) -> None:
        self.end = (trainer.global_step, trainer.progress.batches, self in trainer.callbacks)


def test_looking_for_the_bad_step_runs_no_hooks_again_and_leaves_the_position(tmp_path: Path) -> None:
    values = torch.rand(40, 1) + 1
    values[23] = -1  # in the twelfth batch; the alarm comes at step 20
    counting = Counting()
    trainer = al.Trainer(
        max_epochs=1, log_every_n_steps=20, enable_progress_bar=False, default_root_dir=tmp_path, accelerator="cpu",
        callbacks=[al.ModelCheckpoint(every_n_train_steps=8, save_last=True), counting],
    )  # fmt: skip
    with pytest.raises(NonFiniteLossError, match="first so at step 12"):
        trainer.fit(Roots(), DataLoader(TensorDataset(values), batch_size=2))
    assert set(counting.calls.values()) == {16}, "the save at step 16 finds it, and its search is not seen"
    assert counting.end == (16, 16, True)
    assert counting in trainer.callbacks
