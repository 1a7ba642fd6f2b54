"""Images: detectors and their data, from labelled photos to boxes drawn on them, and the QRIS payment codes among them.

The YOLOv5 family is described as data in ``zoo`` and runs in ``yolo``; ``loss``, ``boxes`` and ``metrics`` are pure
functions on arrays. A finished prediction is a ``Detections``, whatever produced it.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.vision import qris as qris
    from arclight.vision.detections import Detections as Detections
    from arclight.vision.detector import Detector as Detector
    from arclight.vision.letterboxing import letterbox as letterbox
    from arclight.vision.yolo import fuse as fuse
    from arclight.vision.zoo import build_model as build_model

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Detections": "arclight.vision.detections",
        "Detector": "arclight.vision.detector",
        "build_model": "arclight.vision.zoo",
        "fuse": "arclight.vision.yolo",
        "letterbox": "arclight.vision.letterboxing",
        "qris": "arclight.vision.qris",
    },
)
