"""Letterbox an image into a square, keeping its aspect ratio, and map boxes back.

`dataset` letterboxes images of validation, ``tasks.processing`` those to predict, also for exported programs, and maps boxes back; `augment`
fills with the same grey. Rounding and grey must stay, or trained models and old programs see other pixels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arclight.fabric.extras import require

cv2 = require("cv2", extra="vision")

GREY = 114
"""Padding around an image; close to the mean of photographs, so that it excites nothing."""

Frame = tuple[int, int]
"""(height, width) of a batch, pixels."""
Letterbox = tuple[float, int, int]
"""(scale, pad_x, pad_y): ``x_square = x_original * scale + pad_x``, all in pixels."""


def scaled_shape(shape: tuple[int, int], size: int) -> tuple[float, int, int]:
    """Return scale, height and width at which an image fits into a square of ``size``.

    Sizes are in whole pixels, ``shape`` is (height, width).
    """
    height, width = shape
    scale = min(size / height, size / width)
    return scale, max(round(height * scale), 1), max(round(width * scale), 1)


def letterbox(image: NDArray[np.uint8], size: int, frame: Frame | None = None) -> tuple[NDArray[np.uint8], Letterbox]:
    """Scale and centre ``image`` (height, width, 3) in a grey square of ``size`` pixels.

    ``frame`` (height, width) in place of the square cuts grey margins off; it must hold the scaled image. Returns the square
    (size, size, 3), or the frame, and ``(scale, pad_x, pad_y)``. Whole pixels hold the scaled image, so at its
    far edge the scale is exact to half a pixel of the square.
    """
    height, width = image.shape[:2]
    scale, new_height, new_width = scaled_shape((height, width), size)
    full_height, full_width = (size, size) if frame is None else frame
    pad_x, pad_y = (full_width - new_width) // 2, (full_height - new_height) // 2
    square = np.full((full_height, full_width, 3), GREY, np.uint8)
    inside = square[pad_y : pad_y + new_height, pad_x : pad_x + new_width]
    if (new_height, new_width) == (height, width):
        inside[:] = image
    else:
        interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        inside[:] = cv2.resize(image, (new_width, new_height), interpolation=interpolation)
    return square, (scale, pad_x, pad_y)


def unletterbox(boxes: ArrayLike, placed: Letterbox, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Map ``boxes`` (k, 4) xyxy from the letterbox back to the original image.

    ``shape``: (height, width) of the original. The inverse of what ``letterbox`` does to coordinates, float32; what
    lies in the padding is clipped to the image.
    """
    scale, pad_x, pad_y = placed
    height, width = shape
    result = (np.asarray(boxes, np.float64).reshape(-1, 4) - (pad_x, pad_y, pad_x, pad_y)) / scale
    return result.clip(0, (width, height, width, height)).astype(np.float32)
