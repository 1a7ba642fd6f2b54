"""YOLO data sets: what is read, what is refused and why, and batches that are the same wherever they are made."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from arclight.data import ResumableLoader
from arclight.vision.data import dataset as dataset_module
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.dataset import DatasetError, DetectionDataset, collate, read_data_yaml
from arclight.vision.data.labels import check_labels, label_path
from arclight.vision.data.letterbox import unletterbox
from arclight.vision.results.records import RecordingMetrics

Write = Callable[..., Path]


def open_train(yaml: Path, **settings: Any) -> DetectionDataset:
    return DetectionDataset.open(read_data_yaml(yaml), "train", **{"image_size": 64, "cache_labels": False} | settings)


# ---------------------------------------------------------------- data.yaml


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [a, b]", ("a", "b")),
        ("names: {1: b, 0: a}", ("a", "b")),
        ("names:\n  0: no\n  1: 007\n  2: 1e3", ("no", "007", "1e3")),  # names are text, whatever YAML takes them for
        ("nc: 1\nnames: ['qr code']\nroboflow: {license: x}\ndownload: rm -rf /", ("qr code",)),
        ("base: &base\n  names: [a]\n  nc: 1\n<<: *base", ("a",)),
        ("base: &base {names: [a]}\n<<: *base\nnames: [own, b]", ("own", "b")),
        ("first: &first {names: [a]}\nsecond: &second {nc: 1, names: [b]}\n<<: [*first, *second]", ("a",)),
        ("old: &old {0: a, 1: b}\nnames: {<<: *old, 1: own, 2: c}", ("a", "own", "c")),
        ("deep: &deep {nc: 2}\nbase: &base {<<: *deep, names: [a, b]}\n<<: *base", ("a", "b")),
        ("'<<': {names: [b]}\nnames: [a]", ("a",)),
    ],
)
def test_names(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    (tmp_path / "data.yaml").write_text(text)
    assert read_data_yaml(tmp_path / "data.yaml").names == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: x", "names must list the classes"),
        ("names: []", "names must list the classes"),
        ("names: [[a]]", "names must list the classes"),
        ("names: {1: a, 2: b}", "number the classes 0 to 1, not 1, 2"),
        ("nc: 3\nnames: [a, b]", "nc is 3 but names has 2 classes"),
        ("names: [a]\ntrain: {a: b}", "train must be a folder"),
        ("- a\n- b", "must have the keys names"),
        ("names: [a\nb: }", "is not YAML"),
        ("names: {0: a, 1: b, 1: c}", r"data\.yaml:1: names has the number 1 twice"),
        ("names: [a]\ntrain: x\ntrain: y", r"data\.yaml:3: there is the key train twice"),
        ("base: &base {nc: 3}\nnames: [a]\n<<: *base", "nc is 3 but names has 1 classes"),
        ("base: &base {names: [a], train: x, train: y}\n<<: *base", r"data\.yaml:1: there is the key train twice"),
        ("names: [a]\nkey: &key [1]\n? *key\n: 1\n? *key\n: 2", "found unhashable key"),
        ("names: [a]\n<<: images", r"data\.yaml:2: << brings in the keys of other mappings"),
        ("names: [a]\npath: [x]", r"path must be one folder, not \['x'\]"),
        ("names: " + 3000 * "[", "is not YAML: maximum recursion depth"),
        ("!!python/object/apply:os.system ['echo ran > ran']", "must have the keys names"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_data_yaml(tmp_path / "data.yaml")
    assert not (tmp_path / "ran").exists()


def test_references_in_yaml_are_not_written_out(tmp_path: Path) -> None:
    """Twelve lines of references to the line before stand for a text of 10**12 words."""
    lines = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10 if n else ['y'] * 10)}]" for n in range(12)]
    for key in ("names", "path", "train", "kpt_shape", "flip_idx"):
        rest = {"names": "[a]", "kpt_shape": "[4, 2]"} | {key: "*x11"}
        (tmp_path / "data.yaml").write_text("\n".join([*lines, *(f"{name}: {value}" for name, value in rest.items())]))
        with pytest.raises(DatasetError) as error:
            read_data_yaml(tmp_path / "data.yaml")
        assert len(str(error.value)) < 1000 + len(str(tmp_path))


def test_mappings_that_bring_in_each_other_are_read_once(tmp_path: Path) -> None:
    """Thirty mappings that bring in the one before twice stand for a billion."""
    lines = ["x0: &x0 {names: [a]}", *(f"x{n}: &x{n} {{<<: [*x{n - 1}, *x{n - 1}]}}" for n in range(1, 30))]
    (tmp_path / "data.yaml").write_text("\n".join([*lines, "<<: *x29"]))
    assert read_data_yaml(tmp_path / "data.yaml").names == ("a",)


def test_a_missing_yaml_or_split_is_named_with_what_is_there(data: Path) -> None:
    with pytest.raises(DatasetError, match=r"dat\.yaml: No such file.*did you mean data\.yaml"):
        read_data_yaml(data.parent / "dat.yaml")
    spec = read_data_yaml(data)
    with pytest.raises(DatasetError, match="has no 'test' split"):
        spec.images("test")
    with pytest.raises(DatasetError, match=r"images/val does not exist; .*nothing is ever downloaded"):
        spec.images("val")


def test_splits_may_be_folders_lists_and_files_below_a_path(tmp_path: Path, write_dataset: Write) -> None:
    write_dataset(tmp_path / "set", 4)
    (tmp_path / "set" / "images" / "train" / "readme.md").write_text("no image")
    (tmp_path / "set" / "some.txt").write_text("./images/train/003.jpg\n\nimages/train/001.jpg\n")
    (tmp_path / "data.yaml").write_text(
        "path: set\nnames: [a, b]\ntrain: images\nval: some.txt\ntest: [some.txt, images/train/000.jpg]"
    )
    spec = read_data_yaml(tmp_path / "data.yaml")
    assert [path.name for path in spec.images("train")] == ["000.jpg", "001.jpg", "002.jpg", "003.jpg"]
    assert [path.name for path in spec.images("val")] == ["003.jpg", "001.jpg"]
    assert [path.name for path in spec.images("test")] == ["003.jpg", "001.jpg", "000.jpg"]
    assert check_labels(spec.images("val"), 2, cache=False).report.boxes == 2 + 1


# ---------------------------------------------------------------- batches


def test_validation_batches_take_boxes_back_to_the_original(data: Path) -> None:
    opened = open_train(data)
    batch = collate(opened.__getitems__([3, 5, 0]))
    assert batch["images"].shape == (3, 3, 64, 64)
    assert batch["images"].dtype == torch.uint8
    assert batch["targets"].dtype == torch.float32
    assert batch["targets"][:, 0].tolist() == [0, 1, 1, 1, 2]
    for place, index in enumerate([3, 5, 0]):
        rows = batch["targets"][batch["targets"][:, 0] == place].numpy()
        height, width = batch["shapes"][place]
        assert cv2.imread(batch["paths"][place]).shape[:2] == (height, width)
        square = np.concatenate((rows[:, 2:4] - rows[:, 4:] / 2, rows[:, 2:4] + rows[:, 4:] / 2), 1) * 64
        original = unletterbox(square, batch["letterbox"][place], (height, width))
        labels = opened.labels[index]
        corners = np.concatenate((labels[:, 1:3] - labels[:, 3:] / 2, labels[:, 1:3] + labels[:, 3:] / 2), 1)
        np.testing.assert_array_equal(rows[:, 1], labels[:, 0])
        np.testing.assert_allclose(original, corners.clip(0, 1) * (width, height, width, height), atol=1e-2)


def test_part_of_a_batch_can_be_collated(data: Path) -> None:
    samples = open_train(data).__getitems__([0, 1, 2])
    whole, part = collate(samples), collate([samples[2], samples[0]])
    assert torch.equal(part["images"], whole["images"][[2, 0]])
    assert part["paths"] == [whole["paths"][2], whole["paths"][0]]
    assert torch.equal(open_train(data)[1].image, whole["images"][1])


def test_images_without_boxes_stay_in_the_batch(data: Path) -> None:
    label_path(data.parent / "images/train/001.jpg").write_text("")
    for augment in (None, Augment(mosaic=0)):
        batch = collate(open_train(data, augment=augment).__getitems__([1, 0, 1]))
        assert batch["images"].shape[0] == 3
        assert set(batch["targets"][:, 0].tolist()) <= {1.0}
        assert batch["targets"].shape[1] == 6


def test_training_targets_are_shares_of_the_square(data: Path) -> None:
    opened = open_train(data, augment=Augment(fliplr=0.5, mixup=0.5, degrees=10))
    random.seed(1)
    batch = collate(opened.__getitems__(list(range(8))))
    corners = torch.cat(
        (
            batch["targets"][:, 2:4] - batch["targets"][:, 4:] / 2,
            batch["targets"][:, 2:4] + batch["targets"][:, 4:] / 2,
        ),
        1,
    )
    assert len(corners) > 8
    assert corners.min() >= -1e-6
    assert corners.max() <= 1 + 1e-6
    assert "letterbox" not in batch
    assert [Path(path).name for path in batch["paths"]] == [f"{index:03d}.jpg" for index in range(8)]


def boxes_px(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Class and box of each image's targets, in pixels of the original."""
    height, width = batch["images"].shape[2:]
    found = {}
    for place, path in enumerate(batch["paths"]):
        rows = batch["targets"][batch["targets"][:, 0] == place].numpy()
        corners = np.concatenate((rows[:, 2:4] - rows[:, 4:] / 2, rows[:, 2:4] + rows[:, 4:] / 2), 1)
        placed = unletterbox(corners * np.tile((width, height), 2), batch["letterbox"][place], batch["shapes"][place])
        found[path] = np.concatenate((rows[:, 1:2], placed), 1)
    return found


def validation_batches(opened: DetectionDataset, workers: int = 0) -> list[dict[str, Any]]:
    return list(DataLoader(opened, 4, num_workers=workers, collate_fn=collate))


def write_shapes(root: Path, shapes: Sequence[tuple[int, int]]) -> Path:
    """Images of noise of these shapes (height, width), each with one box."""
    numbers = np.random.default_rng(0)
    for index, (height, width) in enumerate(shapes):
        image = root / "images/train" / f"{index:03d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(image), numbers.integers(0, 256, (height, width, 3), dtype=np.uint8))
        label_path(image).parent.mkdir(parents=True, exist_ok=True)
        label_path(image).write_text(f"{index % 2} 0.5 0.4 0.3 0.2\n")
    (root / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [code, text]\n")
    return root / "data.yaml"


SHAPES = [(40, 128), (128, 40), (100, 100), (32, 128), (90, 128), (128, 64), (64, 128), (1, 128), (128, 96), (77, 33)]


@pytest.mark.parametrize("stride", [32, 64])
def test_rectangular_batches_have_the_smallest_multiples_that_hold_their_images(tmp_path: Path, stride: int) -> None:
    yaml = write_shapes(tmp_path, SHAPES)
    batches = validation_batches(open_train(yaml, image_size=128, rect=True, stride=stride))
    aspects = [height / width for batch in batches for height, width in batch["shapes"]]
    assert aspects == sorted(height / width for height, width in SHAPES)
    for batch in batches:
        scaled = [(round(h * 128 / max(h, w)), round(w * 128 / max(h, w))) for h, w in batch["shapes"]]
        wanted = tuple(-(-max(sides) // stride) * stride for sides in zip(*scaled))
        assert tuple(batch["images"].shape[2:]) == wanted
    if stride == 32:
        assert [tuple(batch["images"].shape[2:]) for batch in batches] == [(64, 128), (128, 128), (128, 64)]


def test_rectangular_batches_hold_the_pixels_and_boxes_of_squares(tmp_path: Path) -> None:
    yaml = write_shapes(tmp_path, SHAPES)
    squares = validation_batches(open_train(yaml, image_size=128))
    pixels, boxes = {}, {}
    for batch in squares:
        boxes |= boxes_px(batch)
        pixels |= dict(zip(batch["paths"], zip(batch["images"], batch["letterbox"])))
    seen = set()
    for batch in validation_batches(open_train(yaml, image_size=128, rect=True)):
        for path, rows in boxes_px(batch).items():
            np.testing.assert_allclose(rows, boxes[path], atol=1e-3)
            seen.add(path)
        for image, (scale, x, y), path, (height, width) in zip(
            batch["images"], batch["letterbox"], batch["paths"], batch["shapes"]
        ):
            square, (same_scale, left, top) = pixels[path]
            assert scale == same_scale
            h, w = max(round(height * scale), 1), max(round(width * scale), 1)
            assert torch.equal(image[:, y : y + h, x : x + w], square[:, top : top + h, left : left + w])
            assert image.sum() - image[:, y : y + h, x : x + w].sum() == 114 * 3 * (image[0].numel() - h * w)
    assert seen == boxes.keys()


def test_rectangular_batches_do_not_depend_on_workers_and_leave_out_damaged_images(tmp_path: Path) -> None:
    opened = open_train(write_shapes(tmp_path, SHAPES), image_size=128, rect=True)
    one = validation_batches(opened)
    assert_equal_batches(one, validation_batches(opened, workers=2))
    lost = Path(one[1]["paths"][0])
    lost.write_bytes(lost.read_bytes()[:60])
    other = validation_batches(open_train_again(opened))
    assert [path for batch in other for path in batch["paths"]] == [
        path for batch in one for path in batch["paths"] if path != str(lost)
    ]


def open_train_again(opened: DetectionDataset) -> DetectionDataset:
    return DetectionDataset(opened.images, opened.labels, image_size=128, rect=True)


def test_rectangular_batches_are_refused_for_outlines_and_weights(data: Path) -> None:
    opened = open_train(data)
    with pytest.raises(ValueError, match="rect=True is for boxes alone"):
        DetectionDataset(opened.images, opened.labels, outlines=[()] * len(opened.images), rect=True)
    with pytest.raises(ValueError, match="rect and image_weights both say which images share a batch"):
        open_train(data, augment=Augment(), rect=True, image_weights=True)
    with pytest.raises(ValueError, match="only a data set for training in rectangles has an order"):
        open_train(data, rect=True).aspect_order(4)


@pytest.mark.parametrize("num_classes", [1, 2])
def test_rectangular_batches_give_the_scores_of_squares(tmp_path: Path, num_classes: int) -> None:
    yaml = write_shapes(tmp_path, [shape for shape in SHAPES if min(shape) > 1])

    def score(**options: Any) -> Any:
        metrics = RecordingMetrics(num_classes)
        for batch in validation_batches(open_train(yaml, image_size=128, single_class=num_classes == 1, **options)):
            height, width = batch["images"].shape[2:]
            found = []
            for place, path in enumerate(batch["paths"]):
                number, scale = int(Path(path).stem), batch["letterbox"][place][0]
                rng = np.random.default_rng(number)
                own = batch["targets"][batch["targets"][:, 0] == place]
                boxes = torch.cat((own[:, 2:4] - own[:, 4:] / 2, own[:, 2:4] + own[:, 4:] / 2), 1)
                boxes = boxes.double() * torch.tensor([width, height] * 2)
                boxes = boxes + torch.from_numpy(rng.normal(0, 5 * scale, (len(own), 4)))
                confidence = torch.full((len(own), 1), float(rng.random()))
                found.append(torch.cat((boxes, confidence, own[:, 1:2]), 1))
            metrics.observe_batch(found, batch)
        return metrics.compute()

    rect, square = score(rect=True), score()
    assert 0 < square.map50_95 < 1
    assert rect.map50 == pytest.approx(square.map50, abs=1e-9)
    assert rect.map50_95 == pytest.approx(square.map50_95, abs=1e-9)
    for one, other in zip(rect.records, square.records, strict=True):
        np.testing.assert_allclose(one.predicted, other.predicted, atol=1e-3)
        np.testing.assert_allclose(one.true, other.true, atol=1e-3)


def all_batches(opened: DetectionDataset, workers: int, epochs: int = 2, **options: Any) -> list[dict[str, Any]]:
    loader = DataLoader(opened, 4, shuffle=True, num_workers=workers, collate_fn=collate, **options)
    resumable = ResumableLoader(loader, seed=11)
    return [batch for epoch in range(epochs) for batch in resumable.batches(epoch)]


def assert_equal_batches(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert len(one) == len(two)
    for first, second in zip(one, two):
        assert torch.equal(first["images"], second["images"])
        assert torch.equal(first["targets"], second["targets"])
        assert first["paths"] == second["paths"]


EVERYTHING = Augment(mosaic=0.7, mixup=0.4, degrees=10, perspective=0.0005, fliplr=0.5, close_mosaic=0.5)


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, {"persistent_workers": True}), *(pytest.param(count, {}, marks=pytest.mark.slow) for count in (1, 2))],
)
def test_batches_do_not_depend_on_workers(
    tmp_path: Path, write_dataset: Write, workers: int, options: dict[str, Any]
) -> None:
    yaml = write_dataset(tmp_path, 16)
    one = all_batches(open_train(yaml, augment=EVERYTHING, epochs=2), workers=0)
    other = all_batches(open_train(yaml, augment=EVERYTHING, epochs=2), workers, **options)
    assert_equal_batches(one, other)
    assert not torch.equal(one[0]["images"], one[4]["images"])


def test_batches_do_not_depend_on_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_dataset: Write) -> None:
    yaml = write_dataset(tmp_path, 16)
    one = all_batches(open_train(yaml, augment=EVERYTHING), workers=0)
    assert_equal_batches(one, all_batches(open_train(yaml, augment=EVERYTHING, cache=True), workers=0))
    monkeypatch.setattr(dataset_module, "RECENT_BYTES", 0)
    assert_equal_batches(one, all_batches(open_train(yaml, augment=EVERYTHING), workers=0))


MORE = dataclasses.replace(EVERYTHING, mosaic9=0.5, copy_paste=0.5)


@pytest.mark.slow
def test_batches_of_all_options_do_not_depend_on_workers_or_caches(tmp_path: Path, write_dataset: Write) -> None:
    yaml = write_dataset(tmp_path, 16)
    options = {"augment": MORE, "multi_scale": 0.5, "image_weights": True, "epochs": 2}
    one = all_batches(open_train(yaml, **options), workers=0)
    assert_equal_batches(one, all_batches(open_train(yaml, **options), workers=2))
    files = tmp_path / "kept"
    for _ in range(2):
        assert_equal_batches(one, all_batches(open_train(yaml, disk_cache=files, **options), workers=2))
    assert len({batch["images"].shape[-1] for batch in one}) > 1


def test_a_resumed_epoch_has_the_sizes_and_draws_of_one_that_was_not_stopped(data: Path) -> None:
    opened = open_train(data, augment=MORE, multi_scale=0.5, image_weights=True)
    loader = ResumableLoader(DataLoader(opened, 2, shuffle=True, collate_fn=collate), seed=11)
    assert_equal_batches(list(loader.batches(0))[2:], list(loader.batches(0, start=2)))


def test_batches_of_several_scales_are_multiples_of_the_stride(data: Path) -> None:
    opened = open_train(data, augment=Augment(), image_size=128, multi_scale=0.5)
    sides = {opened.__getitems__([0, 1]).images.shape[-1] for _ in range(40)}
    assert sides == {64, 96, 128, 160, 192}
    assert dataset_module.batch_sides(128, 0.0, 32) == [128]
    assert dataset_module.batch_sides(640, 0.1, 64) == [576, 640, 704]
    still = Augment(mosaic=0, translate=0, scale=0, hsv_h=0, hsv_s=0, hsv_v=0)
    scaled, plain = open_train(data, augment=still, multi_scale=0.5), open_train(data)
    for _ in range(4):
        for sample, whole in zip(scaled.__getitems__([0, 1, 2]), plain.__getitems__([0, 1, 2])):
            torch.testing.assert_close(sample.targets, whole.targets, atol=0.01, rtol=0)  # a pixel of 64 is rounded


def test_images_of_rare_classes_are_drawn_more_often() -> None:
    rows = [np.array([[0, 0.5, 0.5, 0.1, 0.1]], np.float32)] * 9 + [np.array([[1, 0.5, 0.5, 0.1, 0.1]], np.float32)]
    weights = dataset_module.draw_weights(rows)
    np.testing.assert_allclose(weights, [1 / 18] * 9 + [1 / 2])
    with_background = dataset_module.draw_weights([*rows, np.zeros((0, 5), np.float32)])
    assert with_background[-1] == pytest.approx(1 / 11)
    assert with_background.sum() == pytest.approx(1)
    np.testing.assert_allclose(dataset_module.draw_weights([np.zeros((0, 5), np.float32)] * 4), [0.25] * 4)


def test_weighted_batches_follow_the_weights(data: Path) -> None:
    opened = open_train(data, augment=Augment(mosaic=0), image_weights=True)
    weights = dataset_module.draw_weights(opened.labels)
    drawn = [sample.path for _ in range(60) for sample in opened.__getitems__(list(range(8)))]
    shares = np.array([drawn.count(str(path)) for path in opened.images]) / len(drawn)
    np.testing.assert_allclose(shares, weights, atol=0.06)
    assert abs(weights - 1 / 8).max() > 0.06  # else the line above would hold without them


def test_images_kept_in_files_are_read_again_and_follow_their_source(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Path] = []
    read = dataset_module.decode_reduced
    monkeypatch.setattr(
        dataset_module, "decode_reduced", lambda path, size: (decoded.append(path), read(path, size))[1]
    )
    files = tmp_path / "kept"

    def all_images() -> list[np.ndarray]:
        opened = open_train(data, augment=Augment(), disk_cache=files)
        return [opened._decoded(index).image for index in range(8)]

    first = all_images()
    assert len(decoded) == 8
    assert all(np.array_equal(a, b) for a, b in zip(first, all_images()))
    assert len(decoded) == 8
    changed = sorted((data.parent / "images/train").iterdir())[3]
    assert cv2.imwrite(str(changed), np.zeros((80, 80, 3), np.uint8))
    assert all_images()[3].max() == 0
    assert decoded[8:] == [changed]
    for kept in files.iterdir():
        kept.write_bytes(kept.read_bytes()[:100])  # a disk that was full
    assert all(np.array_equal(a, b) for place, (a, b) in enumerate(zip(first, all_images())) if place != 3)


def test_batches_depend_on_the_random_state_only(data: Path) -> None:
    opened = open_train(data, augment=EVERYTHING)
    random.seed(5)
    first = opened.__getitems__([0, 1, 2])
    opened.__getitems__([4, 5])
    second = opened.__getitems__([0, 1, 2])
    random.seed(5)
    np.random.seed(1)
    torch.manual_seed(1)
    again = opened.__getitems__([0, 1, 2])
    assert all(torch.equal(a.image, b.image) for a, b in zip(first, again))
    assert not all(torch.equal(a.image, b.image) for a, b in zip(first, second))


def test_decoded_images_are_kept_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_dataset: Write
) -> None:
    opened = open_train(write_dataset(tmp_path, 16), augment=Augment())
    reads: list[Path] = []
    read = dataset_module.decode_reduced
    monkeypatch.setattr(dataset_module, "decode_reduced", lambda path, size: (reads.append(path), read(path, size))[1])
    opened.__getitems__(list(range(8)))
    assert 8 <= len(reads) == len(set(reads)) <= 9  # eight of the batch and one drawn for it
    opened.__getitems__(list(range(8)))
    assert len(reads) == len(set(reads))
    monkeypatch.setattr(dataset_module, "RECENT_BYTES", 0)
    opened.__getitems__([0])
    reads.clear()
    opened.__getitems__([0])
    assert len(reads) >= 1


def test_the_last_epochs_see_whole_images(data: Path) -> None:
    opened = open_train(
        data, augment=Augment(close_mosaic=0.2, hsv_h=0, hsv_s=0, hsv_v=0, scale=0, translate=0), epochs=10
    )
    plain = open_train(data)
    for epoch, whole in ((0, False), (7, False), (8, True), (9, True), (3, False)):
        opened.set_epoch(epoch)
        random.seed(epoch)
        seen = [
            (sample.image == plain[index].image).float().mean()
            for index, sample in enumerate(opened.__getitems__(list(range(8))))
        ]
        # A whole image differs from its letterboxed self by interpolation only, here at most a grey level or two.
        assert (np.mean(seen) > 0.5) == whole


def test_cache_is_refused_where_it_makes_no_sense_or_does_not_fit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cache=True keeps training images"):
        open_train(data, cache=True)
    monkeypatch.setattr(dataset_module, "available_memory", lambda: 10_000)
    with pytest.raises(DatasetError, match=r"cache=True needs about .* GB for 8 images of 64 pixels"):
        open_train(data, cache=True, augment=Augment())


# ---------------------------------------------------------------- damage that only decoding finds


def damage(image: Path) -> None:
    """Keep header and end, ruin what is between."""
    content = bytearray(image.read_bytes())
    start = content.index(b"\xff\xda")
    content[start + 2 : start + 14] = bytes(12)
    image.write_bytes(content)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_damaged_images_are_replaced_reported_once_and_counted(
    data: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("002.jpg", "003.jpg", "007.jpg"):
        damage(data.parent / "images" / "train" / name)
    opened = open_train(data, augment=Augment())
    assert len(opened) == 8  # the scan cannot see this
    loader = DataLoader(opened, 4, num_workers=workers, collate_fn=collate)
    for _ in range(2):
        names = [Path(path).name for batch in loader for path in batch["paths"]]
        assert names == ["000.jpg", "001.jpg", "004.jpg", "004.jpg", "004.jpg", "005.jpg", "006.jpg", "000.jpg"]
    assert opened.damaged == 3
    if workers == 0:
        assert sorted(Path(str(record.args[0])).name for record in caplog.records) == ["002.jpg", "003.jpg", "007.jpg"]


@pytest.mark.parametrize("workers", [0, 2])
def test_no_neighbour_is_measured_in_the_place_of_a_damaged_image(data: Path, workers: int) -> None:
    for name in ("002.jpg", "004.jpg", "005.jpg", "006.jpg", "007.jpg"):
        damage(data.parent / "images" / "train" / name)
    opened = open_train(data)
    batches = list(DataLoader(opened, 4, num_workers=workers, collate_fn=collate))
    assert [[Path(path).name for path in batch["paths"]] for batch in batches] == [
        ["000.jpg", "001.jpg", "003.jpg"],
        [],
    ]
    assert [tuple(batch["images"].shape[:2]) for batch in batches] == [(3, 3), (0, 3)]
    assert set(batches[0]["targets"][:, 0].tolist()) == {0, 1, 2}
    assert batches[1]["targets"].shape == (0, 6)
    assert len(batches[0]["letterbox"]) == 3
    assert opened.damaged == 5
    torch.testing.assert_close(batches[0]["images"][2], opened[3].image)
    with pytest.raises(DatasetError, match=r"002\.jpg cannot be decoded"):
        opened[2]


def test_all_images_damaged_is_an_error(data: Path) -> None:
    opened = open_train(data, augment=Augment())
    for image in opened.images:
        image.unlink()
    with pytest.raises(DatasetError, match="none of the 8 images can be read"):
        opened[0]


# ---------------------------------------------------------------- real photos


def test_real_photos_with_boxes_and_polygons(shared_data: Path) -> None:
    spec = read_data_yaml(shared_data / "qr_photos" / "data.yaml")
    counts = {
        split: check_labels(spec.images(split), len(spec.names), name=split, cache=False).report
        for split in ("train", "val", "test")
    }
    assert [counts[split].images for split in ("train", "val", "test")] == [188, 45, 70]
    for report in counts.values():
        assert not report.corrupt
        assert not report.malformed
    opened = DetectionDataset.open(spec, "val", image_size=320, cache_labels=False, augment=Augment())
    assert collate(opened.__getitems__(list(range(4))))["images"].float().std() > 20
