"""Parts of a state written in the background by several processes, without a collective there."""

from __future__ import annotations

import json
import os
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import wait_until
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.checkpoint import AsyncSaver, CheckpointError
from arclight.checkpoint.sharded import writer
from arclight.fabric.strategies import FSDPStrategy
from arclight.trainer.callbacks import ModelCheckpoint
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO

torch.set_num_threads(1)


def launch(devices: int, function: Any, *arguments: Any) -> Any:
    strategy = FSDPStrategy(start_method="fork")
    return al.Fabric(accelerator="cpu", devices=devices, strategy=strategy).launch(function, *arguments)


def _in_the_background(fabric: al.Fabric, folder: Path) -> None:
    strategy, rank = fabric.strategy, fabric.global_rank
    mesh = init_device_mesh("cpu", (3,))
    table = distribute_tensor(torch.arange(70.0).reshape(10, 7), mesh, [Shard(0)])
    gate, write = threading.Event(), writer._write
    writer._write = lambda *a: (gate.wait(60) or os._exit(3)) and write(*a)
    with AsyncSaver() as saver:
        first = saver.save_shards(folder / "1", {"model": {"w": table}, "step": 1}, strategy)
        places = {key: buffer.data_ptr() for key, buffer in saver._buffers.items()}
        table.to_local().fill_(-1)  # training goes on
        assert not first.done()
        assert not (folder / "1").exists()
        threading.Timer(0.2 * rank, gate.set).start()
        assert first.result(60) == folder / "1"
        for step in range(2, 5):
            table.to_local().fill_(step)
            saver.save_shards(folder / str(step), {"model": {"w": table}, "step": step}, strategy)
        assert {key: buffer.data_ptr() for key, buffer in saver._buffers.items()} == places
        saver.wait()
        fabric.barrier()
        # one rank's disk is full: rank 0 hears of it, and all of them at the next save
        broken = rank == 2
        writer._write = lambda *a: write(*a) if not broken else (_ for _ in ()).throw(OSError(28, "No space left"))
        future = saver.save_shards(folder / "5", {"model": {"w": table}, "step": 5}, strategy)
        assert (future.exception(60) is None) == (rank == 1)
        writer._write = write
        with pytest.raises(CheckpointError, match=r"5 could not be written by rank 2: .*No space left.* is intact"):
            saver.save_shards(folder / "6", {"model": {"w": table}, "step": 6}, strategy)
        saver.save_shards(folder / "4", {"model": {"w": table}, "step": 7}, strategy)
    fabric.barrier()
    assert [path.name for path in checkpoint.prune(folder, keep=2)] == ["1", "2"] if rank == 0 else True


def test_a_save_in_the_background(tmp_path: Path) -> None:
    launch(3, _in_the_background, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    assert (checkpoint.load(tmp_path / "3")["model"]["w"] == 3).all()
    assert checkpoint.load(tmp_path / "4")["step"] == 7
    assert checkpoint.find_last(tmp_path) == tmp_path / "4"


def _one_never_comes(fabric: al.Fabric, folder: Path) -> str:
    write, told = writer._write, folder / "told"
    if fabric.global_rank == 1:
        writer._write = lambda *a: wait_until(told.exists, "rank 0 gives up") or write(*a)
    saver = AsyncSaver()
    mesh = init_device_mesh("cpu", (2,))
    saver.save_shards(folder / "1", {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}, fabric.strategy)
    if fabric.global_rank == 0:
        saver.limit_wait(0.5)
        with pytest.raises(CheckpointError, match="rank 1 did not report that its part is done"):
            saver.close()
        told.touch()
    return "told"


def test_a_rank_that_never_writes_its_part_is_named(tmp_path: Path) -> None:
    assert launch(2, _one_never_comes, tmp_path) == "told"


# -- by a Trainer --------------------------------------------------------------------------------------------------


class Model(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[1].tolist())
        loss = self.net(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)


def fit(
    devices: int, folder: Path, steps: int, ckpt: Any = None, **options: Any
) -> tuple[list[Any], dict[str, Any], str]:
    torch.set_num_threads(1)
    model = Model()
    torch.manual_seed(11)
    strategy = FSDPStrategy(start_method="fork", auto_wrap_policy={nn.Linear}) if devices > 1 else "auto"
    x = torch.randn(36, 5, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(x, torch.arange(36)), 12 // devices, shuffle=True)
    saver = ModelCheckpoint(folder / "c", every_n_train_steps=1, save_top_k=-1, filename="{step}", **options)
    trainer = al.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, callbacks=saver, logger=False,
        enable_progress_bar=False, default_root_dir=folder,
    )  # fmt: skip

    class Look(al.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            kind = type(trainer.checkpoint_io) is AsyncCheckpointIO
            found = trainer.strategy.all_gather_object((module.seen, module.losses, kind))
            if trainer.is_global_zero:  # another process than the test's
                (folder / "seen.json").write_text(json.dumps(found))

    trainer.callbacks.insert(0, Look())
    trainer.fit(model, loader, ckpt_path=ckpt)
    ranks = json.loads((folder / "seen.json").read_text())
    return ranks, {k: v.detach().clone() for k, v in model.state_dict().items()}, saver.best_model_path


@pytest.mark.parametrize("others", [(1,), pytest.param((3, 1, 2), marks=pytest.mark.slow)], ids=str)
def test_a_trainer_saves_shards_in_the_background_and_goes_on_on_any_number_of_processes(
    tmp_path: Path, others: tuple[int, ...]
) -> None:
    """10 steps of two processes; then from step 4 on others, with the same samples and the same losses."""
    ranks, wanted, last = fit(2, tmp_path / "0", 10)
    assert all(kind for _, _, kind in ranks)
    assert Path(last).name == "step=10.ckpt"
    assert len(list((tmp_path / "0/c").iterdir())) == 10
    saved = tmp_path / "0/c/step=4.ckpt"
    assert checkpoint.verify(saved) == []
    curve = torch.tensor([losses for _, losses, _ in ranks]).mean(0)
    samples = [sorted(a + b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True)]
    for devices in others:
        again, found, _ = fit(devices, tmp_path / str(devices), 10, saved)
        assert [sorted(chain(*step)) for step in zip(*[seen for seen, _, _ in again], strict=True)] == samples[4:]
        theirs = torch.tensor([losses for _, losses, _ in again]).mean(0)
        torch.testing.assert_close(theirs, curve[4:], rtol=0, atol=1e-6 if devices != 2 else 0)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6 if devices != 2 else 0)


def test_asynchronous_false_saves_synchronously(tmp_path: Path) -> None:
    ranks, _, _ = fit(2, tmp_path, 1, asynchronous=False)
    assert not any(kind for _, _, kind in ranks)
    assert checkpoint.verify(tmp_path / "c/step=1.ckpt") == []
