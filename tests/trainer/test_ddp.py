"""Two processes over gloo train what one process trains."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm

import arclight as al
from arclight import checkpoint
from arclight.fabric.strategies import DDPStrategy
from arclight.trainer.callbacks import ModelCheckpoint

SCRIPT = Path(__file__).parent / "ddp_script.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(SCRIPT, *arguments, timeout=300)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    for devices in ("1", "2"):
        done = run(str(tmp_path / devices), devices)
        assert done.returncode == 0, done.stderr
    one, two = checkpoint.load(tmp_path / "1"), checkpoint.load(tmp_path / "2")
    for name, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][name], tensor, rtol=1e-12, atol=1e-14)
    assert one["metrics"].keys() == two["metrics"].keys()
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-6)


@pytest.mark.slow
def test_a_failing_rank_ends_the_run(tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "2", "--fail")
    assert done.returncode != 0
    assert "rank 1 meets a bad sample" in done.stderr
    assert not (tmp_path / "out").exists()


class Tiny(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TinyByHand(Tiny):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).square().mean())
        optimizer.step()


def test_manual_optimization_shares_gradients() -> None:
    by_hand, automatic, data = TinyByHand(), Tiny(), torch.randn(16, 2)
    by_hand.load_state_dict(automatic.state_dict())
    for model, devices in ((by_hand, 2), (automatic, 1)):
        trainer = al.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=devices,
            strategy="ddp_fork" if devices > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(data, 4 // devices))
    torch.testing.assert_close(by_hand.net.weight, automatic.net.weight)


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_weights_and_metrics_come_back_in_the_type_of_training(precision: Any, dtype: torch.dtype) -> None:
    first, data, found = Tiny().state_dict(), torch.randn(16, 2), []
    for strategy in ("auto", "ddp_fork"):
        model = Tiny()
        model.load_state_dict(first)
        trainer = al.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, strategy=strategy, precision=precision, logger=False,
            enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, 4))
        assert model.net.weight.dtype == dtype
        found.append({**model.state_dict(), **trainer.callback_metrics})
    assert len(found[0]) > len(first)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("devices", [1, 2])
def test_processes_that_have_ended_leave_weights_to_be_saved_and_no_optimizers(tmp_path: Path, devices: int) -> None:
    model, data = Tiny(), torch.randn(16, 2)
    last = ModelCheckpoint(dirpath=tmp_path / "kept", save_last=True)
    trainer = al.Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy="ddp_fork", logger=False, callbacks=[last],
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, 4))
    assert checkpoint.load(last.last_model_path)["optimizers"]
    with pytest.raises(RuntimeError, match=r"processes that have ended.*weights_only=True"):
        trainer.save_checkpoint(tmp_path / "whole")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    torch.testing.assert_close(Tiny.load_from_checkpoint(tmp_path / "weights").net.weight, model.net.weight)


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_start_python_bring_their_result_back(tmp_path: Path, start_method: str) -> None:
    warm.context()  # a fork server that has imported torch
    model, data = Tiny(), torch.randn(16, 2)
    before = model.net.weight.detach().clone()
    trainer = al.Trainer(
        max_epochs=1,
        devices=2,
        strategy=DDPStrategy(start_method=start_method),
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, 4))
    assert not torch.equal(model.net.weight, before)
    assert trainer.global_step == 2
    assert trainer.callback_metrics["loss"] > 0
    assert (trainer.run_folder.path / "metrics.csv").exists()
