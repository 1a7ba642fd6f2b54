"""Load parts of a checkpoint; NaN weights, and the fall-back from a damaged newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.checkpoint import CheckpointError, inspect, load, save
from arclight.trainer.callbacks import ModelCheckpoint
from arclight.trainer.fabric.checkpoint_io import FolderCheckpointIO
from arclight.trainer.logging.reporting import NonFiniteLossError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.arange(6.0)
    model = {"body.0.weight": weight, "body.0.bias": torch.ones(2), "head.weight": torch.ones(3), "tied": weight}
    moments = {0: {"exp_avg": torch.ones(6), "step": 3}, 1: {"exp_avg": torch.ones(2), "step": 3}}
    return save(tmp_path / "c", {"model": model, "optimizers": [{"state": moments, "lr": 0.1}], "step": 4})


def test_entries_are_selected_by_name_and_pattern(path: Path) -> None:
    assert list(load(path, only=["model.body.*"])["model"]) == ["body.0.weight", "body.0.bias"]
    assert list(load(path, only="model", exclude="*.bias")["model"]) == ["body.0.weight", "head.weight", "tied"]
    found = load(path, exclude=["model.head", "optimizers.*.exp_avg"])
    assert list(found["model"]) == ["body.0.weight", "body.0.bias", "tied"]
    assert found["model"]["tied"].data_ptr() == found["model"]["body.0.weight"].data_ptr()
    assert found["optimizers"] == [{"state": {0: {"step": 3}, 1: {"step": 3}}, "lr": 0.1}]
    assert found["step"] == 4
    assert load(path, only="model.tied")["model"]["tied"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match=r"no entry 'model.hed.weight'; it has model, .*model\.head\.weight"):
        load(path, only="model.hed.weight")
    with pytest.raises(CheckpointError, match="no entry 'nothing'"):
        load(path, exclude="nothing")


def test_excluded_entries_are_verified_but_not_loaded(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in one of the tensors
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load(path, only="model.head.weight")
    assert set(load(path, only=["step"])) == {"step"}


def test_refuse_nan_names_the_tensor(tmp_path: Path) -> None:
    model = {
        "a": torch.ones(2),
        "b": torch.tensor([1.0, float("nan")]),
        "mask": torch.tensor([float("-inf")]),
        "n": torch.ones(1).int(),
    }
    path = save(tmp_path / "c", {"model": model})
    assert load(path)["model"]["b"][0] == 1
    with pytest.raises(CheckpointError, match=r"has NaN in its weights: b\. "):
        load(path, refuse_nan=True)
    load(path, exclude="model.b", refuse_nan=True)


# -- by a Trainer --------------------------------------------------------------------------------------------------


class Model(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer_for(folder: Path, steps: int, **options: Any) -> al.Trainer:
    saver = ModelCheckpoint(folder / "c", every_n_train_steps=1, save_top_k=-1, save_last=True, filename="{step}")
    return al.Trainer(
        max_steps=steps, callbacks=saver, logger=False, enable_progress_bar=False, accelerator="cpu", devices=1,
        default_root_dir=folder, **options,
    )  # fmt: skip


DATA = torch.utils.data.DataLoader(torch.ones(8, 2), 2)


def damage(path: Path, how: str) -> None:
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8] if how == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_last_checkpoint_falls_back_to_the_previous_with_a_warning(tmp_path: Path, how: str) -> None:
    trainer_for(tmp_path, 3).fit(Model(), DATA)
    damage(tmp_path / "c/step=3.ckpt", how)  # of which `last` is a copy of links
    again = trainer_for(tmp_path, 4)
    with pytest.warns(UserWarning, match=r"last checkpoint is damaged: .*last.*training continues from .*step=2"):
        again.fit(Model(), DATA, ckpt_path="last")
    assert Path(str(again.ckpt_path)).name == "step=2.ckpt"
    assert again.global_step == 4


def test_resuming_from_nan_weights_is_refused_unless_allowed(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, 1)
    model = Model()
    trainer.fit(model, DATA)
    nn.init.constant_(model.net.bias, float("nan"))
    trainer.save_checkpoint(tmp_path / "bad")
    assert inspect(tmp_path / "bad").parameters == 3
    with pytest.raises(CheckpointError, match=r"bad has NaN in its weights: net\.bias"):
        trainer_for(tmp_path / "2", 2).fit(Model(), DATA, ckpt_path=tmp_path / "bad")
    with pytest.raises(NonFiniteLossError):  # what then comes is the person's own wish
        trainer_for(tmp_path / "3", 2, plugins=FolderCheckpointIO(refuse_nan=False)).fit(
            Model(), DATA, ckpt_path=tmp_path / "bad"
        )
