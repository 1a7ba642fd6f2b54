"""Hold one image's detections, from a module, an exported program or a server alike.

``tasks.processing`` makes these of a network's output, for modules, programs and the server; ``inference``, ``tracking`` and ``qris`` take
them. Attribute names are public, and so are the keys of `Detections.to_json` (in files) and the columns of its other forms. Objects are
never changed after they are made.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arclight.fabric.extras import MissingExtraError
from arclight.vision.data.image_headers import ImageError
from arclight.vision.keypoints import SEEN
from arclight.vision.results.masks import Masks
from arclight.vision.rotated import OrientedBoxes

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Boxes:
    """k boxes, most confident first; the arrays cannot be written to."""

    xyxy: Floats
    """(k, 4) left, top, right, bottom in pixels of the image."""
    conf: Floats
    """(k,) confidence in [0, 1]."""
    cls: Floats
    """(k,) class numbers, whole."""

    def __post_init__(self) -> None:
        for name, shape in (("xyxy", (-1, 4)), ("conf", (-1,)), ("cls", (-1,))):
            array = np.array(getattr(self, name), dtype=np.float32).reshape(shape)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not len(self.xyxy) == len(self.conf) == len(self.cls):
            raise ValueError(
                "boxes, confidences and classes must be as many, they are "
                f"{len(self.xyxy)}, {len(self.conf)} and {len(self.cls)}"
            )

    def __len__(self) -> int:
        return len(self.xyxy)

    @property
    def xywh(self) -> Floats:
        """(k, 4) centre x, centre y, width, height in pixels."""
        low, high = self.xyxy[:, :2], self.xyxy[:, 2:]
        return np.concatenate(((low + high) / 2, high - low), axis=1)


@dataclass(frozen=True, eq=False)
class Detections:
    """Detections of one image.

    >>> found = detector.detect([photo])[0]
    >>> found.boxes.xyxy, found.boxes.conf, [found.names[int(c)] for c in found.boxes.cls]
    >>> found.save("found.jpg")
    """

    boxes: Boxes
    names: tuple[str, ...]
    """Class names by number."""
    image: NDArray[np.uint8] | None = None
    """The photo, RGB uint8 (height, width, 3), if it was kept."""
    path: str | None = None
    """File of the photo, if it has one."""
    ids: NDArray[np.int64] | None = None
    """(k,) number of the track that each box belongs to, from 1, if objects are followed through a video."""
    masks: Masks | None = None
    """Mask of each box, from a segmenter."""
    keypoints: Floats | None = None
    """(k, K, 2) x and y in pixels of each box's keypoints, which may lie beside the photo, or (k, K, 3) with how likely each is there."""
    obb: OrientedBoxes | None = None
    """Rotated box of each object, from an oriented detector; ``boxes`` are then the upright ones around them, within the photo."""

    @classmethod
    def from_arrays(
        cls,
        xyxy: ArrayLike,
        conf: ArrayLike,
        labels: ArrayLike,
        *,
        names: Sequence[str],
        image: NDArray[np.uint8] | None = None,
        path: str | Path | None = None,
        masks: Masks | None = None,
        keypoints: ArrayLike | None = None,
        obb: OrientedBoxes | None = None,
    ) -> Detections:
        """Build detections from boxes (k, 4) xyxy in pixels, confidences (k,) and classes (k,).

        They may be in any order; masks, keypoints and angles are of the same boxes. Raises ValueError if these are
        not as many, or a class has no name.
        """
        boxes = Boxes(np.asarray(xyxy), np.asarray(conf), np.asarray(labels))
        order = np.argsort(-boxes.conf, kind="stable")
        boxes = Boxes(boxes.xyxy[order], boxes.conf[order], boxes.cls[order])
        if len(boxes) and not (boxes.cls.min() >= 0 and boxes.cls.max() < len(names)):
            raise ValueError(f"classes must lie in 0 to {len(names) - 1}, there are {np.unique(boxes.cls).tolist()}")
        if masks is not None and len(masks) != len(boxes):
            raise ValueError(f"masks must be as many as boxes, they are {len(masks)} and {len(boxes)}")
        if obb is not None and len(obb) != len(boxes):
            raise ValueError(f"rotated boxes must be as many as boxes, they are {len(obb)} and {len(boxes)}")
        ordered = None if masks is None else masks[order]
        points = None if keypoints is None else np.asarray(keypoints, np.float32)
        if points is not None and not (points.ndim == 3 and len(points) == len(boxes) and points.shape[2] in (2, 3)):
            raise ValueError(
                f"keypoints must be ({len(boxes)}, K, 2 or 3), one of each box, their shape is {points.shape}"
            )
        marked = None if points is None else points[order]
        place, turned = None if path is None else str(path), None if obb is None else obb[order]
        return cls(boxes, tuple(names), image, place, masks=ordered, keypoints=marked, obb=turned)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, chosen: Any) -> Detections:
        """Return some of the boxes, indexed as by NumPy: a number, a slice, a mask or numbers."""
        picked = np.atleast_1d(np.arange(len(self))[chosen])
        boxes = Boxes(self.boxes.xyxy[picked], self.boxes.conf[picked], self.boxes.cls[picked])
        ids = None if self.ids is None else self.ids[picked]
        masks = None if self.masks is None else self.masks[picked]
        keypoints = None if self.keypoints is None else self.keypoints[picked]
        obb = None if self.obb is None else self.obb[picked]
        return dataclasses.replace(self, boxes=boxes, ids=ids, masks=masks, keypoints=keypoints, obb=obb)

    def of(self, *names: str) -> Detections:
        """Return the boxes of the classes named. Raises ValueError for a name that no class has."""
        if unknown := [name for name in names if name not in self.names]:
            raise ValueError(f"{unknown[0]!r} is not a class; choose one of {', '.join(self.names)}")
        return self[np.isin(self.labels, names)] if len(self) else self

    @property
    def labels(self) -> list[str]:
        """The class name of each box."""
        return [self.names[int(c)] for c in self.boxes.cls]

    def summary(self) -> str:
        """Summarise counts by class in a line, as in "2 person, 1 dog"."""
        labels = self.labels
        return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)) or "nothing"

    def plot(self) -> NDArray[np.uint8]:
        """Draw boxes, masks, keypoints, class names and confidences on the photo, RGB.

        Boxes with an angle are drawn rotated. Raises ValueError if the photo was not kept.
        """
        from arclight.vision.results.draw import draw_boxes, draw_keypoints, draw_masks

        if self.image is None:
            raise ValueError("these detections hold no image to draw on: pass image= when making them")
        texts = [f"{label} {confidence:.2f}" for label, confidence in zip(self.labels, self.boxes.conf)]
        if self.ids is not None:
            texts = [f"{number} {text}" for number, text in zip(self.ids.tolist(), texts, strict=True)]
        classes = self.boxes.cls.astype(int).tolist()
        image = self.image if self.masks is None else draw_masks(self.image, self.masks, classes)
        corners = None if self.obb is None else self.obb.corners
        drawn = draw_boxes(image, self.boxes.xyxy, texts, classes, corners)
        return drawn if self.keypoints is None else draw_keypoints(drawn, self.keypoints, classes)

    def crops(self, margin: float = 0.0) -> list[NDArray[np.uint8]]:
        """Crop each box from the photo, RGB, with ``margin`` of its size on every side.

        Parts outside of the photo are left out; a box wholly outside gives an empty crop. Raises ValueError if the
        photo was not kept.
        """
        if self.image is None:
            raise ValueError("these detections hold no image to cut from: pass image= when making them")
        height, width = self.image.shape[:2]
        crops = []
        for left, top, right, bottom in self.boxes.xyxy.tolist():
            across, down = margin * (right - left), margin * (bottom - top)
            x0, x1 = (int(np.clip(x, 0, width)) for x in (np.floor(left - across), np.ceil(right + across)))
            y0, y1 = (int(np.clip(y, 0, height)) for y in (np.floor(top - down), np.ceil(bottom + down)))
            crops.append(self.image[y0:y1, x0:x1].copy())
        return crops

    def to_json(self) -> list[dict[str, Any]]:
        """List the boxes as dictionaries: label, confidence, box_xyxy_px, and id if tracked.

        ``box_xyxy_px`` is (left, top, right, bottom). With masks also outline_xy_px, the points around the largest
        piece of each; with keypoints keypoints_xy_px, and of three numbers keypoint_confidence; of rotated boxes
        obb_xywhr (pixels, radians) and corners_xy_px.
        """
        rows: list[dict[str, Any]] = [
            {"label": label, "confidence": round(float(score), 4), "box_xyxy_px": [round(x, 1) for x in box.tolist()]}
            for label, score, box in zip(self.labels, self.boxes.conf, self.boxes.xyxy)
        ]
        if self.ids is not None:
            rows = [{**row, "id": number} for row, number in zip(rows, self.ids.tolist(), strict=True)]
        for row, outline in zip(rows, self.masks.xy if self.masks is not None else ()):
            row["outline_xy_px"] = outline.tolist()
        for row, points in zip(rows, self.keypoints if self.keypoints is not None else ()):
            row["keypoints_xy_px"] = [[round(value, 1) for value in point[:2]] for point in points.tolist()]
            if points.shape[1] == 3:
                row["keypoint_confidence"] = [round(point[2], 4) for point in points.tolist()]
        if self.obb is not None:
            for row, (*box, angle), corners in zip(
                rows, self.obb.xywhr.tolist(), self.obb.corners.tolist(), strict=True
            ):
                row["obb_xywhr"] = [*(round(value, 1) for value in box), round(angle, 4)]
                row["corners_xy_px"] = [[round(value, 1) for value in corner] for corner in corners]
        return rows

    def to_txt(self, shape: Sequence[int] | None = None) -> str:
        """Write a YOLO label line per box: class, centre and size as shares of the image.

        With masks the outline takes the place of the box, where it has three points, and of a rotated box its four corners do, moved
        into the image; one that has nothing in the image gets no line. Keypoints follow the box, as labels have them;
        a track's id comes last. ``shape``: (height, width, ...) of the image, if it was not kept. Raises ValueError if it is not
        known.
        """
        shape = shape if shape is not None or self.image is None else self.image.shape
        if shape is None:
            raise ValueError("these detections hold no image: give its shape")
        height, width = shape[:2]
        shares = list(self.boxes.xywh / np.array([width, height, width, height], np.float32))
        for number, points in enumerate(self.masks.xyn if self.masks is not None else ()):
            if len(points) >= 3:
                shares[number] = points.flatten()
        if self.keypoints is not None:
            points = _as_labels(self.keypoints, height, width)
            shares = [np.concatenate((row, of_box.flatten())) for row, of_box in zip(shares, points, strict=True)]
        if self.obb is not None:
            corners = self.obb.label_corners((height, width))
            shares = [np.zeros(0) if points is None else points.flatten() for points in corners]
        lines = [
            " ".join([str(int(cls)), *(f"{share:.6g}" for share in row.tolist())])
            for cls, row in zip(self.boxes.cls, shares)
        ]
        if self.ids is not None:
            lines = [f"{line} {number}" for line, number in zip(lines, self.ids.tolist(), strict=True)]
        return "".join(f"{line}\n" for line, row in zip(lines, shares, strict=True) if len(row))

    def save(self, path: str | Path) -> Path:
        """Write ``plot()`` as an image, in the format of the suffix.

        Raises ValueError for a suffix that is none.
        """
        return write_image(path, self.plot())

    def to_coco(self, image_id: int, category_ids: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """List the boxes in COCO's results format: image_id, category_id, bbox, score.

        ``bbox`` is (left, top, width, height). With masks also segmentation, compressed run lengths; with keypoints keypoints.
        ``category_ids``: the data set's number of each class; the class's own if not given.
        """
        rows = []
        for (left, top, right, bottom), score, label in zip(
            self.boxes.xyxy.tolist(), self.boxes.conf.tolist(), self.boxes.cls.astype(int).tolist()
        ):
            category = label if category_ids is None else int(category_ids[label])
            bbox = [left, top, right - left, bottom - top]
            rows.append({"image_id": image_id, "category_id": category, "bbox": bbox, "score": score})
        for row, mask in zip(rows, self.masks.rle if self.masks is not None else ()):
            row["segmentation"] = mask
        for row, points in zip(rows, self.keypoints if self.keypoints is not None else ()):
            row["keypoints"] = [value for point in points.tolist() for value in (*point, 1.0)[:3]]
        return rows

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row per box.

        Its columns are xmin, ymin, xmax, ymax, confidence, class and name. Raises MissingExtraError without pandas.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise MissingExtraError("pandas is not installed; to_pandas needs it: pip install pandas") from error
        columns = dict(zip(("xmin", "ymin", "xmax", "ymax"), self.boxes.xyxy.T))
        more = {"confidence": self.boxes.conf, "class": self.boxes.cls.astype(int), "name": self.labels}
        return pandas.DataFrame(columns | more)


def _as_labels(keypoints: Floats, height: int, width: int) -> Floats:
    """Convert keypoints (k, K, 2 or 3) to YOLO labels: shares of the image, and visibility.

    Visibility is 2 for those that are there, and 0 0 0 stands for the others.
    """
    shares = keypoints.copy()
    shares[..., :2] /= (width, height)
    if keypoints.shape[2] == 3:
        inside = ((shares[..., :2] >= 0) & (shares[..., :2] <= 1)).all(-1)
        shares[..., 2] = 2
        shares[~(inside & (keypoints[..., 2] >= SEEN))] = 0
    return shares.clip(0, 2 if keypoints.shape[2] == 3 else 1)


def write_image(path: str | Path, image: NDArray[np.uint8]) -> Path:
    """Write an RGB image (H, W, 3) in the format of the suffix, atomically.

    Raises ValueError for a suffix that is none, and ImageError for an image that its format cannot hold.
    """
    from arclight.fabric.extras import require

    cv2, path = require("cv2", extra="vision"), Path(path)
    if not cv2.haveImageWriter(path.name):
        raise ValueError(
            f"{path.name}: images are not written as {path.suffix or 'files without suffix'}; use .jpg or .png"
        )
    written, data = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not written:
        height, width = image.shape[:2]
        raise ImageError(f"{path.name}: {path.suffix} does not hold an image of {width} x {height} pixels; use .png")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data.tobytes())
    return partial.replace(path)
