"""Define Modules and DataModules of detection, masks, keypoints, corners and rotated boxes.

`Detector` and its subclasses are public; a recipe's ``[task]`` builds them (`settings`). The Trainer calls the steps of `VisionModule`,
``arclight predict`` its ``predict``. Names of weights are YOLOv5's and in checkpoints; ``order_group`` and ``order_epoch`` of `DetectionData`
are, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from arclight.checkpoint import CheckpointError
from arclight.checkpoint.conversion import read_foreign
from arclight.vision.anchor_limits import GOOD_RECALL
from arclight.vision.data.data_yaml import SINGLE_CLASS
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.data.labels import DatasetError, TaskGeometry
from arclight.vision.data.rectangles import AspectOrder, ResumedEpoch
from arclight.vision.data.site_split import SiteSplit
from arclight.vision.keypoints import sigmas_of
from arclight.vision.models.anchors import best_possible_recall, evolve_anchors, fit_anchors
from arclight.vision.models.architectures import HeadBlock, name_of, parse_architecture
from arclight.vision.models.heads import CornersHead, OrientedHead, PoseHead, SegmentHead
from arclight.vision.models.loss import (
    Assignment,
    Gains,
    KeypointOptions,
    LossOptions,
    assign_levels,
    keypoint_loss,
    level_balance,
    mask_loss,
    scaled_gains,
    yolo_loss,
)
from arclight.vision.models.one_to_one import OneToOneHead, one_to_one_loss
from arclight.vision.models.yolov5 import build_model, fitting_tensors
from arclight.vision.results.analysis import stage_times
from arclight.vision.results.detections import Detections
from arclight.vision.results.metrics import EVALUATION_IOU, MAX_DETECTIONS, DetectionMetrics, SegmentationMetrics
from arclight.vision.results.obb_metrics import OrientedMetrics
from arclight.vision.results.pose_metrics import MAX_POSES, PoseMetrics
from arclight.vision.results.records import RecordingMetrics
from arclight.vision.tasks.distillation import anchored_distillation, one_to_one_distillation
from arclight.vision.tasks.module import TaskMetrics, VisionData, VisionModule, inference_network
from arclight.vision.tasks.processing import (
    DetectionProcessing,
    OrientedProcessing,
    PoseProcessing,
    SegmentationProcessing,
)
from arclight.vision.tasks.settings import CornersTask, DetectionTask, OrientedDetectionTask, PoseTask, SegmentationTask

_LOG = logging.getLogger("arclight")
_MOST = 2**31 - 1
"""Largest epoch, and largest number of images per step, that is accepted from a checkpoint."""
ProcessingT = TypeVar("ProcessingT", bound=DetectionProcessing)


class Detector(VisionModule):
    """Trains and runs an object detector.

    >>> detector = Detector(DetectionTask(data="data.yaml", model="yolov5n", image_size=320), names=["qr_code"])
    >>> detections = detector.detect([photo])[0]            # photo: RGB uint8 (H, W, 3)
    """

    head: ClassVar[HeadBlock] = "detect"
    output_names: ClassVar[list[str]] = ["predictions"]
    settings: DetectionTask
    level_weights: Tensor | None
    _keeps_records = False

    def __init__(
        self,
        settings: DetectionTask,
        names: Sequence[str],
        table: str | None = None,
        network: Mapping[str, Any] | None = None,
    ) -> None:
        """Initialise the detector from a `DetectionTask`.

        ``table``, ``network``: as for every `VisionModule`.
        """
        super().__init__(settings, names, table, network)
        if self.one_to_one:
            _refuse_settings_of_anchors(settings)
        gains = Gains(box=settings.box_gain, obj=settings.obj_gain, cls=settings.cls_gain)
        self.gains = scaled_gains(gains, len(self.names), settings.image_size, len(self.model.stride))
        self.loss_options = LossOptions(
            anchor_t=settings.anchor_t,
            label_smoothing=settings.label_smoothing,
            focal_gamma=settings.focal_gamma,
            quality=settings.focal_loss == "quality",
            obj_pos_weight=settings.obj_pos_weight,
            cls_pos_weight=settings.cls_pos_weight,
        )
        weights = torch.tensor(level_balance(len(self.model.stride))) if settings.autobalance else None
        self.register_buffer("level_weights", weights)  # in checkpoints, where it is learned

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Open a checkpoint, or a YOLOv5 model file (.pt), running none of its code.

        Of another project's file the table, the class names and the weights are taken, averaged ones if it has them; thresholds
        and image size are the defaults. Raises CheckpointError for a file that cannot be read so or lacks weights of its own
        architecture, ValueError for an architecture that is not built here.
        """
        path = Path(path)
        if not path.is_file():
            return super().load(path)
        found = read_foreign(path)
        known = found.get("attributes", {})
        table, names = known.get("yaml"), known.get("names")
        if isinstance(names, dict):
            names = [names[number] for number in range(len(names))] if names.keys() == set(range(len(names))) else None
        task = cls.settings_class()
        if not isinstance(table, dict) or not isinstance(names, list):
            raise CheckpointError(
                f"{path} does not say which architecture and classes its weights are for: name them, "
                f"{cls.__name__}({task.__name__}(model=..., weights={str(path)!r}), names=[...])"
            )
        listed = [str(name) for name in names]
        read = ("backbone", "head", "depth_multiple", "width_multiple", "anchors", "activation")
        text = json.dumps(
            {name: table[name] for name in read if name in table}, default=lambda value: type(value).__name__
        )
        architecture = parse_architecture(text, str(path))
        own = name_of(architecture)
        if architecture.head != cls.head:
            raise ValueError(
                f"{path}: its network ends with a {architecture.head} head, a {cls.__name__} needs one to {cls.head}"
            )
        model = own if own is not None else f"{path.stem}.yaml"
        with torch.device("meta"):  # takes no memory, whatever sizes the table names
            wanted = build_model(model, len(listed), table=text).state_dict()
        fitting = fitting_tensors(wanted, found["model"])
        if missing := [name for name in wanted if name not in fitting]:
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {len(wanted)} tensors of its architecture for {len(listed)} classes, "
                f"{missing[0]} first: its batch norms were folded, or its table or names are another model's"
            )
        settings = task(data=Path("none"), model=model, weights=path)
        return cls(settings, names=listed, table=None if own is not None else text)

    @functools.cached_property
    def one_to_one(self) -> bool:
        """True for a network that predicts each object once: its boxes need no suppression.

        Read once, of the whole network: a stage of a pipeline need not hold the head.
        """
        return isinstance(self.model.head, OneToOneHead)

    @classmethod
    def settings_class(cls) -> type[DetectionTask]:
        """Return the settings that this task is built from."""
        return DetectionTask

    def detect(
        self, images: Sequence[np.ndarray[Any, Any]], processing: DetectionProcessing | None = None
    ) -> list[Detections]:
        """Find objects in RGB uint8 photos of any sizes; see `predict`."""
        return self.predict(images, processing)

    def track(
        self, source: Any, tracker: str = "bytetrack", *, conf_threshold: float | None = None, **options: Any
    ) -> Iterator[Detections]:
        """Follow objects through videos and streams: yield those of each frame, with their ``ids``.

        source, options: as :class:`ImageSource` takes them. tracker: ``bytetrack`` or ``ocsort``. conf_threshold: confidence from
        which a box may begin a track; the detector's own if not given.
        """
        from arclight.vision.inputs.image_source import ImageSource
        from arclight.vision.tracking.tracks import lowest_confidence, make_tracker, track

        confidence = self.processing.conf_threshold if conf_threshold is None else conf_threshold
        make_tracker(tracker, confidence)  # a wrong name is an error here, not at the first frame
        used = dataclasses.replace(self.processing, conf_threshold=lowest_confidence(tracker, confidence))
        frames = ImageSource(source, **options)
        return track(lambda images: self.detect(images, used), frames, lambda: make_tracker(tracker, confidence))

    @property
    def processing(self) -> DetectionProcessing:
        return self._processing_of(DetectionProcessing)

    def _processing_of(self, kind: type[ProcessingT], **more: Any) -> ProcessingT:
        s = self.settings
        return kind(
            names=self.names, image_size=s.image_size, conf_threshold=s.conf_threshold,
            iou_threshold=None if self.one_to_one else s.iou_threshold, **more,
        )  # fmt: skip

    def loss(self, raw: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        head = self.model.head
        if isinstance(head, OneToOneHead):
            s = self.settings
            box_gain, cls_gain = s.box_gain / DetectionTask.box_gain, s.cls_gain / DetectionTask.cls_gain
            return one_to_one_loss(raw, batch["targets"], head, box_gain, cls_gain)
        return self._anchored_loss(raw, batch, self._matches(raw, batch))

    def _matches(self, levels: Sequence[Tensor], batch: dict[str, Any]) -> list[Assignment]:
        """Assign the predictions of a network with anchors to the batch's objects."""
        return assign_levels(levels, batch["targets"], self.model.anchors, self.settings.anchor_t)

    def _anchored_loss(
        self, levels: Sequence[Tensor], batch: dict[str, Any], matches: list[Assignment]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of an anchor-based head: boxes, objectness and classes.

        ``levels``: logits per level (N, k, H_l, W_l, 5 + C), or with an angle.
        """
        learns = self.training and torch.is_grad_enabled()
        loss, parts = yolo_loss(
            levels, batch["targets"], self.model.anchors, self.gains, self.loss_options, self.level_weights, learns,
            oriented=isinstance(self.model.head, OrientedHead), matches=matches,
        )  # fmt: skip
        if len(self.names) == 1:
            del parts["cls"]  # a single class has nothing to tell apart
        return loss, parts

    def distillation_loss(self, raw: list[Tensor], taught: list[Tensor]) -> tuple[Tensor, Tensor]:
        head, s = self.model.head, self.settings
        if isinstance(head, OneToOneHead):
            box_gain, cls_gain = s.box_gain / DetectionTask.box_gain, s.cls_gain / DetectionTask.cls_gain
            return one_to_one_distillation(raw, taught, head, box_gain, cls_gain)
        return anchored_distillation(raw, taught, self.model.anchors, self.gains)

    def _build_metrics(self) -> TaskMetrics:
        kind = RecordingMetrics if self._keeps_records else DetectionMetrics
        return kind(len(self.names), None if self.one_to_one else EVALUATION_IOU)

    def keep_records(self) -> None:
        """Keep each image's boxes in validation and testing: ``results.records`` then holds them."""
        self._keeps_records = True
        self.metrics = self._build_metrics()

    def stage_times(self, paths: Sequence[Path | str]) -> dict[str, list[float]]:
        """Measure the stages of detection on single photos, in ms; the first photo is a warm-up.

        See `analysis.stage_times`.
        """
        self.check_weights()
        return stage_times(paths, self.processing, inference_network(self.model))

    def scores(self, results: Any) -> dict[str, float]:
        names = ("map50", "map50_95", "precision", "recall")
        return {name: getattr(results, name) for name in names}

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import write_charts

        return write_charts(self.results, self.names, folder)

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Split the output into boxes in pixels and scores in [0, 1].

        Judged together, boxes would hide scores that are all wrong.
        """
        (predictions,) = outputs
        if not self.one_to_one:
            return {"boxes": predictions[..., :4], "scores": predictions[..., 4:]}
        # Sizes have no bound where nothing is: those beyond the image say no more than its own. Objectness is always 1.
        boxes = torch.cat((predictions[..., :2], predictions[..., 2:4].clamp(max=self.settings.image_size)), dim=-1)
        return {"boxes": boxes, "scores": predictions[..., 5:]}

    def setup(self, stage: str) -> None:
        """Check how anchors fit the training boxes, and refit them if the settings ask for it.

        A resumed run restores its own later.
        """
        data = self.trainer.datamodule
        if stage != "fit" or self.one_to_one or not isinstance(data, DetectionData):
            return
        if any(map(len, data.train.labels)):
            self._fit_anchors(torch.from_numpy(data.train.box_sizes_px()))

    def _fit_anchors(self, sizes_px: Tensor) -> None:
        """Set the anchors as the settings say, for boxes (n, 2), and log the share that they match."""
        s, anchors = self.settings, self.model.anchors
        strides = torch.tensor(self.model.stride, dtype=anchors.dtype).view(-1, 1, 1)
        before = (anchors * strides).view(-1, 2)
        recall = best_possible_recall(sizes_px, before, s.anchor_t)
        kind = s.anchors if s.anchors != "auto" else "evolved" if recall < GOOD_RECALL else "coco"
        if kind == "coco":
            if recall < GOOD_RECALL:
                _LOG.warning(
                    "no anchor matches %.1f %% of the training boxes: try task.anchors = auto", 100 * (1 - recall)
                )
            return
        try:
            found = fit_anchors(sizes_px, s.image_size, len(before), anchor_t=s.anchor_t)
        except ValueError as error:
            raise DatasetError(
                f"{s.data}: {error} at image_size = {s.image_size}: train with larger images, or anchors = coco"
            ) from error
        if kind == "evolved":
            found = evolve_anchors(found, sizes_px, anchor_t=s.anchor_t)
        self.model.anchors.copy_(found.view_as(anchors) / strides)
        after = best_possible_recall(sizes_px, found, s.anchor_t)
        _LOG.info(
            "anchors %s: they answer for %.1f %% of the training boxes, not %.1f %%", kind, 100 * after, 100 * recall
        )

    def part_of_batch(self, batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return images ``start`` to ``stop`` of a batch, their targets renumbered from image 0."""
        targets = batch["targets"]
        own = targets[(targets[:, 0] >= start) & (targets[:, 0] < stop)].clone()
        own[:, 0] -= start
        return {**super().part_of_batch({**batch, "targets": []}, start, stop), "targets": own}


def _refuse_settings_of_anchors(settings: DetectionTask) -> None:
    """Raise ValueError for the first setting that a network without anchors does not read."""
    unread = (
        "anchors", "anchor_t", "obj_gain", "obj_pos_weight", "cls_pos_weight", "label_smoothing", "focal_gamma", "autobalance",
    )  # fmt: skip
    for name in unread:
        given, default = getattr(settings, name), getattr(DetectionTask, name)
        if given != default:
            raise ValueError(
                f"{name} = {given!r}: {settings.model} has no anchors and no objectness, leave {name} at {default!r}"
            )


class DetectionData(VisionData):
    """Loaders over a YOLO-format data set."""

    settings: DetectionTask
    geometry: ClassVar[TaskGeometry] = "boxes"
    collate = staticmethod(collate)

    def __init__(self, settings: DetectionTask) -> None:
        super().__init__(settings)
        self.spec = read_data_yaml(settings.data)
        self._order: AspectOrder | None = None
        self._begun: ResumedEpoch | None = None  # of a run that is resumed, by the trainer below and no later one
        self._resumed_by: Any = None

    @property
    def names(self) -> list[str]:
        return [SINGLE_CLASS] if self.settings.single_class else list(self.spec.names)

    def open_for_training(self) -> DetectionDataset:
        s = self.settings
        if s.rect_train:
            self._check_rectangles("rect_train")
            if s.augment.mosaic:
                _LOG.info("rect_train = true: training images are not composed to mosaics")
        return self.open("train", augment=s.augment, cache=s.cache)

    def open_for_validation(self, split: str) -> DetectionDataset:
        if self.settings.rect:
            self._check_rectangles("rect")
        options = {"rect": True, "stride": self._coarsest_stride()} if self.settings.rect else {}
        dataset = self.open(split, **options)
        counted = MAX_POSES if self.geometry in ("keypoints", "corners") else MAX_DETECTIONS
        if crowded := sum(np.bincount(rows[:, 0].astype(int)).max(initial=0) > counted for rows in dataset.labels):
            _LOG.warning(
                "%s: %d images have more than %d objects of a class, and average precision counts so many predictions of a class in an image "
                "(COCO): the others are scored as missed", split, crowded, counted,
            )  # fmt: skip
        return dataset

    def _check_rectangles(self, setting: str) -> None:
        if self.geometry != "boxes":
            raise ValueError(
                f"{setting} = true is for detection, a {self.settings.recipe_kind} task reads squares: leave it false"
            )

    def training_order(self) -> AspectOrder | None:
        s = self.settings
        if s.progressive_resizing is not None and self.train.epochs is None:
            raise ValueError(
                "progressive_resizing depends on the share of epochs done, and their number is unknown: "
                "give trainer.max_epochs or max_steps"
            )
        shaped = s.rect_train or s.progressive_resizing is not None
        if shaped and self.trainer is not None and self.trainer.strategy.in_stages:
            named = "rect_train" if s.rect_train else "progressive_resizing"
            raise ValueError(f"{named}: stages of a network take batches of one shape: leave it out")
        if not s.rect_train:
            return None
        begun = self._begun if self._resumed_by is self.trainer else None
        self._order = self.train.aspect_order(self._global_batch, begun)
        return self._order

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the order of training images, beside seed and epoch."""
        return {} if self._order is None else {"order_group": self._order.group, "order_epoch": self._order.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the order of the resumed epoch, even if the batch size has changed.

        Later epochs are grouped by the new batch size. Raises CheckpointError for an order that is none.
        """
        self._begun = None
        if "order_group" not in state_dict:
            return
        for name, least in (("order_group", 1), ("order_epoch", 0)):
            value = state_dict.get(name)
            if type(value) is not int or not least <= value <= _MOST:
                raise CheckpointError(
                    f"the checkpoint has {name} = {value!r} for the order of training images, which must be a whole number from {least} "
                    f"to {_MOST}: resume from another one"
                )
        self._begun, self._resumed_by = ResumedEpoch(state_dict["order_epoch"], state_dict["order_group"]), self.trainer
        if self._order is not None:
            self._order.resume(self._begun)

    def _coarsest_stride(self) -> int:
        with torch.device("meta"):
            return int(build_model(self.settings.model, len(self.names)).stride[-1])

    def open(self, split: str, **options: Any) -> DetectionDataset:
        s = self.settings
        selection = None if s.share is None else SiteSplit(self.spec, s.share)
        mix = s.mix if options.get("augment") is not None else ()
        if options.get("augment") is not None:
            files = self.spec.file.parent / "images.cache" if s.disk_cache else None
            options |= {"disk_cache": files, "image_weights": s.image_weights}
            if s.multi_scale or s.rect_train or s.progressive_resizing:
                options |= {"multi_scale": s.multi_scale, "stride": self._coarsest_stride(), "rect": s.rect_train}
                options |= {"resizing": s.progressive_resizing}
        dataset = DetectionDataset.open(
            self.spec,
            split,
            image_size=s.image_size,
            cache_labels=s.cache_labels,
            selection=selection,
            mix=mix,
            geometry=self.geometry,
            single_class=s.single_class,
            **options,
        )
        if (report := dataset.report) is not None:
            if report.corrupt or report.malformed or report.shared_labels:
                _LOG.warning("%s", report)
            if not report.boxes:
                _LOG.warning("%s: all %d images are background, there is no box in them", split, report.images)
        return dataset


class Segmenter(Detector):
    """Trains and runs an instance segmenter.

    >>> segmenter = Segmenter(SegmentationTask(data="data.yaml", model="yolov5n-seg"), names=["leaf"])
    >>> found = segmenter.predict([photo])[0]               # photo: RGB uint8 (H, W, 3)
    >>> found.masks.xy, found.masks.areas, found.boxes.xyxy
    """

    head: ClassVar[HeadBlock] = "segment"
    output_names: ClassVar[list[str]] = ["predictions", "prototypes"]

    @classmethod
    def settings_class(cls) -> type[SegmentationTask]:
        return SegmentationTask

    @property
    def processing(self) -> SegmentationProcessing:
        return self._processing_of(SegmentationProcessing)

    def loss(self, raw: tuple[list[Tensor], Tensor], batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the mask loss, weighted as boxes are, to the detector's."""
        levels, prototypes = raw
        head, targets = self.model.head, batch["targets"]
        assert isinstance(head, SegmentHead)
        classes, matches = head.num_classes, self._matches(levels, batch)
        loss, parts = self._anchored_loss([level[..., : 5 + classes] for level in levels], batch, matches)
        found = mask_loss(levels, prototypes, batch["masks"], targets, matches, classes)
        of_masks = self.gains.box * found
        return loss + of_masks * len(prototypes), {**parts, "mask": of_masks.detach()}

    def _build_metrics(self) -> TaskMetrics:
        return SegmentationMetrics(len(self.names))

    def scores(self, results: Any) -> dict[str, float]:
        names = ("mask_map50", "mask_map50_95", "map50", "map50_95", "precision", "recall")
        summary = results.summary()
        return {name: summary[name] for name in names}

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Split the output into boxes, scores, mask coefficients and prototypes.

        They are of different sizes, so that each is judged by itself.
        """
        predictions, prototypes = outputs
        rows, coefficients = predictions.split(
            (predictions.shape[-1] - prototypes.shape[1], prototypes.shape[1]), dim=-1
        )
        return {**super().output_parts(rows), "coefficients": coefficients, "prototypes": prototypes}

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import write_charts

        return write_charts(self.results.masks, self.names, folder, of="masks")


class SegmentationData(DetectionData):
    """Loaders over a YOLO-format data set whose rows are polygons."""

    geometry: ClassVar[TaskGeometry] = "polygons"


class PoseEstimator(Detector):
    """Trains and runs a detector of boxes and their keypoints.

    >>> estimator = PoseEstimator(PoseTask(data="data.yaml", model="yolov5n-pose"), names=["person"], keypoints=(17, 3))
    >>> found = estimator.predict([photo])[0]               # photo: RGB uint8 (H, W, 3)
    >>> found.keypoints[..., :2], found.boxes.xyxy          # (k, 17, 2) pixels
    """

    head: ClassVar[HeadBlock] = "pose"
    settings: PoseTask

    def __init__(
        self,
        settings: PoseTask,
        names: Sequence[str],
        table: str | None = None,
        keypoints: tuple[int, int] = (17, 3),
    ) -> None:
        """Initialise the pose estimator from a `PoseTask`.

        ``keypoints``: how many, and numbers of each, 2 for x y, 3 for x y and how likely it is there, as ``kpt_shape``
        says.
        """
        super().__init__(settings, names, table, {"keypoints": list(keypoints)})

    @functools.cached_property
    def keypoints(self) -> tuple[int, int]:
        """Number of keypoints of each box, and numbers of each.

        Read once: a quantized network in the place of this one has no head.
        """
        head = self.model.head
        assert isinstance(head, PoseHead)
        return head.keypoints

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The deviation of each keypoint that loss and score go by."""
        return sigmas_of(self.keypoints[0], self.settings.keypoint_sigmas, self.settings.cyclic)

    @classmethod
    def settings_class(cls) -> type[PoseTask]:
        return PoseTask

    @property
    def processing(self) -> PoseProcessing:
        return self._processing_of(
            PoseProcessing, keypoints=self.keypoints, sigmas=self.sigmas, cyclic=self.settings.cyclic
        )

    def setup(self, stage: str) -> None:
        """Check that the data set has the keypoints that the network has. Raises DatasetError."""
        data = self.trainer.datamodule
        if isinstance(data, PoseData):
            shape, (count, dims) = data.spec.pose_shape(), self.keypoints
            if (shape.count, shape.dims) != (count, dims):
                raise DatasetError(
                    f"{data.spec.file} has {shape}, this network finds {count} keypoints of {dims} numbers: use data of these, or "
                    "train a network for those"
                )
        super().setup(stage)

    def loss(self, raw: list[Tensor], batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the loss of keypoints to the detector's."""
        s, classes, matches = self.settings, len(self.names), self._matches(raw, batch)
        loss, parts = self._anchored_loss([level[..., : 5 + classes] for level in raw], batch, matches)
        options = KeypointOptions(s.cyclic, s.keypoint_error, isinstance(self.model.head, CornersHead))
        points, visible = keypoint_loss(raw, batch["targets"], matches, classes, self.keypoints, self.sigmas, options)
        per_level = 3 / len(raw)
        added = {"keypoint": s.keypoint_gain * per_level * points}
        if self.keypoints[1] == 3:
            added["visible"] = s.visible_gain * per_level * visible
        total = loss + sum(added.values()) * len(raw[0])
        return total, {**parts, **{name: part.detach() for name, part in added.items()}}

    def _build_metrics(self) -> TaskMetrics:
        return PoseMetrics(len(self.names), self.keypoints, self.sigmas, self.settings.cyclic)

    def scores(self, results: Any) -> dict[str, float]:
        names = ("keypoint_map50", "keypoint_map50_95", "map50", "map50_95", "precision", "recall")
        summary = results.summary()
        return {name: summary[name] for name in names}

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Split the output into boxes and keypoints in pixels, and scores in [0, 1].

        Each is judged by itself.
        """
        (predictions,) = outputs
        count, dims = self.keypoints
        rows, points = predictions.split((predictions.shape[-1] - count * dims, count * dims), dim=-1)
        points = points.unflatten(-1, (count, dims))
        parts = {**super().output_parts(rows), "keypoints": points[..., :2]}
        return parts if dims == 2 else {**parts, "visible": points[..., 2]}

    def keep_records(self) -> None:
        raise ValueError(
            "records are of boxes, and this network is judged by keypoints: keep_records is for a Detector"
        )

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import write_charts

        return write_charts(self.results.keypoints, self.names, folder, of="keypoints")


class PoseData(DetectionData):
    """Loaders over a YOLO-format data set of boxes with keypoints (``kpt_shape`` in data.yaml)."""

    geometry: ClassVar[TaskGeometry] = "keypoints"

    @property
    def network_arguments(self) -> dict[str, Any]:
        shape = self.spec.pose_shape()
        return {**super().network_arguments, "keypoints": (shape.count, shape.dims)}


class CornerDetector(PoseEstimator):
    """Detector of boxes and the four corners of what is in them, in turn from any corner.

    >>> detector = CornerDetector(CornersTask(data="data.yaml"), names=["qr_code"])
    >>> found = detector.predict([photo])[0]                # photo: RGB uint8 (H, W, 3)
    >>> found.keypoints[..., :2], found.boxes.xyxy          # (k, 4, 2) pixels
    """

    head: ClassVar[HeadBlock] = "corners"
    settings: CornersTask

    def __init__(
        self,
        settings: CornersTask,
        names: Sequence[str],
        table: str | None = None,
        keypoints: tuple[int, int] = (4, 3),
    ) -> None:
        """Initialise the corner detector from a `CornersTask`.

        ``keypoints``: as for `PoseEstimator`; their number is 4.
        """
        super().__init__(settings, names, table, keypoints)

    @classmethod
    def settings_class(cls) -> type[CornersTask]:
        return CornersTask


class CornersData(PoseData):
    """Loaders over a YOLO-format data set of boxes around four corners.

    ``kpt_shape`` in its data.yaml is [4, 2] or [4, 3].
    """

    geometry: ClassVar[TaskGeometry] = "corners"

    @property
    def network_arguments(self) -> dict[str, Any]:
        self.spec.geometry(self.geometry)
        return super().network_arguments


class OrientedDetector(Detector):
    """Trains and runs a detector of rotated boxes.

    >>> detector = OrientedDetector(OrientedDetectionTask(data="data.yaml", model="yolov5n-obb"), names=["ship"])
    >>> found = detector.predict([photo])[0]                # photo: RGB uint8 (H, W, 3)
    >>> found.obb.xywhr, found.obb.corners                  # (k, 5) pixels and radians, (k, 4, 2) pixels
    """

    head: ClassVar[HeadBlock] = "obb"
    settings: OrientedDetectionTask

    @classmethod
    def settings_class(cls) -> type[OrientedDetectionTask]:
        return OrientedDetectionTask

    @property
    def processing(self) -> OrientedProcessing:
        return self._processing_of(OrientedProcessing)

    def _build_metrics(self) -> TaskMetrics:
        return OrientedMetrics(len(self.names))

    def scores(self, results: Any) -> dict[str, float]:
        """Add the score at an overlap of 0.75, which an error of the angle costs most."""
        return {**super().scores(results), "map75": results.map75}

    def output_parts(self, *outputs: Tensor) -> dict[str, Tensor]:
        """Split the output into boxes in pixels, scores in [0, 1], and angles.

        Angles are given as the cosine and sine of their double, and each part is judged by itself. A box turned by half
        a turn is the same box, and an angle near 0 has no small size that its error could be held against.
        """
        (predictions,) = outputs
        twice = 2 * predictions[..., -1]
        return {**super().output_parts(predictions[..., :-1]), "angles": torch.stack((twice.cos(), twice.sin()), -1)}

    def keep_records(self) -> None:
        raise ValueError(
            "records are of upright boxes, and this network finds rotated ones: keep_records is for a Detector"
        )

    def write_charts(self, folder: Path) -> dict[str, str]:
        from arclight.vision.results.plots import write_charts

        return write_charts(self.results, self.names, folder, of="rotated boxes")


class OrientedData(DetectionData):
    """Loaders over a YOLO-format data set whose rows are the four corners of each object."""

    geometry: ClassVar[TaskGeometry] = "oriented"
