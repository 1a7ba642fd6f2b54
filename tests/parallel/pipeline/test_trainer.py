"""The Trainer with a pipeline and an ordinary module: what one process trains, logs, evaluates and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.parallel import Pipeline, Plan, PlanError
from arclight.trainer.strategies import select


class Classifier(al.Module):
    """Knows nothing of stages, and gathers what it predicts in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.model = nn.Sequential(*layers, nn.Linear(8, 3)).double()
        self.predicted: list[Tensor] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        self.steps += 1
        output = self.model(inputs)
        loss = cross_entropy(output, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("right", (output.argmax(1) == labels).double().mean())
        self.log("samples", float(len(inputs)), reduce_fx="sum", on_epoch=True, on_step=False)
        return {"loss": loss, "output": output.detach(), "lowest": output.detach().min()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        output = self.model(inputs)
        self.predicted.append(output.argmax(1))
        self.log("val_loss", cross_entropy(output, labels))

    def on_validation_epoch_end(self) -> None:
        self.log("predicted", torch.cat(self.predicted).double().mean())
        self.predicted.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watch(al.Callback):
    """What hooks see of each step, on every process."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.shapes: list[tuple[int, ...]] = []
        self.metrics: dict[str, float] = {}

    def on_train_end(self, trainer: al.Trainer, module: al.Module) -> None:
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        everyones = trainer.strategy.all_gather_object(self.metrics)
        assert everyones == everyones[:1] * len(everyones)

    def on_train_batch_end(
        self, trainer: al.Trainer, module: al.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        everyones = trainer.strategy.all_gather_object(float(outputs["loss"]))
        assert everyones == everyones[:1] * len(everyones)
        self.losses.append(float(outputs["loss"]))
        self.shapes.append(tuple(outputs["output"].shape))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "shapes": self.shapes, "metrics": self.metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.shapes, self.metrics = list(state["losses"]), list(state["shapes"]), dict(state["metrics"])


def points(count: int, batch_size: int, shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator)), batch_size, shuffle)


def trainer(folder: Path, strategy: Any, *callbacks: al.Callback, **options: Any) -> al.Trainer:
    torch.manual_seed(5)
    return al.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=list(callbacks), default_root_dir=folder, **options,
    )  # fmt: skip


def fit(folder: Path, strategy: Any, module: Any = None, **options: Any) -> tuple[al.Trainer, Watch, Any]:
    watch, module = Watch(), module or Classifier()
    options = {"max_epochs": 2, "gradient_clip_val": 0.1} | options
    run = trainer(folder, strategy, watch, **options)
    run.fit(module, points(38, 8, True), points(20, 7, False))
    return run, watch, module


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def pipeline(stages: int = 2, **options: Any) -> Pipeline:
    return Pipeline(stages, start_method="fork", **options)


STRATEGIES = [
    pipeline(1),
    pipeline(2),
    pipeline(2, schedule="ZBVZeroBubble", micro_batches=4),
    pipeline(2, schedule="Interleaved1F1B", micro_batches=4),
    Plan(pp=2, micro_batches=3).strategy(start_method="fork"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.plan))
def test_a_pipeline_trains_what_one_process_trains(tmp_path: Path, strategy: Any) -> None:
    _, wanted, alone = fit(tmp_path / "1", "auto")
    _, found, module = fit(tmp_path / "2", strategy)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.losses[-1] < found.losses[0]
    assert found.shapes == wanted.shapes
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-12)
    assert {"loss_epoch", "right", "samples", "val_loss", "predicted"} < found.metrics.keys()
    assert largest_difference(module, alone) < 1e-12


def test_names_and_wishes() -> None:
    chosen = select(strategy="pipeline", accelerator="cpu", devices=2)
    assert isinstance(chosen, Pipeline)
    assert chosen.plan.pp == chosen.world_size == 2
    with pytest.raises(PlanError, match="reduction = 'mean' is not known; choose one of token_mean, micro_mean, sum"):
        Pipeline(2, reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="memory = '22 apples': write a number and a unit, as 22GiB"):
        Pipeline(2, memory="22 apples")
    with pytest.raises(PlanError, match="no pipeline schedule 'ring'"):
        Pipeline(2, schedule="ring")


class Tiny(al.Module):
    """A language model of transformers, its two embeddings tied, with a loss over the tokens that are not masked."""

    def __init__(self, own_loss: bool = True) -> None:
        super().__init__()
        self.own_loss = own_loss
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(7)
        sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2, "use_cache": False}
        config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        self.model = GPT2LMHeadModel(config).double()

    def loss_of(self, batch: Any) -> Tensor:
        if not self.own_loss:  # that of transformers is computed in float32
            return self.model(input_ids=batch["tokens"], labels=batch["labels"]).loss
        logits = self.model(input_ids=batch["tokens"]).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["tokens"]).logits

    def batch_weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def sentences(count: int, batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """Tokens, of which each sample hides another number."""
    tokens = torch.randint(0, 40, (count, 12), generator=torch.Generator().manual_seed(2))
    labels = torch.where(torch.arange(12) < torch.arange(count)[:, None] * 3 % 11, -100, tokens)
    rows = [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    return DataLoader(rows, batch_size, shuffle)  # type: ignore[arg-type]


class Record(al.Callback):
    """The loss and the learning of each step; a checkpoint after one of them."""

    def __init__(self, path: Path | None = None, after: int = 0) -> None:
        self.losses: list[float] = []
        self.path, self.after = path, after

    def on_train_batch_end(
        self, trainer: al.Trainer, module: al.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.path is not None and trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def fit_tokens(
    folder: Path, strategy: Any, record: Record | None = None, ckpt: Any = None, own_loss: bool = True, **options: Any
) -> tuple[Record, Any]:
    record, module = record or Record(), Tiny(own_loss)
    options = {"max_epochs": 2, "gradient_clip_val": 0.5} | options
    run = trainer(folder, strategy, record, **options)
    run.fit(module, sentences(27, 6, True), sentences(8, 4, False), ckpt_path=ckpt)
    return record, module


@pytest.mark.parametrize(
    "strategy",
    [
        pipeline(1), pipeline(2, micro_batches=3), pipeline(2, schedule="ZBVZeroBubble", micro_batches=3),
        pytest.param(pipeline(4, schedule="ZB-H1", micro_batches=4), marks=pytest.mark.slow),
    ],
    ids=lambda strategy: str(strategy.plan),
)  # fmt: skip
def test_a_model_with_tied_embeddings_and_masked_tokens(tmp_path: Path, strategy: Any) -> None:
    wanted, alone = fit_tokens(tmp_path / "1", "auto")
    found, module = fit_tokens(tmp_path / "2", strategy)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-11)
    assert found.losses[-1] < found.losses[0]
    assert largest_difference(module, alone) < 1e-11
    assert module.model.lm_head.weight is module.model.transformer.wte.weight


def test_a_loss_that_the_model_computes_itself(tmp_path: Path) -> None:
    wanted, _ = fit_tokens(tmp_path / "1", "auto", own_loss=False)
    found, _ = fit_tokens(tmp_path / "2", pipeline(2), own_loss=False)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
