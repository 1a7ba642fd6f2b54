"""Images of all kinds are read alike, and hostile bytes cost an ImageError and nothing more."""

from __future__ import annotations

import io
import random
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageOps

from arclight.vision.data.image_headers import file_header
from arclight.vision.data.images import ImageError, decode_image, decode_reduced, read_header


def smooth(height: int = 60, width: int = 80) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack((rows * 255 // height, columns * 255 // width, (rows + columns) % 200), 2).astype(np.uint8)


def encode(kind: str, image: np.ndarray | Pillow.Image | None = None, **options: Any) -> bytes:
    picture = image if isinstance(image, Pillow.Image) else Pillow.fromarray(smooth() if image is None else image)
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {}}
ANIMATED = {"save_all": True, "append_images": [Pillow.fromarray(smooth()[::-1])]}
SAMPLES = {
    "jpeg": encode("JPEG"),
    "progressive": encode("JPEG", progressive=True),
    "png": encode("PNG"),
    "apng": encode("PNG", **ANIMATED),
    "alpha": encode("PNG", np.dstack((smooth(), smooth()[..., 0]))),
    "webp": encode("WEBP"),
    "webp lossless": encode("WEBP", lossless=True),
    "webp animated": encode("WEBP", **ANIMATED),
    "gif": encode("GIF"),
    "gif animated": encode("GIF", **ANIMATED),
    "bmp": encode("BMP"),
    "tiff": encode("TIFF"),
    "tiff lzw": encode("TIFF", compression="tiff_lzw"),
    "tiff jpeg": encode("TIFF", compression="jpeg"),
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_give_the_very_pixels(kind: str, tmp_path: Path) -> None:
    data = encode(kind, **LOSSLESS[kind])
    image = decode_image(data)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, smooth())
    (tmp_path / "file").write_bytes(data)
    np.testing.assert_array_equal(decode_image(str(tmp_path / "file")), smooth())


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_followed(kind: str, orientation: int, tmp_path: Path) -> None:
    exif = Pillow.Exif()
    exif[274] = orientation
    how = {"tiffinfo": {274: orientation}} if kind == "TIFF" else {"exif": exif}
    data = encode(kind, **how, **LOSSLESS.get(kind, {"quality": 95}))
    expected = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data), expected)
    (tmp_path / "photo").write_bytes(data)
    assert file_header(tmp_path / "photo").shape == expected.shape[:2]


def test_grey_palette_cmyk_and_deep_images_become_rgb() -> None:
    rgb = smooth()
    grey = Pillow.fromarray(rgb).convert("L")
    np.testing.assert_array_equal(decode_image(encode("PNG", grey)), np.dstack([np.asarray(grey)] * 3))
    palette = Pillow.fromarray(rgb).convert("P")
    np.testing.assert_array_equal(decode_image(encode("PNG", palette)), np.asarray(palette.convert("RGB")))
    black_and_white = Pillow.fromarray(rgb).convert("1")
    np.testing.assert_array_equal(
        decode_image(encode("PNG", black_and_white))[..., 1], np.asarray(black_and_white) * 255
    )
    deep = (np.arange(60 * 80).reshape(60, 80) * 13).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decode_image(encode(kind, Pillow.fromarray(deep)))[..., 0], deep >> 8)
    inks = encode("JPEG", Pillow.fromarray(rgb).convert("CMYK"), quality=95)
    assert np.abs(decode_image(inks).astype(int) - rgb).mean() < 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_black_on_nothing_is_black_on_white(kind: str) -> None:
    ink = np.zeros((40, 40, 4), np.uint8)
    ink[10:20, 10:20, 3] = 255
    ink[30:, 30:] = (200, 0, 0, 128)
    image = decode_image(encode(kind, ink, **({"lossless": True, "exact": True} if kind == "WEBP" else {})))
    assert (image[10:20, 10:20] == 0).all()
    assert (image[0, 0] == 255).all()
    np.testing.assert_allclose(image[35, 35], (227, 127, 127), atol=1)


def test_a_transparent_palette_colour_is_white() -> None:
    palette = Pillow.fromarray(np.repeat(np.arange(4, dtype=np.uint8), 400).reshape(40, 40), "P")
    palette.putpalette([0, 0, 0, 50, 50, 50, 100, 100, 100, 150, 150, 150])
    image = decode_image(encode("PNG", palette, transparency=0))
    assert [int(image[row, 0, 0]) for row in (0, 10, 20, 30)] == [255, 50, 100, 150]


@pytest.mark.parametrize("animated", [False, True])
def test_a_transparent_colour_of_a_gif_is_white(animated: bool) -> None:
    """A code in black on a transparent colour that is black, too, would be black throughout."""
    ink = Pillow.fromarray(np.repeat(np.array([0, 1], np.uint8), 800).reshape(40, 40), "P")
    ink.putpalette([0, 0, 0, 0, 0, 0])
    frames = {"save_all": True, "append_images": [Pillow.fromarray(smooth(40, 40))]} if animated else {}
    data = encode("GIF", ink, transparency=0, optimize=False, **frames)
    image = decode_image(data)
    assert (int(image[0, 0, 0]), int(image[39, 39, 0])) == (255, 0)
    assert read_header(data).alpha
    assert not read_header(SAMPLES["gif"]).alpha


def tiff_with_alpha(colours: np.ndarray, meaning: int) -> bytes:
    """Encode colours and alpha (H, W, 4), of meaning 0 (not said), 1 (associated) or 2 (not)."""
    height, width, _ = colours.shape
    bits, pixels = 8 * colours.dtype.itemsize, colours.tobytes()
    tags = [
        (256, 3, 1, width), (257, 3, 1, height), (258, 3, 4, 8 + len(pixels)), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 8),
        (277, 3, 1, 4), (278, 3, 1, height), (279, 4, 1, len(pixels)), (284, 3, 1, 1), (338, 3, 1, meaning),
    ]  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", 16 + len(pixels)) + pixels + struct.pack("<4H", *[bits] * 4) + directory


@pytest.mark.parametrize("meaning", [0, 1, 2])
@pytest.mark.parametrize("depth", [np.uint8, np.uint16])
def test_alpha_of_tiff_is_read_as_the_file_says(meaning: int, depth: type) -> None:
    straight = np.array([200, 100, 0, 128], np.float64)
    stored = np.append(straight[:3] * straight[3] / 255, straight[3]) if meaning == 1 else straight
    scaled = (stored * (257 if depth is np.uint16 else 1)).round().astype(depth)
    image = decode_image(tiff_with_alpha(np.tile(scaled, (6, 5, 1)), meaning))
    np.testing.assert_allclose(image[3, 3], 127 + straight[:3] * 128 / 255, atol=1.5)


@pytest.mark.parametrize("value", [0, 200])
def test_grey_tiff_with_transparency_is_refused(value: int) -> None:
    """OpenCV multiplies its grey by alpha and drops that: a code drawn in black on nothing would be all black."""
    grey = Pillow.fromarray(np.full((6, 5), value, np.uint8))
    grey.putalpha(Pillow.fromarray(np.tile([0, 255, 255, 128, 0], (6, 1)).astype(np.uint8)))
    with pytest.raises(ImageError, match="TIFF image in grey with transparency"):
        decode_image(encode("TIFF", grey))
    assert decode_image(encode("PNG", grey))[0, 0].tolist() == [255, 255, 255]


# Too large, incomplete, something else


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def giants() -> dict[str, bytes]:
    """Small files that say they are 20,000 x 20,000 pixels."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    zeros = zlib.compress(bytes(10_000_000), 9)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zeros) + png_chunk(b"IEND", b"")
    jpeg = bytearray(SAMPLES["jpeg"])
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 20_000, 20_000)
    gif = bytearray(SAMPLES["gif"])
    gif[6:10] = struct.pack("<HH", 20_000, 20_000)
    bmp = bytearray(SAMPLES["bmp"])
    bmp[18:26] = struct.pack("<ii", 20_000, -20_000)
    webp = bytearray(SAMPLES["webp animated"])
    webp[24:30] = (19_999).to_bytes(3, "little") * 2
    tiff = bytearray(SAMPLES["tiff"])
    for tag in (256, 257):
        at = (
            tiff.index(struct.pack("<HHI", tag, 4, 1))
            if struct.pack("<HHI", tag, 4, 1) in tiff
            else tiff.index(struct.pack("<HHI", tag, 3, 1))
        )
        tiff[at + 2 : at + 12] = struct.pack("<HII", 4, 1, 20_000)
    return {
        "png": bomb,
        "jpeg": bytes(jpeg),
        "gif": bytes(gif),
        "bmp": bytes(bmp),
        "webp": bytes(webp),
        "tiff": bytes(tiff),
    }


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """Fails where memory in use rises by more than that in between, be it for a moment."""
    with suppress(OSError):  # where peaks cannot be forgotten, only what goes beyond the last one is seen
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes * 1000


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "webp", "tiff"])
def test_giants_are_refused_before_any_memory_is_taken(kind: str) -> None:
    data = giants()[kind]
    refused = pytest.raises(
        ImageError, match=r"20000 x 20000 pixels \(400\.0 million\) is too large: at most 50 million"
    )
    with at_most(200), refused:  # in grey it would be 400 MB
        decode_image(data)


def test_the_limit_can_be_set() -> None:
    decode_image(SAMPLES["png"], max_pixels=4800)
    with pytest.raises(ImageError, match="80 x 60"):
        decode_image(SAMPLES["png"], max_pixels=4799)


def test_a_file_larger_than_its_pixels_could_be_is_not_even_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.jpg"
    with huge.open("wb") as file:
        file.truncate(600_000_000)
    with pytest.raises(ImageError, match="600 MB is too large"):
        decode_image(huge)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_truncated_images_are_refused(kind: str, share: float) -> None:
    data = SAMPLES[kind]
    with pytest.raises(ImageError):
        decode_image(data[: int(len(data) * share)])


@pytest.mark.parametrize("kind", ["jpeg", "progressive", "png", "webp", "gif", "bmp"])
def test_truncated_images_are_detected_by_the_header_alone(kind: str) -> None:
    data = SAMPLES[kind]
    assert not read_header(data).truncated
    assert read_header(data[: len(data) - 40]).truncated


def test_trailing_bytes_of_a_jpeg_are_ignored() -> None:
    np.testing.assert_array_equal(decode_image(SAMPLES["jpeg"] + b"trailer" * 50), decode_image(SAMPLES["jpeg"]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"hello, I am a text file\n", "not an image: it starts with b'hello"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00", "HEIC is not supported; JPEG"),
        (b"\x00\x00\x00\x1cftypavif\x00\x00\x00\x00", "AVIF is not supported"),
        (b"<svg xmlns='x'/>", "SVG is not supported"),
        (b"\xff\xd8\xff", "truncated"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "not an image"),
    ],
)
def test_invalid_images_are_named(data: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        decode_image(data)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        decode_image(tmp_path / "absent.jpg")


def test_endless_scans_and_chunks_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over all of them in the decoder takes minutes."""
    monkeypatch.setattr("arclight.vision.data.images.cv2.imdecode", lambda *_: pytest.fail("it was decoded"))
    scans = SAMPLES["progressive"][:-2]
    last = scans[scans.rindex(b"\xff\xda") :]
    with pytest.raises(ImageError, match="scans"):
        decode_image(scans + last * 5000 + b"\xff\xd9")
    chunks = SAMPLES["png"][:33] + png_chunk(b"teXt", b"") * 1_000_000 + SAMPLES["png"][33:]
    with pytest.raises(ImageError, match="chunks"):
        decode_image(chunks)


def test_a_damaged_animation_does_not_end_the_process() -> None:
    """OpenCV 5.0 crashes on a PNG animation whose first frame is damaged; the still picture is all that is read."""
    data = bytearray(SAMPLES["apng"])
    at = data.index(b"IDAT") + 40
    data[at : at + 20] = bytes(20)
    with pytest.raises(ImageError):
        decode_image(bytes(data))
    np.testing.assert_array_equal(decode_image(SAMPLES["apng"]), smooth())


# Anything at all


def only_image_errors(data: bytes) -> None:
    try:
        image = decode_image(data, max_pixels=1_000_000)
    except ImageError:
        return
    assert image.dtype == np.uint8
    assert image.ndim == 3
    assert image.shape[2] == 3


@given(st.binary(max_size=200), st.sampled_from([b"", *[data[:24] for data in SAMPLES.values()]]))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_image_errors(data: bytes, start: bytes) -> None:
    only_image_errors(start + data)


@given(
    st.sampled_from(sorted(SAMPLES)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12),
    st.booleans(),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_images_raise_nothing_but_image_errors(kind: str, edits: list[tuple[float, int]], early: bool) -> None:
    data = bytearray(SAMPLES[kind])
    for place, value in edits:
        data[int(place * (min(len(data), 120) if early else len(data)))] = value
    only_image_errors(bytes(data))


@pytest.mark.slow
def test_many_mutations_leave_memory_flat() -> None:
    numbers = random.Random(5)
    with at_most(150):  # a megapixel of 16 bits is 8 MB
        for _ in range(3000):
            data = bytearray(numbers.choice(list(SAMPLES.values())))
            for _ in range(numbers.choice((1, 2, 8))):
                data[numbers.randrange(min(len(data), 200))] = numbers.choice(
                    (0, 127, 128, 255, numbers.randrange(256))
                )
            only_image_errors(bytes(data))


# Reduced decoding


@pytest.mark.parametrize(
    ("at_least", "longest"), [(640, 640), (321, 640), (320, 320), (161, 320), (100, 160), (60, 80), (1, 80)]
)
def test_large_jpegs_come_reduced_but_never_below_what_is_needed(at_least: int, longest: int, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(encode("JPEG", smooth(480, 640)))
    image, full = decode_reduced(photo, at_least)
    assert full == (480, 640)
    assert max(image.shape[:2]) == longest


def test_reduced_decoding_follows_orientation(tmp_path: Path) -> None:
    exif = Pillow.Exif()
    exif[274] = 6
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(encode("JPEG", smooth(480, 640), exif=exif))
    image, full = decode_reduced(photo, 320)
    assert full == (640, 480)
    assert image.shape == (320, 240, 3)
    small = decode_image(photo)[::2, ::2]
    assert np.abs(image.astype(int) - small).mean() < 4
