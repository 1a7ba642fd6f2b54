"""Convert images in memory to RGB arrays: arrays, tensors, PIL images and encoded bytes.

`image_source` calls this for arrays, tensors, PIL images and bytes; `live` raises `SourceError` too, and ``arclight predict`` catches it. RGB
uint8 (height, width, 3) goes out. PIL images and tensors are recognised only if their packages have been imported already.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from arclight.fabric.extras import require
from arclight.vision.data.images import Image, ImageError, decode_image

cv2 = require("cv2", extra="vision")


class SourceError(ValueError):
    """An input for prediction does not exist or cannot hold images."""


def is_pil(source: Any) -> bool:
    """Return True for an image of Pillow, which need not be installed."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(source, pillow.Image)


def is_tensor(source: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.Tensor)


def checked_array(array: Any) -> Image:
    """Return an array as RGB (height, width, 3); SourceError unless it is uint8, RGB or grey."""
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] != 3)
        or not array.size
    ):
        given = f"array of shape {array.shape} and type {array.dtype}"
        raise SourceError(f"{given}: give uint8 of (height, width, 3) RGB or (height, width) grey")
    return array if array.ndim == 3 else np.repeat(array[:, :, None], 3, axis=2)


def tensor_images(tensor: Any) -> list[Image]:
    """Return the images of a tensor (C, H, W) or (N, C, H, W), C = 1 or 3.

    Values are uint8, or float in [0, 1]. Raises SourceError for other shapes and types, and for floats that are NaN or
    outside of [0, 1].
    """
    given = f"tensor of shape {tuple(tensor.shape)} and type {str(tensor.dtype).removeprefix('torch.')}"
    batch = tensor.detach()[None] if tensor.ndim == 3 else tensor.detach()
    if batch.ndim != 4 or batch.shape[1] not in (1, 3) or not batch.numel():
        raise SourceError(f"{given}: give (3, height, width) RGB or (N, 3, height, width), or 1 channel of grey")
    if batch.is_floating_point():
        floats = batch.float().cpu()
        low, high = floats.amin().item(), floats.amax().item()
        if not (low >= 0 and high <= 1):  # NaN is in no range
            raise SourceError(f"{given} holds {low:g} to {high:g}: give floats in [0, 1], or uint8 in 0 to 255")
        array = (floats * 255).round().numpy().astype(np.uint8)
    elif str(batch.dtype) == "torch.uint8":
        array = batch.cpu().numpy()
    else:
        raise SourceError(f"{given}: give uint8, or floats in [0, 1]")
    channels_last = array.transpose(0, 2, 3, 1)
    return [np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3))) for image in channels_last]


def pil_image(image: Any, max_pixels: int) -> Image:
    """Convert a PIL image to RGB, turned by its EXIF, on white where it is transparent.

    Of an animation it is the picture that the image stands at. Raises ImageError if it cannot be read, and for numbers that
    are neither of 8 nor of 16 bits, as of a file that has such, or may be of both.
    """
    from PIL import ImageOps

    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            f"PIL image of {width} x {height} pixels ({width * height / 1e6:.1f} million) is too large: "
            f"at most {max_pixels / 1e6:g} million are read; scale it down"
        )
    if not width * height:
        raise ImageError(f"PIL image of {width} x {height} pixels: it has no area")
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16") or upright.mode in ("I", "F"):
            numbers = np.asarray(upright)
            low, high = numbers.min(), numbers.max()
            if upright.mode == "F" or low < 0 or high > 65535:
                raise ImageError(
                    f"PIL image of mode {upright.mode} holds {low:g} to {high:g}, which have no 8-bit meaning of their own: convert it to L or RGB"
                )
            if upright.mode == "I" and image.format != "PNG" and 0 < high < 256:  # of a PNG, Pillow 10 gave 16 bits so
                raise ImageError(
                    f"PIL image of mode I holds {low:g} to {high:g}, which are levels of 8 bits or a black picture of 16: convert it to L or I;16"
                )
            return checked_array((numbers.astype(np.uint16) >> 8).astype(np.uint8))
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            rgba = np.asarray(upright.convert("RGBA")).astype(np.uint16)
            alpha = rgba[..., 3:]
            return ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
        return np.array(upright.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damaged files, which it reads late
        raise ImageError(f"PIL image that cannot be read: {error}") from error


def memory_image(source: Any, max_pixels: int) -> Image:
    """Convert an array, encoded bytes or a PIL image to RGB.

    Raises ImageError if it cannot be read.
    """
    if isinstance(source, bytes):
        return decode_image(source, max_pixels=max_pixels)
    return pil_image(source, max_pixels) if is_pil(source) else checked_array(source)
