"""Checkpoints of a run at addresses: in memory, in a folder that two processes share, and in a store that speaks S3."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from tests import warm
from tests.ports import free_port
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.checkpoint import CheckpointError
from arclight.checkpoint.remote import RemotePath, to_path
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies import FSDPStrategy
from arclight.trainer.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from arclight.trainer.callbacks.settings import Checkpointing
from arclight.trainer.fabric.checkpoint_io import TorchCheckpointIO

SCORES = (5.0, 3.0, 4.0, 1.0, 2.0, 0.5)


class Model(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (step := self.trainer.global_step) < len(SCORES):
            self.log("score", SCORES[step])
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(root: Path, callbacks: Any, steps: int, devices: int = 1, ckpt: Any = None, **options: Any) -> tuple[Any, Any]:
    """The trainer and the weights after as many steps."""
    torch.set_num_threads(1)
    model = Model()
    strategy = FSDPStrategy(start_method="fork", auto_wrap_policy={nn.Linear}) if devices > 1 else "auto"
    trainer = al.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, callbacks=callbacks, logger=False,
        enable_progress_bar=False, default_root_dir=root, **options,
    )  # fmt: skip
    torch.manual_seed(11)
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(7))
    trainer.fit(model, DataLoader(TensorDataset(x), 4 // devices, shuffle=True), ckpt_path=ckpt)
    return trainer, {name: value.detach().clone() for name, value in model.state_dict().items()}


def names(address: str) -> list[str]:
    return sorted(entry.name for entry in to_path(address).iterdir())


def check_a_run(tmp_path: Path, folder: str, devices: int = 1, **options: Any) -> None:
    """The best two and the last are kept; a second trainer goes on from the last, to the weights of an undisturbed run."""

    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(
            f"{folder}/", "{step}", "score", save_top_k=2, save_last=True, every_n_train_steps=1, **options
        )

    _, wanted = fit(tmp_path, ModelCheckpoint(tmp_path / "local"), 6, devices)
    kept = saver()
    fit(tmp_path, kept, 4, devices)
    assert names(folder) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert kept.best_model_path == f"{folder}/step=4.ckpt"
    assert kept.last_model_path == f"{folder}/last.ckpt"
    assert kept.last_checkpoints() == {f"{folder}/last.ckpt"}
    again = saver()
    with pytest.warns(UserWarning, match=f"{folder} exists and is not empty"):
        trainer, found = fit(tmp_path, again, 6, devices, "last")
    assert trainer.ckpt_path == f"{folder}/last.ckpt"
    assert names(folder) == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert [checkpoint.inspect(f"{folder}/{name}").step for name in names(folder)] == [6, 4, 6]
    assert all(checkpoint.verify(f"{folder}/{name}") == [] for name in names(folder))
    assert {path: float(score) for path, score in again.best_k_models.items()} == {
        f"{folder}/step=4.ckpt": 1.0,
        f"{folder}/step=6.ckpt": 0.5,
    }
    assert Model.load_from_checkpoint(again.best_model_path).net[0].weight.equal(found["net.0.weight"])


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_memory(tmp_path: Path, asynchronous: bool) -> None:
    fsspec.filesystem("memory").store.clear()
    check_a_run(tmp_path, f"memory://{tmp_path.name}/runs", asynchronous=asynchronous)


def test_a_recipes_folder_is_an_address(tmp_path: Path) -> None:
    fsspec.filesystem("memory").store.clear()
    made = Checkpointing(folder="memory://bucket/runs").build()
    _, weights = fit(tmp_path, made, 2)
    assert "last.ckpt" in names("memory://bucket/runs")
    assert checkpoint.load(made.best_model_path)["model"]["net.0.weight"].equal(weights["net.0.weight"])
    assert Checkpointing(folder=str(tmp_path / "c")).build().dirpath == str(tmp_path / "c")
    assert Checkpointing(folder=f"file://{tmp_path}/c").build().dirpath == str(tmp_path / "c")


def test_unsupported_remote_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationError, match=r"default_root_dir='memory://a'.*ModelCheckpoint\(dirpath='memory://a'"
    ):
        al.Trainer(default_root_dir="memory://a")
    with pytest.raises(MisconfigurationError, match=r"one file of torch.save is only supported for local file paths"):
        fit(tmp_path, ModelCheckpoint("memory://a"), 1, plugins=TorchCheckpointIO())
    with pytest.raises(CheckpointError, match="nosuch"):
        ModelCheckpoint("nosuch://bucket/a")
    fabric = al.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(CheckpointError, match=r"one file of torch.save is written to local paths only"):
        fabric.save("memory://a/state.pt", {"x": torch.zeros(1)})
    fabric.save("memory://a/state", {"x": torch.ones(1)})
    assert fabric.load("memory://a/state")["x"] == 1


def test_a_run_that_fails_leaves_its_checkpoint_there(tmp_path: Path) -> None:
    fsspec.filesystem("memory").store.clear()

    class Failing(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise KeyError("the fault")

    trainer = al.Trainer(
        accelerator="cpu", max_steps=3, callbacks=OnExceptionCheckpoint("memory://failed"), logger=False,
        enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(KeyError, match="the fault"):
        trainer.fit(Failing(), DataLoader(TensorDataset(torch.randn(8, 5)), 4))
    assert checkpoint.inspect("memory://failed/on_exception.ckpt").step == 1


@pytest.mark.slow
def test_two_processes_write_their_shares(tmp_path: Path) -> None:
    """``file://`` is a local folder: names, hard links and all."""
    folder = tmp_path / "runs"
    saver = ModelCheckpoint(f"file://{folder}", "{step}", save_last=True, every_n_train_steps=1)
    fit(tmp_path, saver, 3, devices=2)
    assert names(str(folder)) == ["last.ckpt", "step=3.ckpt"]
    assert checkpoint.inspect(folder / "last.ckpt").ranks == 2


# -- a store that speaks S3 ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The endpoint of a server that speaks S3 on this machine, with the bucket ``bucket``."""
    pytest.importorskip("moto", reason="moto[server] speaks S3 in this test: pip install 'arclight-torch[dev]'")
    pytest.importorskip("s3fs", reason="s3fs reaches S3: pip install 'arclight-torch[s3]'")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    dummies = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**dummies, "AWS_ENDPOINT_URL": endpoint}.items():
            patched.setenv(name, value)
        try:
            await_server(server, endpoint)
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            fsspec.filesystem("s3").mkdir("bucket")
            yield endpoint
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            server.terminate()
            server.wait(60)


def await_server(server: subprocess.Popen[bytes], endpoint: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=60).close()
        except OSError:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
        else:
            return


@pytest.mark.slow
def test_in_a_bucket(tmp_path: Path, store: str) -> None:
    check_a_run(tmp_path, "s3://bucket/one", asynchronous=True)
    leftovers = [path for path in fsspec.filesystem("s3").find("bucket/one") if "probe" in path]
    assert leftovers == []


@pytest.mark.slow
def test_shards_in_a_bucket(tmp_path: Path, store: str) -> None:
    script = Path(__file__).with_name("bucket_script.py")
    for done in warm.run_ranks(2, script, tmp_path, "s3://bucket/two", timeout=300):
        assert done.returncode == 0, done.stderr
    assert checkpoint.inspect("s3://bucket/two/last.ckpt").ranks == 2


@pytest.mark.slow
def test_faults_of_a_bucket_come_before_training(tmp_path: Path, store: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"s3://missing/a by rank 0: .*FileNotFoundError.* make it, or correct the address"
    ):
        fit(tmp_path, ModelCheckpoint("s3://missing/a"), 1)
    assert fsspec.filesystem("s3").ls("") == ["bucket"], "no bucket was made of a name that may be mistyped"
    with pytest.raises(CheckpointError, match=r"s3://missing/a could not be written: .*intact"):
        checkpoint.save("s3://missing/a", {"x": torch.zeros(1)})


@pytest.mark.slow
def test_a_store_that_goes_away_ends_training_with_the_place_of_what_is_left(tmp_path: Path, store: str) -> None:
    """The bucket vanishes while training goes on: the next save says so, and where the newest complete checkpoint was."""
    files = fsspec.filesystem("s3")
    files.mkdir("vanishing")

    class Vanish(al.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                files.rm("vanishing/c", recursive=True)
                files.rmdir("vanishing")

    saver = ModelCheckpoint("s3://vanishing/c", "{step}", every_n_train_steps=1, save_top_k=-1)
    message = r"s3://vanishing/c/step=2.ckpt could not be written.*FileNotFoundError.*newest complete checkpoint is s3://vanishing/c/step=1"
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, [Vanish(), saver], 4)


@pytest.mark.slow
def test_unreachable_object_stores_are_reported(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        with pytest.raises(
            CheckpointError, match=r"no checkpoint could be written to s3://bucket/c.*check the address, the network"
        ):
            fit(tmp_path, ModelCheckpoint("s3://bucket/c"), 1)
        with pytest.raises(CheckpointError, match=r"s3://bucket/c/manifest.json cannot be read: .*check the address"):
            checkpoint.load("s3://bucket/c")
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_key_that_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    with pytest.raises(
        CheckpointError, match=r"memory://c.*Access Denied; the credentials .* list, read, write and delete"
    ):
        fit(tmp_path, ModelCheckpoint("memory://c"), 1)


def test_addresses_are_compared_as_text() -> None:
    assert RemotePath("memory://a/b/") == RemotePath("memory://a/b")
