"""Images: detectors and their data, from labelled photos to boxes drawn on them, and the QRIS payment codes among them.

The YOLOv5 family is described as data in ``zoo`` and runs in ``yolo``; ``loss``, ``boxes`` and ``metrics`` are pure
functions on arrays. A finished prediction is a ``Detections``, whatever produced it.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.vision import qris as qris
    from arclight.vision.data.letterbox import letterbox as letterbox
    from arclight.vision.models.yolov5 import build_model as build_model
    from arclight.vision.models.yolov5 import fuse as fuse
    from arclight.vision.results.detections import Detections as Detections
    from arclight.vision.tasks.detection import Detector as Detector

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Detections": "arclight.vision.results.detections",
        "Detector": "arclight.vision.tasks.detection",
        "build_model": "arclight.vision.models.yolov5",
        "fuse": "arclight.vision.models.yolov5",
        "letterbox": "arclight.vision.data.letterbox",
        "qris": "arclight.vision.qris",
    },
)
