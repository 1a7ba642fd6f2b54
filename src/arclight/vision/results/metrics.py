"""Compute validation metrics: COCO's average precision, confusion, top-1 and top-5.

The numbers are those of pycocotools for boxes (no crowd regions) on the same detections, which a test compares to: `IOU_THRESHOLDS`,
`RECALL_GRID`, `MAX_DETECTIONS` and the rules of `assign` and `precision_at_recall` are COCO's. ``tasks.module`` (`VisionModule`, `evaluate`)
adds the batches of a validation to a ``...Metrics`` object and logs what its ``compute()`` returns; `analysis`, `comparison` and `plots`
read it. Names of `summary` are public.

Shapes: C classes, T = 10 IoU thresholds, k predictions and m true boxes of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from arclight.vision.boxes import box_iou, nms
from arclight.vision.results.image_class import SHOWN
from arclight.vision.results.masks import Masks, mask_iou

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

IOU_THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
IOU_75 = 5
"""Index of 0.75 in `IOU_THRESHOLDS`."""
RECALL_GRID: Floats = np.linspace(0, 1, 101)
CONFIDENCE_GRID: Floats = np.linspace(0, 1, 1001)
MAX_DETECTIONS = 100
"""Most predictions of a class in an image that count, most confident first (COCO)."""
CONFUSION_CONFIDENCE, CONFUSION_IOU = 0.25, 0.45
"""Confidence above which the confusion matrix counts predictions, and IoU above which it matches them (YOLOv5's)."""
CONFIDENCE_FLOOR = 0.001
"""Confidence above which predictions are scored (YOLOv5's): lower ones cost time, and hardly change average precision."""
EVALUATION_IOU = 0.6
"""IoU above which non-maximum suppression drops the less confident of two boxes of a class before scoring."""


class ImageRecord(NamedTuple):
    """One image of an evaluation, in pixels of the file."""

    path: str
    shape: tuple[int, int]
    """Height and width."""
    predicted: Floats
    """(k, 6) xyxy, confidence, class: the predictions that average precision uses, most confident first."""
    true: Floats
    """(m, 5) class, xyxy."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionResults:
    """Scores of a detector.

    Classes without a true box have no average precision: NaN, left out of every mean.
    """

    map50: float
    """Mean over classes of average precision at an IoU of 0.5; NaN if there is no true box at all."""
    map50_95: float
    """The same, averaged over IoU thresholds 0.50, 0.55 ... 0.95."""
    confidence: float
    """The confidence threshold with the best F1, averaged over classes, at an IoU of 0.5."""
    precision: float
    """Mean precision at ``confidence``."""
    recall: float
    """Mean recall at ``confidence``."""
    f1: float
    """Mean F1 at ``confidence``."""
    average_precision: Floats
    """(C, T) by class and IoU threshold."""
    precision_at_recall: Floats
    """(C, 101) precision at recall 0, 0.01 ... 1 and an IoU of 0.5: the precision-recall curve."""
    precision_curve: Floats
    """(C, 1001) precision at confidence thresholds 0, 0.001 ... 1 and an IoU of 0.5."""
    recall_curve: Floats
    """(C, 1001) recall at the same thresholds."""
    f1_curve: Floats
    """(C, 1001) F1 at the same thresholds."""
    confusion: Ints
    """(C + 1, C + 1) counts at confidence 0.25 and IoU 0.45: rows are predicted classes, columns true ones; the last of each is background."""
    labels: Ints
    """(C,) true boxes."""
    images: int
    """Images seen."""
    records: tuple[ImageRecord, ...] = ()
    """The boxes of each image, where they were kept: see `records`."""

    @property
    def class_scores(self) -> Floats:
        """Return the average precision of each class (C,), over IoU thresholds 0.50 to 0.95."""
        scores: Floats = self.average_precision.mean(axis=1)
        return scores

    @property
    def map75(self) -> float:
        """mAP75, the mean over classes of average precision at an IoU of 0.75.

        NaN if there is no true box at all.
        """
        strict = self.average_precision[self.labels > 0, IOU_75]
        return float(strict.mean()) if len(strict) else float("nan")

    def summary(self) -> dict[str, float]:
        """Return the headline numbers by name, for logs and JSON."""
        names = ("map50", "map50_95", "precision", "recall", "f1", "confidence")
        return {name: float(getattr(self, name)) for name in names}


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationResults:
    """Scores of a segmenter: of its boxes, and of its masks."""

    boxes: DetectionResults
    masks: DetectionResults

    @property
    def images(self) -> int:
        return self.boxes.images

    @property
    def class_scores(self) -> Floats:
        """Return the average precision of each class (C,), of masks."""
        return self.masks.class_scores

    def summary(self) -> dict[str, float]:
        """Return the headline numbers by name, for logs and JSON: of masks first."""
        masks = {f"mask_{name}": value for name, value in self.masks.summary().items()}
        return masks | self.boxes.summary()


class _Image(NamedTuple):
    """Matches of one image, kept for `DetectionMetrics.compute`."""

    scores: Floats
    """(k,)"""
    classes: Ints
    """(k,)"""
    hits: Bools
    """(k, T) whether the prediction is a true positive: the first that matches a true box of its class."""
    ignored: Bools
    """(k, T) whether it matches a true box that is ignored, and so is neither right nor wrong."""
    labels: Ints
    """(m,) classes of the true boxes."""
    confused: Ints
    """(n, 2) predicted and true class of matched boxes; C in place of the class that is missing."""


class DetectionMetrics:
    """Collect predictions image by image, then score them together.

    >>> metrics = DetectionMetrics(num_classes=1)
    >>> metrics.update([predictions], [truths])           # one (k, 6) and one (m, 5) array per image
    >>> metrics.compute().map50

    Processes that share a validation set exchange ``state_dict()`` and ``merge`` what they get. With ``image_ids`` the
    result does not depend on who saw which image, and an image seen twice (samplers pad) counts once.
    """

    def __init__(
        self,
        num_classes: int,
        iou_threshold: float | None = EVALUATION_IOU,
        *,
        max_detections: int = MAX_DETECTIONS,
    ) -> None:
        """Initialise empty metrics.

        ``iou_threshold``: of non-maximum suppression in `update_output`; None for networks with one prediction per
        object.
        """
        self.num_classes, self.iou_threshold, self.max_detections = num_classes, iou_threshold, max_detections
        self.reset()

    def reset(self) -> None:
        """Reset the metrics to no images."""
        self._named: dict[int, _Image] = {}
        self._unnamed: list[_Image] = []

    def __len__(self) -> int:
        return len(self._named) + len(self._unnamed)

    def update(
        self,
        predictions: Sequence[ArrayLike],
        truths: Sequence[ArrayLike],
        image_ids: Sequence[int] | None = None,
        overlaps: Sequence[Floats] | None = None,
        ignored: Sequence[Bools] | None = None,
    ) -> None:
        """Add images: predictions (k, 6), xyxy, confidence, class; true boxes (m, 5), class, xyxy.

        Arrays or tensors on any device; any one unit of length. ``image_ids`` are non-negative numbers of the images in
        the data set. ``overlaps``: (k, m) of each image, in place of the IoU of its boxes (of masks, say). ``ignored``: (m,)
        True for true boxes that count neither as found nor as missed. Raises ValueError for arrays of other shapes and for classes
        that do not exist.
        """
        ids = [-1] * len(truths) if image_ids is None else [int(i) for i in image_ids]
        given = [None] * len(truths) if overlaps is None else overlaps
        flags = [None] * len(truths) if ignored is None else ignored
        for image_id, predicted, true, overlap, ignore in zip(ids, predictions, truths, given, flags, strict=True):
            rows, boxes = _rows(predicted, 6, "predictions"), _rows(true, 5, "truths")
            self._add(image_id, self._observe(rows, boxes, overlap, ignore))

    def update_output(self, output: Tensor, batch: dict[str, Any]) -> None:
        """Add a batch of decoded predictions (N, A, 5 + C), in pixels of its square images."""
        kept = nms(output, CONFIDENCE_FLOOR, self.iou_threshold, multi_label=self.num_classes > 1)
        self.observe_batch(kept, batch)

    def observe_batch(self, predictions: Sequence[Tensor], batch: dict[str, Any]) -> None:
        """Add a batch of a data set: each image's predictions (k, 6) in pixels of its square."""
        self.update_batch(predictions, batch["targets"], size=batch["images"].shape[-2:])

    def update_batch(
        self,
        predictions: Sequence[Tensor],
        targets: Tensor,
        size: int | Sequence[int],
        image_ids: Sequence[int] | None = None,
    ) -> None:
        """Add a batch of predictions (k, 6) per image, in pixels of the square, and its targets.

        targets: (M, 6) image in batch, class, centre x, centre y, width, height as shares of ``size``:
        the pixels of the square's side, or of (height, width).
        """
        rows = targets.detach().cpu().double().numpy()
        low, high = rows[:, 2:4] - rows[:, 4:6] / 2, rows[:, 2:4] + rows[:, 4:6] / 2
        width_height = np.broadcast_to(size, 2)[::-1]
        truths = np.concatenate((rows[:, 1:2], low * width_height, high * width_height), axis=1)
        # one transfer for the whole batch
        found = torch.cat([p.detach() for p in predictions]).cpu().double().numpy() if len(predictions) else np.empty(0)
        ends = np.cumsum([len(p) for p in predictions])
        self.update(
            np.split(found, ends[:-1]) if len(predictions) else [],
            [truths[rows[:, 0] == i] for i in range(len(predictions))],
            image_ids,
        )

    def _observe(self, predicted: Floats, true: Floats, overlap: Floats | None, ignored: Bools | None) -> _Image:
        """Match one image's predictions to its true boxes, by IoU unless ``overlap`` is given."""
        order = np.argsort(-predicted[:, 4], kind="stable")
        predicted = predicted[order]
        scores, classes, labels = predicted[:, 4], predicted[:, 5].astype(np.int64), true[:, 0].astype(np.int64)
        for what, numbers in (("prediction", classes), ("true box", labels)):
            strange = numbers[(numbers < 0) | (numbers >= self.num_classes)]
            if len(strange):
                raise ValueError(
                    f"a {what} has class {strange[0]}, but classes are numbered 0 to {self.num_classes - 1}"
                )
        if overlap is None:
            iou = box_iou(torch.from_numpy(predicted[:, :4]), torch.tensor(true[:, 1:])).numpy()
        else:
            iou = overlap[order]
        ignored = np.zeros(len(labels), np.bool_) if ignored is None else ignored
        hits = np.zeros((len(predicted), len(IOU_THRESHOLDS)), np.bool_)
        on_ignored = np.zeros_like(hits)
        counted = np.zeros(len(predicted), np.bool_)
        for c in np.unique(classes):
            of_class, own = np.flatnonzero(classes == c)[: self.max_detections], np.flatnonzero(labels == c)
            counted[of_class] = True
            found = assign(iou[np.ix_(of_class, own)], ignored[own])
            is_ignored = np.append(ignored[own], False)[found]  # -1, no box, takes the last
            hits[of_class], on_ignored[of_class] = (found >= 0) & ~is_ignored, is_ignored
        sure, labels = scores > CONFUSION_CONFIDENCE, labels[~ignored]
        confused = confusions(iou[sure][:, ~ignored], classes[sure], labels, background=self.num_classes)
        return _Image(scores[counted], classes[counted], hits[counted], on_ignored[counted], labels, confused)

    def _add(self, image_id: int, image: _Image) -> None:
        if image_id < 0:
            self._unnamed.append(image)
        else:
            self._named.setdefault(image_id, image)

    def state_dict(self) -> dict[str, Any]:
        """Return all images as a few plain arrays, to be sent to another process or kept."""
        ids, images = [*self._named, *[-1] * len(self._unnamed)], [*self._named.values(), *self._unnamed]
        state: dict[str, Any] = {"num_classes": self.num_classes, "image_ids": np.array(ids, np.int64)}
        for field, empty in _EMPTY._asdict().items():
            parts = [getattr(image, field) for image in images]
            state[field] = np.concatenate([empty, *parts])
            state[f"{field}_lengths"] = np.array([len(part) for part in parts], np.int64)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all images by those of a ``state_dict()``."""
        self.reset()
        self.merge(state)

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images of another process's ``state_dict()``, without duplicates by id."""
        if state["num_classes"] != self.num_classes:
            raise ValueError(f"cannot merge metrics of {state['num_classes']} classes into {self.num_classes}")
        fields = (np.split(state[field], np.cumsum(state[f"{field}_lengths"])[:-1]) for field in _Image._fields)
        for image_id, parts in zip(state["image_ids"].tolist(), zip(*fields)):
            self._add(image_id, _Image(*parts))

    def compute(self) -> DetectionResults:
        """Score everything seen so far."""
        images = [self._named[i] for i in sorted(self._named)] + self._unnamed
        scores, classes, hits, ignored, labels, confused = (
            np.concatenate([empty, *(getattr(image, field) for image in images)])
            for field, empty in _EMPTY._asdict().items()
        )
        counts = np.bincount(labels, minlength=self.num_classes)
        ap = np.full((self.num_classes, len(IOU_THRESHOLDS)), np.nan)
        pr = np.full((self.num_classes, len(RECALL_GRID)), np.nan)
        curves = np.full((3, self.num_classes, len(CONFIDENCE_GRID)), np.nan)
        order = np.argsort(-scores, kind="stable")
        for c in np.flatnonzero(counts):
            of_class = order[classes[order] == c]
            at_recall = precision_at_recall(hits[of_class], int(counts[c]), ignored[of_class])
            ap[c], pr[c] = at_recall.mean(axis=1), at_recall[0]
            of_class = of_class[~ignored[of_class, 0]]
            curves[:, c] = confidence_curves(scores[of_class], hits[of_class, 0], int(counts[c]))
        present = counts > 0
        mean = curves[:, present].mean(axis=1) if present.any() else np.full((3, len(CONFIDENCE_GRID)), np.nan)
        best = int(np.argmax(mean[2]))
        confusion = np.zeros((self.num_classes + 1, self.num_classes + 1), np.int64)
        np.add.at(confusion, tuple(confused.T), 1)
        return DetectionResults(
            map50=float(ap[present, 0].mean()) if present.any() else float("nan"),
            map50_95=float(ap[present].mean()) if present.any() else float("nan"),
            confidence=float(CONFIDENCE_GRID[best]),
            precision=float(mean[0, best]),
            recall=float(mean[1, best]),
            f1=float(mean[2, best]),
            average_precision=ap,
            precision_at_recall=pr,
            precision_curve=curves[0],
            recall_curve=curves[1],
            f1_curve=curves[2],
            confusion=confusion,
            labels=counts.astype(np.int64),
            images=len(images),
        )


_EMPTY = _Image(
    scores=np.empty(0),
    classes=np.empty(0, np.int64),
    hits=np.empty((0, len(IOU_THRESHOLDS)), np.bool_),
    ignored=np.empty((0, len(IOU_THRESHOLDS)), np.bool_),
    labels=np.empty(0, np.int64),
    confused=np.empty((0, 2), np.int64),
)


def _rows(array: ArrayLike, width: int, what: str) -> Floats:
    """Return ``array`` as float64 (n, width); an empty one may have any shape."""
    rows = np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array, dtype=np.float64)
    if rows.size == 0:
        return rows.reshape(0, width)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"{what} of an image must have shape (n, {width}), their shape is {rows.shape}")
    return rows


def match(iou: Floats) -> Bools:
    """Match predictions to the true boxes of their class: (k, T) hits, by IoU (k, m).

    See `assign`.
    """
    return assign(iou) >= 0


def assign(iou: Floats, ignored: Bools | None = None) -> Ints:
    """Assign predictions to true boxes of their class by IoU (k, m): (k, T) index, -1 for none.

    Predictions must be sorted, most confident first. At each threshold a prediction takes the free true box that it overlaps most, of
    equal ones the last (pycocotools); one of those ``ignored`` (m,) only if no other is left.
    """
    k, m = iou.shape
    taken = np.full((k, len(IOU_THRESHOLDS)), -1, np.int64)
    if m == 0:
        return taken
    free = np.ones((len(IOU_THRESHOLDS), m), np.bool_)
    every = np.arange(len(IOU_THRESHOLDS))
    for i in np.flatnonzero(iou.max(axis=1) >= IOU_THRESHOLDS[0]):
        possible = free & (iou[i] >= IOU_THRESHOLDS[:, None])
        if ignored is not None:
            counting = possible & ~ignored
            possible = np.where(counting.any(axis=1)[:, None], counting, possible)
        best = m - 1 - np.argmax(np.where(possible, iou[i], -1)[:, ::-1], axis=1)
        found = possible[every, best]
        taken[i, found] = best[found]
        free[every[found], best[found]] = False
    return taken


def confusions(iou: Floats, predicted: Ints, true: Ints, background: int) -> Ints:
    """Pair boxes by descending IoU: (n, 2) predicted and true class.

    ``background`` stands for the class of a missing partner.
    """
    candidates = np.argwhere(iou > CONFUSION_IOU)
    candidates = candidates[np.argsort(-iou[tuple(candidates.T)], kind="stable")]
    unmatched_predicted, unmatched_true = dict.fromkeys(range(len(predicted))), dict.fromkeys(range(len(true)))
    pairs = []
    for p, t in candidates.tolist():
        if p in unmatched_predicted and t in unmatched_true:
            del unmatched_predicted[p], unmatched_true[t]
            pairs.append((predicted[p], true[t]))
    pairs += [(predicted[p], background) for p in unmatched_predicted]
    pairs += [(background, true[t]) for t in unmatched_true]
    return np.array(pairs, np.int64).reshape(-1, 2)


def precision_at_recall(hits: Bools, positives: int, ignored: Bools | None = None) -> Floats:
    """Compute the precision (T, 101) at each recall of the grid, for ``hits`` (k, T).

    Hits are ordered by confidence, the highest first. ``ignored`` (k, T) predictions count neither as right nor as
    wrong.

    The highest precision reached at that recall or beyond, 0 for a recall never reached (COCO's 101 points).
    """
    found = np.cumsum(hits, axis=0, dtype=np.float64)
    recall = found / positives
    seen = np.arange(1, len(hits) + 1)[:, None]
    if ignored is not None:
        seen = seen - np.cumsum(ignored, axis=0)
    precision = found / (seen + np.spacing(1))
    precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    out = np.zeros((hits.shape[1], len(RECALL_GRID)))
    for t in range(hits.shape[1]):
        first = np.searchsorted(recall[:, t], RECALL_GRID, side="left")
        reached = first < len(hits)
        out[t, reached] = precision[first[reached], t]
    return out


def confidence_curves(scores: Floats, hits: Bools, positives: int) -> Floats:
    """Compute (3, 1001) precision, recall and F1 at each confidence of the grid; scores descend."""
    kept = np.searchsorted(-scores, -CONFIDENCE_GRID, side="right")
    found = np.concatenate(([0], np.cumsum(hits)))[kept]
    precision = found / np.maximum(kept, 1)
    recall = found / positives
    return np.stack((precision, recall, 2 * found / (kept + positives)))


class SegmentationMetrics:
    """Collect boxes and masks image by image, then score both as `DetectionMetrics` does boxes."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.boxes, self.masks = DetectionMetrics(num_classes), DetectionMetrics(num_classes)

    def reset(self) -> None:
        """Reset the metrics to no images."""
        self.boxes.reset()
        self.masks.reset()

    def update_output(self, output: tuple[Tensor, Tensor], batch: dict[str, Any]) -> None:
        """Add a batch of decoded rows (N, A, 5 + C + P) and prototypes (N, P, h, w)."""
        rows, prototypes = output
        size, extra = batch["images"].shape[-1], prototypes.shape[1]
        kept = nms(rows, CONFIDENCE_FLOOR, EVALUATION_IOU, multi_label=self.num_classes > 1, extra=extra)
        self.boxes.update_batch([k[:, :6] for k in kept], batch["targets"], size=size)
        targets = batch["targets"].cpu().double().numpy()
        stride = size / prototypes.shape[-1]
        for number, (found, maps) in enumerate(zip(kept, prototypes)):
            array, true = found.cpu().numpy(), targets[targets[:, 0] == number]
            masks = Masks.from_prototypes(array[:, 6:], maps.cpu().numpy(), array[:, :4], (size, size), stride)
            self.update(
                array[:, 4],
                array[:, 5],
                masks,
                true[:, 1],
                Masks.from_outlines(batch["outlines"][number], (size, size)),
            )

    def update(self, conf: ArrayLike, cls: ArrayLike, masks: Masks, true_cls: ArrayLike, true_masks: Masks) -> None:
        """Add the masks of one image: k found, with confidences and classes, and m true ones."""
        score, label, truth = (np.asarray(array, np.float64) for array in (conf, cls, true_cls))
        rows = np.concatenate((np.zeros((len(score), 4)), score[:, None], label[:, None]), axis=1)
        self.masks.update(
            [rows],
            [np.concatenate((truth[:, None], np.zeros((len(truth), 4))), axis=1)],
            overlaps=[mask_iou(masks, true_masks)],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all images as a few plain arrays, to be sent to another process or kept."""
        return {"boxes": self.boxes.state_dict(), "masks": self.masks.state_dict()}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images of another process's ``state_dict()``."""
        self.boxes.merge(state["boxes"])
        self.masks.merge(state["masks"])

    def compute(self) -> SegmentationResults:
        """Score everything seen so far."""
        return SegmentationResults(boxes=self.boxes.compute(), masks=self.masks.compute())


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassificationResults:
    """Scores of a classifier; NaN if there is no image."""

    top1: float
    """Share of images whose most probable class is the true one."""
    top5: float
    """Share of images whose true class is among the five most probable."""
    accuracy: NDArray[np.float64]
    """(C,) top-1 by true class; NaN for classes without an image."""
    confusion: Ints
    """(C, C) counts: rows are predicted classes, columns true ones."""
    images: int
    """Images seen."""

    @property
    def class_scores(self) -> Floats:
        """Return the accuracy of each class (C,)."""
        return self.accuracy

    def summary(self) -> dict[str, float]:
        """Return the headline numbers by name, for logs and JSON."""
        return {"top1": self.top1, "top5": self.top5}


class ClassificationMetrics:
    """Collect probabilities batch by batch, then score them together.

    Processes that share a validation set exchange ``state_dict()`` and ``merge`` what they get.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        """Reset the metrics to no images."""
        self._guesses, self._targets = [np.empty((0, min(SHOWN, self.num_classes)), np.int64)], [np.empty(0, np.int64)]

    def update_output(self, output: Tensor, batch: dict[str, Any]) -> None:
        """Add a batch, from its probabilities (N, C)."""
        self.update(output.detach().float().cpu().numpy(), batch["targets"].cpu().numpy())

    def update(self, probs: ArrayLike, targets: ArrayLike) -> None:
        """Add images: probabilities (N, C), or any increasing function of them, and classes (N,).

        Raises ValueError for other shapes and for classes that do not exist.
        """
        scores, true = np.asarray(probs, np.float64), np.asarray(targets, np.int64)
        if scores.ndim != 2 or scores.shape != (len(true), self.num_classes):
            raise ValueError(f"probs must be ({len(true)}, {self.num_classes}), their shape is {scores.shape}")
        if len(strange := true[(true < 0) | (true >= self.num_classes)]):
            raise ValueError(f"an image has class {strange[0]}, but classes are numbered 0 to {self.num_classes - 1}")
        self._guesses.append(np.argsort(-scores, axis=1, kind="stable")[:, :SHOWN])
        self._targets.append(true)

    def state_dict(self) -> dict[str, Any]:
        """Return all images as a few plain arrays, to be sent to another process or kept."""
        return {
            "num_classes": self.num_classes,
            "guesses": np.concatenate(self._guesses),
            "targets": np.concatenate(self._targets),
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the images of another process's ``state_dict()``."""
        if state["num_classes"] != self.num_classes:
            raise ValueError(f"cannot merge metrics of {state['num_classes']} classes into {self.num_classes}")
        self._guesses.append(state["guesses"])
        self._targets.append(state["targets"])

    def compute(self) -> ClassificationResults:
        """Score everything seen so far."""
        guesses, targets = np.concatenate(self._guesses), np.concatenate(self._targets)
        hits = guesses == targets[:, None]
        confusion = np.zeros((self.num_classes, self.num_classes), np.int64)
        np.add.at(confusion, (guesses[:, 0], targets), 1)
        counts = confusion.sum(axis=0)
        accuracy = np.divide(np.diag(confusion), counts, out=np.full(self.num_classes, np.nan), where=counts > 0)
        return ClassificationResults(
            top1=float(hits[:, 0].mean()) if len(targets) else float("nan"),
            top5=float(hits.any(axis=1).mean()) if len(targets) else float("nan"),
            accuracy=accuracy,
            confusion=confusion,
            images=len(targets),
        )
