"""Every callback, logger, loader and strategy: two of a kind in one trainer, or one for two fits, and a run through two resumes."""

from __future__ import annotations

import inspect
import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import Ranks
from tests.trainer.same import assert_same
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import arclight as al
from arclight.data import CombinedLoader
from arclight.fabric import strategies
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies import STRATEGY_REGISTRY
from arclight.parallel import Pipeline, Plan, PlanStrategy
from arclight.trainer import callbacks, loggers

HOSTED = {"ClearMLLogger", "CometLogger", "MLFlowLogger", "WandbLogger"}
"""They write to a service; see test_hosted_loggers."""

NO_CALLBACKS = {"EarlyStoppingReason", "MissingMetricError", "RichProgressBarTheme"}
BASES = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar", "SpikeDetection"}
"""A user's subclass says what they do."""

MADE: dict[str, Callable[[type, Path], Any]] = {
    "BackboneFinetuning": lambda kind, folder: kind(1, backbone_initial_lr=0.02),
    "BatchSizeFinder": lambda kind, folder: kind(max_trials=1, steps_per_trial=1),
    "DiLoCo": lambda kind, folder: kind(sync_every=3),
    "EarlyStopping": lambda kind, folder: kind("val/loss", patience=2),
    "GradientAccumulationScheduler": lambda kind, folder: kind({0: 1, 2: 2}),
    "LearningRateFinder": lambda kind, folder: kind(num_training_steps=5, update_attr=False),
    "ModelCheckpoint": lambda kind, folder: kind(folder / "c", monitor="val/loss", save_last=True),
    "ModelPruning": lambda kind, folder: kind("l1_unstructured", parameter_names=["weight"], amount=0.2),
    "OnExceptionCheckpoint": lambda kind, folder: kind(folder / "e"),
    "PipelineTimeline": lambda kind, folder: kind(),
    "StochasticWeightAveraging": lambda kind, folder: kind(0.05, swa_epoch_start=2, annealing_epochs=2),
    "ThroughputMonitor": lambda kind, folder: kind(lambda batch: len(batch[0])),
    "Timer": lambda kind, folder: kind("1h"),
}
"""How to make those that need arguments, or others than the default to do something in six short epochs."""

TOGETHER = {
    "DeviceStatsMonitor", "GradientAccumulationScheduler", "LambdaCallback", "LearningRateMonitor", "ModelSummary", "OnExceptionCheckpoint",
    "RichModelSummary", "RunReport", "ThroughputMonitor",
}  # fmt: skip
"""Two of each can be in a trainer. The others have a state that only one could be given back, a terminal, or a pipeline."""

PASSING = {"time_elapsed", "dirpath", "best_model_path", "kth_best_model_path", "last_model_path", "newest_path"}
"""What of a callback's state is another in every run: times, and places in its folder."""


def of_kind(room: Any, base: type) -> list[str]:
    kinds = {name: getattr(room, name) for name in room.__all__}
    return sorted(name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, base))


CALLBACKS = [name for name in of_kind(callbacks, al.Callback) if name not in BASES]
LOGGERS = [name for name in of_kind(loggers, loggers.Logger) if name not in HOSTED | {"Logger"}]


class Net(al.Module):
    """Dropout, a norm, momentum and a schedule: what a resume can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(6, 1)
        self.lr = 0.05

    def _loss(self, batch: Any) -> torch.Tensor:
        return (self.head(self.backbone(batch[0])) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Data(al.DataModule):
    def __init__(self) -> None:
        self.batch_size = 8

    def _loader(self, shuffle: bool) -> DataLoader[Any]:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self._loader(True)

    def val_dataloader(self) -> Any:
        return self._loader(False)


class Stop(callbacks.Checkpoint):
    """Save after so many epochs, when all others have, and end there."""

    def __init__(self, until: int, path: Path | None) -> None:
        self.until, self.path = until, path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == self.until and self.path is not None:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def train(
    folder: Path, parts: list[Any], until: int = 6, start: Path | None = None, save: Path | None = None, **settings: Any
) -> al.Trainer:
    trainer = al.Trainer(
        **{
            "max_epochs": 6, "accelerator": "cpu", "enable_progress_bar": any(isinstance(p, callbacks.ProgressBar) for p in parts),
            "enable_model_summary": False, "default_root_dir": folder, "logger": loggers.CSVLogger(), "log_every_n_steps": 1,
            **settings,
        },
        callbacks=[*parts, Stop(until, save)],
    )  # fmt: skip
    torch.manual_seed(7)
    trainer.fit(Net(), datamodule=Data(), ckpt_path=start)
    return trainer


def make(name: str, folder: Path) -> Any:
    kind = getattr(callbacks, name)
    return MADE.get(name, lambda kind, folder: kind())(kind, folder)


def state_of(callback: Any) -> Any:
    def kept(state: Any) -> Any:
        if isinstance(state, dict):
            return {k: kept(v) for k, v in state.items() if k not in PASSING and not str(k).startswith("/")}
        return state

    return kept(callback.state_dict())


@pytest.mark.parametrize("name", CALLBACKS)
def test_two_callbacks_of_a_kind_work_or_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    pair = [make(name, tmp_path), make(name, tmp_path)]
    refusal = ""
    try:
        trainer = train(tmp_path, pair, max_epochs=2)
    except (RuntimeError, ValueError) as error:
        refusal = str(error)
    assert (refusal == "") == (name in TOGETHER), refusal
    if refusal:
        assert re.search(rf"more than one stateful callback of type `{name}`|one progress bar|^{name} shows", refusal)
    else:
        assert trainer.global_step > 0
        assert all(torch.isfinite(p).all() for p in trainer.lightning_module.parameters())


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_run_through_two_resumes_ends_as_one_that_was_never_stopped(name: str, tmp_path: Path) -> None:
    whole = make(name, tmp_path / "whole")
    if name in {"DiLoCo", "PipelineTimeline"}:
        with pytest.raises(MisconfigurationError, match=f"{name} .*strategy"):  # one of several processes
            train(tmp_path, [whole])
        return
    expected = train(tmp_path / "whole", [whole])
    start = None
    for until in (2, 4, 6):
        part, save = make(name, tmp_path / "parts"), tmp_path / f"{until}.ckpt" if until < 6 else None
        trainer = train(tmp_path / "parts", [part], until, start, save)
        start = save
    assert trainer.global_step == expected.global_step
    assert_same(dict(trainer.lightning_module.state_dict()), dict(expected.lightning_module.state_dict()), name)
    assert_same(state_of(part), state_of(whole), name)


@pytest.mark.parametrize("name", LOGGERS)
def test_two_loggers_of_a_kind_log_or_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    kind = getattr(loggers, name)
    pair = [kind(), kind()] if name == "DummyLogger" else [kind(tmp_path, "one"), kind(tmp_path, "two")]
    assert train(tmp_path, [], max_epochs=1, logger=pair).global_step == 3
    if name != "DummyLogger":
        same = [kind(tmp_path, "same", version=0), kind(tmp_path, "same", version=0)]
        if name == "CSVLogger":
            with pytest.raises(MisconfigurationError, match="two CSVLoggers of one trainer"):
                train(tmp_path, [], max_epochs=1, logger=same)
        else:
            assert train(tmp_path, [], max_epochs=1, logger=same).global_step == 3


# -- loaders -----------------------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Numbers with an augmentation that is drawn for each."""

    def __init__(self, count: int = 12, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.first + index + torch.rand(1)


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, count: int = 12, first: int = 0) -> None:
        self.count, self.first = count, first

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield self.first + index + torch.rand(1)


class StatefulStream(Stream):
    """A stream that says where it stands."""

    index = 0

    def __iter__(self) -> Iterator[Any]:
        while self.index < self.count:
            self.index += 1
            yield self.first + self.index - 1 + torch.rand(1)
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


class OwnLoader:
    """A loader of one's own: batches in an order that is drawn in each epoch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for start in torch.randperm(4).tolist():
            yield torch.arange(3.0)[:, None] + 3 * start + torch.rand(1)


class StatefulLoader(OwnLoader):
    """A loader of one's own that says where it stands."""

    def __init__(self) -> None:
        self.batch = 0

    def __iter__(self) -> Iterator[Any]:
        while self.batch < 4:
            self.batch += 1
            yield torch.full((3, 1), float(self.batch)) + torch.rand(1)
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


def pairs(mode: Any) -> Any:
    return CombinedLoader([DataLoader(Noisy(), 3, shuffle=True), DataLoader(Noisy(7), 2, shuffle=True)], mode)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Noisy(), 3),
    "shuffled": lambda: DataLoader(Noisy(), 3, shuffle=True),
    "seeded": lambda: DataLoader(Noisy(), 3, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drop_last": lambda: DataLoader(Noisy(), 5, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(Noisy(), 3, sampler=WeightedRandomSampler([1.0] * 6 + [3.0] * 6, 12)),
    "distributed sampler": lambda: DataLoader(Noisy(), 3, sampler=DistributedSampler(Noisy(), 1, 0)),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(range(12), 5, False)),
    "single samples": lambda: DataLoader(Noisy(4), batch_size=None, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 3, shuffle=True, num_workers=1),
    "persistent workers": lambda: DataLoader(Noisy(), 3, shuffle=True, num_workers=1, persistent_workers=True),
    "concatenated": lambda: DataLoader(ConcatDataset([Noisy(5), Noisy(7, 5)]), 3, shuffle=True),
    "subset": lambda: DataLoader(Subset(Noisy(20), range(0, 20, 2)), 3, shuffle=True),
    "stacked": lambda: DataLoader(StackDataset(Noisy(), Noisy()), 3, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 3),
    "stream, workers": lambda: DataLoader(Stream(), 3, num_workers=1),
    "stateful stream": lambda: DataLoader(StatefulStream(), 3),
    "chained streams": lambda: DataLoader(ChainDataset([Stream(5), Stream(7, 5)]), 3),
    "own": OwnLoader,
    "own, stateful": StatefulLoader,
    "generator": lambda: lambda: iter(OwnLoader()),
    "batches": lambda: [torch.full((3, 1), float(number)) for number in range(4)],
    "combined, min_size": lambda: pairs("min_size"),
    "combined, max_size_cycle": lambda: pairs("max_size_cycle"),
    "combined, max_size": lambda: pairs("max_size"),
}


class Reader(al.Module):
    """Keeps every batch that a step read, and trains on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.read.append(batch)
        parts = leaves(batch)
        return torch.stack([self.net(part.reshape(-1, 1) / 20).square().mean() for part in parts]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def leaves(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else []
    return [leaf for part in parts for leaf in leaves(part)]


class StopAt(al.Callback):
    """Save after so many steps, and leave the fit there, wherever in its epoch that is."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def read_by(folder: Path, train: Any, stop: StopAt | None = None, start: Path | None = None) -> Reader:
    model = Reader()
    al.seed_everything(11)
    trainer = al.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[stop] if stop else [],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers, streams that are read up to their place, and interrupted fits
        try:
            trainer.fit(model, train, ckpt_path=start)
        except KeyboardInterrupt:
            assert stop is not None
    return model


QUICK_LOADERS = {
    "shuffled",
    "seeded",
    "workers",
    "stateful stream",
    "own, stateful",
    "generator",
    "batches",
    "combined, min_size",
}
"""Of loaders, one of each way in which a place in an epoch is kept; the others are of these ways."""
ALONE = {"seeded", "workers", "own, stateful"}
"""Those of which two side by side show no more than one, or take long."""


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(
            name, count, id=f"{name}-{word}",
            marks=() if name in QUICK_LOADERS and (count == 1 or name not in ALONE) else pytest.mark.slow,
        )
        for name in LOADERS
        for count, word in ((1, "one"), (2, "two"))
    ],
)  # fmt: skip
def test_loaders_of_a_kind_read_the_same_through_two_resumes(name: str, count: int, tmp_path: Path) -> None:
    def loaders() -> Any:
        made = [LOADERS[name]() for _ in range(count)]
        if "combined" in name:
            return made[0] if count == 1 else CombinedLoader([part.iterables for part in made], made[0].mode)
        return made[0] if count == 1 else {"a": made[0], "b": made[1]}

    if count == 2 and name in {"generator", "batches"}:
        with pytest.raises(MisconfigurationError, match="a dict is read as several loaders, and these are none"):
            read_by(tmp_path, loaders())
        return
    expected = read_by(tmp_path, loaders())
    per_epoch = len(expected.read) // 3
    assert per_epoch >= 2
    read, start = [], None
    for number, step in enumerate((1, per_epoch + 1)):
        path = tmp_path / f"{number}.ckpt"
        read += read_by(tmp_path, loaders(), StopAt(step, path), start).read
        start = path
    last = read_by(tmp_path, loaders(), None, start)
    assert_same(read + last.read, expected.read, name)
    assert_same(dict(last.state_dict()), dict(expected.state_dict()), name)


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_persistent_workers_end_with_their_run(tmp_path: Path, stopped: bool) -> None:
    before = set(multiprocessing.active_children())
    one, two = LOADERS["persistent workers"](), LOADERS["persistent workers"]()
    read_by(tmp_path, {"a": one, "b": two}, StopAt(5, tmp_path / "5.ckpt") if stopped else None)
    assert not set(multiprocessing.active_children()) - before


# -- strategies --------------------------------------------------------------------------------------------------------


class Stages(al.Module):
    """A model that every strategy can train, whose loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


ALIASES = {"find_unused_parameters", "fork", "spawn", "notebook"}
"""Names of the registry that start processes in another way, or are DDP with one option."""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "DDPStrategy": strategies.DDPStrategy,
    "FSDPStrategy": strategies.FSDPStrategy,
    "ModelParallelStrategy": strategies.ModelParallelStrategy,
    "ReplicaStrategy": strategies.ReplicaStrategy,
    "Plan": lambda: PlanStrategy(Plan(dp_shard=2)),
    "Pipeline": lambda: Pipeline(2, schedule="1F1B", micro_batches=2),
    **{
        name: lambda name=name: name
        for name in STRATEGY_REGISTRY.available_strategies()
        if not any(word in name for word in ALIASES)
    },
}


def test_all_strategies_are_held_to_it() -> None:
    kinds = {
        name
        for name in strategies.__all__
        if inspect.isclass(kind := getattr(strategies, name)) and issubclass(kind, strategies.Strategy)
    }
    assert kinds - set(STRATEGIES) == {"Strategy", "ParallelStrategy", "SingleDeviceStrategy"}


def fit_stages(folder: str, strategy: Any, until: int = 3, start: Path | None = None, save: Path | None = None) -> Any:
    trainer = al.Trainer(
        max_epochs=until, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    module = Stages()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    al.seed_everything(7)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True), ckpt_path=start)
    if save is not None:
        trainer.save_checkpoint(save)
    weights = trainer.strategy.portable(dict(module.state_dict()))
    return {name: value.tolist() for name, value in weights.items()} if trainer.is_global_zero else trainer.global_step


def fit_twice(rank: int, folder: str, name: str) -> Any:
    """The weights of two fits of one strategy object, and of a run through two resumes with new ones."""
    kind = STRATEGIES[name]
    shared = kind()
    whole, again = fit_stages(folder, shared), fit_stages(folder, shared)
    start = None
    for until in (1, 2, 3):
        save = Path(folder) / f"{until}.ckpt"
        last = fit_stages(folder, kind(), until, start, save)
        start = save
    return whole, again, last


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


QUICK = {"FSDPStrategy", "Pipeline"}
"""The one whose parameters are shards, and the one whose ranks hold different parts of the model."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_a_strategy_serves_two_fits_and_two_resumes(ranks: Ranks, tmp_path: Path, name: str) -> None:
    for whole, again, resumed in ranks(fit_twice, str(tmp_path), name):
        assert whole
        assert again == whole
        assert resumed == whole
