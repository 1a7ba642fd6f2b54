"""Lint: every fault is named by file and line, look-alikes are found, and a mended copy has none of them."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from arclight.cli.command import main
from arclight.vision.data.data_yaml import read_data_yaml, write_data_yaml
from arclight.vision.data.dataset import DetectionDataset
from arclight.vision.data.formats.annotations import read_yolo, write_yolo
from arclight.vision.data.image_headers import read_header
from arclight.vision.data.images import decode_image
from arclight.vision.data.labels import DatasetError, check_labels, label_path
from arclight.vision.data.lint.checks import Finding, LintReport, best_possible_recall, lint
from arclight.vision.data.lint.fingerprints import (
    MAX_DISTANCE,
    Fingerprints,
    _near_hashes,
    equal_files,
    fingerprint_all,
    linked_groups,
    similar_pairs,
)
from arclight.vision.data.lint.mend import mend
from arclight.vision.data.lint.sheet import write_sheet
from arclight.vision.tasks.settings import DetectionTask

Write = Callable[..., Path]


@pytest.fixture
def both(tmp_path: Path, write_dataset: Write) -> Path:
    """Eight images to train with and four others to validate with; all are fine but for few boxes per class."""
    yaml = write_dataset(tmp_path, 8)
    write_dataset(tmp_path, 12, split="val")
    for index in range(8):
        (tmp_path / f"images/val/{index:03d}.jpg").unlink()
        (tmp_path / f"labels/val/{index:03d}.txt").unlink()
    return yaml


def found_in(yaml: Path, check: str, **options: Any) -> list[str]:
    report = lint(read_data_yaml(yaml), cache=False, **options)
    return [str(finding) for finding in report.findings if finding.check == check]


def checks_of(report: LintReport) -> set[str]:
    return {finding.check for finding in report.findings}


# ---------------------------------------------------------------- one fault at a time


def test_a_sound_data_set_has_no_errors(both: Path) -> None:
    report = lint(read_data_yaml(both), cache=False)
    assert checks_of(report) <= {"class"}
    assert report.errors == 0
    assert not list(both.parent.rglob("*.npz"))


def write_label(root: Path, text: str, name: str = "train/000") -> None:
    (root / f"labels/{name}.txt").write_text(text)


def copy_image(root: Path, source: str, target: str) -> None:
    shutil.copy(root / f"images/{source}.jpg", root / f"images/{target}.jpg")
    shutil.copy(root / f"labels/{source}.txt", root / f"labels/{target}.txt")


@pytest.mark.parametrize(
    ("check", "break_it", "expected"),
    [
        ("malformed-row", lambda r: write_label(r, "0 .5 .5 .1 .1\n7 .5 .5 .1 .1\n"), "000.txt:2: unknown class 7"),
        ("repeated-row", lambda r: write_label(r, "0 .5 .5 .1 .1\n\n0 .5 .5 .1 .1\n"), "000.txt:3: repeats line 1"),
        ("near-equal-box", lambda r: write_label(r, "0 .5 .5 .2 .2\n0 .5 .501 .2 .2\n"), "000.txt:2: the box all but equals that of line 1"),
        ("disputed-box", lambda r: write_label(r, "0 .5 .5 .2 .2\n\n1 .5 .501 .2 .2\n"), "000.txt:3: the box all but equals that of line 1 (IoU"),
        ("tiny-box", lambda r: write_label(r, "0 .5 .5 .5 .5\n0 .5 .5 .001 .3\n"), "000.txt:2: the box is 0."),
        ("covering-box", lambda r: write_label(r, "0 .5 .5 1 1\n"), "000.txt:1: the box covers the whole image"),
        ("cut-box", lambda r: write_label(r, "0 .95 .5 .3 .3\n"), "000.txt:1: the box reaches out of its image"),
        ("missing-label", lambda r: (r / "labels/train/000.txt").unlink(), "000.jpg: has no label file 000.txt"),
        ("orphan-label", lambda r: write_label(r, "0 .5 .5 .1 .1", "train/lost"), "lost.txt: there is no image lost.* in"),
        ("corrupt-image", lambda r: (r / "images/train/000.jpg").write_text("x"), "000.jpg: not an image"),
        ("duplicate-image", lambda r: copy_image(r, "train/000", "train/copy"), "copy.jpg: is the same file as"),
        ("leak", lambda r: copy_image(r, "train/000", "val/copy"), "copy.jpg: is the same file as"),
        ("class", lambda r: (r / "data.yaml").write_text("train: images/train\nnames: [code, text, third]\n"), "class 2 (third) has no box in any split"),
        ("split", lambda r: (r / "data.yaml").write_text("train: images/train\nval: images/no\nnames: [code, text]\n"), "images/no does not exist"),
        ("same-split", lambda r: (r / "data.yaml").write_text("{train: images/train, val: images/train, names: [a, b]}"), "8 images are in train and in val"),
    ],
)  # fmt: skip
def test_a_fault_is_named_by_file_and_line(
    both: Path, check: str, break_it: Callable[[Path], Any], expected: str
) -> None:
    assert not [finding for finding in found_in(both, check) if expected in finding]
    break_it(both.parent)
    found = found_in(both, check)
    assert len([finding for finding in found if expected in finding]) == 1, found


def test_listed_twice_shared_and_contradicting_files(both: Path) -> None:
    root = both.parent
    (root / "list.txt").write_text("images/train/000.jpg\nimages/train/001.jpg\nimages/train/000.jpg\n")
    both.write_text("train: list.txt\nnames: [code, text]\n")
    assert found_in(both, "listed-twice") == [f"{root}/images/train/000.jpg: is listed 2 times in train"]

    both.write_text("train: images/train\nnames: [code, text]\n")
    assert cv2.imwrite(str(root / "images/train/000.png"), np.zeros((9, 9, 3), np.uint8))
    assert found_in(both, "shared-label") == [f"{root}/labels/train/000.txt: is the label file of 000.jpg, 000.png"]

    copy_image(root, "train/001", "train/copy")
    assert not found_in(both, "contradiction")
    write_label(root, "1 0.2 0.2 0.1 0.1\n", "train/copy")
    (message,) = found_in(both, "contradiction")
    assert message.endswith(f"copy.jpg: is the same file as {root}/images/train/001.jpg, and its boxes differ")


def test_rare_and_missing_classes_are_distinguished(both: Path) -> None:
    root = both.parent
    both.write_text("train: images/train\nval: images/val\nnames: [code, text, only in val, code]\n")
    write_label(root, "2 0.5 0.5 0.2 0.2\n", "val/009")
    text = "\n".join(found_in(both, "class"))
    assert "2 classes are called 'code'" in text
    assert "class 2 (only in val) has no box in train, and 1 in val" in text
    assert "class 3 (code) has no box in any split" in text
    rows = [f"0 {0.1 + 0.0003 * n:.4f} 0.5 0.01 0.3" for n in range(2500)]
    write_label(root, "\n".join([*rows, *(f"1 0.5 {0.1 + 0.05 * n:.3f} 0.05 0.01" for n in range(12))]))
    assert "class 1 (text) has" in "\n".join(found_in(both, "class"))
    assert "and the commonest class 2,5" in "\n".join(found_in(both, "class"))


def test_recall_of_anchors_agrees_with_the_training_code(both: Path) -> None:
    torch = pytest.importorskip("torch")
    from arclight.vision.models import anchors as training

    report = lint(read_data_yaml(both), cache=False, image_size=320, anchors=[(10, 13), (300, 300)])
    train = report.splits["train"]
    sizes = [
        (row[3] * width * 320 / max(height, width), row[4] * height * 320 / max(height, width))
        for rows, (height, width) in zip(train.labels, train.shapes)
        for row in rows
    ]
    expected = training.best_possible_recall(
        torch.tensor(np.array(sizes)), torch.tensor([(10.0, 13.0), (300.0, 300.0)])
    )
    assert report.anchor_recall == pytest.approx(expected)
    assert best_possible_recall(train, 320, [(64, 64)]) == 1.0
    assert 'train with anchors = "fitted"' in "".join(found_in(both, "anchors", image_size=320, anchors=[(2, 2)]))
    assert not found_in(both, "anchors", image_size=320, anchors=[(64, 64)])


def test_a_fit_measures_anchors_by_its_own_anchor_t(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    DetectionTask(data=both, cache_labels=False).check_data()
    assert "x anchors:" not in caplog.text
    DetectionTask(data=both, cache_labels=False, anchor_t=1.001).check_data()
    assert "x anchors: anchors that do not fit the boxes" in caplog.text


# ---------------------------------------------------------------- odd images


def png(width: int, height: int, bits: int, colour: int, *, animated: bool = False) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    row = b"\0" + bytes(width * channels * bits // 8)
    control = chunk(b"acTL", struct.pack(">II", 2, 0)) if animated else b""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(row * height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + control + pixels + chunk(b"IEND", b"")


def gif(pictures: int) -> bytes:
    picture = b"\x21\xf9\x04\0\0\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + picture * pictures + b";"


def test_oddities_are_read_from_headers() -> None:
    assert read_header(png(2, 2, 16, 2)).oddities() == ["PNG image of 16 bits per channel: the upper 8 are used"]
    assert read_header(png(2, 2, 8, 6)).oddities() == ["PNG image with transparency: what is transparent becomes white"]
    assert read_header(png(2, 2, 8, 2, animated=True)).several
    assert read_header(png(1, 1, 8, 2)).oddities() == ["PNG image of one pixel"]
    assert not read_header(png(2, 2, 8, 2)).oddities()
    assert not read_header(gif(1)).several
    assert read_header(gif(2)).several
    assert not read_header(gif(2)[:30]).several
    image = pytest.importorskip("PIL.Image")
    from io import BytesIO

    def saved(mode: str, kind: str, **options: Any) -> Any:
        file = BytesIO()
        image.new(mode, (8, 6)).save(file, kind, **options)
        return read_header(file.getvalue())

    assert saved("CMYK", "JPEG").cmyk
    assert saved("CMYK", "TIFF").cmyk
    assert not saved("RGB", "JPEG").oddities()
    assert not saved("RGB", "TIFF").oddities()
    pages = {"save_all": True, "append_images": [image.new("RGB", (8, 6), (255, 0, 0))]}
    assert saved("RGB", "TIFF", **pages).several
    assert saved("RGB", "WEBP", **pages).several
    assert saved("RGB", "GIF", **pages).several
    assert saved("I;16", "PNG").bits == 16


def test_images_that_are_odd_or_too_large_get_a_sentence(both: Path) -> None:
    train = both.parent / "images/train"
    (train / "deep.png").write_bytes(png(20, 20, 16, 2))
    (train / "dot.png").write_bytes(png(1, 1, 8, 2))
    huge = png(2, 2, 8, 2).replace(struct.pack(">II", 2, 2), struct.pack(">II", 10_000, 10_000), 1)
    (train / "huge.png").write_bytes(huge)
    odd = found_in(both, "odd-image")
    assert f"{train}/deep.png: PNG image of 16 bits per channel: the upper 8 are used" in odd
    assert f"{train}/dot.png: PNG image of one pixel" in odd
    (huge_says,) = found_in(both, "corrupt-image")
    assert huge_says.endswith("huge.png: PNG image of 10000 x 10000 pixels (100.0 million) is too large: at most 50 million "
                              "are read; scale it down")  # fmt: skip


def test_pixels_that_are_damaged_behind_a_sound_header_are_found_by_decoding(both: Path) -> None:
    path = both.parent / "images/train/zz.png"
    data = bytearray(png(64, 64, 8, 2))
    data[60:64] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(data))
    assert not found_in(both, "corrupt-image", hashes="none")
    (message,) = found_in(both, "corrupt-image")
    assert message.startswith(f"{path}: damaged PNG image")


# ---------------------------------------------------------------- look-alikes


def scenery(seed: int, size: tuple[int, int] = (320, 240)) -> np.ndarray[Any, Any]:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(small, size, interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize(
    "change", ["half", *(pytest.param(change, marks=pytest.mark.slow) for change in ("jpeg", "bright", "noise"))]
)
def test_copies_are_recognised_and_others_are_not(tmp_path: Path, change: str) -> None:
    files = []
    for seed in range(40):
        image = scenery(seed)
        files.append(tmp_path / f"{seed}.png")
        assert cv2.imwrite(str(files[-1]), image)
        changed = {
            "jpeg": lambda i: cv2.imdecode(cv2.imencode(".jpg", i, [1, 40])[1], 1),
            "half": lambda i: cv2.resize(i, (160, 120), interpolation=cv2.INTER_AREA),
            "bright": lambda i: np.clip(i * 0.8 + 10, 0, 255).astype(np.uint8),
            "noise": lambda i: np.clip(i + np.random.default_rng(1).normal(0, 8, i.shape), 0, 255).astype(np.uint8),
        }[change](image)
        files.append(tmp_path / f"{seed}-changed.png")
        assert cv2.imwrite(str(files[-1]), changed)
    pairs, distances = similar_pairs(fingerprint_all(files))
    assert pairs.tolist() == [[2 * seed, 2 * seed + 1] for seed in range(40)]
    assert distances.max() <= MAX_DISTANCE


def test_the_search_finds_what_comparing_all_pairs_finds() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, 300, dtype=np.uint64)
    near = hashes[:200].copy()
    for place in range(200):
        for bit in rng.choice(64, int(rng.integers(1, 12)), replace=False):
            near[place] ^= np.uint64(1) << np.uint64(bit)
    every = np.unique(np.concatenate((hashes, near)))
    left, right, distance = _near_hashes(every)
    bits = np.array([[int(a ^ b).bit_count() for b in every] for a in every])
    expected = np.argwhere(np.triu(bits <= MAX_DISTANCE, 1))
    np.testing.assert_array_equal(np.stack((left, right), 1), expected)
    np.testing.assert_array_equal(distance, bits[left, right])
    assert len(left) > 80


def test_sheets_of_one_colour_look_like_nothing_and_shapes_matter() -> None:
    blank = Fingerprints(np.zeros(3, np.uint64), np.full((3, 16, 16), 200, np.uint8), np.ones(3, np.float32), {})
    assert len(similar_pairs(blank)[0]) == 0
    thumbs = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16))
    told = Fingerprints(np.full(3, 7, np.uint64), thumbs, np.array([1.0, 1.05, 1.5], np.float32), {})
    assert similar_pairs(told)[0].tolist() == [[0, 1]]


def test_links_make_groups() -> None:
    assert linked_groups(6, [(4, 1), (1, 5), (0, 2)]) == [[0, 2], [1, 4, 5]]
    assert linked_groups(3, []) == []


def test_equal_files_are_found_by_all_their_bytes(tmp_path: Path) -> None:
    ends = bytes(5000)
    for name, data in {
        "a": b"1",
        "b": ends + b"x" + ends,
        "c": ends + b"y" + ends,
        "d": ends + b"x" + ends,
        "e": b"",
    }.items():
        (tmp_path / name).write_bytes(data)
    files = [tmp_path / name for name in "abcde"] + [tmp_path / "absent"]
    assert equal_files(files) == [[1, 3]]


def test_hashes_are_cached_until_a_file_changes(both: Path) -> None:
    spec = read_data_yaml(both)
    copy_image(both.parent, "train/000", "val/copy")
    changed = both.parent / "images/val/copy.jpg"
    assert cv2.imwrite(str(changed), cv2.imread(str(changed)), [cv2.IMWRITE_JPEG_QUALITY, 60])
    assert "leak" not in checks_of(lint(spec, hashes="cached"))
    first = lint(spec)
    assert "leak" in checks_of(first)
    cached = lint(spec, hashes="cached")
    assert cached.findings == first.findings
    assert cv2.imwrite(str(changed), scenery(5))
    assert "leak" not in checks_of(lint(spec, hashes="cached"))
    (both.parent / "labels/train.hashes.npz").write_bytes(b"damaged")
    assert lint(spec).findings == lint(spec, cache=False).findings


# ---------------------------------------------------------------- the sheet and the mended copy


class Pictures(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_sheet_shows_the_worst_and_needs_nothing_else(both: Path, tmp_path: Path) -> None:
    root = both.parent
    copy_image(root, "train/000", "val/copy")
    write_label(root, "0 .5 .5 .001 .3\n", "train/001")
    both.write_text("train: images/train\nval: images/val\nnames: ['<script>alert(1)</script>', text]\n")
    sheet = tmp_path / "out/sheet.html"
    write_sheet(lint(read_data_yaml(both), cache=False), sheet)
    page = Pictures()
    page.feed(sheet.read_text())
    assert len(page.sources) == 3  # two of the leak, one of the tiny box
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    assert "script" not in page.tags
    assert "&lt;script&gt;" in sheet.read_text()


def spoilt(both: Path) -> None:
    root = both.parent
    copy_image(root, "train/000", "val/copy")
    copy_image(root, "train/001", "train/again")
    (root / "images/train/002.jpg").write_bytes((root / "images/train/002.jpg").read_bytes()[:-200])
    write_label(root, "0 .5 .5 .2 .2\nrubbish\n0 .5 .5 .2 .2\n0 .5 .501 .2 .2\n1 .1 .1 .3 .1 .2 .4\n", "train/003")
    write_label(root, "0 .5 .5 .2 .2\n", "train/lost")
    (root / "images/train/deep.png").write_bytes(png(20, 20, 16, 2))
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    data = (root / "images/train/004.jpg").read_bytes()
    turned = data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]
    (root / "images/train/004.jpg").write_bytes(turned)


def test_a_mended_copy_has_none_of_the_faults_and_the_original_all(both: Path, tmp_path: Path) -> None:
    spoilt(both)
    before = {path: path.read_bytes() for path in both.parent.rglob("*") if path.is_file()}
    report = lint(read_data_yaml(both), cache=False)
    assert checks_of(report) >= {
        "leak", "duplicate-image", "corrupt-image", "malformed-row", "repeated-row", "near-equal-box", "orphan-label",
        "odd-image", "exif-turn",
    }  # fmt: skip
    mended = mend(report, both.parent.parent / f"{tmp_path.name}-mended/set")
    assert {path: path.read_bytes() for path in both.parent.rglob("*") if path.is_file()} == before
    again = lint(read_data_yaml(mended.file), cache=False)
    assert checks_of(again) <= {"class", "missing-label"}
    train = {path.name: path for path in again.splits["train"].images}
    assert sorted(train) == ["001.jpg", "003.jpg", "004.jpg", "005.jpg", "006.jpg", "007.jpg", "deep.png"] or sorted(
        train
    ) == ["003.jpg", "004.jpg", "005.jpg", "006.jpg", "007.jpg", "again.jpg", "deep.png"]
    assert label_path(train["003.jpg"]).read_text() == "0 .5 .5 .2 .2\n1 .1 .1 .3 .1 .2 .4\n"  # the polygon as it was
    assert train["005.jpg"].read_bytes() == before[both.parent / "images/train/005.jpg"]
    seen = decode_image(both.parent / "images/train/004.jpg").astype(int)
    written = decode_image(train["004.jpg"]).astype(int)
    assert written.shape == seen.shape
    assert abs(written - seen).mean() < 3
    assert len(mended.changes) == len((mended.file.parent / "changes.txt").read_text().splitlines()) == 9
    assert len(again.splits["val"].images) == 5


def test_a_mend_writes_nowhere_but_into_a_new_folder(both: Path, tmp_path: Path) -> None:
    report = lint(read_data_yaml(both), cache=False)
    with pytest.raises(DatasetError, match="holds something already"):
        mend(report, both.parent)
    with pytest.raises(DatasetError, match="part of the data set"):
        mend(report, both.parent / "images/train/new")
    both.write_text("train: images/train\nval: images/train\nnames: [code, text]\n")
    with pytest.raises(DatasetError, match="no image of train would be left: another split has them too"):
        mend(lint(read_data_yaml(both), cache=False), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))


def test_two_images_of_one_label_file_get_one_each(both: Path, tmp_path: Path) -> None:
    assert cv2.imwrite(str(both.parent / "images/train/000.png"), scenery(3))
    mended = mend(lint(read_data_yaml(both), cache=False), tmp_path / "new")
    names = {path.name for path in (tmp_path / "new/images/train").iterdir()}
    assert {"000.jpg", "000_png.png"} <= names
    assert (tmp_path / "new/labels/train/000_png.txt").exists()
    assert any("shared-label" in sentence for sentence in mended.left)


@pytest.mark.parametrize("places", [("s1", "s2"), ("s1", "../s2")])
def test_images_of_several_folders_keep_their_labels(
    tmp_path: Path, write_dataset: Write, places: tuple[str, str]
) -> None:
    root = tmp_path / "set"
    for number, place in enumerate(places):
        write_dataset(root / place, 2)
        for file in [*(root / place).rglob("*.jpg"), *(root / place / "labels").rglob("*.txt")]:
            file = file.rename(file.with_stem(f"{number}{file.stem}"))
            if number and file.suffix == ".jpg":
                assert cv2.imwrite(str(file), 255 - cv2.imread(str(file)))
    lines = (f"{place}/images/train/{number}00{n}.jpg\n" for number, place in enumerate(places) for n in range(2))
    (root / "list.txt").write_text("".join(lines))
    (root / "data.yaml").write_text("train: list.txt\nnames: [code, text]\n")
    spec = read_data_yaml(root / "data.yaml")
    yaml = mend(lint(spec, hashes="none", cache=False), tmp_path / "mended").file
    copied = write_yolo(read_yolo(spec), tmp_path / "written")
    before = check_labels(spec.images("train"), 2, cache=False)
    expected = {image.name: rows for image, rows in zip(before.images, before.labels)}
    for written in (yaml, copied):
        after = check_labels(read_data_yaml(written).images("train"), 2, cache=False)
        assert {image.name for image in after.images} == expected.keys()
        assert after.report.missing_labels == 0
        for image, rows in zip(after.images, after.labels):
            np.testing.assert_allclose(rows, expected[image.name], atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} <= {"set", "s2", "mended", "written"}


def test_outlines_that_share_a_box_are_no_copies(tmp_path: Path, write_dataset: Write) -> None:
    yaml = write_dataset(tmp_path / "set", 1)
    falling, rising = "0 .1 .1 .9 .9 .9 .85 .15 .1\n", "0 .9 .1 .1 .9 .1 .85 .85 .1\n"
    nearly = "0 .9 .1 .1 .9 .1 .85 .85 .102\n"
    label = tmp_path / "set/labels/train/000.txt"
    label.write_text(falling + rising + falling + nearly)
    spec = replace(read_data_yaml(yaml), val=())
    mended = mend(lint(spec, cache=False), tmp_path / "new")
    assert (tmp_path / "new/labels/train/000.txt").read_text() == falling + rising + nearly
    assert mended.left[0].startswith("2 x outlines")
    (image,) = read_yolo(spec).splits["train"]
    assert len(image.annotations) == 3


def test_a_list_of_images_that_are_gone_is_a_finding(both: Path) -> None:
    shutil.rmtree(both.parent / "images/train")
    (both.parent / "list.txt").write_text("images/train/000.jpg\n")
    both.write_text("train: list.txt\nval: images/val\nnames: [code, text]\n")
    (problem,) = found_in(both, "split")
    assert "none of 1 images can be read" in problem


def test_a_data_set_of_which_nothing_can_be_used_is_a_finding(both: Path, tmp_path: Path) -> None:
    both.write_text("train: image/train\nnames: [code, text]\n")
    report = lint(read_data_yaml(both), cache=False)
    assert checks_of(report) == {"split"}
    with pytest.raises(DatasetError, match="no split can be used"):
        mend(report, tmp_path / "new")


def test_findings_that_no_copy_mends_are_left_to_decide(both: Path, tmp_path: Path) -> None:
    report = lint(read_data_yaml(both), cache=False)
    names = ("upright-box", "disputed-box", "anchors")
    found = [Finding(check=name, path=str(both), message="made up") for name in names]
    assert {f"1 x {name}" for name in names} <= set(mend(replace(report, findings=found), tmp_path / "new").left)


def test_a_split_that_no_copy_has_is_left_to_decide_and_findings_are_json(both: Path, tmp_path: Path) -> None:
    both.write_text("train: images/train\nval: nowhere\nnames: [code, code]\n")
    report = lint(read_data_yaml(both), cache=False)
    json.dumps(report.as_dict(), allow_nan=False)
    assert "called 'code'" in report.by_check()["class"][0].message
    assert "1 x split" in mend(report, tmp_path / "new").left


def test_a_list_names_files_by_their_bytes(both: Path) -> None:
    image = both.parent / "images/train/000.jpg"
    other = Path(os.fsdecode(os.fsencode(image.parent) + b"/caf\xe9.jpg"))
    try:
        image.rename(other)
    except OSError:
        pytest.skip("this file system names files in UTF-8")
    (both.parent / "labels/train/000.txt").rename(label_path(other))
    (both.parent / "list.txt").write_bytes(b"images/train/caf\xe9.jpg\n")
    both.write_text("train: list.txt\nnames: [code, text]\n")
    assert lint(read_data_yaml(both), cache=False).splits["train"].report.boxes > 0


def test_rows_with_keypoints_have_boxes(both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = "0 .5 .5 .2 .4 .45 .5 2 .5 .6 1 0 0 0\n"
    both.write_text(both.read_text() + "kpt_shape: [3, 3]\nflip_idx: [1, 0, 2]\n")
    spec = read_data_yaml(both)
    labels = [label_path(image) for split in ("train", "val") for image in spec.images(split)]
    for label in labels:
        label.write_text(row)
    report = lint(spec, hashes="none", cache=False)
    assert "malformed-row" not in report.by_check()
    assert main(["data", "check", str(both)]) == 0
    opened = DetectionDataset.open(spec, "train", image_size=64, cache_labels=False)
    assert opened.labels[0].tolist() == [pytest.approx([0, 0.5, 0.5, 0.2, 0.4])]
    assert opened.outlines is None
    with pytest.raises(DatasetError, match="this task learns outlines"):
        DetectionDataset.open(spec, "train", cache_labels=False, geometry="polygons")
    assert read_data_yaml(mend(report, tmp_path / "mended").file).keypoints == spec.keypoints
    assert main(["data", "export", str(both), "--to", str(tmp_path / "coco")]) == 0
    document = json.loads((tmp_path / "coco" / "instances_train.json").read_text())
    image, annotation = document["images"][0], document["annotations"][0]
    width, height = image["width"], image["height"]
    wanted = [0.45 * width, 0.5 * height, 2, 0.5 * width, 0.6 * height, 1, 0, 0, 0]
    assert annotation["keypoints"] == pytest.approx(wanted, abs=1e-3)
    assert annotation["num_keypoints"] == 2
    assert document["categories"][0]["keypoints"] == ["0", "1", "2"]
    assert annotation["bbox"][2:] == pytest.approx([0.2 * width, 0.4 * height], abs=1e-2)
    labels[0].write_text(
        row + "0 .5 .5 .2 .4\n0 .5 .5 .2 .4 .45 1.5 2 0 0 0 0 0 0\n0 .5 .5 .2 .4 nan 0 2 0 0 0 0 0 0\n"
    )
    assert main(["data", "check", str(both)]) == 1
    said = capsys.readouterr().out
    for line, reason in ((2, "5 numbers"), (3, "keypoint 1 has coordinate 1.5"), (4, "nan is not a coordinate")):
        assert f"{labels[0]}:{line}: {reason}" in said


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("kpt_shape: [3]", "kpt_shape must be"), ("kpt_shape: [3, 4]", "of 2 numbers"), ("kpt_shape: [0, 2]", "there are 1 to"),
        ("kpt_shape: [2, 2]\nflip_idx: [0]", "flip_idx must pair"), ("flip_idx: [0]", "there is no kpt_shape"),
        ("kpt_shape: [3, 2]\nflip_idx: [1, 2, 0]", "flip_idx must pair"),
    ],
)  # fmt: skip
def test_a_kpt_shape_that_cannot_be_is_refused(both: Path, rows: str, reason: str) -> None:
    both.write_text(both.read_text() + rows + "\n")
    with pytest.raises(DatasetError, match=reason):
        read_data_yaml(both)


def test_a_list_of_classes_among_labels_is_no_orphan(both: Path) -> None:
    write_label(both.parent, "code\ntext\n", "train/classes")
    assert not found_in(both, "orphan-label")


def test_names_of_any_kind_survive_a_data_yaml(tmp_path: Path) -> None:
    names = ["no", "3", "a: b", "# c", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "'", '"', "- d", "{e}"]
    (tmp_path / "images").mkdir()
    assert read_data_yaml(write_data_yaml(tmp_path, names, {"train": "images"})).names == tuple(names)


# ---------------------------------------------------------------- before a fit


def test_a_fit_reports_faulty_data_and_checks_once(
    both: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_image(both.parent, "train/000", "val/copy")
    write_label(both.parent, "0 .5 .5 .001 .3\n", "train/001")
    task = DetectionTask(data=both, image_size=320)
    task.check_data()
    first = caplog.text
    assert "1 x leak: images that an earlier split has, too, for example" in first
    assert "1 x tiny-box" in first
    assert "missing-label" not in first

    def decoded(path: Path) -> Any:
        raise AssertionError(f"{path} is decoded again")

    monkeypatch.setattr("arclight.vision.data.lint.fingerprints.fingerprint", decoded)
    caplog.clear()
    task.check_data()
    assert caplog.text == first
    DetectionTask(data=both, cache_labels=False).check_data()


def test_an_impossible_fit_is_refused_before_any_image_is_decoded(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in (both.parent / "labels/val").iterdir():
        label.unlink()
    monkeypatch.delattr("arclight.vision.data.lint.fingerprints.fingerprint")
    with pytest.raises(DatasetError, match="val: none of 4 images has a label file"):
        DetectionTask(data=both).check_data()
    assert not list(both.parent.rglob("*.hashes.npz"))


# ---------------------------------------------------------------- real photos


def test_a_leak_in_real_photos_is_found_and_nothing_else_is_called_one(shared_data: Path) -> None:
    report = lint(read_data_yaml(shared_data / "qr_photos"), cache=False)
    leaks = [
        (Path(finding.path).name, Path(finding.other).name) for finding in report.findings if finding.check == "leak"
    ]
    assert leaks == [("packs_img109.jpg", "packs_img108.jpg")]
    (tiny,) = (finding for finding in report.findings if finding.check == "tiny-box")
    assert (Path(tiny.path).name, tiny.line) == ("packs_img115.txt", 9)


@pytest.mark.slow
def test_photos_of_coco_have_no_look_alikes(tmp_path: Path, shared_data: Path) -> None:
    names = "\n".join(f"  {number}: c{number}" for number in range(80))
    root = shared_data / "coco128/images"
    (tmp_path / "data.yaml").write_text(f"train: {root}/train2017\nval: {root}/val2017\nnames:\n{names}\n")
    report = lint(read_data_yaml(tmp_path), cache=False)
    assert report.errors == 0
    assert not checks_of(report) & {"similar-images", "duplicate-image"}
