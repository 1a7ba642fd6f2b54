"""The monitor of experts: shares and cosines in NumPy, weights with the same bits, a picture in the report."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.text.test_language_model import SMALL, fit

from arclight.cli.run_setup import callbacks
from arclight.cli.schema import Recipe
from arclight.fabric.errors import MisconfigurationError
from arclight.recipe import read
from arclight.text.callbacks.expert_monitor import ExpertMonitor, similarity
from arclight.text.model.moe import BaseRouter
from arclight.text.settings import LanguageTask
from arclight.trainer import Callback
from arclight.trainer.callbacks import RunReport


class Choices(Callback):
    """Record choices and weights of routers at each step, head by head, by forward hooks."""

    def __init__(self) -> None:
        self.counts: dict[str, np.ndarray[Any, Any]] = {}
        self.weights: dict[str, np.ndarray[Any, Any]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, module in pl_module.named_modules():
            if isinstance(module, BaseRouter):
                module.register_forward_hook(self._keep(name.removesuffix(".router")))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.counts.clear()

    def _keep(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            if module.training:
                chosen_hk = output[1].unflatten(1, (module.heads, -1)) if output[1].ndim == 2 else output[1]
                experts = len(module.weight) // module.heads
                now = [np.bincount(chosen_hk[:, h].flatten().numpy(), minlength=experts) for h in range(module.heads)]
                self.counts[name] = self.counts.get(name, 0) + np.stack(now)  # of all runs of a shared block
                self.weights[name] = module.weight.detach().double().numpy().reshape(module.heads, experts, -1).copy()

        return keep


def cosine(rows: np.ndarray[Any, Any]) -> float:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float(np.abs(unit @ unit.T)[~np.eye(len(rows), dtype=bool)].mean())


@pytest.mark.parametrize(
    ("model", "layers", "several"),
    [
        ("sigma-moe-debug", {"feed_forward"}, False),
        ("switch-head-debug", {"wv", "wo"}, True),
        ("deptoe-debug", {"feed_forward", "wv", "wo"}, True),
    ],
)
def test_shares_and_similarities_are_those_of_numpy_and_weights_keep_their_bits(
    tmp_path: Path, model: str, layers: set[str], several: bool
) -> None:
    task = LanguageTask(model=model, sampling=None)
    choices, runs = Choices(), {}
    for name, watching in (("with", [ExpertMonitor(4), choices, RunReport()]), ("without", [])):
        runs[name] = fit(tmp_path / name, steps=4, settings=task, callbacks=watching)
    ours, theirs = (model.state_dict() for _, model in runs.values())
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    folder = runs["with"][0].run_folder.path
    (row,) = (
        one for one in csv.DictReader((folder / "metrics.csv").open()) if any(one[k] for k in one if "max_share" in k)
    )
    assert row["step"] == "4"
    assert {name.rpartition(".")[2] for name in choices.counts} == layers
    violations, entropies = [], []
    for name, counts in choices.counts.items():
        shares = counts / counts.sum(1, keepdims=True)
        assert float(row[f"experts/{name}/max_share"]) == pytest.approx(shares.max())
        assert float(row[f"experts/{name}/min_share"]) == pytest.approx(shares.min())
        rows = np.mean([cosine(of_head) for of_head in choices.weights[name]])
        assert float(row[f"experts/{name}/router_similarity"]) == pytest.approx(rows, rel=1e-4)
        assert 0 <= float(row[f"experts/{name}/expert_similarity"]) < 0.5
        violations.append(np.mean(counts.max(1) / counts.mean(1) - 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            entropies.append(np.mean(-np.nansum(shares * np.log(shares), 1) / np.log(shares.shape[1])))
    logged = runs["with"][0].callback_metrics
    assert float(logged["experts/max_violation"]) == pytest.approx(np.mean(violations), rel=1e-4)
    assert float(logged["experts/entropy"]) == pytest.approx(np.mean(entropies), rel=1e-4)
    picture = (folder / "plots" / "experts.svg").read_text()
    assert picture.count("expert ") == sum(counts.size for counts in choices.counts.values())
    assert ("head 1, expert 0" in picture) == several
    assert "Share of the choices that each expert got" in (folder / "report.html").read_text()


def test_similarity_of_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 7))
    assert similarity(torch.from_numpy(rows)) == pytest.approx(cosine(rows), rel=1e-5)
    assert similarity(torch.tensor([[1.0, 2.0], [-2.0, -4.0]])) == pytest.approx(1.0)
    assert np.isnan(similarity(torch.ones(1, 3)))


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationError, match="no layers of experts"):
        fit(tmp_path, steps=1, settings=LanguageTask(overrides=SMALL, sampling=None), callbacks=[ExpertMonitor(1)])


def test_recipes_choose_it_by_kind() -> None:
    recipe = read(Recipe, {"task": {"kind": "language"}, "monitors": [{"kind": "experts", "every_n_steps": 7}]})
    (made,) = (one for one in callbacks(recipe) if isinstance(one, ExpertMonitor))
    assert made.every_n_steps == 7
