"""The Trainer with a pipeline and an ordinary module: what one process trains, logs, evaluates and saves."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.parallel import Pipeline, Plan, PlanError, PlanStrategy, initialize
from arclight.parallel.pipeline.steps.micro_batch import hides_targets, split_samples
from arclight.parallel.step_protocol import batch_loss
from arclight.text import build_model
from arclight.trainer.callbacks import MicroBatching
from arclight.trainer.fabric.strategies import select
from arclight.vision import Detector
from arclight.vision.tasks.settings import DetectionTask


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
    """Record the hooks of each step, on every process."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.shapes: list[tuple[int, ...]] = []
        self.metrics: dict[str, float] = {}
        self.seeded: list[Any] = []

    def on_train_epoch_end(self, trainer: al.Trainer, module: al.Module) -> None:
        counts = trainer.strategy.all_gather_object(module.steps)  # what the last stage's process has counted
        assert counts == counts[:1] * len(counts)
        assert counts[0] > 0

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
        self.seeded.append(torch.cuda._lazy_seed_tracker.manual_seed_all_cb)  # torch.manual_seed formats a stack for it
        assert self.seeded[-1] is self.seeded[0]

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
    pytest.param(pipeline(2, schedule="ZBVZeroBubble", micro_batches=4), marks=pytest.mark.slow),
    pytest.param(pipeline(2, memory="1GiB", evaluation_micro_batches=3), marks=pytest.mark.slow),
    PlanStrategy(Plan(pp=2, micro_batches=3), start_method="fork"),
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[al.Trainer, Watch, Any]:
    return fit(tmp_path_factory.mktemp("one"), "auto")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.plan))
def test_a_pipeline_trains_what_one_process_trains(tmp_path: Path, strategy: Any, one_process: Any) -> None:
    _, wanted, alone = one_process
    _, found, module = fit(tmp_path / "2", strategy)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.losses[-1] < found.losses[0]
    assert found.shapes == wanted.shapes
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-12)
    assert {"loss_epoch", "right", "samples", "val_loss", "predicted"} < found.metrics.keys()
    assert largest_difference(module, alone) < 1e-12


class Trunk(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = layers

    def forward(self, inputs: Tensor) -> Tensor:
        return self.c(self.b(self.a(inputs).tanh()).tanh()).tanh()


class Parts(Classifier):
    """Has its layers itself, and some in a module of a user's."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for layer in self._modules.pop("model") if isinstance(layer, nn.Linear)]
        self.first, self.trunk, self.last = layers[0], Trunk(*layers[1:4]), layers[4]
        self.output = nn.Linear(8, 3).double()

    def model(self, inputs: Tensor) -> Tensor:
        return self.output(self.last(self.trunk(self.first(inputs).tanh())))


def test_layers_that_are_the_modules_own_stay_on_their_stages(tmp_path: Path) -> None:
    _, alone, whole = fit(tmp_path / "one", "auto", Parts())
    run, watch, module = fit(tmp_path / "two", pipeline(2), Parts())
    run.validate(module, points(20, 7, False), verbose=False)
    assert largest_difference(whole, module) < 1e-9
    assert watch.metrics == pytest.approx(alone.metrics, rel=1e-9)


def test_the_pipeline_strategy_is_selected_by_name_and_refuses_invalid_options() -> None:
    chosen = select(strategy="pipeline", accelerator="cpu", devices=2)
    assert isinstance(chosen, Pipeline)
    assert chosen.plan.pp == chosen.world_size == 2
    with pytest.raises(PlanError, match="reduction = 'mean' is not known; choose one of token_mean, micro_mean, sum"):
        Pipeline(2, reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="memory 22 apples: write a number and a unit"):
        Pipeline(2, memory="22 apples")
    with pytest.raises(PlanError, match="memory = 0 is not a size"):
        Pipeline(2, memory=0)
    with pytest.raises(PlanError, match="no pipeline schedule 'ring'"):
        Pipeline(2, schedule="ring")


class Tiny(al.Module):
    """A language model of transformers, its two embeddings tied, with a loss over the tokens that are not masked."""

    def __init__(self, own_loss: bool = True) -> None:
        super().__init__()
        self.own_loss = own_loss
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(7)
        sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
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
    """The loss of each step; a checkpoint after one of them."""

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


@pytest.fixture(scope="module")
def tokens_alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train one process on tokens with some options, once."""
    return functools.cache(lambda **options: fit_tokens(tmp_path_factory.mktemp("alone"), "auto", **options))


@pytest.mark.parametrize(
    "strategy",
    [
        pipeline(2, schedule="ZBVZeroBubble", micro_batches=3),
        pipeline(4, schedule="ZB-H1", micro_batches=4),
    ],
    ids=lambda strategy: str(strategy.plan),
)  # fmt: skip
@pytest.mark.slow
def test_a_model_with_tied_embeddings_and_masked_tokens(tmp_path: Path, strategy: Any, tokens_alone: Any) -> None:
    wanted, alone = tokens_alone()
    found, module = fit_tokens(tmp_path / "2", strategy)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-11)
    assert found.losses[-1] < found.losses[0]
    assert largest_difference(module, alone) < 1e-11
    assert module.model.lm_head.weight is module.model.transformer.wte.weight


@pytest.mark.slow
def test_a_loss_that_the_model_computes_itself(tmp_path: Path) -> None:
    wanted, _ = fit_tokens(tmp_path / "1", "auto", own_loss=False)
    found, _ = fit_tokens(tmp_path / "2", pipeline(2), own_loss=False)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)


class Scored(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", cross_entropy(self.model(batch[0]), batch[1]))


def test_points_are_evaluated_as_by_one_process(tmp_path: Path) -> None:
    data, found = points(11, 4, False), []
    for strategy in ("auto", pipeline(2)):
        run, module = trainer(tmp_path, strategy), Scored()
        metrics = run.validate(module, data, verbose=False) + run.test(module, data, verbose=False)
        found.append((metrics, run.predict(module, data)))
    (wanted, outputs), (metrics, others) = found
    assert [one.keys() for one in metrics] == [{"val_loss", "predicted"}, {"test_loss"}]
    assert [list(one.values()) for one in metrics] == [pytest.approx(list(one.values()), rel=1e-12) for one in wanted]
    assert len(outputs) == 3
    torch.testing.assert_close(others, outputs, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_evaluation_is_that_of_one_process(tmp_path: Path) -> None:
    one, module = trainer(tmp_path, "auto"), Tiny()
    data = sentences(11, 4, False)
    wanted = one.validate(module, data, verbose=False), one.test(module, data, verbose=False), one.predict(module, data)
    two, module = trainer(tmp_path, pipeline(2, schedule="DualPipeV", micro_batches=4)), Tiny()
    found = two.validate(module, data, verbose=False), two.test(module, data, verbose=False), two.predict(module, data)
    assert found[:2] == wanted[:2]
    assert len(found[2]) == len(wanted[2]) == 3
    assert all(torch.equal(a, b) for a, b in zip(found[2], wanted[2], strict=True))


@pytest.mark.slow
def test_a_checkpoint_opens_at_fewer_stages(tmp_path: Path, tokens_alone: Any) -> None:
    wanted, alone = tokens_alone()
    fit_tokens(tmp_path / "4", pipeline(4, micro_batches=4), Record(tmp_path / "a", 3), max_steps=3)
    fit_tokens(tmp_path / "2", pipeline(2), Record(tmp_path / "b", 7), ckpt=tmp_path / "a", max_steps=7)
    found, module = fit_tokens(tmp_path / "one", "auto", ckpt=tmp_path / "b")
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert largest_difference(module, alone) < 1e-12
    saved = checkpoint.load(tmp_path / "a")["model"]
    assert saved.keys() == alone.state_dict().keys()


class Killed(Record):
    """Ends the process of the last stage without a word."""

    def on_train_batch_start(self, trainer: al.Trainer, module: al.Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.after + 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Dropping(Tiny):
    """Draws random numbers in its parts, on every stage."""

    def configure_model(self) -> None:
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.2


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def run(name: str, record: Record, ckpt: Any = None) -> Any:
        module = Dropping()
        strategy = pipeline(2, schedule="1F1B", micro_batches=3)
        fit = trainer(tmp_path / name, strategy, record, max_epochs=2, accumulate_grad_batches=2)
        fit.fit(module, sentences(27, 6, True), ckpt_path=ckpt)
        return module

    whole = Record()
    wanted = run("whole", whole)
    with pytest.raises(Exception, match="terminated with signal SIGKILL"):
        run("killed", Killed(tmp_path / "kept", 2))
    resumed = Record()
    found = run("resumed", resumed, tmp_path / "kept")
    assert len(resumed.losses) == 5
    assert resumed.losses == whole.losses[-5:]
    assert largest_difference(found, wanted) == 0


@pytest.mark.slow
def test_pipelines_beside_each_other(tmp_path: Path) -> None:
    def fitted(folder: str, strategy: Any, samples: int) -> Any:
        module = Tiny()
        run = trainer(tmp_path / folder, strategy, max_epochs=1, gradient_clip_val=0.5)
        run.fit(module, sentences(24, samples, True), sentences(8, 4, False))
        return module

    wanted = fitted("1", "auto", 6)
    for number, options in enumerate(({"shards": 2}, {"replicas": 2, "schedule": "1F1B"}, {"shards": 2, "stages": 1})):
        found = fitted(f"{number + 2}", pipeline(**({"stages": 2} | options)), 3)
        assert largest_difference(found, wanted) < 1e-12, options


class OwnBatches(al.Callback):
    """The batch and the loss of each rank, of all ranks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: al.Trainer, module: al.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        inputs, labels = batch
        own = (inputs.tolist(), labels.tolist(), float(outputs["loss"]))
        self.seen = trainer.strategy.all_gather_object(own)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_replicas_of_one_stage_have_the_losses_of_their_own_batches(tmp_path: Path) -> None:
    own, module = OwnBatches(), Classifier()
    trainer(tmp_path, pipeline(1, replicas=2), own, max_steps=1).fit(Classifier(), points(8, 4, False))
    batches = [(torch.tensor(inputs, dtype=torch.float64), torch.tensor(labels)) for inputs, labels, _ in own.seen]
    wanted = [float(cross_entropy(module.model(inputs), labels).detach()) for inputs, labels in batches]
    assert [loss for _, _, loss in own.seen] == pytest.approx(wanted, rel=1e-12)
    assert wanted[0] != pytest.approx(wanted[1], rel=1e-3)


@pytest.mark.parametrize(
    ("again", "options"),
    [("full", {"accumulate_grad_batches": 2}), ("selective", {"precision": "bf16-mixed"})],
    ids=str,
)
@pytest.mark.slow
def test_windows_precisions_and_recomputation(tmp_path: Path, again: Any, options: dict[str, Any]) -> None:
    wanted, alone = fit_tokens(tmp_path / "1", "auto", **options)
    found, module = fit_tokens(tmp_path / "2", pipeline(2, plan=Plan(activation_checkpointing=again)), **options)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert largest_difference(module, alone) < 1e-12


class OnMeta(Classifier):
    """Comes into being without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
                self.model = nn.Sequential(*layers, nn.Linear(8, 3)).double()


def test_first_weights_do_not_depend_on_the_number_of_stages(tmp_path: Path) -> None:
    found = []
    for number, stages in enumerate((1, 2)):
        module = OnMeta()
        trainer(tmp_path / str(number), pipeline(stages, micro_batches=2), max_epochs=1, max_steps=0).fit(
            module, points(16, 8, False)
        )
        found.append(module)
    assert largest_difference(*found) == 0
    assert float(found[0].model[0].weight.abs().max()) > 0


class Unused(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(2, 2).double()


class Manual(Classifier):
    automatic_optimization = False


class Branching(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.model[0](batch[0])
        if hidden.sum() > 0:
            hidden = -hidden
        return cross_entropy(self.model[2:](hidden), batch[1])


class Mixing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = torch.rand((), dtype=batch[0].dtype)
        output = self.model(share * batch[0] + (1 - share) * batch[0].flip(0))
        return share * cross_entropy(output, batch[1]) + (1 - share) * cross_entropy(output, batch[1].flip(0))


class Ragged(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.model(batch[0]), batch[1][: len(batch[0])])


class Short(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = self.model[:2]


REFUSED = [
    (Mixing, pipeline(2), {}, "random numbers that the step draws are needed by many"),
    (Unused, pipeline(2), {}, "no stage of the pipeline uses forgotten.weight, forgotten.bias"),
    (Manual, pipeline(2), {}, "automatic_optimization=False hides from the plan what a step calls"),
    (Classifier, pipeline(2), {"precision": "16-mixed"}, "use precision bf16-mixed or 32, or pp = 1"),
    (Short, pipeline(2), {}, "has 1 parts that can be stages, and 2 stages are asked for: use stages = 1"),
    (Branching, pipeline(2), {}, "data-dependent control flow on what another stage computes: model.0"),
]


@pytest.mark.parametrize(("kind", "strategy", "options", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_unsupported_steps_are_refused_before_training(
    tmp_path: Path, kind: Any, strategy: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=r"PlanError|DataDependentError") as caught:
        trainer(tmp_path, strategy, max_epochs=1, **options).fit(kind(), points(16, 8, False))
    assert message in str(caught.value)


def test_batches_that_cannot_be_cut_are_refused_with_the_hook_that_cuts_them() -> None:
    batch = {"images": torch.zeros(4, 3), "boxes": torch.zeros(7, 6)}
    with pytest.raises(PlanError, match=r"a tensor of shape \(7, 6\).*give Ragged a part_of_batch"):
        split_samples(Ragged(), batch, 2)
    packed = pack_sequence([torch.ones(n, 2) for n in (2, 5, 3)], enforce_sorted=False)
    with pytest.raises(PlanError, match=r"3 samples has a tensor of shape \(10, 2\).*give Ragged a part_of_batch"):
        split_samples(Ragged(), [packed, torch.zeros(3)], 2)
    assert [size for _, size in split_samples(Ragged(), torch.zeros(5, 2), 3)] == [1, 2, 2]
    detector = Detector(DetectionTask(data=Path("none"), image_size=64, memory_format="contiguous"), names=["code"])
    (first, _), (second, _) = split_samples(detector, scenes(1, 4)[0], 2)
    assert [len(first["images"]), len(second["images"])] == [2, 2]
    assert [first["targets"][:, 0].tolist(), second["targets"][:, 0].tolist()] == [[1], [0, 0, 1, 1, 1]]
    with pytest.raises(PlanError, match=r"ZBVZeroBubble computes gradients of weights by themselves.*compile = none"):
        pipeline(2, schedule="ZBVZeroBubble", plan=Plan(compile="aot_eager"))


def scenes(count: int, size: int) -> list[dict[str, Any]]:
    """Batches as a detector's loader gives them; images have unequal numbers of boxes, one of them none."""
    generator, batches = torch.Generator().manual_seed(4), []
    for _ in range(count):
        images = torch.randint(0, 256, (size, 3, 64, 64), generator=generator, dtype=torch.uint8)
        rows = [(n, 0.0, *(0.3 + 0.1 * k for _ in range(2)), 0.3, 0.2) for n in range(size) for k in range(n)]
        batches.append({"images": images, "targets": torch.tensor(rows), "paths": [str(n) for n in range(size)]})
    return batches


@pytest.mark.slow
def test_a_detector_as_it_is(tmp_path: Path) -> None:
    """Its batches have rows of boxes, its loss branches on them, and its epochs end with a metric over all images."""

    def fitted(folder: str, strategy: Any, *callbacks: al.Callback) -> tuple[list[float], dict[str, float], Any]:
        torch.manual_seed(1)
        settings = DetectionTask(data=Path("none"), image_size=64, memory_format="contiguous")
        detector, record = Detector(settings, names=["code"]), Record()
        run = trainer(tmp_path / folder, strategy, record, *callbacks, max_epochs=1)
        run.fit(detector, scenes(3, 4), scenes(2, 3))
        metrics = {name: float(value) for name, value in run.callback_metrics.items()}
        return record.losses, metrics, detector

    # What mixes samples (batch normalization) sees micro-batches: the reference is a step in parts, in one process.
    losses, metrics, alone = fitted("1", "auto", MicroBatching(2))
    found, others, module = fitted("2", pipeline(2, micro_batches=2))
    assert found == pytest.approx(losses, rel=1e-4)
    for name in ("val/loss", "val/map50", "val/recall"):
        assert others[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-4)
    before, after = alone.state_dict(), module.state_dict()
    assert before.keys() == after.keys()
    counted = [name for name in before if name.endswith("num_batches_tracked")]
    assert counted
    assert all(torch.equal(before[name], after[name]) for name in counted)
    assert all(torch.allclose(before[name], after[name], atol=1e-2) for name in before if "running_mean" in name)


class Runnable(Tiny):
    """A module that is written for runners, whose embeddings are tied."""

    runner: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        sizes = {"vocab_size": 40, "dim": 16, "layers": 4, "heads": 2, "kv_heads": 2, "hidden": 24}
        self.model = build_model("llama3-debug", **sizes, tied=True).double()
        initialize(self.model, 3)

    def split_batch(self, batch: Any) -> Any:
        return (batch["tokens"][:, :-1],), {"positions": None}, batch["labels"][:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total = cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def loss_of(self, batch: Any) -> Tensor:
        total, count = batch_loss(self, batch)
        return total / count


@pytest.mark.slow
def test_modules_for_runners_may_have_tied_embeddings_too(tmp_path: Path) -> None:
    def fitted(folder: str, chosen: Any) -> Any:
        module = Runnable()
        trainer(tmp_path / folder, chosen, max_epochs=1).fit(module, sentences(18, 6, True))
        return module

    wanted = fitted("1", "auto")
    for number, strategy in enumerate((pipeline(2), PlanStrategy(Plan(pp=2), start_method="fork"))):
        assert largest_difference(fitted(f"{number + 2}", strategy), wanted) < 1e-12, strategy


class Other(Classifier):
    """A validation step that comes back to an earlier part."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(self.model[:-1](batch[0])).mean())


@pytest.mark.slow
def test_a_step_that_comes_back_to_an_earlier_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"validation_step calls model.0 .stage 0. after parts of stage 1"):
        fit(tmp_path, pipeline(2, micro_batches=4, schedule="1F1B"), Other())


class Finetuned(Classifier):
    """Of its model only the head trains, which it finds by name; it counts in a buffer what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3).double()
        self.model.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        self.steps += 1
        output = self.head(self.model(batch[0]))
        return {"loss": cross_entropy(output, batch[1]), "output": output.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.head(self.model(batch[0])), batch[1]))

    on_validation_epoch_end = al.Module.on_validation_epoch_end

    def configure_optimizers(self) -> Any:
        body = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": body, "lr": 1e-4}, {"params": self.head.parameters()}], lr=1e-2)


@pytest.mark.slow
def test_a_stage_of_which_nothing_trains_and_a_buffer_of_no_part(tmp_path: Path) -> None:
    _, wanted, alone = fit(tmp_path / "1", "auto", Finetuned())
    _, found, module = fit(tmp_path / "2", pipeline(2, micro_batches=4), Finetuned())
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert largest_difference(module, alone) < 1e-12
    assert float(module.seen) == 76
    with pytest.raises(Exception, match="seen is changed between parts of the model, by each of the 2 stages of a pro"):
        fit(tmp_path / "3", pipeline(2, schedule="ZBVZeroBubble", micro_batches=4), Finetuned())


@dataclass
class Rows:
    inputs: Tensor
    labels: Tensor


class OfRows(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch.inputs, batch.labels), batch_idx)


def test_batches_may_be_dataclasses_and_hidden_targets_are_counted_or_warned_of(tmp_path: Path) -> None:
    def fitted(folder: str, strategy: Any) -> Any:
        rows = points(20, 8, False)
        loader = DataLoader(rows.dataset, 8, collate_fn=lambda xs: Rows(*map(torch.stack, zip(*xs, strict=True))))
        module = OfRows()
        trainer(tmp_path / folder, strategy, max_epochs=1).fit(module, loader)
        return module

    assert largest_difference(fitted("2", pipeline(2, micro_batches=4)), fitted("1", "auto")) < 1e-12
    hidden = {"tokens": torch.zeros(2, 3), "labels": torch.tensor([[1, -100], [2, 3]])}
    assert hides_targets(Classifier(), hidden)
    assert not hides_targets(Tiny(), hidden)
    assert not hides_targets(Classifier(), {"labels": torch.ones(2, dtype=torch.long), "mask": torch.ones(2).bool()})
