"""A Trainer's run shows what its pipeline does."""

from __future__ import annotations

import errno
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.pipeline.naps import Sleeper
from torch import Tensor, nn
from torch.utils.data import DataLoader

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.parallel import Pipeline, Plan, PlanStrategy
from arclight.parallel.pipeline import record
from arclight.parallel.step_protocol import batch_loss
from arclight.trainer.callbacks import PipelineTimeline
from arclight.trainer.run.report import write_report

SECONDS = 0.004


class Module(al.Module):
    """Layers that sleep, trained as any module is."""

    def __init__(self) -> None:
        super().__init__()
        inner = Sleeper([(SECONDS, SECONDS, SECONDS)] * 4)
        self.model, self.runner = inner.model, None
        self.split_batch, self.loss = inner.split_batch, inner.loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total, count = batch_loss(self, batch)
        return total / count

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        batch_loss(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder: Path, callback: PipelineTimeline, plan: Plan | None, steps: int = 4) -> None:
    trainer = al.Trainer(
        accelerator="cpu", devices=1 if plan is None else plan.world_size, default_root_dir=folder, max_steps=steps, logger=False,
        strategy="auto" if plan is None else PlanStrategy(plan, start_method="fork"), enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[callback], limit_val_batches=1, val_check_interval=2,
    )  # fmt: skip
    batches = DataLoader(torch.randn(64, 16), batch_size=8)
    trainer.fit(Module(), batches, batches)


class Ordinary(al.Module):
    """A module that knows nothing of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.model(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def data(page: Path) -> Any:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_a_run_writes_the_timeline_of_a_step_once_it_has_seen_enough(tmp_path: Path) -> None:
    fit(tmp_path, PipelineTimeline(after=1, steps=2), Plan(pp=2, schedule="1F1B", micro_batches=4))
    (plots,) = tmp_path.glob("**/plots")
    assert sorted(file.name for file in plots.iterdir()) == [
        "captions.json", "pipeline.html", "pipeline.json", "pipeline.svg",
    ]  # fmt: skip
    report = write_report(plots.parent).read_text(encoding="utf-8")
    assert "One training step of the pipeline" in report
    assert report.count('<figure class="wide"><img alt="One training step') == 1
    found = data(plots / "pipeline.html")
    simulated, measured = found["traces"]
    assert (simulated["name"], measured["name"]) == ("predicted", "measured")
    for lane, other in zip(measured["lanes"], simulated["lanes"], strict=True):
        assert len(lane["spans"]) == len(other["spans"]) == 6 * 8
        kinds = [found["letters"][int(kind)] for kind in lane["spans"][::6]]
        assert sorted(kinds) == ["B"] * 4 + ["F"] * 4  # a training step, none of validation
        assert min(durations(lane)) > 2 * SECONDS * 1e6 * 0.99
        for kind in set(other["spans"][::6]):  # a prediction is made of means: what repeats takes as long each time
            alike = [took for took, what in zip(durations(other), other["spans"][::6], strict=True) if what == kind]
            assert max(alike) - min(alike) <= 2
            assert min(alike) > 2 * SECONDS * 1e6 * 0.99
    assert {event["ph"] for event in json.loads((plots / "pipeline.json").read_text())["traceEvents"]} == set("XsfMC")
    with record():  # no recording was left open
        pass


def durations(lane: Any) -> list[int]:
    """Microseconds of each action."""
    return [end - start for start, end in zip(lane["spans"][3::6], lane["spans"][4::6], strict=True)]


def fit_ordinary(folder: Path, callback: PipelineTimeline, stages: int) -> list[Path]:
    trainer = al.Trainer(
        accelerator="cpu", devices=stages, default_root_dir=folder, max_steps=3, logger=False, enable_checkpointing=False,
        strategy=Pipeline(stages, schedule="1F1B", micro_batches=4, start_method="fork"), enable_progress_bar=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Ordinary(), DataLoader(torch.randn(64, 16), batch_size=8))
    return list(folder.glob("**/pipeline.html"))


@pytest.mark.parametrize("stages", [1, 2])
def test_an_ordinary_module_is_seen_too(tmp_path: Path, stages: int) -> None:
    (page,) = fit_ordinary(tmp_path, PipelineTimeline(after=1, steps=5), stages)
    measured = data(page)["traces"][1]
    assert len(measured["lanes"]) == stages
    assert sum(len(lane["spans"]) for lane in measured["lanes"]) == 6 * 2 * 4 * stages
    assert "2 steps," in page.read_text(encoding="utf-8")  # all that there were after the first


def test_a_run_that_is_too_short_has_no_timeline(tmp_path: Path) -> None:
    assert fit_ordinary(tmp_path, PipelineTimeline(after=3), 1) == []
    trainer: Any = SimpleNamespace(strategy=Pipeline(1))
    callback = PipelineTimeline(after=3)
    callback.on_train_start(trainer, Ordinary())
    with pytest.warns(UserWarning, match="nothing to show: fewer than 4 steps were trained"):
        callback.on_train_end(trainer, Ordinary())


def test_a_run_without_a_pipeline_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationError, match='this run has none: use strategy = "pipeline"'):
        fit(tmp_path, PipelineTimeline(), None)
    with pytest.raises(MisconfigurationError, match="not after = -1 and steps = 5"):
        PipelineTimeline(after=-1)


def test_a_timeline_that_a_full_disk_does_not_take_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arclight.parallel.pipeline.view import timeline as view

    def keep(text: str, *_: Any, **__: Any) -> None:  # of all ranks, which are processes
        with open(tmp_path / "warnings.txt", "a") as file:
            file.write(f"{text}\n")

    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(warnings, "warn", keep)
    monkeypatch.setattr(view, "figure", full)  # the picture of the report, which comes after the page
    fit(tmp_path, PipelineTimeline(after=1, steps=2), Plan(pp=2, schedule="1F1B", micro_batches=4))
    (plots,) = tmp_path.glob("**/plots")
    assert "pipeline.html" in [file.name for file in plots.iterdir()]
    said = (tmp_path / "warnings.txt").read_text()
    assert said.count("the timeline of the pipeline was not drawn ([Errno 28] No space left") == 1
