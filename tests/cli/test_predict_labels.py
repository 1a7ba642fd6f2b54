"""predict --uncertain and --save-labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from arclight.vision import Detections, Detector

Typed = Callable[[str], tuple[int, str, str]]


def bright(self: Detector, images: list[Any], processing: Any = None) -> list[Detections]:
    """Find grey rectangles, as confident as they are bright: what a trained detector would, without the training."""
    results = []
    for image in images:
        count, _, stats, _ = cv2.connectedComponentsWithStats((image[..., 0] > 5).astype(np.uint8))
        boxes = [(x, y, x + w, y + h) for x, y, w, h, area in stats[1:count] if area > 20]
        scores = [float(image[y + 3, x + 3, 0]) / 255 for x, y, _, _ in boxes]
        kept = [i for i, score in enumerate(scores) if score > processing.conf_threshold]
        rows = np.array(boxes, np.float32).reshape(-1, 4)[kept]
        results.append(
            Detections.from_arrays(rows, [scores[i] for i in kept], [0] * len(kept), names=self.names, image=image)
        )
    return results


@pytest.fixture
def photos(detector: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's detector that finds what is bright, and photos of rectangles: sure ones, torn ones, hardly any."""
    monkeypatch.setattr(Detector, "predict", bright)
    for name, levels in (("sure", [250, 250]), ("torn", [128, 100]), ("faint", [40]), ("none", [])):
        image = np.zeros((64, 128, 3), np.uint8)
        for i, level in enumerate(levels):
            image[10:40, 10 + 50 * i : 40 + 50 * i] = level
        Path("photos").mkdir(exist_ok=True)
        cv2.imwrite(f"photos/{name}.png", image)
    return detector


def test_uncertain_images_are_listed_to_label_next(photos: Path, typed: Typed) -> None:
    status, out, err = typed(f"predict {photos} photos --uncertain 2 --json found.json")
    assert (status, err) == (0, "")
    named = [line for line in out.splitlines() if line.startswith("label next")]
    assert named == [
        "label next: photos/torn.png (uncertainty 1.97)",
        "label next: photos/faint.png (uncertainty 0.63)",
    ]
    found = {Path(name).stem: len(boxes) for name, boxes in json.loads(Path("found.json").read_text()).items()}
    assert found == {"sure": 2, "torn": 2, "faint": 0, "none": 0}, "other outputs keep the confidence of predictions"


def test_save_labels_writes_boxes_above_the_thresholds_only(photos: Path, typed: Typed) -> None:
    Path("validate.json").write_text(json.dumps({"classes": {"cat": {"confidence": 0.45}}}))
    status, _, err = typed(f"predict {photos} photos --save-labels new --thresholds validate.json")
    assert (status, err) == (0, "")
    assert sorted(path.name for path in Path("new").iterdir()) == ["sure.txt", "torn.txt"]
    assert len(Path("new/torn.txt").read_text().splitlines()) == 1, "the box of 0.39 is not sure"


def test_thresholds_of_a_run_as_it_is_do_not_label_with_other_confidences(photos: Path, typed: Typed) -> None:
    (photos / "validate.json").write_text(json.dumps({"classes": {"cat": {"confidence": 0.45}}}))
    assert typed(f"predict {photos} photos --save-labels new")[0] == 0
    status, _, err = typed(f"predict {photos} photos --save-labels other --code-evidence")
    assert status == 2
    assert "--code-evidence has other confidences" in err
    status, _, err = typed(f"predict {photos} {photos} photos --save-labels other")
    assert status == 2
    assert "an ensemble has other confidences" in err
    assert not Path("other").exists()
    Path("own.json").write_text(json.dumps({"classes": {"cat": {"confidence": 0.45}}}))
    with pytest.warns(UserWarning, match="takes all boxes for QR codes"):
        assert typed(f"predict {photos} photos --save-labels other --code-evidence --thresholds own.json")[0] == 0


def test_thresholds_of_another_step_do_not_label(photos: Path, typed: Typed) -> None:
    """The run was trained on since, or another checkpoint was validated."""
    for step, status in ((0, 0), (40, 2), (None, 0)):
        numbers = {"checkpoint": "last.ckpt", "step": step, "classes": {"cat": {"confidence": 0.45}}}
        (photos / "validate.json").write_text(json.dumps(numbers))
        found, _, err = typed(f"predict {photos} photos --save-labels new{step}")
        assert found == status
        assert Path(f"new{step}").exists() == (status == 0)
        assert ("measured on last.ckpt (step 40), and last.ckpt (step 0) predicts" in err) == (step == 40)
        assert typed(f"predict {photos} photos --save-labels own{step} --thresholds {photos}/validate.json")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--save-labels new", "needs each class's threshold: arclight validate"),
        ("--thresholds validate.json", "--thresholds are those of --save-labels"),
        ("--uncertain 2 --thresholds validate.json", "--thresholds are those of --save-labels"),
        ("--uncertain 1 --track bytetrack", "run --uncertain and --save-labels without it"),
        ("--save-labels new --thresholds other.json", "bird is not a class of this detector"),
        ("--save-labels new --thresholds photos/none.png", "holds no thresholds"),
        ("--uncertain 0", "0 is not 1 or more"),
    ],
)
def test_invalid_label_options_are_refused(photos: Path, typed: Typed, words: str, message: str) -> None:
    (photos / "validate.json").unlink(missing_ok=True)
    Path("other.json").write_text(json.dumps({"classes": {"bird": {"confidence": 0.4}}}))
    status, _, err = typed(f"predict {photos} photos {words}")
    assert status == 2
    assert message in err
