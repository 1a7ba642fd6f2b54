"""Entry points of ``torch.hub.load(CHECKOUT, NAME, source="local")``: detectors of this checkout, and nothing is downloaded.

>>> model = torch.hub.load("path/to/arclight", "custom", path="runs/detect-qris/1/checkpoints/last.ckpt", source="local")
>>> detections = model("photo.jpg")[0]                     # or a list; RGB arrays (H, W, 3) and PIL images too
>>> detections.to_pandas()
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

dependencies = ["torch", "numpy", "cv2", "pydantic", "safetensors"]

if importlib.util.find_spec("arclight") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

COCO_CLASSES = 80


class _HubDetector(torch.nn.Module):
    """A detector that takes photos, as YOLOv5's hub models do; ``detector`` is what it wraps.

    ``conf``, ``iou``, ``agnostic``, ``max_det`` and ``classes`` (numbers of those that are kept; None for all) may be set.
    """

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector.eval()
        used = detector.processing
        self.conf, self.iou = used.conf_threshold, used.iou_threshold
        self.agnostic, self.max_det = used.agnostic, used.max_det
        self.classes: Sequence[int] | None = None

    @property
    def names(self) -> list[str]:
        return list(self.detector.names)

    def forward(self, images: Any, size: int | None = None) -> Any:
        """Detect in one image or several: files, RGB or grey uint8 arrays, PIL images; a list of Detections.

        A tensor (N, 3, H, W) in [0, 1] goes through the network alone. ``size``: side of the square that photos are laid into.
        """
        if isinstance(images, torch.Tensor):
            return self.detector(images)
        import dataclasses

        import numpy as np

        from arclight.vision.boxes import TOP_K

        self._check()
        several = list(images) if isinstance(images, list | tuple) else [images]
        processing = dataclasses.replace(
            self.detector.processing,
            conf_threshold=self.conf,
            iou_threshold=self.iou,
            agnostic=self.agnostic,
            max_det=self.max_det if self.classes is None else max(TOP_K, self.max_det),  # other classes take no places
            **({"image_size": size} if size else {}),
        )
        found = self.detector.detect([_photo(image) for image in several], processing)
        if self.classes is None:
            return found
        return [one[np.isin(one.boxes.cls, self.classes)][: self.max_det] for one in found]

    def _check(self) -> None:
        """Refuse settings that would silently find nothing. Raises ValueError."""
        import numpy as np

        for name in ("conf", "iou"):
            value = getattr(self, name)
            if name == "iou" and value is None:
                continue  # no suppression, as of networks that name an object once
            if not isinstance(value, int | float | np.integer | np.floating) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}: give a number in [0, 1]")
        if not isinstance(self.max_det, int | np.integer) or self.max_det < 1:
            raise ValueError(f"max_det is {self.max_det!r}: give 1 or more")
        known = range(len(self.names))
        chosen = self.classes
        if chosen is not None and (np.ndim(chosen) != 1 or not len(chosen) or any(one not in known for one in chosen)):
            raise ValueError(
                f"classes is {self.classes!r}: give numbers from 0 to {len(self.names) - 1}, or None for all"
            )


def _photo(image: Any) -> Any:
    """Return an image as every reader of Arclight sees it: turned by its EXIF, white where it is transparent."""
    import numpy as np

    from arclight.vision.data.images import MAX_PIXELS, decode_image
    from arclight.vision.inputs.memory_images import is_pil, memory_image

    if isinstance(image, str | Path):
        if "://" in str(image):
            raise ValueError(f"{image}: nothing is downloaded; give a file, an RGB array or a PIL image")
        return decode_image(Path(image))
    return memory_image(image if is_pil(image) else np.asarray(image), MAX_PIXELS)


def _served(detector: Any, autoshape: bool, device: Any) -> torch.nn.Module:
    served = _HubDetector(detector) if autoshape else detector.model
    return served if device is None else served.to(device)


def _entry(name: str) -> Callable[..., torch.nn.Module]:
    def entry(
        pretrained: bool = False,
        classes: int | Sequence[str] = COCO_CLASSES,
        weights: str | None = None,
        autoshape: bool = True,
        device: Any = None,
    ) -> torch.nn.Module:
        from arclight.vision import Detector
        from arclight.vision.tasks.settings import DetectionTask

        if pretrained:
            raise ValueError(
                f"pretrained: nothing is downloaded. Give weights=PATH for {name}, or load a file of yours: "
                'torch.hub.load(CHECKOUT, "custom", path="yolov5s.pt", source="local")'
            )
        names = [str(number) for number in range(classes)] if isinstance(classes, int) else list(classes)
        task = DetectionTask(data=Path("none"), model=name, weights=None if weights is None else Path(weights))
        detector = Detector(task, names=names)
        detector.check_weights()
        return _served(detector, autoshape, device)

    entry.__name__ = name
    entry.__doc__ = f"Build {name} with ``classes`` (a number, or names), from ``weights`` or freshly initialised."
    return entry


yolov5n, yolov5s, yolov5m, yolov5l, yolov5x = map(_entry, ("yolov5n", "yolov5s", "yolov5m", "yolov5l", "yolov5x"))
yolov5n6, yolov5s6, yolov5m6, yolov5l6, yolov5x6 = map(
    _entry, ("yolov5n6", "yolov5s6", "yolov5m6", "yolov5l6", "yolov5x6")
)


def custom(path: str, autoshape: bool = True, device: Any = None) -> torch.nn.Module:
    """Open a detector of yours: a checkpoint of Arclight, or the .pt of YOLOv5, of which nothing is run."""
    from arclight.vision import Detector

    return _served(Detector.load(path), autoshape, device)
