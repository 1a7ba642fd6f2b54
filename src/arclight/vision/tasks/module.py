"""Define the base class of all vision tasks, a `Module` that the trainer runs.

A task (`detection`, `classification`) is a subclass of `VisionModule` that overrides the methods under "to override": above all its head, its
loss, how it scores decoded output (`TaskMetrics`) and its ``processing`` from photos to results. Its `settings`, chosen by ``kind`` in a
recipe, build it with its `VisionData`. Everything else is here, once: weights, layers that are frozen, the memory layout, steps,
evaluation over all ranks, prediction, checkpoints. The Trainer calls it, and ``arclight predict``, ``export`` and ``compare``. Hyperparameters
(settings, names, table) and what `on_save_checkpoint` adds are in checkpoints: they stay.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import logging
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from arclight.checkpoint import CheckpointError
from arclight.fabric.distributed.dtensor import is_dtensor
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.modules import evaluating
from arclight.fabric.seeding import isolate_rng
from arclight.optim.schedules import phase
from arclight.optim.settings import Mixed
from arclight.trainer import Callback, DataModule, Module
from arclight.trainer.checkpoint.loading import read as read_checkpoint
from arclight.trainer.hparams import arguments_for
from arclight.vision.data.data_yaml import first_names
from arclight.vision.data.labels import DatasetError
from arclight.vision.models.architectures import HeadBlock, find_architecture, is_table, read_table
from arclight.vision.models.yolov5 import Yolo, build_model, fuse, load_pretrained
from arclight.vision.tasks.distillation import Teacher, TeacherError, check_fit, checkpoint_at, refuse
from arclight.vision.tasks.measuring import UNMEASURED, BatchSizeError, fastest_memory_format, fitting_batch_size

if TYPE_CHECKING:
    from arclight.deploy import Processing
    from arclight.deploy.comparison import Evaluation, NamedInputs
    from arclight.deploy.deployment import Deployment

_LOG = logging.getLogger("arclight")

BIASES = r"\.bias$"
"""Names of the parameters that ``warmup_bias_lr`` is for: biases of convolutions, linear layers and batch norms."""
_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


class TaskMetrics(Protocol):
    """Protocol of a task's metrics: update per batch, merge across processes, compute."""

    def reset(self) -> None:
        """Reset the metrics to no images."""

    def update_output(self, output: Any, batch: dict[str, Any]) -> None:
        """Add a batch, from the decoded output of the network."""

    def state_dict(self) -> dict[str, Any]:
        """Return all images as a few plain arrays."""

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images of another process."""

    def compute(self) -> Any:
        """Score all images."""


class VisionModule(Module, abc.ABC):
    """Train and run a network over images; a subclass for each task."""

    head: ClassVar[HeadBlock]
    """The head that its networks end with."""
    names: list[str]
    """Class names by number."""

    def __init__(
        self,
        settings: Any,
        names: Sequence[str],
        table: str | None = None,
        network: Mapping[str, Any] | None = None,
    ) -> None:
        """Initialise the module from the settings of a `VisionTask` and the names of the classes.

        ``table``: the text of the .yaml file that ``settings.model`` names, if it does; the file is read where not
        given.
        ``network``: what else `build_model` takes from the data set; a subclass takes it under the same names.
        """
        super().__init__()
        if table is None and is_table(settings.model):
            table = read_table(settings.model)
        # A checkpoint holds weights and table themselves: it must not be tied to the files that they came from.
        network = dict(network or {})
        kept = {"settings": dataclasses.replace(settings, weights=None), "names": list(names), **network}
        self.save_hyperparameters(kept if table is None else {**kept, "table": table})
        self.settings, self.names = settings, list(names)
        self.model = self._build_network(table, network)
        if settings.image_size % (coarsest := self.model.stride[-1]):
            raise ValueError(
                f"image_size must be a multiple of {coarsest} for {settings.model}, got {settings.image_size}"
            )
        self.model.names = self.names
        self.metrics = self._build_metrics()
        self.results: Any = None
        """Results of the newest validation or test, as the task's metrics compute them."""
        self.memory_format = _FORMATS.get(settings.memory_format)
        self._awaited_weights: Path | None = None
        if settings.weights is not None and settings.weights.exists():
            load_pretrained(self.model, checkpoint_at(settings.weights, "weights", CheckpointError))
        else:
            self._awaited_weights = settings.weights  # a checkpoint may bring others before these are needed
        self._inference: InferenceCopy | None = None
        self._teacher: Teacher | None = None
        self._taught_by: str | None = (
            None  # digests of the teacher of these weights, and of the one that a resumed run wants
        )
        self._awaited_teacher: str | None = None
        self._batch_size: int | None = None  # what was measured
        self._freeze(settings.freeze)

    # -- to override -------------------------------------------------------------------------------------------------

    def _build_network(self, table: str | None, network: dict[str, Any]) -> Yolo:
        """Build the network of the settings, for the module's classes.

        Raises ValueError if its head is another task's.
        """
        if (found := find_architecture(self.settings.model, table).head) != self.head:
            raise ValueError(
                f"model = {self.settings.model} ends with a {found} head, a {type(self).__name__} needs one to {self.head}"
            )
        return build_model(self.settings.model, num_classes=len(self.names), table=table, **network)

    @abc.abstractmethod
    def _build_metrics(self) -> TaskMetrics:
        """Make empty metrics for the module's classes."""

    @abc.abstractmethod
    def loss(self, raw: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the network's raw output on ``batch``, and its parts, detached.

        The sum of the parts is logged.
        """

    def distillation_loss(self, raw: Any, taught: Any) -> tuple[Tensor, Tensor]:
        """Return the distillation loss of the raw output, and its logged part, detached.

        Tasks that can learn from a teacher override it.
        """
        raise NotImplementedError(f"a {type(self).__name__} does not learn from a teacher")

    @abc.abstractmethod
    def scores(self, results: Any) -> dict[str, float]:
        """Name the numbers of computed metrics that are logged, the one to watch first."""

    @property
    @abc.abstractmethod
    def processing(self) -> Any:
        """Return the pre- and postprocessing of photos and output, as programs do it too."""

    @abc.abstractmethod
    def write_charts(self, folder: Path) -> dict[str, str]:
        """Write charts of ``results`` into ``folder``; return the caption of each file."""

    output_names: ClassVar[list[str]]
    """What the outputs of its programs are called."""

    @abc.abstractmethod
    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Name the tensors in the decoded output that a program is judged by, each by itself."""

    # -- deployment --------------------------------------------------------------------------------------------------

    def configure_deployment(self, data: Any, batches: int) -> Deployment:
        """Return the deployment of the module, with ``batches`` of training images of ``data``.

        ``data``: a `VisionData` (default: the module's own). Its metric is the first of the module's scores on the
        validation images, and `evaluation` what others are compared by.
        """
        data = data or self.settings.data_class()(self.settings)

        def score(network: Callable[..., Any]) -> float:
            return next(iter(self._scored(network, data, data.open("val")).values()))

        shipped = self.deployment(data.calibration_dataset(), batches)
        return dataclasses.replace(shipped, metric=score, evaluation=self.evaluation(data))

    def configure_example(self, data: Any) -> Tensor:
        """Return a few training images as the network takes them.

        data: a `VisionData`; default: its own.

        Raises MisconfigurationError if batches have several sizes: a graph, of a model that is trained with rounding, has one.
        """
        varied = [
            name
            for name in ("rect", "rect_train", "multi_scale", "progressive_resizing")
            if getattr(self.settings, name, None)
        ]
        if varied:
            raise MisconfigurationError(
                f"task.{varied[0]} = {getattr(self.settings, varied[0])} gives images of several sizes, and a network that is trained with rounding is "
                f"captured for one: leave task.{varied[0]} out"
            )
        data = data or self.settings.data_class()(self.settings)
        return _found_batches(data.calibration_dataset(), 1)[0]

    def evaluation(self, data: Any, split: str = "val") -> Evaluation:
        """Return the evaluation that compares two networks on a split of ``data``, a `VisionData`.

        Scores are those that are logged, and those of each class that has labels. Raises DatasetError.
        """
        from arclight.deploy.comparison import Evaluation

        opened = functools.cache(
            lambda: data.open(split)
        )  # not before it is read: what is exported needs no such split
        return Evaluation(
            samples=_named_batches(opened),
            scores=lambda network: self._scored(network, data, opened()),
            classes=frozenset(map(_of_class, self.names)),
            parts=self.output_parts,
        )

    def _scored(self, network: Callable[..., Any], data: VisionData, images: Any) -> dict[str, float]:
        """Score a network on ``images`` of ``data``.

        Raises DatasetError for data of other classes.
        """
        if len(data.names) != len(self.names):
            raise DatasetError(
                f"{data.settings.data} has {len(data.names)} classes, and this network tells {len(self.names)} apart: "
                f"{first_names(self.names)}"
            )
        check_class_names(self.names, data.names)
        results = evaluate(network, images, self._build_metrics(), data.collate)
        by_class = zip(self.names, results.class_scores, strict=True)
        return self.scores(results) | {_of_class(name): float(one) for name, one in by_class if np.isfinite(one)}

    def deployment(self, images: Any, batches: int = 1) -> Deployment:
        """Return the deployment: the network with fused batch norms, and ``batches`` of ``images``.

        ``images``: a data set of training images without augmentation, as the module's data opens them. The program says how photos become its
        input and its output becomes results, so ``Program.load(path).predict([photo])`` works. Raises DatasetError if no image of those
        picked can be decoded, CheckpointError if the weights that the settings name are missing.
        """
        from arclight.deploy.deployment import EXAMPLES, Deployment

        self.check_weights()
        found = _found_batches(images, batches)
        return Deployment(
            model=self._shipped_network(),
            example_inputs=found[0][:EXAMPLES],
            calibration=found,
            capture_inputs=found[0],
            input_names=["images"],
            output_names=self.output_names,
            parts=self.output_parts,
            processing=self.processing,
            metadata={
                "task": self.head,
                "names": self.names,
                "image_size": self.settings.image_size,
                "model": self.settings.model,
            },
        )

    def _shipped_network(self) -> nn.Module:
        """Fold batch norms of the network; one that is or trains quantized is shipped as it is."""
        return fuse(self.model) if isinstance(self.model, Yolo) else self.model

    # -- weights -----------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Open a checkpoint of this task; ``VisionModule.load`` opens one of any vision task.

        What was trained with rounding rounds.

        Raises CheckpointError for a file that cannot be read so, or that is of another task.
        """
        checkpoint = read_checkpoint(path)
        settings: Any = arguments_for(VisionModule, checkpoint, {}).get("settings")
        if not hasattr(settings, "module_class"):
            raise CheckpointError(f"{path} holds no model of a vision task")
        found: type[VisionModule] = settings.module_class()
        if cls is not VisionModule:
            # a class of one's own stands for the one it is derived from, but a detector is no segmenter
            if not (issubclass(cls, found) or issubclass(found, cls)) or getattr(cls, "head", found.head) != found.head:
                raise CheckpointError(
                    f"{path} holds a {found.__name__}, no {cls.__name__}: open it with {found.__name__}.load"
                )
            if issubclass(cls, found):
                found = cls
        from arclight.deploy.quantizing.trained import callbacks_of

        loaded: Self = found.load_from_checkpoint(path, replaced_by=callbacks_of(checkpoint.get("callbacks", {})))
        return loaded

    def _freeze(self, layers: int) -> None:
        if layers >= len(self.model.model):
            raise ValueError(
                f"freeze = {layers}: {self.settings.model} has {len(self.model.model)} layers, and its head must train"
            )
        for layer in list(self.model.model)[:layers]:
            layer.requires_grad_(False)

    def check_weights(self) -> None:
        """Load the weights that the settings name, if they are still awaited.

        Raises CheckpointError if they are not there.
        """
        if self._awaited_weights is not None:
            load_pretrained(
                self.model, checkpoint_at(self._awaited_weights, "weights", CheckpointError)
            )  # raises, unless it has come meanwhile
            self._awaited_weights = None

    # -- inference ---------------------------------------------------------------------------------------------------

    def forward(self, images: Tensor) -> Any:
        """Map images (N, 3, H, W) in [0, 1] to decoded predictions, in training mode to raw output."""
        self.check_weights()
        return self.model(images)

    def predict(self, images: Sequence[np.ndarray[Any, Any]], processing: Processing | None = None) -> list[Any]:
        """Predict: return the result of each RGB uint8 photo.

        ``processing`` replaces the module's own, for example one with other thresholds. Photos may have any sizes. Runs
        a copy of the model with folded batch norms (see :class:`InferenceCopy`); threads may call it together. One that
        is trained with rounding runs itself, in evaluation mode meanwhile, and is for one thread.
        """
        self.check_weights()
        if not len(images):
            return []
        processing = processing or self.processing
        batch, context = processing.preprocess(images)
        network: Any = self._inference
        if network is None or not network.is_current(self.model):
            if any(map(is_dtensor, self.model.parameters())):
                raise RuntimeError(
                    f"this process has shards of the weights only: predict with a checkpoint of them, {type(self).__name__}.load"
                )
            network = inference_network(self.model)
        # steps may come that count no version of the weights: fused ones
        self._inference = network if isinstance(network, InferenceCopy) and not self.training else None
        return list(processing.postprocess(network(torch.from_numpy(batch)), context))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inference": None, "_teacher": None}

    # -- training ----------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        from arclight.vision.results.plots import DetectionPlots

        return [DetectionPlots(self.settings.batch_pictures)]

    def configure_optimizers(self) -> dict[str, Any]:
        self._measure_batch_size()
        s, steps = self.settings, self.trainer.estimated_stepping_batches
        total, rule = int(steps) if steps != float("inf") else 1_000_000, s.optimizer
        if s.warmup_bias_lr is not None:  # biases are groups of their own
            rule = Mixed(groups=(dataclasses.replace(rule, pattern=BIASES),), default=rule)
        optimizer = rule.build(self.model.named_parameters())
        schedule = s.schedule.build(optimizer, total)
        if s.warmup_bias_lr is not None:
            optimizer.register_step_pre_hook(partial(self._warm_up_biases, phase(s.schedule.warmup, total)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _measure_batch_size(self) -> None:
        """Set the batch size of the data if it is "auto"; a resumed run keeps the first one's.

        All ranks take the smallest batch size that fits on each.
        """
        s, data, strategy = self.settings, self.trainer.datamodule, self.trainer.strategy
        if s.batch_size != "auto" or not isinstance(data, VisionData):
            return
        if self._batch_size is None:
            if strategy.in_stages:
                raise BatchSizeError(
                    'batch_size = "auto": no process of a pipeline has the whole network to measure: set a number'
                )
            stride, grown = self.model.stride[-1], 1 + getattr(s, "multi_scale", 0.0)
            side = stride * math.ceil(s.image_size * grown / stride)
            context = self.trainer.precision_plugin.forward_context
            own = fitting_batch_size(
                self.model, side, context, s.batch_memory_gib, len(data.train), share=s.batch_memory_share
            )
            found = strategy.all_gather_object(own if strategy.contributes_logs else None)
            self._batch_size = min(size for size in found if size is not None)
            _LOG.info("batch_size = auto: %d images of up to %d pixels per step", self._batch_size, side)
        data.batch_size = self._batch_size
        self.trainer.record_measured("batch_size", self._batch_size)

    def _warm_up_biases(self, steps: int, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Warm up the learning rate of biases linearly, from ``warmup_bias_lr`` (YOLOv5).

        ``steps``: length of the warm-up.
        """
        first, step = self.settings.warmup_bias_lr, self.trainer.global_step
        if step >= steps:
            return
        for group in optimizer.param_groups:
            if all(re.search(BIASES, name) for name in group["param_names"]):
                group["lr"] = first + (group["initial_lr"] - first) * step / steps

    def on_fit_start(self) -> None:
        """Open the teacher, and choose the faster memory format, if it is "auto", for this machine.

        A resumed run keeps the first one's format.
        """
        self.check_weights()
        if self.settings.teacher is not None:
            if self.trainer.strategy.in_stages:
                raise TeacherError(
                    f"teacher = {self.settings.teacher}: a network in stages does not learn from one: train it whole"
                )
            self._teacher = None  # the file may have changed since an earlier fit
            self.teacher()
        if self.memory_format is None and self.trainer.strategy.in_stages:
            self.memory_format = torch.contiguous_format  # nobody has the whole model to measure
        if self.memory_format is None:
            found = fastest_memory_format(
                self.model, self.settings.image_size, self.trainer.precision_plugin.forward_context
            )
            # each rank has timed its own, and all of them must have the same strides
            self.memory_format = self.trainer.strategy.broadcast(found)
        if self.settings.memory_format == "auto":
            self.trainer.record_measured("memory_format", _format_name(self.memory_format))
        self.model.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def teacher(self) -> Teacher | None:
        """Return the teacher that the settings name, opened when it is first needed; None for none.

        Raises TeacherError if it does not fit this network, or is another than that of the run that is resumed.
        """
        if self.settings.teacher is not None and self._teacher is None:
            found = self._open_teacher(self.settings.teacher)
            wanted, self._awaited_teacher = self._awaited_teacher, None
            if wanted not in (None, found.digest):
                raise TeacherError(
                    f"teacher = {self.settings.teacher} has other weights than the teacher of the run that is resumed: give that one"
                )
            self._teacher, self._taught_by = found, found.digest
        return self._teacher

    def _open_teacher(self, path: Path) -> Teacher:
        """Open a teacher: a checkpoint, a run's best checkpoint, or a YOLOv5 model file.

        Draws nothing from the random streams.
        """
        checkpoint = checkpoint_at(path, "teacher", TeacherError)
        with isolate_rng():
            found = type(self).load(checkpoint) if checkpoint.is_file() else VisionModule.load(checkpoint)
            found.check_weights()
        check_fit(path, found.model, self.model)
        if not checkpoint.is_file():  # a file of another project does not say
            refuse(path, "image_size", found.settings.image_size, self.settings.image_size)
        return Teacher(found.model, path)

    def on_fit_end(self) -> None:
        self._teacher = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.memory_format is not None:  # before a fit none was measured
            checkpoint["memory_format"] = _format_name(self.memory_format)
        if self._batch_size is not None:
            checkpoint["batch_size"] = self._batch_size
        if self._taught_by is not None:
            checkpoint["teacher"] = self._taught_by

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None:
            known = arguments_for(VisionModule, checkpoint, dict.fromkeys(("settings", "table", "network")))
            check_class_names(known.get("names") or (), self.names)
        self._awaited_weights = None
        if self.settings.memory_format == "auto":
            self.memory_format = _FORMATS.get(checkpoint.get("memory_format", "auto"))
        resumed = self._trainer is not None and self._trainer.state.fn == "fit"  # one that is only opened binds nobody
        self._taught_by = checkpoint.get("teacher")
        self._batch_size = checkpoint.get("batch_size") if resumed else None
        self._awaited_teacher = self._taught_by if resumed else None

    def on_train_epoch_start(self) -> None:
        for layer in list(self.model.model)[: self.settings.freeze]:
            layer.eval()  # frozen layers keep their statistics too

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse quantization-aware training with frozen layers, whose statistics would move.

        Batch norms of its graph heed no mode of a layer.
        """
        if not self.settings.freeze or isinstance(self.model, Yolo):
            return
        kept = {id(value) for layer in list(self.model.model)[: self.settings.freeze] for value in layer.buffers()}
        if any(id(value) in kept for value in self.model.running_statistics()):
            raise MisconfigurationError(
                f"freeze = {self.settings.freeze}: QuantizationAwareTraining would move the batch norms of frozen layers: give it "
                "freeze_batch_norm_at=0, with which all batch norms stay, or leave freeze at 0"
            )

    def prepare(self, images: Tensor) -> Tensor:
        """Convert bytes (N, 3, S, S) to floats in [0, 1], in the module's memory format."""
        if self.memory_format is not None:  # reordered as bytes, which are a quarter of the floats
            images = images.contiguous(memory_format=self.memory_format)
        return images.to(torch.float32).div_(255)

    def part_of_batch(self, batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return images ``start`` to ``stop`` of a batch, with their targets."""
        return {name: value[start:stop] for name, value in batch.items()}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self._inference = None
        images = self.prepare(batch["images"])
        # called where that gives what is not decoded: one that is quantized rounds in its forward alone
        raw = self.model(images) if self.model.training else self.model.raw(images)
        loss, parts = self.loss(raw, batch)
        if (teacher := self.teacher()) is not None:
            added, part = self.distillation_loss(raw, teacher(images))
            gain = self.settings.teacher_gain
            loss, parts = loss + gain * added, {**parts, "teacher": gain * part}
        size = len(batch["images"])
        self.log("train/loss", sum(parts.values()), prog_bar=True, batch_size=size)
        if len(parts) > 1:
            for name, value in parts.items():
                self.log(f"train/{name}", value, batch_size=size)
        return loss

    # -- evaluation --------------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Any], stage: str) -> None:
        if not len(batch["images"]):
            return  # every image of the batch was damaged
        images = self.prepare(batch["images"])
        if not isinstance(self.model, Yolo):  # quantized: its output is decoded, and gives no loss
            self.metrics.update_output(self.model(images), batch)
            return
        raw = self.model.raw(images)
        _, parts = self.loss(raw, batch)
        self.log(f"{stage}/loss", sum(parts.values()), batch_size=len(batch["images"]))
        self.metrics.update_output(self.model.decode(raw), batch)

    def on_validation_epoch_start(self) -> None:
        self.check_weights()
        self.metrics.reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, stage: str) -> None:
        """Score the images of all ranks together."""
        merged = self._build_metrics()
        strategy = self.trainer.strategy
        for other in strategy.all_gather_object(self.metrics.state_dict() if strategy.contributes_logs else None):
            if other is not None:
                merged.merge(other)
        self.results = merged.compute()
        for number, (name, value) in enumerate(self.scores(self.results).items()):
            self.log(f"{stage}/{name}", value, prog_bar=not number)


def check_class_names(trained: Sequence[str], names: Sequence[str]) -> None:
    """Compare the class names of a checkpoint with those of the data that it meets.

    Raises CheckpointError if a class has another number there: each would be taken for another one. Only warns of other names, as
    they may have been corrected.
    """
    pairs = list(enumerate(zip(trained, names, strict=False)))
    other = [(number, before, here) for number, (before, here) in pairs if before != here]
    if not other or len(trained) != len(names):  # other numbers of classes do not fit the weights
        return
    number, before, here = other[0]
    # of two classes of one name, one may have got another name
    moved = ((was, now, name) for was, name, _ in other for now, _, new in other if new == name)
    if found := next(moved, None):
        was, now, name = found
        raise CheckpointError(
            f"the checkpoint's class {was} is {name!r}, which is class {now} of the data: each class would be "
            f"taken for another. Put the names in the order of the run: {first_names(trained)}"
        )
    _LOG.warning(
        "class %d is %r in the checkpoint, and %r in the data%s: they are taken for the same",
        number, before, here, f", and {len(other) - 1} more differ" if len(other) > 1 else "",
    )  # fmt: skip


@torch.inference_mode()
def evaluate(
    predict: Callable[[Tensor], Any],
    dataset: Any,
    metrics: TaskMetrics,
    collate: Callable[[Any], dict[str, Any]],
    batch_size: int = 8,
) -> Any:
    """Score a program or a network on a data set as training validates its model.

    ``predict`` maps images (N, 3, S, S) in [0, 1] to decoded output.
    ``dataset``: one without augmentation, or a ``Subset`` of it. Damaged images are left out.
    """
    for start in range(0, len(dataset), batch_size):
        batch = collate(dataset.__getitems__(list(range(start, min(start + batch_size, len(dataset))))))
        if len(batch["images"]):
            metrics.update_output(predict(batch["images"].float() / 255), batch)
    return metrics.compute()


def _of_class(name: str) -> str:
    return f"class {name}"


def _named_batches(opened: Callable[[], Any]) -> Iterator[NamedInputs]:
    """Yield the images of a data set in order, as the network takes them, by their files."""
    from arclight.deploy.comparison import NamedInputs

    data = opened()
    for start in range(0, len(data), CALIBRATION_BATCH):
        samples = data.__getitems__(list(range(start, min(start + CALIBRATION_BATCH, len(data)))))
        if samples:
            images = torch.stack([sample.image for sample in samples]).float() / 255
            yield NamedInputs([sample.path for sample in samples], images)


CALIBRATION_BATCH = 8
"""Images per calibration batch."""


def _found_batches(data: Any, count: int) -> list[Tensor]:
    """Return `_float_batches`; DatasetError if there is none."""
    found = list(_float_batches(data, count))
    if not found:
        raise DatasetError(
            f"none of the images picked of {len(data)} can be decoded: repair or remove the damaged ones"
        )
    return found


def _float_batches(data: Any, count: int) -> Iterator[Tensor]:
    """Yield up to ``count`` batches spread evenly over ``data``, as the network takes them."""
    picks = np.linspace(0, len(data) - 1, min(len(data), count * CALIBRATION_BATCH)).astype(int).tolist()
    for start in range(0, len(picks), CALIBRATION_BATCH):
        images = [sample.image for sample in data.__getitems__(picks[start : start + CALIBRATION_BATCH])]
        if images:
            yield torch.stack(images).float() / 255


class VisionData(DataModule, abc.ABC):
    """Data module of labelled images; a task defines how to open a split."""

    train: Any
    val: Any
    test: Any
    collate: Callable[[Any], dict[str, Any]]
    """Collates samples to a batch: ``images`` (N, 3, S, S) uint8 and what the task's loss reads."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.batch_size: int = UNMEASURED if settings.batch_size == "auto" else settings.batch_size
        """Images per step on each device, as the settings say, or what was found by measuring or a search (`BatchSizeFinder`)."""

    @property
    @abc.abstractmethod
    def names(self) -> list[str]:
        """Class names by number."""

    @property
    def network_arguments(self) -> dict[str, Any]:
        """Arguments of the task's module that depend on the data set."""
        return {"names": self.names}

    @abc.abstractmethod
    def open(self, split: str, **options: Any) -> Any:
        """Open the data set of a split, check it and report its faults.

        Raises DatasetError.
        """

    @abc.abstractmethod
    def open_for_training(self) -> Any:
        """Open the training images, augmented."""

    def open_for_validation(self, split: str) -> Any:
        """Open the images of a split as validation and testing read them."""
        return self.open(split)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.train = self.open_for_training()
            self.train.epochs = self._epochs(len(self.train))
        if stage in ("fit", "validate"):
            self.val = self.open_for_validation("val")
        if stage == "test":
            self.test = self.open_for_validation("test")

    def _epochs(self, images: int) -> float | None:
        """Return the number of epochs that the trainer's settings allow.

        None if only time or a callback ends training. With ``max_steps`` a part of the last one may be all that there
        is of it.
        """
        if (trainer := self.trainer) is None:
            return None
        ends: list[float] = [trainer.max_epochs] if (trainer.max_epochs or 0) > 0 else []
        if trainer.max_steps > 0:
            each = self._global_batch
            batches = images // each if images > each else 1
            if isinstance(limit := trainer.limit_train_batches, int):
                batches = min(batches, limit)
            elif limit < 1:
                batches = int(batches * limit)
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            ends.append(trainer.max_steps / max(1, steps))
        return min(ends, default=None)

    @property
    def _global_batch(self) -> int:
        """Images per step on all ranks that read data of their own."""
        own = self.batch_size
        if (trainer := self.trainer) is None or not trainer.use_distributed_sampler:
            return own
        return own * int(trainer.strategy.distributed_sampler_kwargs["num_replicas"])

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self.train.damaged:
            _LOG.warning("%d training images could not be decoded; others took their place", self.train.damaged)
        measured = {"fit": "val", "validate": "val", "test": "test"}.get(stage)
        if measured and (damaged := getattr(self, measured).damaged):
            _LOG.warning(
                "%d images of the %s split could not be decoded: the metrics are of the others", damaged, measured
            )

    def calibration_dataset(self) -> Any:
        """Return the training images as they are, for calibration."""
        return self.open("train")

    def train_dataloader(self) -> DataLoader[Any]:
        self.train.epochs = self._epochs(len(self.train))  # again: a search may have changed the batch size
        return self._loader(self.train, shuffle=True, order=self.training_order())

    def training_order(self) -> Any:
        """Return a sampler of the training images; None for a random order."""
        return None

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test)

    def _loader(self, dataset: Any, shuffle: bool = False, order: Any = None) -> DataLoader[Any]:
        s = self.settings
        drop = (
            shuffle and len(dataset) > self._global_batch
        )  # a last batch of one or two images would shake batch statistics
        return DataLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle and order is None,
            sampler=order,
            drop_last=drop,
            num_workers=s.workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
        )


class InferenceCopy:
    """Frozen copy of a network for inference: fused batch norms, channels last, native bfloat16.

    Native: a CPU with AMX tiles or AVX-512's bfloat16 instructions, a GPU that has it. Elsewhere (bfloat16 is emulated, and slower
    than float32), and for weights that are not float32, the weights' own type is kept. Boxes are decoded in float32 either way.

    Changes of the weights are told by the versions that PyTorch counts, and it counts neither those made through ``.data`` nor
    those of fused optimizers: a detector drops its copy in training.
    """

    def __init__(self, model: Yolo) -> None:
        self._source = model
        tables = (
            table for module in model.modules() for table in (module._parameters, module._buffers, module._modules)
        )
        self._tables = [(table, tuple(table.values())) for table in tables]
        self._states = [(tensor, _state_of(tensor)) for tensor in itertools.chain(model.parameters(), model.buffers())]
        with torch.inference_mode():
            self._model = fuse(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._device = next(model.parameters()).device
            self._dtype = next(model.parameters()).dtype
            if self._dtype == torch.float32 and _multiplies_bfloat16(self._device):
                self._dtype = torch.bfloat16
                exact = dict(self._model.head.named_buffers(recurse=False))
                self._model.to(self._dtype)
                for (
                    name,
                    value,
                ) in exact.items():  # anchors: decoding multiplies by them, they stay as exact as they were
                    setattr(self._model.head, name, value)

    def is_current(self, model: Yolo) -> bool:
        """Return True if ``model`` has the very modules and weights that were copied."""
        # each prediction asks: the modules' own tables are compared, as walking the modules takes several times as long
        return (
            model is self._source
            and all(
                len(table) == len(known) and all(map(operator.is_, table.values(), known))
                for table, known in self._tables
            )
            and all(state is not None and _state_of(tensor) == state for tensor, state in self._states)
        )

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Any:
        """Decode the output, float32 on the CPU, for images (N, 3, S, S) in [0, 1]."""
        moved = images.to(self._device, self._dtype, memory_format=torch.channels_last)
        return _float_on_cpu(self._model(moved))


def inference_network(model: nn.Module) -> Callable[[Tensor], Any]:
    """Return a function from images (N, 3, S, S) in [0, 1] to the decoded output of ``model``.

    Output is float32 on the CPU. The function is an `InferenceCopy` of a network. A graph, of a model that is trained with rounding or is
    quantized, computes with the layers that it was captured with, so nothing can be folded in it: such a model runs itself.
    """
    return InferenceCopy(model) if isinstance(model, Yolo) else partial(_run_itself, model)


@torch.no_grad()
def _run_itself(model: nn.Module, images: Tensor) -> Any:
    with evaluating(model):
        return _float_on_cpu(model(images.to(next(itertools.chain(model.parameters(), model.buffers())).device)))


def _float_on_cpu(decoded: Any) -> Any:
    return tuple(part.float().cpu() for part in decoded) if isinstance(decoded, tuple) else decoded.float().cpu()


def _state_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the address and version of a tensor, to detect changes; None if it has no version."""
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def _format_name(layout: torch.memory_format | None) -> str:
    return "channels_last" if layout is torch.channels_last else "contiguous"
