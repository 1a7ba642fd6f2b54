"""Callbacks that measure each n-th step: curvature of a quadratic, moments in NumPy, and weights with the same bits."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import Ranks
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.cli.run_setup import callbacks
from arclight.cli.schema import Recipe
from arclight.fabric.errors import MisconfigurationError
from arclight.recipe import RecipeError, read
from arclight.trainer.callbacks import RunReport
from arclight.trainer.callbacks.monitoring.activation_monitor import ActivationMonitor
from arclight.trainer.callbacks.monitoring.curvature_monitor import CurvatureMonitor

HESSIAN = np.diag([1.0, 4.0, 10.0])
RATE = 0.05


class Quadratic(al.Module):
    """Half of w H w, whatever the batch."""

    def __init__(self, rate: float = RATE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        self.rate = rate

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return 0.5 * self.weight @ torch.from_numpy(HESSIAN) @ self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


class Net(al.Module):
    """Three blocks alike, of which the second drops at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(3))
        self.seen: list[np.ndarray[Any, Any]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
            self.seen.append(batch.detach().double().numpy().copy())
        return batch.square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for block in self.blocks:
            batch = block(batch * 1000)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(
    folder: Path, module: al.Module, *watching: al.Callback, steps: int = 6, **options: Any
) -> list[dict[str, str]]:
    torch.manual_seed(3)
    data = DataLoader(list(torch.randn(24, 5, 4)), 2)
    trainer = al.Trainer(
        max_steps=steps, default_root_dir=folder, enable_progress_bar=False, accelerator="cpu", log_every_n_steps=1, callbacks=list(watching),
        **options,
    )  # fmt: skip
    trainer.fit(module, data, data if "val_check_interval" in options else None)
    file = trainer.run_folder.path / "metrics.csv"
    return list(csv.DictReader(file.open())) if file.exists() else []


def logged(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(float(row["step"])): float(row[name]) for row in rows if row.get(name)}


@pytest.mark.parametrize("every", [1, 3])
def test_curvature_of_a_quadratic(tmp_path: Path, every: int) -> None:
    """In NumPy: gradient descent by hand, and y = H s."""
    rows = fit(tmp_path, Quadratic(), CurvatureMonitor(every), steps=7)
    weights = [np.array([1.0, -2.0, 3.0])]
    for _ in range(7):
        weights.append(weights[-1] - RATE * HESSIAN @ weights[-1])
    expected: dict[str, dict[int, float]] = {"bb_long": {}, "bb_short": {}, "lipschitz": {}}
    for step in range(2, 8):
        if step % every == 0:  # the gradients of steps t - 1 and t are those at weights t - 2 and t - 1
            s = weights[step - 1] - weights[step - 2]
            y = HESSIAN @ s
            expected["bb_long"][step] = s @ s / (s @ y)
            expected["bb_short"][step] = s @ y / (y @ y)
            expected["lipschitz"][step] = float(np.linalg.norm(y) / np.linalg.norm(s))
    for name, by_step in expected.items():
        assert logged(rows, f"curvature/{name}") == pytest.approx(by_step, rel=1e-9)
        assert len(by_step) == (6 if every == 1 else 2)
    assert all(1 <= 1 / value <= 10 for value in expected["bb_long"].values())


def test_steps_that_change_no_weight_give_no_curvature(tmp_path: Path) -> None:
    rows = fit(tmp_path, Quadratic(rate=0.0), CurvatureMonitor(1), steps=3)
    assert not any(name.startswith("curvature/") for row in rows for name in row)


def moments(x: np.ndarray[Any, Any]) -> tuple[float, float]:
    centred = x - x.mean()
    return float(np.linalg.norm(x, axis=-1).mean()), float((centred**4).mean() / (centred**2).mean() ** 2)


@pytest.mark.parametrize(("window", "every"), [(1, 2), (2, 2), (2, 1)])
def test_activations_are_those_of_numpy(tmp_path: Path, window: int, every: int) -> None:
    """Also over a window of two batches with a validation between them, whose activations are a thousand times larger."""
    module = Net()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1} if window == 2 else {}
    rows = fit(tmp_path, module, ActivationMonitor(every), steps=4, **options)
    for block in range(3):
        passes = [moments(x) for x in module.seen[block::3]]
        expected = {
            step: np.mean(passes[(step - 1) * window : step * window], axis=0) for step in range(every, 5, every)
        }
        for number, name in enumerate(("norm", "kurtosis")):
            found = logged(rows, f"activations/blocks.{block}/{name}")
            assert found == pytest.approx({step: float(values[number]) for step, values in expected.items()}, rel=1e-5)
    assert not any(block._forward_hooks for block in module.blocks)


def test_features_of_images_are_their_channels(tmp_path: Path) -> None:
    from arclight.trainer.callbacks.monitoring.activation_monitor import norm_and_kurtosis

    x = np.random.default_rng(0).standard_t(5, (2, 3, 4, 5))
    norm, kurtosis, count = norm_and_kurtosis(torch.from_numpy(x)).tolist()
    assert norm == pytest.approx(np.linalg.norm(x, axis=1).mean(), rel=1e-5)
    assert kurtosis == pytest.approx(moments(x)[1], rel=1e-5)
    assert count == 1


def test_training_keeps_its_bits_and_the_report_has_curves(tmp_path: Path) -> None:
    watching = (ActivationMonitor(2, r"blocks\.\d(\.0)?"), CurvatureMonitor(2), RunReport())
    modules = []
    for name, callbacks_of_run in (("with", watching), ("without", ())):
        al.seed_everything(1)
        modules.append(Net())
        fit(tmp_path / name, modules[-1], *callbacks_of_run)
    ours, theirs = (module.state_dict() for module in modules)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    (report,) = (tmp_path / "with").rglob("report.html")
    text = report.read_text()
    assert "curvature/lipschitz by step" in text
    assert "activations/blocks.1.0/kurtosis by step" in text


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: CurvatureMonitor(0), "every_n_steps >= 1, not 0"),
        (lambda: ActivationMonitor(1, "("), "is not a regular expression"),
    ],
)
def test_settings_that_measure_nothing_are_refused(made: Any, message: str) -> None:
    with pytest.raises(MisconfigurationError, match=message):
        made()


def test_runs_that_cannot_be_measured_are_refused_before_the_first_step(tmp_path: Path) -> None:
    module = Net()
    with pytest.raises(MisconfigurationError, match=r"no module is called 'layers\.\*'"):
        fit(tmp_path, module, ActivationMonitor(1, "layers.*"))
    with pytest.raises(MisconfigurationError, match="no module is a repeated block"):
        fit(tmp_path, Quadratic(), ActivationMonitor(1))
    module.blocks[0].compile(backend="eager")
    with pytest.raises(MisconfigurationError, match="leave one out"):
        fit(tmp_path, module, ActivationMonitor(1))
    assert not module.seen


def test_parts_of_features_are_refused_and_whole_blocks_are_measured() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(in_stages=False, plan=SimpleNamespace(tp=2)))
    module = Net()
    ActivationMonitor(1).on_train_start(trainer, module)
    ActivationMonitor(1, r"blocks\.1").on_train_start(trainer, module)
    with pytest.raises(MisconfigurationError, match=r"plan.tp = 2 cuts features of modules such as 'blocks.1.0'"):
        ActivationMonitor(1, r"blocks\.1\.0").on_train_start(trainer, module)


def test_recipes_choose_monitors_by_kind() -> None:
    tables = [{"kind": "activations", "modules": "model.*", "every_n_steps": 3}, {"kind": "curvature"}]
    made = callbacks(read(Recipe, {"task": {"kind": "language"}, "monitors": tables}))
    (activations,) = (one for one in made if isinstance(one, ActivationMonitor))
    (curvature,) = (one for one in made if isinstance(one, CurvatureMonitor))
    assert (activations.every_n_steps, activations.modules, curvature.every_n_steps) == (3, "model.*", 50)
    with pytest.raises(RecipeError, match=r"monitors\[0\]\.kind"):
        read(Recipe, {"task": {"kind": "language"}, "monitors": [{"kind": "curvatures"}]})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def measure_on_a_rank(rank: int, folder: Path) -> tuple[list[dict[str, str]], list[np.ndarray[Any, Any]]]:
    module = Net()
    rows = fit(folder, module, ActivationMonitor(2), CurvatureMonitor(2), steps=2, strategy="ddp", devices=2)
    return rows, module.seen


def test_ranks_measure_all_that_they_compute(tmp_path: Path, ranks: Ranks) -> None:
    (rows, first), (_, second) = ranks(measure_on_a_rank, tmp_path)
    assert not np.array_equal(first[3], second[3])
    expected = np.mean([moments(first[3]), moments(second[3])], axis=0)
    assert logged(rows, "activations/blocks.0/norm") == pytest.approx({2: expected[0]}, rel=1e-5)
    assert logged(rows, "activations/blocks.0/kurtosis") == pytest.approx({2: expected[1]}, rel=1e-5)
    assert logged(rows, "curvature/lipschitz").keys() == {2}
