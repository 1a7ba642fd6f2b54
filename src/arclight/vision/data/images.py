"""Decode image bytes to RGB arrays, in one way for data sets, predictions and uploads.

Everything in ``vision`` that reads an image file goes through here, and the server's detection too: training, validation and serving see the
same pixels (large JPEGs of training images at a reduced size). Files and bytes come in, RGB uint8 (height, width, 3) goes out, or
ImageError. A change of the result changes what models see.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arclight.fabric.extras import require
from arclight.vision.data.image_headers import ImageError, ImageHeader, file_header, read_header, still_png

cv2 = require("cv2", extra="vision")

Image = NDArray[np.uint8]
"""RGB, (height, width, 3)."""

MAX_PIXELS = 50_000_000
"""Largest image that is decoded by default, in pixels."""

_READ = (".jpg", ".jpeg", ".jfif", ".mpo", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
SUFFIXES = (*_READ, ".heic", ".avif", ".jp2")
"""Files that a folder of images is taken to hold; those that cannot be read are reported, not passed over."""

__all__ = [
    "MAX_PIXELS",
    "SUFFIXES",
    "Image",
    "ImageError",
    "ImageHeader",
    "decode_image",
    "decode_reduced",
    "encode_jpeg",
    "file_header",
    "read_header",
]


def decode_image(source: bytes | str | Path, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Decode an image file, or its bytes, to RGB uint8 (height, width, 3), turned by its EXIF.

    Grey, palette, CMYK and 16-bit images become 8-bit RGB; what is transparent becomes white, as on paper. TIFF images in grey with
    transparency are refused: OpenCV drops their alpha.
    Raises ImageError, and nothing else, for content that is not a complete JPEG, PNG, WebP, GIF, BMP or TIFF image
    of at most ``max_pixels``: the size is read from the header, before any memory for pixels is taken. A path
    that cannot be read raises OSError.
    """
    data = source if isinstance(source, bytes) else _read(Path(source), max_pixels)
    return _decode(data, read_header(data), max_pixels, reduction=1)


def encode_jpeg(image: Image, quality: int) -> bytes:
    """Encode an RGB or grey image as JPEG, of ``quality`` 0 to 100."""
    bgr = cv2.cvtColor(image, cv2.COLOR_GRAY2BGR if image.ndim == 2 else cv2.COLOR_RGB2BGR)
    return bytes(cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes())


def decode_reduced(path: Path, at_least: int, *, max_pixels: int = MAX_PIXELS) -> tuple[Image, tuple[int, int]]:
    """Decode an image, a large JPEG at 1/2, 1/4 or 1/8 of its size; return it and its full size.

    The longer side of the result is never below ``at_least`` pixels unless the image itself is smaller. Also returns
    the full (height, width).
    """
    data = _read(path, max_pixels)
    header = read_header(data)
    reduction = 1
    if header.format == "JPEG":
        longest = max(header.shape)
        reduction = next((factor for factor in (8, 4, 2) if longest >= factor * at_least), 1)
    return _decode(data, header, max_pixels, reduction), header.shape


def _read(path: Path, max_pixels: int) -> bytes:
    size = path.stat().st_size
    if size > 8 * max_pixels + 2**20:  # more than the same pixels uncompressed
        raise ImageError(
            f"file of {size / 1e6:.0f} MB is too large for an image of at most {max_pixels / 1e6:g} million pixels"
        )
    return path.read_bytes()


def _decode(data: bytes, header: ImageHeader, max_pixels: int, reduction: int) -> Image:
    header.check(max_pixels)
    flags = {
        1: cv2.IMREAD_COLOR,
        2: cv2.IMREAD_REDUCED_COLOR_2,
        4: cv2.IMREAD_REDUCED_COLOR_4,
        8: cv2.IMREAD_REDUCED_COLOR_8,
    }
    flag = cv2.IMREAD_UNCHANGED if header.alpha else flags[reduction] | cv2.IMREAD_IGNORE_ORIENTATION
    if header.format == "PNG":
        data = still_png(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    except cv2.error as error:
        raise ImageError(f"damaged {header.format} image: {error.err or 'it cannot be decoded'}") from error
    if image is None:
        raise ImageError(f"damaged {header.format} image: its pixels cannot be decoded")
    if image.dtype == np.uint16:
        image = (image >> 8).astype(np.uint8)
    if image.ndim == 2:
        image = cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
    if image.shape[2] == 4:
        # libtiff multiplies colours of 8 bits by an alpha that the file says they are not multiplied by
        multiplied = header.associated_alpha or (header.associated_alpha is False and header.bits == 8)
        image = _on_white(image, multiplied=multiplied)
    rgb: Image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
    # OpenCV turns TIFF images itself, whatever it is asked.
    return rgb if header.format == "TIFF" else _turn(rgb, header.orientation)


def _on_white(image: NDArray[np.uint8], *, multiplied: bool) -> NDArray[np.uint8]:
    """Blend colours over white paper: a code drawn in black on nothing stays readable.

    ``multiplied``: the colours are multiplied by alpha already.
    """
    alpha = image[..., 3].astype(np.uint16)
    if multiplied:
        return (image[..., :3] + (255 - alpha)[..., None]).clip(0, 255).astype(np.uint8)
    background = 255 * (255 - alpha)
    result = np.empty((*image.shape[:2], 3), np.uint8)
    for channel in range(3):
        result[..., channel] = (image[..., channel] * alpha + background + 127) // 255
    return result


def _turn(image: Image, orientation: int) -> Image:
    """Undo an EXIF orientation (CIPA DC-008, tag 274)."""
    if orientation in (5, 7):
        image = cv2.transpose(image)
    if orientation in (6, 8):
        image = cv2.rotate(image, cv2.ROTATE_90_CLOCKWISE if orientation == 6 else cv2.ROTATE_90_COUNTERCLOCKWISE)
    if orientation in (2, 3, 4, 7):
        image = cv2.flip(image, {2: 1, 3: -1, 4: 0, 7: -1}[orientation])
    return image
