"""Answer a photo with the boxes that a detector finds and the payment codes read in them.

`app` calls `answer` for ``POST /detect``, whose JSON the dataclasses are, and `records` for the path of YOLOv5's REST example. The detector
comes from `models` or from the caller of `create_app`. Keys of the JSON are public and stay; the page reads those of ``/detect``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from arclight.serve.admission import Refusal, one_sentence
from arclight.serve.settings import Limits

if TYPE_CHECKING:
    from arclight.vision.data.images import Image
    from arclight.vision.results.detections import Detections


Detect: TypeAlias = "Callable[[Image], Detections]"


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class Box:
    xyxy_px: tuple[float, float, float, float]
    """Left, top, right, bottom in pixels of the photo as it is shown (after its EXIF rotation)."""
    confidence: float
    """In [0, 1]."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Milliseconds:
    decode: float
    detect: float
    scan: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Boxes found in a photo, and the codes read in it."""

    image: Size
    boxes: list[Box]
    codes: list[dict[str, Any]]
    """One object per code: corners_px, box_xyxy_px, confidence, text, kind, payload, problems."""
    milliseconds: Milliseconds


def answer(photo: bytes, detector: Detect, limits: Limits, stop: Callable[[], bool]) -> Answer:
    """Decode, detect and read codes until ``stop()``.

    Raises Refusal 422 if ``photo`` is no readable image.
    """
    from arclight.vision.qris import scan

    started = time.perf_counter()
    image = decode(photo, limits)
    decoded = time.perf_counter()
    detections = detector(image)
    detected = time.perf_counter()

    codes = scan(image, lambda _: top_k(detections, limits.codes), stop=stop)
    scanned = time.perf_counter()
    return Answer(
        image=Size(width=image.shape[1], height=image.shape[0]),
        boxes=boxes(detections),
        codes=[code.to_json() for code in codes],
        milliseconds=Milliseconds(
            decode=milliseconds(started, decoded),
            detect=milliseconds(decoded, detected),
            scan=milliseconds(detected, scanned),
            total=milliseconds(started, scanned),
        ),
    )


def decode(photo: bytes, limits: Limits) -> Image:
    """Decode a photo; raises Refusal 422 if it is no readable image."""
    from arclight.vision.data.images import ImageError, decode_image

    try:
        return decode_image(photo, max_pixels=limits.pixels)
    except ImageError as error:
        raise Refusal(422, one_sentence(error)) from None


def top_k(detections: Detections, most: int) -> Detections:
    """Keep the ``most`` boxes of highest confidence, with all that belongs to them."""
    return detections[np.argsort(-detections.boxes.conf, kind="stable")[:most]]


def boxes(detections: Detections) -> list[Box]:
    found = detections.boxes
    return [
        Box(
            xyxy_px=(round(left, 1), round(top, 1), round(right, 1), round(bottom, 1)),
            confidence=round(confidence, 4),
            label=detections.names[int(category)],
        )
        for (left, top, right, bottom), confidence, category in zip(
            found.xyxy.tolist(), found.conf.tolist(), found.cls.tolist(), strict=True
        )
    ]


def milliseconds(start: float, end: float) -> float:
    return round((end - start) * 1000, 2)


def records(photo: bytes, detector: Detect, limits: Limits) -> list[dict[str, Any]]:
    """Return the boxes as YOLOv5's REST example does, one record for each.

    Raises Refusal 422 as `answer` does.
    """
    found = detector(decode(photo, limits))
    keys = ("xmin", "ymin", "xmax", "ymax")
    return [
        {
            **dict(zip(keys, box.xyxy_px, strict=True)),
            "confidence": box.confidence,
            "class": int(number),
            "name": box.label,
        }
        for box, number in zip(boxes(found), found.boxes.cls.tolist(), strict=True)
    ]
