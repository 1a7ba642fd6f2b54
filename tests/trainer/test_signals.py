"""SIGTERM saves and ends; a SLURM job that is asked to goes back into the queue and on from where it was."""

import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from torch.utils.data import DataLoader

import arclight as al
from arclight import checkpoint
from arclight.fabric.errors import SIGTERMException
from arclight.trainer.run.folder import RunFolder

SCRIPT = """
import os, signal, sys, torch
import arclight as al

class Model(al.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        if self.global_step == 3 and os.environ.get("ASK"):
            os.kill(os.getpid(), getattr(signal, os.environ["ASK"]))
        return self.line(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

al.seed_everything(1)
data = torch.utils.data.DataLoader(torch.randn(24, 2), batch_size=3, shuffle=True)
trainer = al.Trainer(max_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=".", run_name="run")
model = Model()
trainer.fit(model, data, ckpt_path="last" if os.environ.get("AGAIN") else None)
torch.save(model.state_dict(), "end.pt")
"""


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-c", SCRIPT, cwd=folder, env={**os.environ, **variables}, timeout=300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    run(folder).check_returncode()
    weights: dict[str, torch.Tensor] = torch.load(folder / "end.pt", weights_only=True)
    return weights


def same(folder: Path, whole: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(value, whole[name]) for name, value in torch.load(folder / "end.pt", weights_only=True).items()
    )


def test_sigterm_saves_ends_with_143_and_the_run_goes_on_to_the_same_bits(
    tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    ended = run(tmp_path, ASK="SIGTERM")
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    saved = next((tmp_path / "run" / "1" / "checkpoints").glob("*step=4*"))
    assert not checkpoint.verify(saved)
    assert str(saved.name) in ended.stderr
    run(tmp_path, AGAIN="1").check_returncode()
    assert same(tmp_path, whole)


def test_a_slurm_job_is_put_back_into_the_queue_and_goes_on_by_itself(
    tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IEXEC)
    job = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train",
    }  # fmt: skip
    ended = run(tmp_path, ASK="SIGUSR1", **job)
    assert ended.returncode == 143, ended.stderr
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert not checkpoint.verify(tmp_path / "run" / "1" / "checkpoints" / "hpc_ckpt_77_1")
    again = run(tmp_path, **job)
    assert again.returncode == 0, again.stderr
    assert same(tmp_path, whole)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"], "it goes on in its own folder"
    assert not list(tmp_path.rglob("hpc_ckpt_*")), "the next fit of the job must not go on from it"


def trainer_of(root: Path, name: str, *callbacks: Any, **settings: Any) -> al.Trainer:
    return al.Trainer(
        accelerator="cpu", default_root_dir=root, run_name=name, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, logger=False, **{"max_epochs": 2, **settings},
    )  # fmt: skip


def test_a_requeued_job_takes_no_checkpoint_of_another_run_or_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [tmp_path / "mine" / run / "checkpoints" / f"hpc_ckpt_77_{n}" for run, n in (("1", 1), ("2", 10), ("3", 9))]
    others = [
        tmp_path / "theirs" / "1" / "checkpoints" / "hpc_ckpt_77_11",
        tmp_path / "mine" / "4" / "checkpoints" / "hpc_ckpt_78_12",
        tmp_path / "mine" / "4" / "checkpoints" / "hpc_ckpt_77_5_13",  # of an array
        tmp_path / "hpc_ckpt_14",
    ]
    for path in (*mine, *others):
        path.mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    trainer = trainer_of(tmp_path, "mine")
    assert trainer.requeue_checkpoints.all() == [mine[0], mine[2], mine[1]]
    assert trainer.requeue_checkpoints.newest() == mine[1]
    assert trainer_of(tmp_path, "new").requeue_checkpoints.newest() is None
    monkeypatch.setenv("SLURM_JOB_ID", "79")
    assert trainer.requeue_checkpoints.newest() is None
    assert trainer.requeue_checkpoints.newest(any_job=True) is not None  # ckpt_path="hpc" asks for it
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    assert trainer.requeue_checkpoints.newest() == others[2]


def test_a_requeued_job_does_not_stumble_over_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> int:
        trainer = trainer_of(tmp_path, "run", al.ModelCheckpoint(every_n_train_steps=3))
        trainer.fit(Line(), DataLoader(torch.randn(24, 2), batch_size=3))
        return trainer.global_step

    train()
    kept = tmp_path / "run" / "1" / "checkpoints"
    requeued = kept / "hpc_ckpt_77_1"
    shutil.copytree(next(kept.iterdir()), requeued)
    next(requeued.glob("*.safetensors")).write_bytes(b"cut off")
    for name, value in {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="damaged"):
        assert train() == 16
    assert not requeued.exists()
    assert train() == 16, "nothing is left that this fit would go on from"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "2"]


class Line(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.line(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Terminated(al.Callback):
    """SIGTERM after each of these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: al.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.run_state.request_stop(sigterm=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_at_sigterm_go_when_there_are_newer_ones(tmp_path: Path, asynchronous: bool) -> None:
    def train(*steps: int, ckpt_path: str | None = "last") -> list[str]:
        keeps = al.ModelCheckpoint(every_n_epochs=1, save_top_k=1, asynchronous=asynchronous)
        folder = RunFolder.open(tmp_path / "run" / "1") if ckpt_path not in (None, "last") else None
        trainer = trainer_of(tmp_path, "run", Terminated(*steps), keeps, run_folder=folder)
        data = DataLoader(torch.randn(24, 2), batch_size=3)
        if steps:
            with pytest.raises(SIGTERMException):
                trainer.fit(Line(), data, ckpt_path=ckpt_path)
        else:
            trainer.fit(Line(), data, ckpt_path=ckpt_path)
            assert trainer.global_step == 16
        kept = sorted((tmp_path / "run" / "1" / "checkpoints").iterdir())
        assert not any(checkpoint.verify(path) for path in kept)
        return [path.name for path in kept]

    assert train(3, ckpt_path=None) == ["epoch=0-step=3.ckpt"]
    assert train(5) == ["epoch=0-step=5.ckpt"]
    assert train(11) == ["epoch=0-step=8.ckpt", "epoch=1-step=11.ckpt"]
    named = str(tmp_path / "run" / "1" / "checkpoints" / "epoch=1-step=11.ckpt")
    assert train(13, ckpt_path=named) == ["epoch=0-step=8.ckpt", "epoch=1-step=11.ckpt", "epoch=1-step=13.ckpt"]
    assert train() == ["epoch=1-step=16.ckpt"]
