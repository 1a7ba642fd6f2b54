"""Train, run and score vision models; read, check and draw QRIS payment codes.

Labelled images come in through `data`, photos and videos to predict on through `inputs`; `models` are the networks, `tasks`
train and deploy them, `results` are predictions and their scores. `inference` predicts in tiles, views and ensembles, and draws heat
maps; `tracking` follows objects through a video. `boxes`, `rotated` (with `prob_iou`) and `keypoints` are the geometry that these share,
`anchor_limits` says when an anchor fits a box;
`qris` reads, checks and draws payment codes. Open `tasks.detection` first. What a detector finds is a ``Detections``, whatever produced it;
what a classifier answers is a ``Classification``. The names below are public and must stay.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.vision import qris as qris
    from arclight.vision.data.letterbox import letterbox as letterbox
    from arclight.vision.models.yolov5 import build_model as build_model
    from arclight.vision.models.yolov5 import fuse as fuse
    from arclight.vision.results.detections import Detections as Detections
    from arclight.vision.tasks.classification import Classifier as Classifier
    from arclight.vision.tasks.detection import Detector as Detector
    from arclight.vision.tasks.detection import OrientedDetector as OrientedDetector
    from arclight.vision.tasks.detection import PoseEstimator as PoseEstimator
    from arclight.vision.tasks.detection import Segmenter as Segmenter

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Classifier": "arclight.vision.tasks.classification",
        "Detections": "arclight.vision.results.detections",
        "Detector": "arclight.vision.tasks.detection",
        "OrientedDetector": "arclight.vision.tasks.detection",
        "PoseEstimator": "arclight.vision.tasks.detection",
        "Segmenter": "arclight.vision.tasks.detection",
        "build_model": "arclight.vision.models.yolov5",
        "fuse": "arclight.vision.models.yolov5",
        "letterbox": "arclight.vision.data.letterbox",
        "qris": "arclight.vision.qris",
    },
)
