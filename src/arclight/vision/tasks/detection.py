"""Object detection as an ordinary module and data module."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from arclight.fabric.seeding import isolate_rng
from arclight.trainer import Callback, DataModule, Module
from arclight.vision.boxes import nms
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.data.site_split import SiteSplit
from arclight.vision.models.anchors import fit_anchors
from arclight.vision.models.loss import Gains, scaled_gains, yolo_loss
from arclight.vision.models.yolov5 import Yolo, build_model, load_pretrained
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

    def __init__(self, settings: DetectionTask, names: Sequence[str]) -> None:
        super().__init__()
        if settings.image_size % 32:
            raise ValueError(f"image_size must be a multiple of 32, got {settings.image_size}")
        self.save_hyperparameters({"settings": settings, "names": list(names)})
        self.settings, self.names = settings, list(names)
        self.model = build_model(settings.model, num_classes=len(self.names))
        self.model.names = self.names
        gains = Gains(box=settings.box_gain, obj=settings.obj_gain, cls=settings.cls_gain)
        self.gains = scaled_gains(gains, len(self.names), settings.image_size)
        self.metrics = DetectionMetrics(num_classes=len(self.names))
        self.results: Any = None
        """Metrics of the newest validation; see DetectionMetrics.compute."""
        self.memory_format = _FORMATS.get(settings.memory_format)
        if settings.weights is not None:
            load_pretrained(self.model, settings.weights)
        self._freeze(settings.freeze)

    def _freeze(self, layers: int) -> None:
        for number, layer in enumerate(self.model.model):
            if number < layers:
                layer.requires_grad_(False)

    @property
    def processing(self) -> DetectionProcessing:
        """Return the processing from photos to input and from output to boxes, as programs do it too."""
        s = self.settings
        return DetectionProcessing(
            names=self.names, image_size=s.image_size, conf_threshold=s.conf_threshold, iou_threshold=s.iou_threshold
        )

    def forward(self, images: torch.Tensor) -> Any:
        """Images (N, 3, H, W) float in [0, 1]: decoded predictions in evaluation mode, raw levels in training mode."""
        return self.model(images)

    @torch.inference_mode()
    def detect(
        self, images: Sequence[np.ndarray[Any, Any]], processing: DetectionProcessing | None = None
    ) -> list[Detections]:
        """Find boxes in RGB uint8 photos of any sizes, by the detector's own ``processing`` or another, say with other thresholds."""
        processing = processing or self.processing
        batch, context = processing.preprocess(images)
        was_training = self.training
        self.eval()
        predictions = self.model(torch.from_numpy(batch).to(self.device))
        self.train(was_training)
        return processing.postprocess(predictions.float().cpu(), context)

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
            anchors = fit_anchors(sizes, self.settings.image_size).view_as(self.model.anchors)
            strides = torch.tensor(self.model.stride, dtype=anchors.dtype).view(-1, 1, 1)
            self.model.head.anchors.copy_(anchors / strides)

    def on_fit_start(self) -> None:
        """Pick the memory layout that this machine trains faster in; a resumed run keeps the first one's."""
        if self.memory_format is None and getattr(self.trainer.strategy, "in_stages", False):
            self.memory_format = torch.contiguous_format  # nobody has the whole model to measure
        if self.memory_format is None:
            self.memory_format = fastest_memory_format(
                self.model, self.settings.image_size, self.trainer.precision_plugin.forward_context
            )
        self.model.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["memory_format"] = "channels_last" if self.memory_format is torch.channels_last else "contiguous"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
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
        images, targets = self.prepare(batch["images"]), batch["targets"]
        raw = self.model.raw(images)
        _, parts = yolo_loss(raw, targets, self.model.anchors, self.gains)
        self.log(f"{stage}/loss", sum(parts.values()), batch_size=len(images))
        kept = nms(self.model.decode(raw), CONFIDENCE_FLOOR, EVALUATION_IOU, multi_label=len(self.names) > 1)
        self.metrics.update_batch(kept, targets, size=images.shape[-1])

    def on_validation_epoch_start(self) -> None:
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
            epochs = self.trainer.max_epochs if self.trainer is not None and self.trainer.max_epochs > 0 else None
            self.train = self._open("train", augment=s.augment, epochs=epochs, cache=s.cache)
        if stage in ("fit", "validate"):
            self.val = self._open("val")
        if stage == "test":
            self.test = self._open("test")

    def _open(self, split: str, **options: Any) -> DetectionDataset:
        s = self.settings
        selection = None if s.share is None else SiteSplit(self.spec, s.share)
        dataset = DetectionDataset.open(
            self.spec, split, image_size=s.image_size, cache_labels=s.cache_labels, selection=selection, **options
        )
        if dataset.report is not None and (dataset.report.corrupt or dataset.report.malformed):
            _LOG.warning("%s", dataset.report)
        return dataset

    def teardown(self, stage: str) -> None:
        damaged = self.train.damaged if stage == "fit" else 0
        if damaged:
            _LOG.warning("%d training images could not be decoded; others took their place", damaged)

    def calibration_dataset(self) -> DetectionDataset:
        """The training images as they are, for calibration."""
        return self._open("train")

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test)

    def _loader(self, dataset: DetectionDataset, shuffle: bool = False) -> DataLoader[Any]:
        s = self.settings
        drop = shuffle and len(dataset) > s.batch_size  # a last batch of one or two images would shake batch statistics
        return DataLoader(
            dataset,
            s.batch_size,
            shuffle=shuffle,
            drop_last=drop,
            num_workers=s.workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
        )


REPEATS = 3


def fastest_memory_format(
    model: Yolo, image_size: int, context: Callable[[], AbstractContextManager[Any]], batch_size: int = 4
) -> torch.memory_format:
    """The layout in which forward and backward of ``model`` take less time on its device under ``context``.

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
