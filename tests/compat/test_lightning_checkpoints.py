"""Files that Lightning wrote: weights, arguments and states are taken over, and training goes on from where it was."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
import arclight.compat.lightning.pytorch as pl
from arclight.checkpoint import CheckpointError

BATCHES, KEPT = 6, {"width": 3, "rate": 0.05}


class Regression(al.Module):
    def __init__(self, width: int, rate: float = 0.1, activation: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="activation")
        self.layer = nn.Linear(width, 1)
        self.trained: list[tuple[int, int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained.append((self.current_epoch, batch_idx))
        return F.mse_loss(self.layer(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def vectors() -> torch.Tensor:
    return torch.randn(BATCHES * 2, 3, generator=torch.Generator().manual_seed(1))


def loader() -> DataLoader[Any]:
    return DataLoader(vectors(), batch_size=2)  # type: ignore[arg-type]


class ByHand:
    """A plain loop over the same batches, which also writes what Lightning 2.6 would have written."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=KEPT["rate"])
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def run(self, batches: int, start: int = 0) -> None:
        rows = vectors().split(2)
        for number in range(start, batches):
            batch = rows[number % BATCHES]
            self.optimizer.zero_grad()
            F.mse_loss(self.layer(batch), batch.sum(1, keepdim=True)).backward()
            self.optimizer.step()
            if (number + 1) % BATCHES == 0:
                self.schedule.step()

    def write(self, path: Path, done: int) -> Path:
        """The file of a ModelCheckpoint after ``done`` batches: in the last one's hook, or at its epoch's end."""
        epoch, batch = divmod(done - 1, BATCHES)
        batch, last = batch + 1, done % BATCHES == 0
        here = {"ready": batch, "started": batch, "processed": batch, "completed": batch if last else batch - 1}
        begun = {"ready": epoch + 1, "started": epoch + 1, "processed": epoch + last, "completed": epoch}
        checkpoint = {
            "epoch": epoch,
            "global_step": done,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": {f"layer.{name}": value for name, value in self.layer.state_dict().items()},
            "loops": {
                "fit_loop": {
                    "state_dict": {},
                    "epoch_loop.state_dict": {"_batches_that_stepped": done},
                    "epoch_loop.batch_progress": {
                        "total": dict.fromkeys(here, done), "current": here, "is_last_batch": last,
                    },
                    "epoch_loop.val_loop.batch_progress": {"total": {}, "current": {}, "is_last_batch": False},
                    "epoch_progress": {"total": begun, "current": begun},
                },
                "validate_loop": {}, "test_loop": {}, "predict_loop": {},
            },
            "callbacks": {"EarlyStopping{'monitor': 'v', 'mode': 'min'}": {
                "wait_count": 2, "stopped_epoch": 0, "best_score": torch.tensor(0.25), "patience": 7,
            }},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.schedule.state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": KEPT,
        }  # fmt: skip
        torch.save(checkpoint, path)
        return path


def quiet(trainer: type[al.Trainer], folder: Path, **settings: Any) -> al.Trainer:
    return trainer(
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


@pytest.mark.parametrize("kind", [al.Trainer, pl.Trainer])
@pytest.mark.parametrize("done", [4, 6, 9, 12])
def test_training_goes_on_as_the_plain_loop_does(tmp_path: Path, kind: type[al.Trainer], done: int) -> None:
    plain = ByHand()
    plain.run(done)
    path = plain.write(tmp_path / "run.ckpt", done)
    plain.run(3 * BATCHES, start=done)

    model, stopping = Regression(**KEPT), al.EarlyStopping("v", patience=7, strict=False)
    trainer = quiet(kind, tmp_path, max_epochs=3, callbacks=[stopping])
    trainer.fit(model, loader(), ckpt_path=path)
    assert model.trained == [divmod(number, BATCHES) for number in range(done, 3 * BATCHES)]
    torch.testing.assert_close(model.layer.state_dict(), plain.layer.state_dict(), rtol=1e-6, atol=1e-7)
    assert trainer.global_step == 3 * BATCHES
    assert trainer.optimizers[0].param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert (stopping.wait_count, stopping.best_score.item()) == (2, 0.25)


def test_a_module_is_built_with_the_kept_arguments_and_weights(tmp_path: Path) -> None:
    plain = ByHand()
    path = plain.write(tmp_path / "run.ckpt", 6)
    for source in (path, str(path), io.BytesIO(path.read_bytes()), f"file://{path}"):
        model = Regression.load_from_checkpoint(source)
        assert model.hparams == KEPT
        torch.testing.assert_close(model.layer.state_dict(), plain.layer.state_dict())
    assert Regression.load_from_checkpoint(path, rate=0.5).hparams.rate == 0.5
    (tmp_path / "hparams.csv").write_text("key,value\nwidth,3\nrate,0.125\n")
    assert Regression.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.csv").hparams.rate == 0.125
    with pytest.raises(TypeError, match=r"`Regression.load_from_checkpoint` cannot be called on an instance"):
        model.load_from_checkpoint(path)


def test_objects_are_not_unpickled_and_their_class_is_named(tmp_path: Path) -> None:
    path = ByHand().write(tmp_path / "run.ckpt", 6)
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"] = {"width": 3, "activation": nn.ReLU()}
    torch.save(content, path)
    for load in (
        Regression.load_from_checkpoint,
        lambda p: quiet(pl.Trainer, tmp_path).fit(Regression(3), ckpt_path=p),
    ):
        with pytest.raises(CheckpointError, match=r"objects of class torch\.nn\.modules\.activation\.ReLU"):
            load(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: c["state_dict"].pop("layer.bias"), r'Missing key\(s\) in state_dict: "layer.bias"'),
        (lambda c: c["state_dict"].update(extra=torch.ones(1)), r'Unexpected key\(s\) in state_dict: "extra"'),
    ],
)
def test_weights_that_do_not_fit_are_an_error_or_a_warning(tmp_path: Path, change: Any, problem: str) -> None:
    path = ByHand().write(tmp_path / "run.ckpt", 6)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(RuntimeError, match=problem) as error:
        Regression.load_from_checkpoint(path)
    assert isinstance(error.value, CheckpointError)
    with pytest.warns(UserWarning, match="Found keys that are"):
        Regression.load_from_checkpoint(path, strict=False)


def test_strictness_of_call_and_module_must_agree(tmp_path: Path) -> None:
    class Lenient(Regression):
        strict_loading = False  # type: ignore[assignment]

    path = ByHand().write(tmp_path / "run.ckpt", 6)
    with pytest.raises(ValueError, match=r"strict=True.*in conflict with.*strict_loading=False"):
        Lenient.load_from_checkpoint(path, strict=True)
    model = Regression(3)
    assert model.strict_loading
    model.strict_loading = None  # type: ignore[assignment]
    assert model.strict_loading
    model.strict_loading = False
    assert not model.strict_loading


def test_a_file_does_not_choose_what_is_called(tmp_path: Path) -> None:
    path = ByHand().write(tmp_path / "run.ckpt", 6)
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"] = {"_instantiator": "os.system", **KEPT}
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"'os.system' from the checkpoint is not in the allowlist"):
        Regression.load_from_checkpoint(path)


def test_files_without_a_checkpoint_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save({"weights": {}}, path)
    with pytest.raises(CheckpointError, match=r"has no state_dict .* it has weights"):
        Regression.load_from_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        Regression.load_from_checkpoint(tmp_path / "none.ckpt")


def test_data_modules_keep_arguments_and_state(tmp_path: Path) -> None:
    class Data(al.DataModule):
        def __init__(self, folder: str, batch_size: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.read = 0

        def train_dataloader(self) -> Any:
            self.read += 1
            return loader()

        def state_dict(self) -> dict[str, Any]:
            return {"read": self.read}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.read = state_dict["read"]

    trainer = quiet(pl.Trainer, tmp_path, max_epochs=1)
    trainer.fit(Regression(**KEPT), datamodule=Data("here"))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    data = Data.load_from_checkpoint(tmp_path / "run.ckpt", batch_size=5)
    assert data.hparams == {"folder": "here", "batch_size": 5}
    assert data.read == 1
    assert Regression.load_from_checkpoint(tmp_path / "run.ckpt").hparams == KEPT


def test_hyperparameters_that_are_not_plain_data_are_dropped_with_a_warning(tmp_path: Path) -> None:
    class Kept(Regression):
        def __init__(self, width: int, activation: Any = None, where: Path | None = None) -> None:
            super().__init__(width)
            self.save_hyperparameters()

    trainer = quiet(pl.Trainer, tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match=r"`nn.Module`"):
        model = Kept(3, activation=nn.ReLU(), where=Path("/data"))
    trainer.fit(model, loader())
    with pytest.warns(UserWarning, match=r"'activation' removed from hparams.*torch\.nn\.modules\.activation\.ReLU"):
        trainer.save_checkpoint(tmp_path / "run.ckpt")
    kept = torch.load(tmp_path / "run.ckpt", weights_only=True)["hyper_parameters"]
    assert (kept["where"], "activation" in kept) == ("/data", False)
    weights = copy.deepcopy(model.layer.state_dict())
    torch.testing.assert_close(Kept.load_from_checkpoint(tmp_path / "run.ckpt").layer.state_dict(), weights)
