"""Steps that run out of memory are done in parts, with the outcome of the whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.fabric.batches import slice_batch
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callbacks import MicroBatching


def no_room() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Small(al.Module):
    """A regression that has room for so many samples at once, in forward or only in backward."""

    def __init__(self, room: int = 1000, in_backward: bool = False, error: Callable[[], Exception] = no_room) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.room, self.in_backward, self.error = room, in_backward, error
        self.sizes: list[int] = []
        self.gradients: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, torch.Tensor]:
        rows = batch["rows"]
        assert len(batch["names"]) == len(rows)
        self.sizes.append(len(rows))
        if len(rows) > self.room and not self.in_backward:
            raise self.error()
        hidden = self.net[1](self.net[0](rows))
        if len(rows) > self.room:
            hidden.register_hook(self._fail)  # the last layer has its gradients by then
        loss = (self.net[2](hidden) - batch["scale"]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss}

    def _fail(self, gradient: torch.Tensor) -> None:
        raise self.error()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None]))

    def train_dataloader(self) -> Any:
        rows = torch.randn(26, 4, generator=torch.Generator().manual_seed(1))
        batches = [rows[:10], rows[10:20], rows[20:]]
        return [{"rows": b, "names": [str(i) for i in range(len(b))], "scale": torch.ones(())} for b in batches]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Listed(Small):
    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader(), batch_size=None)


def fit(folder: Path, model: al.Module, *callbacks: al.Callback, **options: Any) -> al.Trainer:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    trainer = al.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=1, callbacks=list(callbacks), **quiet, **options
    )
    trainer.fit(model)
    return trainer


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_parts_give_the_gradients_of_the_whole(
    tmp_path: Path, in_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole, micro = Listed(), MicroBatching()
    plain = fit(tmp_path, whole)
    model = Listed(room=3, in_backward=in_backward)
    with caplog.at_level(logging.WARNING, "arclight"):
        trainer = fit(tmp_path, model, micro)
    assert model.sizes == [10, 5] + 2 * [2, 3, 2, 3] + [3, 3]  # what was learned once is kept
    assert micro.micro_batch_size == 3
    assert caplog.text.count("out of memory with") == 2
    assert trainer.global_step == plain.global_step == 3
    assert len(model.gradients) == 3
    for ours, reference in zip(model.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-6, rtol=0)
    if not in_backward:
        torch.testing.assert_close(trainer.callback_metrics["loss"], plain.callback_metrics["loss"])


def test_begins_with_parts_of_a_given_size_and_keeps_it_in_checkpoints(tmp_path: Path) -> None:
    model, micro = Listed(), MicroBatching(micro_batch_size=4)
    fit(tmp_path, model, micro)
    assert model.sizes == [3, 3, 4, 3, 3, 4, 3, 3]
    other = MicroBatching()
    other.load_state_dict(micro.state_dict())
    assert other.micro_batch_size == 4


def test_without_an_error_nothing_is_cut(tmp_path: Path) -> None:
    whole, model = Listed(), Listed()
    fit(tmp_path, whole)
    fit(tmp_path, model, MicroBatching())
    assert model.sizes == [10, 10, 6]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_one_sample_too_many_and_other_errors_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, Listed(room=0), MicroBatching())
    model = Listed(room=3, error=lambda: RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        fit(tmp_path, model, MicroBatching())
    assert model.sizes == [10]


def test_refuses_accumulation(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationError, match="accumulate_grad_batches"):
        fit(tmp_path, Listed(), MicroBatching(), accumulate_grad_batches=2)


def test_a_part_of_a_batch_takes_the_same_samples_everywhere() -> None:
    x, shared = torch.arange(6).reshape(3, 2), torch.zeros(2, 2)
    boxes = [{"box": torch.full((n, 4), float(n))} for n in range(3)]
    part = slice_batch((x, [x[:, 0], shared], boxes, {"id": ["a", "b", "c"], "scale": 2.0}), 1, 3, size=3)
    assert torch.equal(part[0], x[1:])
    assert torch.equal(part[1][0], x[1:, 0])
    assert torch.equal(part[1][1], shared)
    assert [len(target["box"]) for target in part[2]] == [1, 2]
    assert part[3] == {"id": ["b", "c"], "scale": 2.0}


class RowsOfBoxes(al.Module):
    """Its batches are images and rows of boxes whose first column names the image, as a detector's are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.seen: list[list[float]] = []

    def part_of_batch(self, batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        rows = batch["boxes"][(batch["boxes"][:, 0] >= start) & (batch["boxes"][:, 0] < stop)]
        return {"images": batch["images"][start:stop], "boxes": rows - torch.tensor([start, 0.0])}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["boxes"][:, 0].tolist())
        return self.net(batch["images"]).square().mean()

    def train_dataloader(self) -> Any:
        return [{"images": torch.ones(4, 4), "boxes": torch.tensor([[0.0, 1], [1, 2], [1, 3], [3, 4]])}]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_may_cut_its_own_batches(tmp_path: Path) -> None:
    module = RowsOfBoxes()
    al.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[MicroBatching(2)],
    ).fit(module)  # fmt: skip
    assert module.seen == [[0.0, 1.0, 1.0], [1.0]]
