"""Replicas that exchange rarely: against gradient averaging, and resumed between two exchanges. Real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.fabric.strategies import DDPStrategy, ModelParallelStrategy, ReplicaStrategy
from arclight.optim import AdamW
from arclight.trainer.callbacks import DiLoCo
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO, TorchCheckpointIO


class Model(al.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 1)])
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layers[1](torch.tanh(self.layers[0](batch[0]))) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        if self.kind == "adam":
            return torch.optim.AdamW(self.parameters(), lr=0.02)
        return AdamW(lr=0.02).build(self.named_parameters())


class Recorder(al.Callback):
    """Every process's weights at the end, and a checkpoint on the way."""

    def __init__(self, folder: Path, save_at: int = -1) -> None:
        self.folder, self.save_at = folder, save_at

    def on_train_batch_end(self, trainer: al.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.folder / "state")
            trainer.save_checkpoint(self.folder / "weights", weights_only=True)

    def on_train_end(self, trainer: al.Trainer, module: Any) -> None:
        weights = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in module.state_dict().items()}
        checkpoint.save(
            self.folder / f"end-{trainer.global_rank}", {"weights": {n: w.clone() for n, w in weights.items()}}
        )


def fit(
    folder: Path, strategy: Any, *callbacks: Any, kind: str = "ours", devices: int = 2, ckpt: Any = None, save_at: int = -1,
    **options: Any,
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """Eight steps, or ``max_steps``; the weights of each process."""
    recorder = Recorder(folder, save_at)
    trainer = al.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, enable_progress_bar=False, default_root_dir=folder,
        logger=False, enable_checkpointing=False, callbacks=[*callbacks, recorder], **{"max_steps": 8, **options},
    )  # fmt: skip
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    torch.manual_seed(3)
    trainer.fit(Model(kind), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True), ckpt_path=ckpt)
    return [checkpoint.load(folder / f"end-{rank}")["weights"] for rank in range(devices)]


def replicas() -> ReplicaStrategy:
    return ReplicaStrategy(start_method="fork")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("window", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_exchange_after_every_step_of_sgd_is_gradient_averaging(tmp_path: Path, window: int) -> None:
    options = {"kind": "sgd", "accumulate_grad_batches": window, "max_steps": 4}
    wanted = fit(tmp_path / "ddp", DDPStrategy(start_method="fork"), **options)
    found = fit(tmp_path / "own", replicas(), DiLoCo(1, outer_lr=1.0, outer_momentum=0.0), **options)
    assert_same(found[0], wanted[0], 1e-12)
    assert_same(found[0], found[1])


def test_replicas_differ_between_exchanges_and_agree_after_one(tmp_path: Path) -> None:
    apart = fit(tmp_path / "a", replicas(), DiLoCo(3))
    assert not torch.equal(apart[0]["layers.0.weight"], apart[1]["layers.0.weight"])
    together = fit(tmp_path / "b", replicas(), DiLoCo(4))
    assert_same(together[0], together[1])


def test_a_writer_without_shards_writes_replicas_whole(tmp_path: Path) -> None:
    written = AsyncCheckpointIO(TorchCheckpointIO())  # shards are of folders alone
    fit(tmp_path, replicas(), DiLoCo(3), save_at=4, plugins=[written])
    assert torch.load(tmp_path / "state", weights_only=True)["global_step"] == 4


@pytest.mark.parametrize(
    ("kind", "fragments"), [*(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("ours", "adam")), ("ours", 2)]
)
def test_a_resume_between_exchanges_has_the_same_bits(tmp_path: Path, kind: str, fragments: int) -> None:
    def diloco() -> DiLoCo:
        return DiLoCo(3, fragments=fragments)

    wanted = fit(tmp_path / "a", replicas(), diloco(), kind=kind, save_at=4)
    state = checkpoint.load(tmp_path / "a" / "state")
    local = state["callbacks"]["DiLoCo"]["local"]["layers.0.weight"]
    assert local.shape == (2, 8, 5)
    assert not torch.equal(local[0], local[1])
    assert torch.equal(state["model"]["layers.0.weight"], state["callbacks"]["DiLoCo"]["anchor"]["layers.0.weight"])
    found = fit(tmp_path / "b", replicas(), diloco(), kind=kind, ckpt=tmp_path / "a" / "state")
    for rank in range(2):
        assert_same(found[rank], wanted[rank])


def test_weights_alone_are_the_anchor_too(tmp_path: Path) -> None:
    fit(tmp_path, replicas(), DiLoCo(3), save_at=4)
    alone, whole = (checkpoint.load(tmp_path / name) for name in ("weights", "state"))
    assert "callbacks" not in alone
    assert_same(alone["model"], whole["callbacks"]["DiLoCo"]["anchor"])
    assert not torch.equal(
        alone["model"]["layers.0.weight"], whole["callbacks"]["DiLoCo"]["local"]["layers.0.weight"][0]
    )


def test_another_number_of_replicas_begins_at_the_anchor(tmp_path: Path) -> None:
    fit(tmp_path / "a", replicas(), DiLoCo(3), save_at=4)
    anchor = checkpoint.load(tmp_path / "a" / "state")["model"]
    trained = fit(tmp_path / "b", replicas(), DiLoCo(3), ckpt=tmp_path / "a" / "state", devices=1, max_steps=4)
    assert_same(trained[0], anchor)


@pytest.mark.slow
def test_replicas_of_several_processes(tmp_path: Path) -> None:
    """Two replicas, each tensor-parallel over two processes, equal two of one process; resumed on the way too."""

    def mesh() -> ModelParallelStrategy:
        def cut(model: nn.Module, device_mesh: Any) -> nn.Module:
            plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
            return parallelize_module(model, device_mesh["tensor_parallel"], plan)

        return ModelParallelStrategy(cut, data_parallel_size=2, tensor_parallel_size=2, start_method="fork")

    wanted = fit(tmp_path / "a", replicas(), DiLoCo(3), max_steps=6)
    found = fit(tmp_path / "b", mesh(), DiLoCo(3), devices=4, save_at=4, max_steps=6)
    resumed = fit(tmp_path / "c", mesh(), DiLoCo(3), devices=4, ckpt=tmp_path / "b" / "state", max_steps=6)
    for rank in range(4):
        rows = slice(rank % 2 * 4, rank % 2 * 4 + 4)
        torch.testing.assert_close(
            found[rank]["layers.0.weight"], wanted[rank // 2]["layers.0.weight"][rows], rtol=0, atol=1e-12
        )
        assert_same(resumed[rank], found[rank])


def test_a_strategy_that_keeps_replicas_alike_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"keeps them alike in every step: use strategy=\"replicas\""):
        fit(tmp_path, "auto", DiLoCo(3), devices=1)
    with pytest.raises(ValueError, match="needs a step of its own"):
        DiLoCo(2, fragments=3)
