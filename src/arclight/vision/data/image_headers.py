"""Read headers of image files before decoding: format, size, orientation, completeness.

`images` calls this before any decoder, `labels`, `dataset`, `image_folder` and ``formats.annotations`` for sizes. Only the formats named here
reach a decoder, and none before its size is known, so that a small file that claims to be huge costs nothing. Every reader takes the
file's bytes (or a memory map, of which it usually touches a few pages) and trusts no length or offset without comparing it with the file's
own length. A new format goes into `_READERS` and ``images.SUFFIXES``.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Data = bytes | mmap.mmap

MAX_PNG_CHUNKS = 65_536
MAX_JPEG_SCANS = 100
"""A progressive JPEG repeats the work of decoding for each scan; encoders write about ten."""


class ImageError(ValueError):
    """Error of an input that is not a readable image; the message says why in one sentence."""


@dataclass(frozen=True)
class ImageHeader:
    """Header of an image; ``width`` and ``height`` are before ``orientation`` is applied."""

    format: str
    width: int
    height: int
    orientation: int = 1
    """EXIF orientation, 1 to 8; 5 to 8 exchange width and height."""
    alpha: bool = False
    truncated: bool = False
    """The file ends before the image does."""
    bits: int = 8
    """Bits of each channel."""
    cmyk: bool = False
    """Inks instead of light: cyan, magenta, yellow and black."""
    several: bool = False
    """An animation, or several pages."""
    associated_alpha: bool | None = None
    """Whether colours are stored multiplied by alpha (TIFF 6.0, section 18); None where the file does not say."""

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) as the image is meant to be seen, pixels."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)

    def check(self, max_pixels: int) -> None:
        """Raise ImageError if the image is incomplete, empty or larger than ``max_pixels``."""
        name = f"{self.format} image"
        if self.width <= 0 or self.height <= 0:
            raise ImageError(f"{name} of {self.width} x {self.height} pixels: it has no area")
        if self.width * self.height > max_pixels:
            size = f"{self.width} x {self.height} pixels ({self.width * self.height / 1e6:.1f} million)"
            raise ImageError(
                f"{name} of {size} is too large: at most {max_pixels / 1e6:g} million are read; scale it down"
            )
        if self.truncated:
            raise ImageError(f"truncated {name}: the file ends before the image does")

    def oddities(self) -> list[str]:
        """List what decoding changes in the image, a sentence each, except EXIF orientation."""
        name = f"{self.format} image"
        found = [f"{name} of one pixel"] * (self.width * self.height == 1)
        if self.bits > 8:
            found.append(f"{name} of {self.bits} bits per channel: the upper 8 are used")
        if self.cmyk:
            found.append(f"{name} in CMYK inks: it is converted to RGB, without its colour profile")
        if self.alpha:
            found.append(f"{name} with transparency: what is transparent becomes white")
        if self.several:
            found.append(f"{name} of several pictures: only the first is used")
        return found


def read_header(data: Data) -> ImageHeader:
    """Read the header of an image file in ``data``. Raises ImageError for any other content."""
    if len(data) == 0:
        raise ImageError("empty file: there is no image in it")
    start = bytes(data[:16])
    try:
        for magic, reader in _READERS:
            if start.startswith(magic) and (magic != b"RIFF" or start[8:12] == b"WEBP"):
                return reader(data)
    except struct.error as error:
        raise ImageError("truncated image: the file ends inside its header") from error
    raise ImageError(_unsupported(start))


def file_header(path: Path) -> ImageHeader:
    """Read the header of the image file at ``path``.

    Raises ImageError and OSError.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ImageError("empty file: there is no image in it")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_header(data)


def _unsupported(start: bytes) -> str:
    known = {
        b"ftyphei": "HEIC",
        b"ftypmif": "HEIF",
        b"ftypavi": "AVIF",
        b"jP  ": "JPEG 2000",
        b"%PDF": "PDF",
        b"<svg": "SVG",
    }
    name = next((name for magic, name in known.items() if magic in start), None)
    accepted = "JPEG, PNG, WebP, GIF, BMP and TIFF are read"
    return f"{name} is not supported; {accepted}" if name else f"not an image: it starts with {start!r}; {accepted}"


def _unpack(layout: str, data: Data, offset: int) -> tuple[int, ...]:
    size = struct.calcsize(layout)
    return struct.unpack(layout, data[offset : offset + size])  # struct.error where the file is too short


# ---------------------------------------------------------------- JPEG (ITU-T T.81, annex B)


def _jpeg(data: Data) -> ImageHeader:
    position, orientation, height, width, progressive, bits, channels = 2, 1, 0, 0, False, 8, 3
    while True:
        # As decoders do: skip to the next 0xFF, then over fill bytes.
        position = data.find(b"\xff", position)
        if position < 0:
            raise ImageError("truncated JPEG image: the file ends inside its header")
        (code,) = _unpack("B", data, position + 1)
        position += 1 if code == 0xFF else 2
        if code in (0x00, 0x01, 0xFF) or 0xD0 <= code <= 0xD8:
            continue
        if code == 0xD9:
            raise ImageError("truncated JPEG image: it ends before any pixel")
        (length,) = _unpack(">H", data, position)
        if 0xC0 <= code <= 0xCF and code not in (0xC4, 0xC8, 0xCC):
            bits, height, width, channels = _unpack(">BHHB", data, position + 2)
            progressive = code == 0xC2
        elif code == 0xE1 and data[position + 2 : position + 8] == b"Exif\0\0":
            orientation = _exif_orientation(bytes(data[position + 8 : position + length]))
        elif code == 0xDA:
            break
        position += max(length, 2)
    if progressive and bytes(data[position:]).count(b"\xff\xda") >= MAX_JPEG_SCANS:
        raise ImageError(f"JPEG image with more than {MAX_JPEG_SCANS} scans: it costs too much to decode")
    # Among pixels 0xFF is always followed by 0x00 or a restart marker, so this can only be the end of the image.
    complete = data[-2:] == b"\xff\xd9" or data.find(b"\xff\xd9", position) >= 0
    return ImageHeader("JPEG", width, height, orientation, truncated=not complete, bits=bits, cmyk=channels == 4)


# ---------------------------------------------------------------- PNG (W3C PNG, third edition)


def _png_chunks(data: Data) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of each complete chunk; ``data[start:end]`` is all of it."""
    position = 8
    for _ in range(MAX_PNG_CHUNKS):
        if position + 12 > len(data):
            return
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        end = position + 12 + length
        if end > len(data):
            return
        yield kind, position, end
        if kind == b"IEND":
            return
        position = end
    raise ImageError(f"damaged PNG image: more than {MAX_PNG_CHUNKS} chunks")


def _png(data: Data) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise ImageError("damaged PNG image: it does not start with its header")
    width, height, bits, colour = _unpack(">IIBB", data, 16)
    orientation, alpha, truncated, animated = 1, colour in (4, 6), True, False
    for kind, start, end in _png_chunks(data):
        if kind == b"tRNS":
            alpha = True
        elif kind == b"eXIf":
            orientation = _exif_orientation(bytes(data[start + 8 : end - 4]))
        elif kind == b"acTL":
            animated = True
        elif kind == b"IEND":
            truncated = False
    return ImageHeader("PNG", width, height, orientation, alpha, truncated, bits, several=animated)


def still_png(data: bytes) -> bytes:
    """Strip a PNG file to the chunks that its first picture needs.

    OpenCV 5.0 crashes the process on damaged animations, and colour profiles and texts are only more to attack.
    """
    kept = (data[start:end] for kind, start, end in _png_chunks(data) if kind in _PNG_PICTURE)
    return data[:8] + b"".join(kept)


_PNG_PICTURE = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


# ---------------------------------------------------------------- WebP (RFC 9649)


def _webp(data: Data) -> ImageHeader:
    (riff_size,) = _unpack("<I", data, 4)
    truncated = riff_size + 8 > len(data)
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = _unpack("<HH", data, 26)
        return ImageHeader("WebP", width & 0x3FFF, height & 0x3FFF, truncated=truncated)
    if kind == b"VP8L":
        (bits,) = _unpack("<I", data, 21)
        return ImageHeader("WebP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1, bool(bits >> 28 & 1), truncated)
    if kind != b"VP8X":
        raise ImageError(f"damaged WebP image: unknown first chunk {bytes(kind)!r}")
    flags, width_low, width_high, height_low, height_high = _unpack("<B3xHBHB", data, 20)
    orientation, position = 1, 12
    while flags & 0x08 and position + 8 <= len(data):
        (length,) = _unpack("<I", data, position + 4)
        if data[position : position + 4] == b"EXIF":
            orientation = _exif_orientation(bytes(data[position + 8 : position + 8 + length]).removeprefix(b"Exif\0\0"))
            break
        position += 8 + length + length % 2
    size = (width_high << 16) + width_low + 1, (height_high << 16) + height_low + 1
    return ImageHeader("WebP", *size, orientation, bool(flags & 0x10), truncated, several=bool(flags & 0x02))


# ---------------------------------------------------------------- GIF (GIF89a), BMP


def _gif(data: Data) -> ImageHeader:
    width, height = _unpack("<HH", data, 6)
    truncated = not bytes(data[-64:]).rstrip(b"\0").endswith(b";")
    alpha, several = _gif_pictures(data)
    return ImageHeader("GIF", width, height, alpha=alpha, truncated=truncated, several=several)


def _gif_pictures(data: Data) -> tuple[bool, bool]:
    """Return whether the first picture has a transparent colour, and whether another follows."""
    position, pictures, alpha = 13 + _palette_bytes(data[10:11]), 0, False
    while position < len(data):
        kind = data[position]
        if kind == 0x2C:
            pictures += 1
            if pictures == 2:
                return alpha, True
            position += 11 + _palette_bytes(data[position + 9 : position + 10])
        elif kind == 0x21:
            if pictures == 0 and data[position + 1 : position + 3] == b"\xf9\x04":  # graphic control
                alpha = bool(data[position + 3 : position + 4] and data[position + 3] & 1)
            position += 2
        else:
            break  # the end, or damage
        while position < len(data) and data[position]:
            position += 1 + data[position]
        position += 1
    return alpha, False


def _palette_bytes(flags: bytes) -> int:
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _bmp(data: Data) -> ImageHeader:
    offset, header_size = _unpack("<II", data, 10)
    if header_size == 12:
        width, height, _, bits = _unpack("<HHHH", data, 18)
        compression = 0
    else:
        width, height, _, bits, compression = _unpack("<iiHHI", data, 18)
    rows = (width * bits + 31) // 32 * 4 * abs(height)
    # The size of run-length coded pixels (compression 1 and 2) is not known from the header.
    return ImageHeader("BMP", width, abs(height), truncated=compression in (0, 3) and offset + rows > len(data))


# ---------------------------------------------------------------- TIFF 6.0, which is also the inside of EXIF

_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _STRIPS, _ORIENTATION, _SAMPLES = 256, 257, 258, 262, 273, 274, 277
_EXTRA_SAMPLES = 338
_STRIP_SIZES, _TILE_WIDTH, _TILE_HEIGHT = 279, 322, 323
_TYPE_LAYOUT = {1: "B", 3: "H", 4: "I"}
_MAX_VALUES = 65_536


def _tiff_tags(data: Data) -> dict[int, tuple[int, ...]]:
    """Read the whole-number tags of the first directory.

    Raises struct.error where an offset points outside ``data``.
    """
    order = "<" if data[:2] == b"II" else ">"
    (directory,) = _unpack(order + "I", data, 4)
    (count,) = _unpack(order + "H", data, directory)
    tags = {}
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, values = _unpack(order + "HHI", data, entry)
        if kind not in _TYPE_LAYOUT or not 0 < values <= _MAX_VALUES:
            continue
        layout = f"{order}{values}{_TYPE_LAYOUT[kind]}"
        position = entry + 8
        if struct.calcsize(layout) > 4:
            (position,) = _unpack(order + "I", data, position)
        tags[tag] = _unpack(layout, data, position)
    return tags


def _exif_orientation(exif: bytes) -> int:
    if exif[:4] not in (b"II*\0", b"MM\0*"):
        return 1
    try:
        value = _tiff_tags(exif).get(_ORIENTATION, (1,))[0]
    except struct.error:
        return 1  # photographs with damaged EXIF are common and their pixels are fine
    return value if 1 <= value <= 8 else 1


def _tiff(data: Data) -> ImageHeader:
    arrays = _tiff_tags(data)
    tags = {tag: values[0] for tag, values in arrays.items()}
    bits, samples = tags.get(_BITS, 1), tags.get(_SAMPLES, 1)
    if bits not in (1, 2, 4, 8, 16) or not 1 <= samples <= 5:
        raise ImageError(f"TIFF image with {samples} samples of {bits} bits: up to 5 of 1 to 16 bits are read")
    if samples == 2 and tags.get(_PHOTOMETRIC) in (0, 1):
        raise ImageError(
            "TIFF image in grey with transparency, which would be read as black: save it in RGB, or as PNG"
        )
    width, height = tags.get(_WIDTH, 0), tags.get(_HEIGHT, 0)
    # A tile may be larger than its image; rounding to 16 is normal, a giant tile is an attack on memory.
    for side, tile in ((width, tags.get(_TILE_WIDTH, 0)), (height, tags.get(_TILE_HEIGHT, 0))):
        if tile > max(2 * side, 1024):
            raise ImageError(f"damaged TIFF image: a tile of {tile} pixels in an image of {width} x {height}")
    ends = (at + size for at, size in zip(arrays.get(_STRIPS, ()), arrays.get(_STRIP_SIZES, ())))
    truncated = any(end > len(data) for end in ends)
    orientation = tags.get(_ORIENTATION, 1)
    alpha = (tags.get(_PHOTOMETRIC), samples) == (2, 4)
    return ImageHeader(
        "TIFF", width, height, orientation if 1 <= orientation <= 8 else 1, alpha, truncated, bits,
        cmyk=tags.get(_PHOTOMETRIC) == 5, several=_tiff_has_several(data),
        associated_alpha={1: True, 2: False}.get(tags.get(_EXTRA_SAMPLES, 0)),
    )  # fmt: skip


def _tiff_has_several(data: Data) -> bool:
    order = "<" if data[:2] == b"II" else ">"
    (directory,) = _unpack(order + "I", data, 4)
    (count,) = _unpack(order + "H", data, directory)
    following = data[directory + 2 + 12 * count : directory + 6 + 12 * count]
    return len(following) == 4 and any(following)


_READERS: tuple[tuple[bytes, Callable[[Data], ImageHeader]], ...] = (
    (b"\xff\xd8\xff", _jpeg),
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"RIFF", _webp),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"BM", _bmp),
    (b"II*\0", _tiff),
    (b"MM\0*", _tiff),
)
