"""Define the Module and DataModule of object detection."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from arclight.checkpoint import CheckpointError
from arclight.checkpoint.conversion import read_foreign
from arclight.fabric.distributed.dtensor import is_dtensor
from arclight.fabric.seeding import isolate_rng
from arclight.trainer import Callback, DataModule, Module
from arclight.vision.boxes import nms
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.data.site_split import SiteSplit
from arclight.vision.models.anchors import fit_anchors
from arclight.vision.models.architectures import is_table, name_of, parse_architecture, read_table
from arclight.vision.models.loss import Gains, scaled_gains, yolo_loss
from arclight.vision.models.yolov5 import Yolo, build_model, fitting_tensors, fuse, load_pretrained
from arclight.vision.results.detections import Detections
from arclight.vision.results.metrics import DetectionMetrics
from arclight.vision.tasks.processing import DetectionProcessing
from arclight.vision.tasks.settings import DetectionTask

_LOG = logging.getLogger("arclight")

_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}

CONFIDENCE_FLOOR = 0.001
"""Smallest confidence that counts in average precision, as COCO's protocol has it."""
EVALUATION_IOU = 0.6
"""Overlap above which boxes of a class are merged before average precision is measured."""


class Detector(Module):
    """Trains and runs an object detector.

    >>> detector = Detector(DetectionTask(data="data.yaml", model="yolov5n", image_size=320), names=["qr_code"])
    >>> detections = detector.detect([photo])[0]            # photo: RGB uint8 (H, W, 3)
    """

    def __init__(self, settings: DetectionTask, names: Sequence[str], table: str | None = None) -> None:
        """``table``: the text of the .yaml file that ``settings.model`` names, if it does; the file is read where not given."""
        super().__init__()
        if table is None and is_table(settings.model):
            table = read_table(settings.model)
        # A checkpoint holds weights and table themselves: it must not be tied to the files that they came from.
        kept = {"settings": dataclasses.replace(settings, weights=None), "names": list(names)}
        self.save_hyperparameters(kept if table is None else {**kept, "table": table})
        self.settings, self.names = settings, list(names)
        self.model = build_model(settings.model, num_classes=len(self.names), table=table)
        if settings.image_size % (coarsest := self.model.stride[-1]):
            raise ValueError(
                f"image_size must be a multiple of {coarsest} for {settings.model}, got {settings.image_size}"
            )
        self.model.names = self.names
        gains = Gains(box=settings.box_gain, obj=settings.obj_gain, cls=settings.cls_gain)
        self.gains = scaled_gains(gains, len(self.names), settings.image_size, len(self.model.stride))
        self.metrics = DetectionMetrics(num_classes=len(self.names))
        self.results: Any = None
        """Metrics of the newest validation; see DetectionMetrics.compute."""
        self.memory_format = _FORMATS.get(settings.memory_format)
        self._awaited_weights: Path | None = None
        if settings.weights is not None and settings.weights.exists():
            load_pretrained(self.model, settings.weights)
        else:
            self._awaited_weights = settings.weights  # a checkpoint may bring others before these are needed
        self._inference: InferenceCopy | None = None
        self._freeze(settings.freeze)

    @classmethod
    def load(cls, path: Path | str) -> Detector:
        """Open a detector: a checkpoint, or a model file of YOLOv5 (.pt), of which nothing is run.

        Of another project's file the table, the class names and the weights are taken, averaged ones if it has them; thresholds
        and image size are the defaults. Raises CheckpointError for a file that cannot be read so or lacks weights of its own
        architecture, ValueError for an architecture that is not built here.
        """
        path = Path(path)
        if not path.is_file():
            loaded: Detector = cls.load_from_checkpoint(path)
            return loaded
        found = read_foreign(path)
        known = found.get("attributes", {})
        table, names = known.get("yaml"), known.get("names")
        if isinstance(names, dict):
            names = [names[number] for number in range(len(names))] if names.keys() == set(range(len(names))) else None
        if not isinstance(table, dict) or not isinstance(names, list):
            raise CheckpointError(
                f"{path} does not say which architecture and classes its weights are for: name them, "
                f"Detector(DetectionTask(model=..., weights={str(path)!r}), names=[...])"
            )
        listed = [str(name) for name in names]
        read = ("backbone", "head", "depth_multiple", "width_multiple", "anchors", "activation")
        text = json.dumps(
            {name: table[name] for name in read if name in table}, default=lambda value: type(value).__name__
        )
        own = name_of(parse_architecture(text, str(path)))
        model = own if own is not None else f"{path.stem}.yaml"
        with torch.device("meta"):  # takes no memory, whatever sizes the table names
            wanted = build_model(model, len(listed), table=text).state_dict()
        fitting = fitting_tensors(wanted, found["model"])
        if missing := [name for name in wanted if name not in fitting]:
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {len(wanted)} tensors of its architecture for {len(listed)} classes, "
                f"{missing[0]} first: its batch norms were folded, or its table or names are another model's"
            )
        settings = DetectionTask(data=Path("none"), model=model, weights=path)
        return cls(settings, names=listed, table=None if own is not None else text)

    def _freeze(self, layers: int) -> None:
        if layers >= len(self.model.model):
            raise ValueError(
                f"freeze = {layers}: {self.settings.model} has {len(self.model.model)} layers, and its head must train"
            )
        for layer in list(self.model.model)[:layers]:
            layer.requires_grad_(False)

    def check_weights(self) -> None:
        """Read the weights that the settings name, if they were not there yet. Raises CheckpointError if they still are not."""
        if self._awaited_weights is not None:
            load_pretrained(self.model, self._awaited_weights)  # raises, unless it has come meanwhile
            self._awaited_weights = None

    @property
    def processing(self) -> DetectionProcessing:
        """Return the processing from photos to input and from output to boxes, as programs do it too."""
        s = self.settings
        return DetectionProcessing(
            names=self.names, image_size=s.image_size, conf_threshold=s.conf_threshold, iou_threshold=s.iou_threshold
        )

    def forward(self, images: torch.Tensor) -> Any:
        """Images (N, 3, H, W) float in [0, 1]: decoded predictions in evaluation mode, raw levels in training mode."""
        self.check_weights()
        return self.model(images)

    def detect(
        self, images: Sequence[np.ndarray[Any, Any]], processing: DetectionProcessing | None = None
    ) -> list[Detections]:
        """Find boxes in RGB uint8 photos of any sizes, by the detector's own ``processing`` or another, say with other thresholds.

        Runs a copy of the model with folded batch norms (see :class:`InferenceCopy`); threads may call it together.
        """
        self.check_weights()
        if not len(images):
            return []
        processing = processing or self.processing
        batch, context = processing.preprocess(images)
        copy = self._inference
        if copy is None or not copy.is_current(self.model):
            if any(map(is_dtensor, self.model.parameters())):
                raise RuntimeError(
                    "this process has shards of the weights only: detect with a checkpoint of them, Detector.load"
                )
            copy = InferenceCopy(self.model)
        self._inference = (
            None if self.training else copy
        )  # steps may come that count no version of the weights: fused ones
        return processing.postprocess(copy(torch.from_numpy(batch)), context)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inference": None}

    # -- training --------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        from arclight.vision.results.plots import DetectionPlots

        return [DetectionPlots()]

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.settings.optimizer.build(self.model.named_parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = self.settings.schedule.build(optimizer, int(steps) if steps != float("inf") else 1_000_000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def setup(self, stage: str) -> None:
        """Fit the anchors to the training boxes, where the settings ask for it; a resumed run gets its own back later."""
        data = self.trainer.datamodule
        if stage == "fit" and self.settings.anchors == "fitted" and isinstance(data, DetectionData):
            sizes = (
                torch.from_numpy(np.concatenate([labels[:, 3:5] for labels in data.train.labels]))
                * self.settings.image_size
            )
            anchors = fit_anchors(sizes, self.settings.image_size, self.model.anchors.shape[:2].numel()).view_as(
                self.model.anchors
            )
            strides = torch.tensor(self.model.stride, dtype=anchors.dtype).view(-1, 1, 1)
            self.model.head.anchors.copy_(anchors / strides)

    def on_fit_start(self) -> None:
        """Pick the memory layout that this machine trains faster in; a resumed run keeps the first one's."""
        self.check_weights()
        if self.memory_format is None and self.trainer.strategy.in_stages:
            self.memory_format = torch.contiguous_format  # nobody has the whole model to measure
        if self.memory_format is None:
            self.memory_format = fastest_memory_format(
                self.model, self.settings.image_size, self.trainer.precision_plugin.forward_context
            )
        self.model.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["memory_format"] = "channels_last" if self.memory_format is torch.channels_last else "contiguous"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._awaited_weights = None
        self.memory_format = _FORMATS.get(checkpoint.get("memory_format", ""))

    def on_train_epoch_start(self) -> None:
        for layer in list(self.model.model)[: self.settings.freeze]:
            layer.eval()  # frozen layers keep their statistics too

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Bytes (N, 3, S, S) as floats in [0, 1], in the layout that the model computes in."""
        floats = images.to(torch.float32).div_(255)
        return floats.contiguous(memory_format=self.memory_format) if self.memory_format is not None else floats

    def part_of_batch(self, batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Images ``start`` to ``stop`` of a batch, with their targets, whose first column then counts from 0 again."""
        targets = batch["targets"]
        own = targets[(targets[:, 0] >= start) & (targets[:, 0] < stop)].clone()
        own[:, 0] -= start
        parts = {name: value[start:stop] for name, value in batch.items() if name != "targets"}
        return {**parts, "targets": own}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self._inference = None
        raw = self.model(self.prepare(batch["images"]))
        loss, parts = yolo_loss(raw, batch["targets"], self.model.anchors, self.gains)
        size = len(batch["images"])
        self.log("train/loss", sum(parts.values()), prog_bar=True, batch_size=size)
        for name, value in parts.items():
            if name == "cls" and len(self.names) == 1:
                continue  # a single class has nothing to tell apart
            self.log(f"train/{name}", value, batch_size=size)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Any], stage: str) -> None:
        if not len(batch["images"]):
            return  # every image of the batch was damaged
        images, targets = self.prepare(batch["images"]), batch["targets"]
        raw = self.model.raw(images)
        _, parts = yolo_loss(raw, targets, self.model.anchors, self.gains)
        self.log(f"{stage}/loss", sum(parts.values()), batch_size=len(images))
        kept = nms(self.model.decode(raw), CONFIDENCE_FLOOR, EVALUATION_IOU, multi_label=len(self.names) > 1)
        self.metrics.update_batch(kept, targets, size=images.shape[-1])

    def on_validation_epoch_start(self) -> None:
        self.check_weights()
        self.metrics.reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._report("val")

    def on_test_epoch_end(self) -> None:
        self._report("test")

    def _report(self, stage: str) -> None:
        """Average precision over the images of all ranks."""
        merged = DetectionMetrics(num_classes=len(self.names))
        strategy = self.trainer.strategy
        for other in strategy.all_gather_object(self.metrics.state_dict() if strategy.counts else None):
            if other is not None:
                merged.merge(other)
        self.results = merged.compute()
        self.log(f"{stage}/map50", self.results.map50, prog_bar=True)
        self.log(f"{stage}/map50_95", self.results.map50_95)
        self.log(f"{stage}/precision", self.results.precision)
        self.log(f"{stage}/recall", self.results.recall)


class DetectionData(DataModule):
    """Loaders over a YOLO-format data set."""

    def __init__(self, settings: DetectionTask) -> None:
        self.settings = settings
        self.spec = read_data_yaml(settings.data)

    def setup(self, stage: str) -> None:
        s = self.settings
        if stage == "fit":
            self.train = self._open("train", augment=s.augment, cache=s.cache)
            self.train.epochs = self._epochs(len(self.train))
        if stage in ("fit", "validate"):
            self.val = self._open("val")
        if stage == "test":
            self.test = self._open("test")

    def _epochs(self, images: int) -> int | None:
        """Return the epochs that training will last by the trainer's settings; None where only time or a callback ends it."""
        if (trainer := self.trainer) is None:
            return None
        ends = [trainer.max_epochs] if (trainer.max_epochs or 0) > 0 else []
        if trainer.max_steps > 0:
            each = self._global_batch
            batches = images // each if images > each else 1
            if isinstance(limit := trainer.limit_train_batches, int):
                batches = min(batches, limit)
            elif limit < 1:
                batches = int(batches * limit)
            steps = math.ceil(batches / trainer.accumulate_grad_batches)
            ends.append(math.ceil(trainer.max_steps / max(1, steps)))
        return min(ends, default=None)

    @property
    def _global_batch(self) -> int:
        """Images per step on all ranks that read data of their own."""
        if (trainer := self.trainer) is None or not trainer.use_distributed_sampler:
            return self.settings.batch_size
        return self.settings.batch_size * int(trainer.strategy.distributed_sampler_kwargs["num_replicas"])

    def _open(self, split: str, **options: Any) -> DetectionDataset:
        s = self.settings
        selection = None if s.share is None else SiteSplit(self.spec, s.share)
        dataset = DetectionDataset.open(
            self.spec, split, image_size=s.image_size, cache_labels=s.cache_labels, selection=selection, **options
        )
        if (report := dataset.report) is not None:
            if report.corrupt or report.malformed or report.shared_labels:
                _LOG.warning("%s", report)
            if not report.boxes:
                _LOG.warning("%s: all %d images are background, there is no box in them", split, report.images)
        return dataset

    def teardown(self, stage: str) -> None:
        if stage == "fit" and self.train.damaged:
            _LOG.warning("%d training images could not be decoded; others took their place", self.train.damaged)
        measured = {"fit": "val", "validate": "val", "test": "test"}.get(stage)
        if measured and (damaged := getattr(self, measured).damaged):
            _LOG.warning(
                "%d images of the %s split could not be decoded: the metrics are of the others", damaged, measured
            )

    def calibration_dataset(self) -> DetectionDataset:
        """Return the training images as they are, for calibration."""
        return self._open("train")

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test)

    def _loader(self, dataset: DetectionDataset, shuffle: bool = False) -> DataLoader[Any]:
        s = self.settings
        drop = (
            shuffle and len(dataset) > self._global_batch
        )  # a last batch of one or two images would shake batch statistics
        return DataLoader(
            dataset,
            s.batch_size,
            shuffle=shuffle,
            drop_last=drop,
            num_workers=s.workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
        )


class InferenceCopy:
    """A frozen copy of a network for inference: folded batch norms, channels last, and bfloat16 where that is native.

    Native: a CPU with AMX tiles, a GPU that has it. Elsewhere (AVX-512's bfloat16 is slower than its float32), and for
    weights that are not float32, the weights' own type is kept. Boxes are decoded in float32 either way.

    Changes of the weights are told by the versions that PyTorch counts, and it counts neither those made through ``.data`` nor
    those of fused optimizers: a detector drops its copy in training.
    """

    def __init__(self, model: Yolo) -> None:
        self._tensors = list(itertools.chain(model.parameters(), model.buffers()))
        self._state = [_state_of(tensor) for tensor in self._tensors]
        with torch.inference_mode():
            self._model = fuse(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._device = next(model.parameters()).device
            self._dtype = next(model.parameters()).dtype
            if self._dtype == torch.float32 and _multiplies_bfloat16(self._device):
                self._dtype = torch.bfloat16
                anchors = self._model.head.anchors
                self._model.to(self._dtype)
                self._model.head.anchors = anchors  # decoding multiplies by them: they stay as exact as they were

    def is_current(self, model: Yolo) -> bool:
        """Return True if ``model`` has the very weights that were copied."""
        tensors = list(itertools.chain(model.parameters(), model.buffers()))
        return len(tensors) == len(self._tensors) and all(
            tensor is own and state is not None and _state_of(tensor) == state
            for tensor, own, state in zip(tensors, self._tensors, self._state, strict=True)
        )

    @torch.inference_mode()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Decode predictions (N, A, 5 + C), float32 on the CPU, of images (N, 3, S, S) in [0, 1]."""
        moved = images.to(self._device, self._dtype, memory_format=torch.channels_last)
        decoded: torch.Tensor = self._model(moved)
        return decoded.float().cpu()


def _state_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Tell a state of a tensor from others by its place and version; None for tensors that have no version."""
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.cpu._is_amx_tile_supported())


REPEATS = 3


def fastest_memory_format(
    model: Yolo, image_size: int, context: Callable[[], AbstractContextManager[Any]], batch_size: int = 4
) -> torch.memory_format:
    """Return the layout in which forward and backward of ``model`` take less time on its device under ``context``.

    The model's weights, statistics, gradients and the random streams are as before when this returns.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        return torch.channels_last  # tensor cores want it; timing a cold GPU would say little
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with isolate_rng():
        images = torch.rand(batch_size, 3, image_size, image_size)
        seconds = {
            layout: _time(model, images, layout, context) for layout in (torch.contiguous_format, torch.channels_last)
        }
    model.load_state_dict(weights)
    model.zero_grad(set_to_none=True)
    return min(seconds, key=lambda layout: seconds[layout])


def _time(
    model: Yolo, images: torch.Tensor, layout: torch.memory_format, context: Callable[[], AbstractContextManager[Any]]
) -> float:
    model.to(memory_format=layout)  # type: ignore[call-overload]
    model.train()
    images = images.contiguous(memory_format=layout)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        with context():
            loss = sum(level.float().square().mean() for level in model.raw(images))
        loss.backward()  # type: ignore[union-attr]
        times.append(time.perf_counter() - start)
    return min(times)
