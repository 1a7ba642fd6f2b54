"""Define settings of the vision tasks, without importing torch.

A recipe's ``[task]`` with one of their kinds becomes one of these classes (``cli.schema`` lists them), which builds module and data. Field
names and kinds are recipe keys and stay, and their docstrings are texts of ``arclight train --help``. A new task also needs an entry in
``tasks.deployment``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from arclight._intervals import (
    Checked,
    Fraction,
    Interval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
)
from arclight.data.sites import IID, Dirichlet
from arclight.optim.schedule_settings import WSD, Constant, Cosine, Linear
from arclight.optim.settings import SGD, AdamW
from arclight.vision.anchor_limits import ANCHOR_T
from arclight.vision.data.augment_settings import AnyAugment, Augment, CropAugment
from arclight.vision.data.mix import MixedData
from arclight.vision.data.progressive_resizing import ProgressiveResizing
from arclight.vision.data.site_split import Merchant, SiteShare

if TYPE_CHECKING:
    from arclight.trainer import DataModule, Module
    from arclight.vision.tasks.module import VisionData, VisionModule


@dataclass(frozen=True, kw_only=True)
class VisionTask(Checked):
    """Define what every task over images has: data, model, and how it is trained."""

    data: Path
    """The data set."""
    model: str
    """Architecture."""
    image_size: Annotated[int, Interval(ge=32)] = 640
    """Side of the square input, pixels; a multiple of the largest stride: 32, or 64 for yolov5n6 to yolov5x6."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of images and weights; auto measures which is faster on this machine."""
    batch_size: PositiveInt | Literal["auto"] = 16
    """Images per step on each device; auto measures how many fit into memory when training starts, at most 64 (on a CPU 16)."""
    batch_memory_gib: PositiveFloat | None = None
    """Memory for a step where batch_size is auto, GiB on each device; none for a share of the free memory."""
    batch_memory_share: Annotated[float, Interval(gt=0, le=1)] | None = None
    """Share of the free memory that a step may take where batch_size is auto; none for 0.7 of a GPU's, 0.25 of a CPU's."""
    workers: NonNegativeInt = 2
    """Worker processes that load images; 0 loads in the training process."""
    cache: bool = False
    """Keep decoded training images in memory."""
    weights: Path | None = None
    """Start from this checkpoint (.safetensors, a checkpoint folder, or a foreign .pt read without unpickling), or the best one of this run."""
    freeze: NonNegativeInt = 0
    """Leading layers whose weights do not change."""
    teacher: Path | None = None
    """Learn the outputs of this trained network, too: a checkpoint, a run (its best checkpoint) or a foreign .pt; detection and classification."""
    teacher_gain: PositiveFloat = 1.0
    """Weight of the loss by the teacher's outputs, beside that by labels."""
    optimizer: SGD | AdamW = field(default_factory=AdamW)
    """Optimizer."""
    schedule: Cosine | Linear | WSD | Constant = field(default_factory=Cosine)
    """Learning-rate schedule."""
    warmup_bias_lr: NonNegativeFloat | None = None
    """Rate of biases in the first step, from which it goes to their peak in the schedule's warm-up; none for that of the others."""

    batch_pictures: NonNegativeInt = 3
    """First batches that are drawn, with their labels after augmentation, for the run's report, beside a chart of the labels; 0 for none."""

    learns_from_teacher: ClassVar[bool] = False
    """Whether a teacher's outputs can be learned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_memory_gib is not None and self.batch_memory_share is not None:
            raise ValueError(
                "batch_memory_gib and batch_memory_share both say what a step may take: leave one of them out"
            )
        if self.teacher is not None and not self.learns_from_teacher:
            raise ValueError(
                f"teacher = {self.teacher}: a {type(self).__name__} does not learn from one, detection and classification do: leave it out"
            )
        if self.warmup_bias_lr is not None and (self.schedule.tokens is not None or self.schedule.seconds is not None):
            raise ValueError(
                f"warmup_bias_lr = {self.warmup_bias_lr:g} follows the steps of a schedule's warm-up: leave it out, or schedule.seconds and tokens"
            )

    def with_data(self, data: str) -> Self:
        """Return the task on a site's own images, all of them."""
        return dataclasses.replace(self, weights=None, data=Path(data))

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        """Return the class that this task trains."""
        raise NotImplementedError(f"{cls.__name__} has no module")

    @classmethod
    def data_class(cls) -> type[VisionData]:
        """Return the class of its loaders."""
        raise NotImplementedError(f"{cls.__name__} has no data")

    def build(self) -> tuple[Module, DataModule]:
        data = self.data_class()(self)
        return self.module_class()(self, **data.network_arguments), data


@dataclass(frozen=True, kw_only=True)
class DetectionTask(VisionTask):
    """Train an object detector on a YOLO-format data set."""

    recipe_kind: ClassVar[str] = "detection"
    linted_rows: ClassVar[Literal["boxes", "oriented"]] = "boxes"
    """What rows of labels are checked as before a fit."""
    learns_from_teacher: ClassVar[bool] = True

    data: Path
    """The data set: a data.yaml with train, val and names."""
    mix: tuple[MixedData, ...] = ()
    """Further data sets whose training images are mixed into each epoch."""
    share: SiteShare | None = None
    """One site's share of the images, as arclight federate partitions them; none for all."""
    model: str = "yolov5n"
    """Architecture: yolov5n to yolov5x, yolov5n6 to yolov5x6, a variant such as yolov5-p2, arc-n to arc-x, or your .yaml of YOLOv5's form."""
    anchors: Literal["coco", "fitted", "evolved", "auto"] = "coco"
    """Box shapes that the head starts from: published, fitted to this data set, these evolved; auto evolves where published ones miss."""
    anchor_t: Annotated[float, Interval(gt=1, le=20)] = ANCHOR_T
    """An anchor is matched with objects less than this many times wider, narrower, taller or flatter than itself."""
    cache_labels: bool = True
    """Cache verified labels in the data set's folder, for a quicker start; false writes nothing there."""
    disk_cache: bool = False
    """Keep decoded training images on disk, in the data set's folder images.cache, for this and later runs."""
    augment: AnyAugment = field(default_factory=Augment)
    """Random changes to training images; the kinds beside augment are YOLOv5's presets."""
    multi_scale: Annotated[float, Interval(ge=0, le=0.9)] = 0.0
    """Give each training batch a side of its own, up to this share below or above image_size."""
    progressive_resizing: ProgressiveResizing | None = None
    """Begin with small training images and end with those of image_size; none for one size."""
    rect: bool = False
    """Validate and test in batches of like aspect ratios, each padded no further than the coarsest stride asks."""
    rect_train: bool = False
    """Train in such batches, too, without mosaics: for photos that are much wider than high, or higher than wide."""
    image_weights: bool = False
    """Draw training images with replacement, those of rare classes more often."""
    single_class: bool = False
    """Take all classes for one, called object; images are not mirrored if those of any class never are."""
    box_gain: NonNegativeFloat = 0.05
    """Weight of the box loss."""
    obj_gain: NonNegativeFloat = 1.0
    """Weight of the objectness loss; arc-n to arc-x have none."""
    cls_gain: NonNegativeFloat = 0.5
    """Weight of the class loss."""
    obj_pos_weight: PositiveFloat = 1.0
    """Weight of objects against background in the objectness loss (pos_weight of cross-entropy)."""
    cls_pos_weight: PositiveFloat = 1.0
    """Weight of the right class against the others in the class loss."""
    label_smoothing: ProperFraction = 0.0
    """Smoothing of class targets, in [0, 1)."""
    focal_gamma: Annotated[float, Interval(ge=0, le=10)] = 0.0
    """Exponent of focal loss, by which easy predictions count less; 0 turns it off."""
    focal_loss: Literal["focal", "quality"] = "focal"
    """Form of the loss where focal_gamma is not 0; quality focal loss judges shares such as the overlap."""
    autobalance: bool = False
    """Learn the weights of the levels' objectness, so that each counts alike."""
    conf_threshold: Fraction = 0.25
    """Confidence threshold of predictions, in [0, 1]."""
    iou_threshold: Fraction = 0.45
    """IoU threshold of non-maximum suppression, in [0, 1]; arc-n to arc-x have none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rect_train and self.image_weights:
            raise ValueError(
                "rect_train and image_weights both say which images share a batch: leave one of them false"
            )
        if self.rect_train and self.progressive_resizing is not None:
            raise ValueError(
                "rect_train and progressive_resizing both say which sides batches have: leave one of them out"
            )

    def site(self, number: int, count: int, partition: Merchant | IID | Dirichlet | None = None) -> Self:
        """Return the task on one site's images; ValueError for a partition that divides no images.

        Its weights come from elsewhere.
        """
        if self.batch_size == "auto":
            raise ValueError('batch_size = "auto" would give each site its own: set a number')
        if not isinstance(partition, Merchant | IID | Dirichlet | None):
            raise ValueError(
                f"{type(partition).__name__.lower()} does not divide images: choose merchant, iid or dirichlet"
            )
        if self.anchors != "coco":
            raise ValueError(f'anchors = "{self.anchors}" would fit each site its own: leave it at "coco"')
        return dataclasses.replace(
            self, weights=None, share=SiteShare(number=number, count=count, partition=partition or IID())
        )

    def check_sites(self, count: int, partition: Merchant | IID | Dirichlet | None = None) -> None:
        """Raise DatasetError unless each of ``count`` sites gets training and validation images."""
        from arclight.vision.data.data_yaml import read_data_yaml
        from arclight.vision.data.site_split import SiteSplit

        share = self.site(0, count, partition).share
        assert share is not None
        SiteSplit(read_data_yaml(self.data), share).check()

    def check_data(self) -> None:
        """Lint the data set before a model is built, and log its faults; see ``arclight data lint``.

        Images are compared once and their hashes kept, unless there are very many or ``cache_labels`` is false. Raises DatasetError
        for a split that cannot be used.
        """
        from arclight.vision.data.data_yaml import read_data_yaml
        from arclight.vision.data.lint.checks import log_before_fit
        from arclight.vision.models.architectures import find_architecture

        if self.share is None:  # a site's images are not all there
            levels = find_architecture(self.model).anchors_px if self.anchors == "coco" else ()
            anchors = [anchor for level in levels for anchor in level]
            spec = read_data_yaml(self.data)
            log_before_fit(
                spec, self.image_size, anchors, cache=self.cache_labels, anchor_t=self.anchor_t, rows=self.linted_rows
            )

    def with_data(self, data: str) -> Self:
        """Return the task on a site's own images, all of them."""
        return dataclasses.replace(super().with_data(data), share=None)

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        from arclight.vision.tasks.detection import Detector

        return Detector

    @classmethod
    def data_class(cls) -> type[VisionData]:
        from arclight.vision.tasks.detection import DetectionData

        return DetectionData


@dataclass(frozen=True, kw_only=True)
class SegmentationTask(DetectionTask):
    """Train an instance segmenter on a YOLO-format data set of polygons."""

    recipe_kind: ClassVar[str] = "segmentation"
    learns_from_teacher: ClassVar[bool] = False

    data: Path
    """The data set: a data.yaml with train, val and names, and rows `class x1 y1 x2 y2 x3 y3 ...`."""
    model: str = "yolov5n-seg"
    """Architecture: yolov5n-seg to yolov5x-seg, or your .yaml that ends with Segment."""

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        from arclight.vision.tasks.detection import Segmenter

        return Segmenter

    @classmethod
    def data_class(cls) -> type[VisionData]:
        from arclight.vision.tasks.detection import SegmentationData

        return SegmentationData


@dataclass(frozen=True, kw_only=True)
class PoseTask(DetectionTask):
    """Train a detector of boxes and their keypoints on a YOLO-format data set that has them."""

    recipe_kind: ClassVar[str] = "pose"
    learns_from_teacher: ClassVar[bool] = False

    data: Path
    """The data set: a data.yaml with train, val, names and kpt_shape, and rows `class cx cy w h x1 y1 [v1] x2 y2 [v2] ...`."""
    model: str = "yolov5n-pose"
    """Architecture: yolov5n-pose to yolov5x-pose, or your .yaml that ends with Pose."""
    keypoint_gain: NonNegativeFloat = 0.1
    """Weight of the loss of the keypoints' places."""
    visible_gain: NonNegativeFloat = 0.01
    """Weight of the loss of which keypoints are there, where labels say it (kpt_shape [K, 3])."""
    keypoint_sigmas: tuple[PositiveFloat, ...] = ()
    """How exact each keypoint is, as a share of the object's size, for loss and score; if not given, COCO's for 17, else 1 / K."""
    cyclic: bool = False
    """Whether any keypoint may be the first, the others following in turn: for outlines that look alike from several sides."""
    keypoint_error: Literal["similarity", "l1"] = "similarity"
    """What the loss of the places measures: the similarity lacking to 1, or the distance in sides of the box."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cyclic and len(set(self.keypoint_sigmas)) > 1:
            raise ValueError(
                f"keypoint_sigmas = {self.keypoint_sigmas}: cyclic keypoints have no numbers of their own, give them all the same"
            )

    def check_data(self) -> None:
        """Lint the data set as for a detector, once it says which keypoints its rows have."""
        from arclight.vision.data.data_yaml import read_data_yaml

        read_data_yaml(self.data).pose_shape()  # else its rows would be blamed
        super().check_data()

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        from arclight.vision.tasks.detection import PoseEstimator

        return PoseEstimator

    @classmethod
    def data_class(cls) -> type[VisionData]:
        from arclight.vision.tasks.detection import PoseData

        return PoseData


@dataclass(frozen=True, kw_only=True)
class CornersTask(PoseTask):
    """Settings of a detector of boxes and their four corners, such as those of payment codes."""

    recipe_kind: ClassVar[str] = "corners"

    data: Path
    """The data set: a data.yaml with train, val, names and kpt_shape [4, 2] or [4, 3], and rows `class cx cy w h x1 y1 [v1] ... x4 y4 [v4]`."""
    model: str = "yolov5n-corners"
    """Architecture: yolov5n-corners to yolov5x-corners, or your .yaml that ends with Corners."""
    cyclic: bool = True
    """Whether any corner may be the first, the others following in turn: codes stand every way."""
    keypoint_sigmas: tuple[PositiveFloat, ...] = (0.05, 0.05, 0.05, 0.05)
    """How exact each corner is, as a share of the object's size, for the score (and a loss by similarity): strict, as a warp goes by them."""
    keypoint_error: Literal["similarity", "l1"] = "l1"
    """What the loss of the places measures: the similarity lacking to 1, or the distance in sides of the box."""

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        from arclight.vision.tasks.detection import CornerDetector

        return CornerDetector

    @classmethod
    def data_class(cls) -> type[VisionData]:
        from arclight.vision.tasks.detection import CornersData

        return CornersData


@dataclass(frozen=True, kw_only=True)
class OrientedDetectionTask(DetectionTask):
    """Train a detector of rotated boxes on a YOLO-format data set of their corners."""

    recipe_kind: ClassVar[str] = "obb"
    linted_rows: ClassVar[Literal["boxes", "oriented"]] = "oriented"
    learns_from_teacher: ClassVar[bool] = False

    data: Path
    """The data set: a data.yaml with train, val and names, and rows `class x1 y1 x2 y2 x3 y3 x4 y4`."""
    model: str = "yolov5n-obb"
    """Architecture: yolov5n-obb to yolov5x-obb, or your .yaml that ends with OBB."""
    iou_threshold: Fraction = 0.45
    """Threshold of non-maximum suppression, in [0, 1], of the probabilistic IoU of rotated boxes."""

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        from arclight.vision.tasks.detection import OrientedDetector

        return OrientedDetector

    @classmethod
    def data_class(cls) -> type[VisionData]:
        from arclight.vision.tasks.detection import OrientedData

        return OrientedData


@dataclass(frozen=True, kw_only=True)
class ClassificationTask(VisionTask):
    """Train a classifier of whole images on folders of images."""

    recipe_kind: ClassVar[str] = "classification"
    learns_from_teacher: ClassVar[bool] = True

    data: Path
    """The data set: a folder with train/CLASS/image.jpg, and so for val and test."""
    model: str = "yolov5n-cls"
    """Architecture: yolov5n-cls to yolov5x-cls, or your .yaml that ends with Classify."""
    image_size: Annotated[int, Interval(ge=32)] = 224
    """Side of the square input, pixels; a multiple of 32."""
    augment: CropAugment = field(default_factory=CropAugment)
    """Random changes to training images."""
    label_smoothing: ProperFraction = 0.1
    """Share of the target that all classes divide among them."""
    dropout: ProperFraction = 0.0
    """Probability of leaving out each of the features before the last layer, in training."""
    teacher_temperature: PositiveFloat = 4.0
    """Temperature at which the teacher's probabilities are learned: a higher one says more about the classes that it thinks less likely."""

    @classmethod
    def module_class(cls) -> type[VisionModule]:
        from arclight.vision.tasks.classification import Classifier

        return Classifier

    @classmethod
    def data_class(cls) -> type[VisionData]:
        from arclight.vision.tasks.classification import ClassificationData

        return ClassificationData
