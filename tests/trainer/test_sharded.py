"""The Trainer with models that are shared out: what one process trains, and checkpoints that open anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy


class Model(al.Module):
    """Units, a parameter of its own, a schedule, and metrics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.scale = nn.Parameter(torch.ones(5))
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x * self.scale)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(batch_size: int, count: int = 32, shuffle: bool = True) -> DataLoader[Any]:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, shuffle=shuffle)


def fit(
    folder: Path, model: al.Module, strategy: Any = "auto", devices: int = 1, ckpt: Any = None, **options: Any
) -> Any:
    """Two epochs of four global batches of eight; the trainer and what a checkpoint of its end holds."""
    torch.manual_seed(11)
    options = {"max_epochs": 2, "gradient_clip_val": 0.5, "logger": False, "enable_checkpointing": False} | options
    trainer = al.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        enable_progress_bar=False,
        default_root_dir=folder,
        **options,
    )
    share = getattr(strategy, "data_parallel_size", devices)
    trainer.fit(model, loader(8 // share), loader(8 // share, 8, False), ckpt_path=ckpt)
    state = model.state_dict().items()
    return trainer, {name: value.detach().clone() for name, value in state if isinstance(value, torch.Tensor)}


def fsdp(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(start_method="fork", auto_wrap_policy={nn.Linear}, **options)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    one, wanted = fit(tmp_path / "1", Model(), accumulate_grad_batches=2)
    two, found = fit(tmp_path / "2", Model(), fsdp(), 2, accumulate_grad_batches=2)
    assert_same(found, wanted)
    assert two.global_step == one.global_step
    for name in ("train/loss", "val/loss"):
        assert float(two.callback_metrics[name]) == pytest.approx(float(one.callback_metrics[name]), rel=1e-5)


class Saving(al.Callback):
    """Saves in the middle, after the third batch of the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: al.Trainer, module: al.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0 and batch_idx == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "sharded"])
def test_a_run_goes_on_where_another_number_of_processes_stopped(tmp_path: Path, kind: str) -> None:
    _, wanted = fit(tmp_path / "1", Model(), callbacks=Saving(tmp_path / "one"))
    fit(tmp_path / "2", Model(), fsdp(state_dict_type=kind), 2, callbacks=Saving(tmp_path / "two"), max_epochs=1)
    one, two = checkpoint.load(tmp_path / "one"), checkpoint.load(tmp_path / "two")
    assert one["model"].keys() == two["model"].keys()
    assert (tmp_path / "two" / "model-00002-of-00002.safetensors").exists() is (kind == "sharded")
    assert_same(two["model"], one["model"])
    assert_same(fit(tmp_path / "3", Model(), ckpt=tmp_path / "two")[1], wanted)
    assert_same(fit(tmp_path / "4", Model(), fsdp(), 2, ckpt=tmp_path / "one")[1], wanted)
    assert_same(fit(tmp_path / "5", Model(), fsdp(), 2, ckpt=tmp_path / "two")[1], wanted)


def test_a_window_of_batches_is_taken_up_again(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2}
    _, wanted = fit(tmp_path / "1", Model(), fsdp(), 2, callbacks=Saving(tmp_path / "state"), **options)
    assert checkpoint.load(tmp_path / "state")["window"][1]["count"] == 1
    assert_same(fit(tmp_path / "2", Model(), fsdp(), 2, ckpt=tmp_path / "state", **options)[1], wanted, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_an_accumulation_window_restarts_if_gradients_are_sharded_differently(tmp_path: Path, turned: bool) -> None:
    """Its gradients are parts of other parameters."""
    options = {"accumulate_grad_batches": 2}
    first, second = (fsdp(), DDPStrategy(start_method="fork"))[:: -1 if turned else 1]
    _, wanted = fit(tmp_path / "1", Model(), first, 2, callbacks=Saving(tmp_path / "state"), **options)
    assert_same(fit(tmp_path / "2", Model(), second, 2, ckpt=tmp_path / "state", **options)[1], wanted)


class ByHand(Model):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward((self(batch[0]) - batch[1]).square().mean())
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()


@pytest.mark.slow
def test_manual_optimization(tmp_path: Path) -> None:
    _, wanted = fit(tmp_path / "1", ByHand(), gradient_clip_val=None)
    assert_same(fit(tmp_path / "2", ByHand(), fsdp(), 2, gradient_clip_val=None)[1], wanted)


@pytest.mark.slow
def test_averages_of_weights(tmp_path: Path) -> None:
    averages = {}
    for devices, strategy in ((1, "auto"), (2, fsdp())):
        path = tmp_path / f"state{devices}"
        average = al.EMAWeightAveraging(decay=0.5)
        fit(tmp_path / str(devices), Model(), strategy, devices, callbacks=[average, Saving(path)])
        averages[devices] = checkpoint.load(path)["ema"]
    assert_same(averages[2], averages[1])
    again = fit(
        tmp_path / "3", Model(), fsdp(), 2, ckpt=tmp_path / "state1", callbacks=al.EMAWeightAveraging(decay=0.5)
    )
    assert again[0].global_step == 8


class OnAMesh(Model):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None:
            return
        parallelize_module(self, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in (self.up, self.down):
            fully_shard(part, mesh=mesh["data_parallel"])

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 1.0


@pytest.mark.parametrize("data_parallel_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_users_own_mesh(tmp_path: Path, data_parallel_size: int) -> None:
    _, wanted = fit(tmp_path / "1", OnAMesh())
    sizes = {"data_parallel_size": data_parallel_size, "tensor_parallel_size": 2, "start_method": "fork"}
    saving, ranks = Saving(tmp_path / "state"), 2 * data_parallel_size
    assert_same(fit(tmp_path / "2", OnAMesh(), ModelParallelStrategy(**sizes), ranks, callbacks=saving)[1], wanted)
    for number, (strategy, devices) in enumerate((("auto", 1), (ModelParallelStrategy(**sizes), ranks))):
        resumed = fit(tmp_path / f"3{number}", OnAMesh(), strategy, devices, ckpt=saving.path)
        assert_same(resumed[1], wanted)


class Tables(nn.Module):
    """A buffer that no state has, and a parameter whose memory is in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(3, 4, device="meta").t())
        self.register_buffer("table", torch.empty(6, device="meta"), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.turned.fill_(1.0)
            self.table.copy_(torch.arange(6.0))


class Peculiar(Model):
    """Has state that is no tensor, and tables that are nowhere in the process that starts the others."""

    def configure_model(self) -> None:
        if not hasattr(self, "tables"):
            self.tables = Tables()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.tables.turned.mean()

    def get_extra_state(self) -> Any:
        return {"words": ["a", "b"]}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def test_spawned_workers_return_weights_buffers_and_attributes(tmp_path: Path) -> None:
    _, wanted = fit(tmp_path / "1", one := Peculiar())
    _, found = fit(tmp_path / "2", two := Peculiar(), DDPStrategy(start_method="fork"), 2)
    assert_same(found, wanted)
    assert two.words == ["a", "b"]
    assert torch.equal(two.tables.table, one.tables.table)


def test_uneven_batches_of_sharded_ranks_are_refused(tmp_path: Path) -> None:
    """With batches of one sample three samples are two batches here and one there."""
    trainer = al.Trainer(
        accelerator="cpu", devices=2, strategy=fsdp(), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(
        Exception, match="`validate` would run 2 batches on rank 0 and 1 on rank 1, but with strategy='fsdp'"
    ):
        trainer.validate(Model(), loader(1, 3, False))
    assert trainer.validate(Model(), loader(2, 5, False))


class Nowhere(Model):
    """Made without memory; the values are drawn when it is placed."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale, self.up, self.down
        self.scale = 1.0

    def configure_model(self) -> None:
        if not hasattr(self, "up"):
            with torch.device("meta"):
                self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 1)


def test_a_model_that_is_nowhere_yet(tmp_path: Path) -> None:
    saving = Saving(tmp_path / "state")
    _, wanted = fit(tmp_path / "1", Nowhere(), callbacks=saving)
    for number, ckpt in enumerate((None, saving.path)):
        assert_same(fit(tmp_path / f"2{number}", Shown(), fsdp(), 2, ckpt=ckpt)[1], wanted)


class Shown(Nowhere):
    """The same, there again in the process that started the others: what they trained is brought back."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "up"):
            self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 1)
        return super().load_state_dict(state_dict, *args, **kwargs)
