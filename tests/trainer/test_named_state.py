"""The Trainer with an optimizer whose state goes by name: saved on two processes, taken up on one, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.fabric.strategies import FSDPStrategy
from arclight.optim import WSD, AdamW, NorMuon


class Model(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.up, self.down, self.output = nn.Linear(5, 6), nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch[0])
        return (self.output(x + self.down(torch.tanh(self.up(x)))) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        settings = NorMuon(precision="float32", state_dtype="bfloat16", others=AdamW(lr=0.01, state_dtype="bfloat16"))
        optimizer = settings.build(self.named_parameters())
        schedule = WSD(warmup=2, shape="1-sqrt").build(optimizer, 8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SavingAt(al.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_start(self, trainer: al.Trainer, module: al.Module) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: al.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.on_train_start(trainer, module)


def fit(folder: Path, devices: int, ckpt: Path | None = None, kind: str = "full", **options: Any) -> dict[str, Any]:
    """Two epochs of four global batches of eight; the state at the end."""
    strategy = FSDPStrategy(start_method="fork", auto_wrap_policy={nn.Linear}, state_dict_type=kind)
    trainer = al.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy if devices > 1 else "auto", enable_progress_bar=False,
        default_root_dir=folder, logger=False, enable_checkpointing=False, gradient_clip_val=0.5,
        **{"max_epochs": 2, **options},
    )  # fmt: skip
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(7))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8 // devices)
    model = Model()
    trainer.fit(model, data, ckpt_path=ckpt)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": value for name, entries in state["state"].items() for key, value in entries.items()}


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_two_processes_one_and_two_again(tmp_path: Path, kind: str) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    wanted = fit(tmp_path / "a", 2, kind=kind, callbacks=SavingAt(two, 3))
    alone = fit(tmp_path / "b", 1, two, callbacks=SavingAt(one, 3))
    saved, again = (flat(checkpoint.load(path)["optimizers"][0]) for path in (two, one))
    assert saved.keys() == again.keys()
    assert "up.weight/neuron_sq" in saved
    assert "output.weight/exp_avg_sq" in saved
    assert all(torch.equal(saved[name], again[name]) and saved[name].dtype == again[name].dtype for name in saved)
    found = fit(tmp_path / "c", 2, one, kind=kind)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        torch.testing.assert_close(alone[name], value, rtol=0, atol=2e-3)  # other sums, rounded to bfloat16
