"""SIGTERM saves and ends; a SLURM job that is asked to goes back into the queue and on from where it was."""

import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from tests import warm

from arclight import checkpoint

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
    assert not checkpoint.verify(tmp_path / "hpc_ckpt_1")
    again = run(tmp_path, **job)
    assert again.returncode == 0, again.stderr
    assert same(tmp_path, whole)
