"""One rank that has nothing, or something of another shape, where ranks exchange: no wait without end, the same result on all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import Ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.precision import MixedPrecision, names
from arclight.trainer.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


class Total:
    """Shaped as a metric that sums over all processes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum = torch.zeros(())

    def compute(self) -> torch.Tensor:
        whole = self.sum.clone()
        torch.distributed.all_reduce(whole)
        return whole


class Model(al.Module):
    """Logs the mean of its batches in every way that there is, and counts its hooks."""

    def __init__(self, metric: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(1, 1).double()
        self.total = Total() if metric else None
        self.outputs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def _evaluate(self, batch: Any) -> None:
        self.log("mean", batch[0].mean(), sync_dist=True)
        self.log("most", batch[0].max(), on_step=True, on_epoch=True, reduce_fx="max", sync_dist=True)
        if self.total is not None:
            self.total.sum += batch[0].sum().float()
            self.log("total", self.total)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self.log("ends", 1.0, reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return batch[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset[Any]):
    """Keeps to its rank's share of so many numbers, and does not say how many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for number in range(rank, self.count, world_size):
            yield (torch.tensor([float(number)], dtype=torch.float64),)


class Own:
    """A loader of one's own, with a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(1, 1).double(),)] * self.count)


def numbers(count: int, kind: str = "map") -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(count), batch_size=1)
    return DataLoader(TensorDataset(torch.arange(count, dtype=torch.float64)[:, None]), batch_size=1)


def make(folder: str | Path | None, *callbacks: Any, **settings: Any) -> al.Trainer:
    return al.Trainer(
        **{
            "max_epochs": 2, "accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False, "log_every_n_steps": 1,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
            "enable_checkpointing": bool(callbacks), **settings,
        },
        callbacks=list(callbacks),
    )  # fmt: skip


def read(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def expected(count: int, suffix: str = "") -> dict[str, float]:
    return {f"mean{suffix}": (count - 1) / 2, f"most_epoch{suffix}": count - 1.0}


# -- evaluation --------------------------------------------------------------------------------------------------------


QUICK = ([1], "map"), ([1, 3], "stream"), ([3, 1], "map")


def fit_with(rank: int, folder: str, counts: list[int], kind: str, metric: bool) -> Any:
    saver = ModelCheckpoint(dirpath=Path(folder) / "c", monitor="ends", save_top_k=-1, filename="{epoch}")
    stopper = EarlyStopping("ends", patience=9)
    trainer = make(folder, saver, stopper)
    loaders = [numbers(count, kind) for count in counts]
    trainer.fit(Model(metric), numbers(4), loaders[0] if len(loaders) == 1 else loaders)
    found = read(trainer.callback_metrics)
    found = {
        name: value for name, value in found.items() if "train" not in name and not name.startswith(("most/", "most "))
    }
    found.pop("most", None)
    return found, len(saver.best_k_models), stopper.wait_count


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        pytest.param(counts, kind, marks=() if (counts, kind) in QUICK else pytest.mark.slow)
        for counts in ([1], [1, 3], [1, 1, 2], [3, 1]) for kind in ("map", "stream")
    ],
)  # fmt: skip
def test_a_fit_validates_where_a_rank_has_no_batch(ranks: Ranks, tmp_path: Path, counts: list[int], kind: str) -> None:
    wanted = {"ends": 2.0}
    for number, count in enumerate(counts):
        wanted |= expected(count, f"/dataloader_idx_{number}" if len(counts) > 1 else "")
    assert ranks(fit_with, str(tmp_path), counts, kind, False) == [(wanted, 2, 1)] * 2


def test_a_metric_computes_with_a_rank_that_has_no_batch(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(fit_with, str(tmp_path), [1, 3], "map", True)
    assert found[0] == found[1]
    assert (found[0][0]["total/dataloader_idx_0"], found[0][0]["total/dataloader_idx_1"]) == (0.0, 3.0)


def evaluate_with(rank: int, folder: str, entry: str, count: int, kind: str) -> Any:
    trainer = make(folder)
    loaders = [numbers(count, kind), numbers(3, kind)]
    if entry == "predict":
        batches = trainer.predict(Model(), loaders)
        return [[float(batch) for batch in part] for part in batches]
    return [read(results) for results in getattr(trainer, entry)(Model(), loaders, verbose=False)]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("entry", ["validate", "test"])
def test_evaluations_give_all_ranks_the_same_results(ranks: Ranks, tmp_path: Path, entry: str, kind: str) -> None:
    last = {"ends": 2.0} if entry == "validate" else {}
    wanted = [expected(1, "/dataloader_idx_0") | last, expected(3, "/dataloader_idx_1") | last]
    assert ranks(evaluate_with, str(tmp_path), entry, 1, kind) == [wanted, wanted]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_rank_without_batches_predicts_nothing(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert ranks(evaluate_with, str(tmp_path), "predict", 1, kind) == [[[0.0], [0.0, 2.0]], [[], [1.0]]]


class Writer(BasePredictionWriter):
    """Keeps what it is given to write, and meets the other ranks at the end of the epoch."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.batches.append((loader, batch_indices, prediction.flatten().tolist()))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        trainer.strategy.barrier("written")
        several = bool(predictions) and isinstance(predictions[0], list)
        parts = predictions if several else [predictions]
        self.epochs.append(([[float(batch) for batch in part] for part in parts], batch_indices))


def written(rank: int, folder: str, interval: str, counts: list[int], kind: str, returned: bool) -> Any:
    writer = Writer(interval)
    loaders = [numbers(count, kind) for count in counts]
    trainer = make(folder, writer, enable_checkpointing=False)
    found = trainer.predict(Model(), loaders if len(loaders) > 1 else loaders[0], return_predictions=returned)
    assert (found is not None) == returned
    return writer.batches, writer.epochs


@pytest.mark.parametrize(
    ("counts", "interval", "returned"),
    [
        pytest.param(counts, interval, returned, marks=() if number % 5 == 0 else pytest.mark.slow)
        for number, (counts, interval, returned) in enumerate(
            itertools.product(([1], [1, 3], [3, 1]), ("batch", "epoch", "batch_and_epoch"), (True, False))
        )
    ],
)
def test_writers_write_what_a_rank_predicts_which_may_be_nothing(
    ranks: Ranks, tmp_path: Path, counts: list[int], interval: str, returned: bool
) -> None:
    for rank, (batches, epochs) in enumerate(ranks(written, str(tmp_path), interval, counts, "map", returned)):
        own = [list(range(rank, count, 2)) for count in counts]
        by_batch = [(number, [place], [float(place)]) for number, part in enumerate(own) for place in part]
        assert batches == (by_batch if "batch" in interval else [])
        at_end = ([[float(place) for place in part] for part in own], [[[place] for place in part] for part in own])
        assert epochs == ([at_end] if "epoch" in interval else [])


def test_writers_of_streams_know_no_places(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(written, str(tmp_path), "batch_and_epoch", [1], "stream", True)
    assert found == [([(0, None, [0.0])], [([[0.0]], [[None]])]), ([], [([[]], [[]])])]


def with_as_many_loaders(rank: int, folder: str, counts: list[int], stage: str) -> str:
    loaders = [numbers(4) for _ in range(counts[rank])]
    try:
        if stage == "train":
            make(folder).fit(Model(), loaders)
        else:
            getattr(make(folder), stage)(Model(), loaders)
    except MisconfigurationError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("stage", ["validate", "predict", "train"])
@pytest.mark.parametrize("counts", [[1, 2], [3, 2]])
def test_ranks_with_different_numbers_of_loaders_are_refused(
    ranks: Ranks, tmp_path: Path, counts: list[int], stage: str
) -> None:
    found = ranks(with_as_many_loaders, str(tmp_path), counts, stage)
    assert found[0] == found[1]
    assert (
        f"different numbers of loaders from `{ {'validate': 'val'}.get(stage, stage) }_dataloader()`: {counts}"
        in found[0]
    )


# -- training ----------------------------------------------------------------------------------------------------------


def saved_by_time(rank: int, folder: str) -> list[str]:
    saver = ModelCheckpoint(Path(folder) / "kept", train_time_interval=timedelta(0), save_top_k=-1, filename="{step}")
    make(folder, saver, max_epochs=1, log_every_n_steps=0).fit(Model(), numbers(100))
    return sorted(path.name for path in (Path(folder) / "kept").iterdir())


def test_saves_by_time_need_no_rows(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(saved_by_time, str(tmp_path)) == [["step=50.ckpt"]] * 2


class Lengths(IterableDataset[Any]):
    """Six batches: of two rows on rank 0, of three on rank 1."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield (torch.ones(2 + torch.distributed.get_rank(), 1).double(),)


def saved_by_samples(rank: int, folder: str) -> list[str]:
    saver = ModelCheckpoint(Path(folder) / "kept", every="4sp", save_top_k=-1, filename="{step}")
    make(folder, saver, max_epochs=1).fit(Model(), DataLoader(Lengths(), batch_size=None))
    return sorted(path.name for path in (Path(folder) / "kept").iterdir())


def test_saves_by_samples_go_by_those_of_rank_zero(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(saved_by_samples, str(tmp_path)) == [["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]] * 2


class Streamed(al.Module):
    """Records the epochs and steps of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(1, 1).double()
        self.seen: list[tuple[int, int]] = []
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch_idx))
        return (self.net(batch[0]) - 2 * batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    @property
    def weights(self) -> list[float]:
        return [float(parameter.detach()) for parameter in self.parameters()]


def stepped(rank: int, folder: str, count: int, steps: int) -> Any:
    module = Streamed()
    trainer = make(folder, max_epochs=-1, max_steps=steps, num_sanity_val_steps=0)
    trainer.fit(module, numbers(count, "stream"), numbers(2))
    return module.seen, module.validated, module.weights


@pytest.mark.parametrize("steps", [3, 4])
def test_streams_of_unequal_length_end_together_at_max_steps(ranks: Ranks, tmp_path: Path, steps: int) -> None:
    """Rank 0 has five batches, rank 1 four: neither may ask whether another follows."""
    first, second = ranks(stepped, str(tmp_path), 9, steps)
    assert first == second
    assert first[:2] == ([(0, step) for step in range(steps)], 0)


class SkipFrom(al.Callback):
    """Skips the rest of an epoch from one batch on."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.batch else None


def skipped(rank: int, folder: str, closure: bool) -> list[float]:
    module = Streamed()
    if closure:
        module.optimizer_step = lambda epoch, index, optimizer, closure: optimizer.step(closure)  # type: ignore[method-assign]
    trainer = make(folder, SkipFrom(3), max_epochs=1, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.fit(module, numbers(12))
    assert trainer.global_step == 2
    return module.weights


@pytest.mark.parametrize("closure", [False, True])
def test_a_window_that_a_skip_closes_updates_all_ranks_alike(ranks: Ranks, tmp_path: Path, closure: bool) -> None:
    first, second = ranks(skipped, str(tmp_path), closure)
    assert first == second
    module = Streamed()
    for batches in (range(4), range(4, 6)):
        x = torch.tensor(batches, dtype=torch.float64)[:, None]
        (module.net(x) - 2 * x).square().mean().backward()
        for parameter in module.parameters():
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
    assert first == pytest.approx(module.weights, rel=1e-12)


class NoLoss(Streamed):
    """Has no loss for some batches, given by rank and number."""

    def __init__(self, without: set[tuple[int, int]]) -> None:
        super().__init__()
        self.without = without

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step([batch[0].to(self.dtype)], batch_idx)
        return None if (self.global_rank, batch_idx) in self.without else loss


def without_a_loss(
    rank: int, folder: str, without: set[tuple[int, int]], closure: bool, half: bool = False, ends: int | None = None
) -> list[float]:
    module = NoLoss(without)
    if closure:
        module.optimizer_step = lambda epoch, index, optimizer, closure: optimizer.step(closure)  # type: ignore[method-assign]
    if half:
        module.float()
    trainer = make(
        folder, *([] if ends is None else [SkipFrom(ends)]), max_epochs=1, accumulate_grad_batches=3, enable_checkpointing=False,
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0)) if half else None,
    )  # fmt: skip
    trainer.fit(module, numbers(12))
    return module.weights


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_window_whose_last_batch_has_no_loss_updates_all_ranks_alike(
    ranks: Ranks, tmp_path: Path, closure: bool, half: bool
) -> None:
    first, second = ranks(without_a_loss, str(tmp_path), {(0, 2), (1, 2)}, closure, half)
    assert first == second
    whole, _ = ranks(
        without_a_loss, str(tmp_path), {(rank, batch) for rank in (0, 1) for batch in (0, 1, 2)}, closure, half
    )
    assert first != whole, "the first two batches of the window were trained on"


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
@pytest.mark.parametrize("closure", [False, True])
def test_a_window_that_ends_early_averages_a_rank_without_losses(ranks: Ranks, tmp_path: Path, closure: bool) -> None:
    """Its two batches have a loss on rank 0 alone."""
    first, second = ranks(without_a_loss, str(tmp_path), {(1, 3), (1, 4)}, closure, False, 5)
    assert first == second


def refused(rank: int, folder: str, kind: str) -> str:
    own = Own(2 if rank == 0 else 0)
    train: Any = {
        "list": list(own), "own": own, "generator": lambda: iter(own), "stream": numbers(1, "stream"), "tree": [own, numbers(4)],
    }[kind]  # fmt: skip
    try:
        make(folder).fit(Model(), train)
    except MisconfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("kind", ["list", "own", "generator", "stream", "tree"])
def test_training_is_refused_on_all_ranks_where_one_has_no_batch(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    found = ranks(refused, str(tmp_path), kind)
    assert found[0] == found[1]
    assert "rank 1" in found[0], found[0]


# -- exchanges of tensors ----------------------------------------------------------------------------------------------


def exchanged(rank: int, operation: str, kind: str) -> Any:
    fabric = al.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    tensor = {
        "same": torch.arange(2.0) + rank, "shape": torch.arange(2.0 + rank), "dimensions": torch.ones(2 + rank, 3 - rank),
        "empty": torch.ones(3 * (1 - rank)), "type": torch.ones(2, dtype=torch.int64 if rank else torch.float32),
    }[kind]  # fmt: skip
    given = {"a": tensor.requires_grad_() if operation == "gradients" else tensor}
    try:
        if operation == "all_reduce":
            return fabric.all_reduce(given)["a"].tolist()
        return fabric.all_gather(given, sync_grads=operation == "gradients")["a"].tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", r"rank 0 has (2,) float32, rank 1 has (3,) float32"),
        ("dimensions", r"rank 0 has (2, 3) float32, rank 1 has (3, 2) float32"),
        ("empty", r"rank 0 has (3,) float32, rank 1 has (0,) float32"),
        ("type", r"rank 0 has (2,) float32, rank 1 has (2,) int64"),
    ],
)
def test_tensors_of_different_shapes_or_types_are_named_on_all_ranks(
    ranks: Ranks, operation: str, kind: str, said: str
) -> None:
    found = ranks(exchanged, operation, kind)
    assert found[0] == found[1]
    assert f"{operation} needs tensors of one shape and type, but {said}" in found[0]


def test_tensors_of_one_shape_are_exchanged(ranks: Ranks) -> None:
    assert ranks(exchanged, "all_gather", "same") == [[[0.0, 1.0], [1.0, 2.0]]] * 2
    assert ranks(exchanged, "gradients", "same") == [[[0.0, 1.0], [1.0, 2.0]]] * 2
    assert ranks(exchanged, "all_reduce", "same") == [[0.5, 1.5]] * 2
    assert "rank 1 has (3,)" in ranks(exchanged, "gradients", "shape")[0]


# -- a rank that holds nothing -----------------------------------------------------------------------------------------


class Narrow(al.Module):
    """Every parameter has one row: split over two ranks, the second has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


AVERAGES: dict[str, Any] = {"none": None, "ema": EMAWeightAveraging, "mean": WeightAveraging}


def trained(rank: int, folder: str, strategy: str, settings: dict[str, Any], average: str, epochs: list[int]) -> Any:
    """The weights at the end of fits of which each goes on from the one before."""
    devices, start = (1, None) if strategy == "auto" else (2, None)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).double()
    for until in epochs:
        saver = ModelCheckpoint(Path(folder) / strategy, filename="{epoch}", save_top_k=-1)
        parts = [saver] if AVERAGES[average] is None else [saver, AVERAGES[average]()]
        trainer = make(folder, *parts, strategy=strategy, devices=devices, max_epochs=until, **settings)
        module = Narrow()
        trainer.fit(module, DataLoader(TensorDataset(x), 4 // devices), ckpt_path=start)
        start = saver.best_model_path
    weights = trainer.strategy.portable(dict(module.state_dict()))
    return [weights[name].flatten().tolist() for name in sorted(weights)] if rank == 0 else trainer.global_step


CLIPPING: dict[str, dict[str, Any]] = {
    "mean": {}, "none": {"gradient_clip_val": 0.1},
    "ema": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}  # fmt: skip
"""How gradients are clipped; each with the average that it is quickly tried with."""


@pytest.mark.parametrize(
    ("settings", "average"),
    [
        pytest.param(settings, average, marks=() if average == own else pytest.mark.slow)
        for own, settings in CLIPPING.items() for average in AVERAGES
    ],
)  # fmt: skip
def test_a_rank_without_a_parameter_trains_clips_averages_and_saves(
    ranks: Ranks, tmp_path: Path, settings: dict[str, Any], average: str
) -> None:
    alone = trained(0, str(tmp_path), "auto", settings, average, [3])
    found = ranks(trained, str(tmp_path), "fsdp", settings, average, [1, 3])
    assert found[1] == 6
    for mine, whole in zip(found[0], alone, strict=True):
        assert mine == pytest.approx(whole, rel=1e-9)


# -- batches of another shape ------------------------------------------------------------------------------------------


class Rows(IterableDataset[Any]):
    """Two batches; those of rank 1 have a row more."""

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        for batch in range(2):
            yield (torch.arange(3.0 * (2 + rank)).view(-1, 3).double() + batch + 10 * rank,)


class Normed(al.Module):
    """A batch norm, whose statistics are measured anew for an average; logs with an exchange in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", batch[0].sum(), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def averaged(rank: int, folder: str, kind: str) -> Any:
    average = StochasticWeightAveraging(0.05, 2, 1) if kind == "swa" else AVERAGES[kind]()
    module = Normed()
    trainer = make(folder, average, max_epochs=4, enable_checkpointing=False)
    trainer.fit(module, DataLoader(Rows(), batch_size=None), numbers(1))
    return average.n_averaged, {name: tensor.tolist() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("kind", ["swa", "ema", "mean"])
def test_averages_are_those_of_all_ranks_where_batches_and_validation_are_uneven(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    (updates, found), (_, other) = ranks(averaged, str(tmp_path), kind)
    assert updates == (3 if kind == "swa" else 8)
    parameters = [name for name in found if "running" not in name and "tracked" not in name]
    assert {name: found[name] for name in parameters} == {name: other[name] for name in parameters}
    if kind == "swa":
        batches = [
            torch.arange(3.0 * (2 + rank)).view(-1, 3) + batch + 10 * rank for rank in range(2) for batch in range(2)
        ]
        for measured in (found, other):
            assert measured["net.0.running_mean"] == pytest.approx(
                torch.stack([batch.mean(0) for batch in batches]).mean(0).tolist()
            )
            assert measured["net.0.running_var"] == pytest.approx(
                torch.stack([batch.var(0) for batch in batches]).mean(0).tolist()
            )


def refused_average(rank: int, folder: str) -> str:
    try:
        make(folder, StochasticWeightAveraging(0.05), strategy="fsdp").fit(Narrow(), numbers(4))
    except MisconfigurationError as error:
        return str(error)
    return "trained"


def test_swa_of_shards_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert (
        ranks(refused_average, str(tmp_path))
        == ["SWA does not currently support sharded models: use EMAWeightAveraging"] * 2
    )


def measured_alone(rank: int) -> tuple[str, str]:
    """Measure bf16-mixed as faster on rank 0 alone; return the precision of a fit and of a Fabric."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(names, "faster_precision", lambda device: ["bf16-mixed", "32-true"][rank])
        trainer = al.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", precision="auto", max_steps=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Model().float()
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(4, 1)), 2))
        fabric = al.Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="auto")
        fabric.launch()
        with fabric.autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
    return trainer.precision, str(product.dtype)


def test_ranks_compute_in_the_precision_that_rank_zero_measured(ranks: Ranks) -> None:
    assert ranks(measured_alone) == [("bf16-mixed", "torch.bfloat16")] * 2
