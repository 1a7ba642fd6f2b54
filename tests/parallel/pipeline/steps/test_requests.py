"""Honour what is asked of `Pipeline` for modules that are written for runners too, or refuse it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ranks import Ranks
from tests.text.test_language_model import SMALL, fit

import arclight as al
from arclight.optim.schedule_settings import Constant
from arclight.optim.settings import SGD
from arclight.parallel import Pipeline, Plan, PlanError, PlanStrategy
from arclight.parallel.pipeline.steps.auto_schedule import PipelineChoice
from arclight.parallel.pipeline.steps.parallelize_steps import _choose_once, parallelize_steps
from arclight.text.language_model import LanguageModel
from arclight.text.settings import LanguageTask
from arclight.text.training_settings import Sampling

MIXTURE = {"layers": 2, "dim": 64, "hidden": 64, "heads": 4, "moe": {"balance_loss": 0.3, "bias_rate": 0.0}}


class Chosen(al.Callback):
    """Keeps how the steps are run; of rank 0, which the run leaves in ``metrics``."""

    def on_train_batch_end(self, trainer: al.Trainer, pl_module: Any, *_: Any) -> None:
        (steps,) = trainer.strategy._steps.values()
        kind, options = steps.topology.kind, steps.options
        pl_module.log("stages_per_process", float(kind.stages_per_process))
        pl_module.log("micro_batches", float(options.micro_batches))
        pl_module.log("evaluation_micro_batches", float(options.evaluation_micro_batches))


def trained(folder: Path, strategy: Any, overrides: dict[str, Any], model: str, *callbacks: al.Callback) -> Any:
    """Two steps with labels that are not to be predicted, validation and samples."""
    settings = LanguageTask(
        model=model, overrides=overrides, sampling=Sampling(new_tokens=2), optimizer=SGD(lr=0.1), schedule=Constant()
    )
    return fit(
        folder, 2, settings=settings, strategy=strategy, val_check_interval=2, limit_val_batches=1, gradient_clip_val=None,
        callbacks=list(callbacks),
    )  # fmt: skip


ASKED, PLANNED = (
    Pipeline(2, schedule="ZBVZeroBubble", micro_batches=3, evaluation_micro_batches=2, start_method="fork"),
    PlanStrategy(Plan(pp=2), start_method="fork"),
)


@pytest.mark.parametrize(
    ("model", "overrides", "strategy"),
    [
        pytest.param("llama3-debug", SMALL, ASKED, id="llama3-asked"),
        pytest.param("qwen3-moe-debug", MIXTURE, ASKED, id="qwen3-moe-asked", marks=pytest.mark.slow),
        pytest.param("qwen3-moe-debug", MIXTURE, PLANNED, id="qwen3-moe-plan", marks=pytest.mark.slow),
    ],
)
def test_a_language_model_trains_in_stages_as_alone(
    model: str, overrides: Any, strategy: PlanStrategy, tmp_path: Path
) -> None:
    _, alone = trained(tmp_path / "1", "auto", overrides, model)
    watched = [Chosen()] if strategy is ASKED else []
    trainer, module = trained(tmp_path / "2", strategy, overrides, model, *watched)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-5, msg=f"{name} {strategy.name}")
    if watched:
        found = {name: float(trainer.callback_metrics[name]) for name in ("stages_per_process", "micro_batches")}
        assert found == {"stages_per_process": 2.0, "micro_batches": 3.0}
        assert float(trainer.callback_metrics["evaluation_micro_batches"]) == 2.0


class Masked(al.Module):
    """Classifies rows, of which those of the second half of a batch have no label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def batch_weight(self, batch: Any) -> Any:
        return (batch[1] != -100).sum()

    def _loss(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.last(self.first(batch[0])), batch[1], ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log("val/loss", loss)
        self.log("val/sized", loss, batch_size=len(batch[0]))
        self.log("val/most", loss, reduce_fx="max")
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.first(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluated(rank: int, folder: Path, parts: int) -> tuple[dict[str, float], torch.Tensor]:
    """Scores and predictions of one batch, of two of whose rows have labels."""
    torch.manual_seed(0)
    module = Masked()
    rows = [(torch.full((4,), float(row)), label) for row, label in enumerate((1, 2, -100, -100))]
    batches = torch.utils.data.DataLoader(rows, batch_size=4)
    trainer = al.Trainer(
        strategy=Pipeline(1, schedule="1F1B", micro_batches=2, evaluation_micro_batches=parts), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=folder,
    )  # fmt: skip
    (scores,) = trainer.validate(module, batches, verbose=False)
    (predicted,) = trainer.predict(module, batches)
    return scores, predicted


def test_evaluation_keeps_rows_without_labels(tmp_path: Path) -> None:
    ranks = Ranks(1)
    try:
        ((scores, predicted),) = ranks(evaluated, tmp_path, 1)
        ((scores_in_parts, predicted_in_parts),) = ranks(evaluated, tmp_path, 2)
    finally:
        ranks.close()
    assert predicted_in_parts.shape == (4, 3)
    torch.testing.assert_close(predicted_in_parts, predicted)
    assert scores_in_parts == pytest.approx(scores, rel=1e-6)


def test_memory_that_is_not_enough_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="PlanError: no plan keeps each process within 1 KiB"):
        trained(tmp_path, Pipeline(2, memory="1KiB", start_method="fork"), SMALL, "llama3-debug")


@pytest.mark.parametrize(
    ("option", "value"), [("memory", "1GiB"), ("evaluation_micro_batches", 2), ("reduction", "sum"), ("example", {})]
)
def test_tensor_parallel_stages_refuse_unsupported_options(option: str, value: Any) -> None:
    module = LanguageModel(LanguageTask(overrides=SMALL), 256)
    module.configure_model()
    plan = Plan(tp=2)
    with pytest.raises(PlanError, match=rf"Pipeline\({option}=\.\.\.\) needs stages that are cut.*tp = 2 spreads"):
        Pipeline(2, plan=plan, schedule="1F1B", micro_batches=4, **{option: value})._cuts_steps(module)
    assert not Pipeline(2, plan=plan, schedule="1F1B", micro_batches=4)._cuts_steps(module)
    with pytest.warns(
        UserWarning, match='schedule and micro_batches = "auto" cannot be predicted with tp = 2: 1F1B and 4'
    ):
        assert not Pipeline(2, plan=plan)._cuts_steps(module)
    assert Pipeline(2)._cuts_steps(module)


def test_losses_that_are_added_in_backward_count_beside_means_of_counts_alone() -> None:
    module = LanguageModel(LanguageTask(overrides=SMALL), 256)
    mesh: Any = SimpleNamespace(plan=Plan(pp=2))
    request = Pipeline(2, reduction="micro_mean").request
    with pytest.raises(PlanError, match=r"LanguageModel adds losses in backward \(scale_losses\)"):
        parallelize_steps(module, mesh, torch.device("cpu"), None, 0, (module.training_step, {}), request)  # type: ignore[arg-type]


def choices(rank: int) -> tuple[PipelineChoice, str, list[int]]:
    """A choice, what is said of one that fails, and the calls of this rank."""
    called = []

    def fail() -> PipelineChoice:
        called.append(rank)
        raise PlanError(f"refused by rank {rank}")

    def choose() -> PipelineChoice:
        called.append(rank)
        return PipelineChoice("1F1B", 4 + rank, (0, 3 + rank))

    with pytest.raises(PlanError) as refused:
        _choose_once(fail, torch.device("cpu"))
    return _choose_once(choose, torch.device("cpu")), str(refused.value), called


def test_rank_0_chooses_for_all_ranks_and_its_refusal_is_theirs() -> None:
    ranks = Ranks(2)
    try:
        found = ranks(choices)
    finally:
        ranks.close()
    chosen = PipelineChoice("1F1B", 4, (0, 3))
    assert found == [(chosen, "refused by rank 0", [0, 0]), (chosen, "refused by rank 0", [])]
