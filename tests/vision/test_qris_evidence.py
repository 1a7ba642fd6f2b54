"""Evidence of codes in a detector's boxes: finder patterns count and place them, text and checkers do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
segno = pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.vision.qris.reading import evidence  # noqa: E402
from arclight.vision.qris.reading.evidence import (  # noqa: E402
    MAX_SHIFT,
    NEUTRAL,
    SLOPE,
    UNREAD,
    CodeEvidence,
    code_classes,
    code_evidence,
    threshold_before,
    with_code_evidence,
)
from arclight.vision.results.detections import Boxes, Detections  # noqa: E402

SIDE = 84


def symbol(cell: int) -> np.ndarray:
    made = segno.make("KOPI SENJA 3", micro=False, error="m", version=1)
    return np.kron(np.where(np.array(made.matrix) > 0, 30, 220).astype(np.uint8), np.ones((cell, cell), np.uint8))


def text() -> np.ndarray:
    picture = np.full((SIDE, SIDE), 220, np.uint8)
    for row in range(6):
        cv2.putText(picture, "Ut enim ad", (2, 12 + 14 * row), cv2.FONT_HERSHEY_SIMPLEX, 0.42, 30, 1, cv2.LINE_AA)
    return picture


def checkers() -> np.ndarray:
    dark = np.add.outer(np.arange(7), np.arange(7)) % 2
    return np.kron(np.where(dark > 0, 30, 220).astype(np.uint8), np.ones((12, 12), np.uint8))


BOXES = {"code": (60, 60), "text": (260, 60), "checkers": (460, 60)}


def photo(blur: float = 0.0) -> np.ndarray:
    """A code, text and checkers of one size beside each other, blurred."""
    picture = np.full((220, 620), 220, np.uint8)
    for (x, y), sprite in zip(BOXES.values(), (symbol(4), text(), checkers()), strict=True):
        picture[y : y + SIDE, x : x + SIDE] = sprite
    return cv2.GaussianBlur(picture, (0, 0), blur) if blur else picture


def box(name: str, move: float = 0.0, grow: float = 0.0) -> tuple[float, float, float, float]:
    x, y = BOXES[name]
    return x + move - grow, y + move - grow, x + move + SIDE + grow, y + move + SIDE + grow


def detector(*rows: tuple[float, float, float, float, float]):
    """A detector that sees these boxes, with these confidences, in every image."""
    array = np.array(rows, np.float64).reshape(-1, 5)

    def detect(images: Sequence[np.ndarray]) -> list[Detections]:
        return [Detections(Boxes(array[:, :4], array[:, 4], np.zeros(len(array))), ("qr",)) for _ in images]

    return detect


def rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, 2)


@pytest.mark.parametrize("blur", [0.0, 3.2])
def test_codes_are_evidence_and_text_and_checkers_are_not(blur: float) -> None:
    """Blurred by three quarters of a module no plain reader sees the code: its finder patterns remain."""
    grey = photo(blur)
    seen = {name: code_evidence(grey, box(name, move=3)).strength for name in BOXES}
    assert seen["code"] == 1 if not blur else 0.5 < seen["code"] < 1
    assert max(seen["text"], seen["checkers"]) < 0.3


@pytest.mark.parametrize("blur", [0.0, 3.2])
def test_a_code_is_no_evidence_of_a_box_that_is_elsewhere(blur: float) -> None:
    grey = photo(blur)
    assert code_evidence(grey, box("code", grow=50)).strength < 0.3
    assert code_evidence(grey, box("code", move=60)).strength < 0.3


@pytest.mark.parametrize("blur", [0.0, 3.2])
def test_a_code_gives_the_box_its_place_and_suppresses_duplicates(blur: float) -> None:
    """Two boxes overlap the code too little to be duplicates of each other, until it gives both its place."""
    rows = [(*box("code", move=-16), 0.6), (*box("code", move=16), 0.5), (*box("text"), 0.4)]
    (found,) = with_code_evidence(detector(*rows))([rgb(photo(blur))])
    assert len(found) == 2
    assert found.boxes.xyxy[0] == pytest.approx(box("code"), abs=4)
    assert found.boxes.xyxy[1].tolist() == list(box("text"))
    (found,) = with_code_evidence(detector(*rows), iou_threshold=1.0)([rgb(photo(blur))])
    assert len(found) == 3


def test_a_symbol_that_cannot_be_decoded_gives_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.array([[0, 0], [200, 0], [200, 200], [0, 200]], np.float32)
    monkeypatch.setattr(evidence, "symbol_quads", lambda grey: [(whole, False)])
    seen = code_evidence(photo(), box("text"))
    assert (seen.strength, seen.hull) == (UNREAD.strength, None)
    assert NEUTRAL < seen.strength < code_evidence(photo(), box("code")).strength < 1


def test_boxes_without_a_code_fall_below_those_with_one() -> None:
    rows = [(*box("text"), 0.9), (*box("checkers"), 0.8), (*box("code"), 0.3)]
    (found,) = with_code_evidence(detector(*rows))([rgb(photo(blur=1.0))])
    assert found.boxes.xyxy[0] == pytest.approx(box("code"), abs=3)
    assert found.boxes.xyxy[1:].tolist() == [list(box(name)) for name in ("checkers", "text")]
    odds = (found.boxes.conf / (1 - found.boxes.conf))[[0, 2]]
    assert odds == pytest.approx([3 / 7 * np.exp(MAX_SHIFT), 9 * np.exp(-SLOPE * NEUTRAL)], rel=0.01)


def test_weighed_boxes_below_the_threshold_are_dropped() -> None:
    low = threshold_before(0.25)
    rows = [(*box("text"), 0.7), (*box("code"), 1.01 * low)]
    (found,) = with_code_evidence(detector(*rows), threshold=0.25)([rgb(photo(blur=1.0))])
    assert found.boxes.xyxy.tolist() == [pytest.approx(box("code"), abs=3)]
    assert 0.25 < found.boxes.conf[0] < 0.26
    (found,) = with_code_evidence(detector(*rows), threshold=0.26)([rgb(photo(blur=1.0))])
    assert len(found) == 0


def test_only_the_surest_boxes_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(evidence, "code_evidence", lambda grey, box: looked.append(box) or CodeEvidence(NEUTRAL, None))
    rows = [(15 * number, 0, 15 * number + 10, 10, 0.9 - 0.001 * number) for number in range(evidence.MAX_WEIGHED + 5)]
    (found,) = with_code_evidence(detector(*rows))([rgb(photo())])
    assert len(looked) == evidence.MAX_WEIGHED
    assert found.boxes.conf == pytest.approx([row[4] for row in rows])


def test_boxes_of_any_shape_and_place() -> None:
    grey = photo()
    strange = [(0, 0, 0, 0), (-50, -50, 700, 300), (0, 0, 619.5, 9), (611, 0, 620, 220), (650, 10, 700, 60)]
    (found,) = with_code_evidence(detector(*[(*one, 0.5) for one in strange]))([rgb(grey)])
    assert len(found) == len(strange)
    assert (found.boxes.conf <= 0.5).all()
    assert with_code_evidence(detector())([rgb(grey)])[0].boxes.xyxy.shape == (0, 4)
    assert with_code_evidence(detector())([]) == []


@pytest.mark.parametrize("edges", [(np.nan, 10, 90, 90), (10, 10, 90, np.nan), (-np.inf, -np.inf, np.inf, np.inf)])
def test_boxes_that_are_not_finite_are_no_evidence_of_a_code(edges: tuple[float, float, float, float]) -> None:
    (found,) = with_code_evidence(detector((*edges, 0.5)))([rgb(checkers())])
    assert found.boxes.conf < 0.5


def test_boxes_of_classes_other_than_codes_keep_confidence_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take none of the places of the boxes that are looked at, either."""
    monkeypatch.setattr(evidence, "MAX_WEIGHED", 1)
    rows = [(*box("checkers", move=9), 0.9), (*box("text"), 0.8), (*box("code", move=9), 0.4)]

    def two_classes(images: Sequence[np.ndarray]) -> list[Detections]:
        (found,) = detector(*rows)(images)
        return [Detections(replace(found.boxes, cls=np.array([0.0, 0.0, 1.0])), ("person", "QR code"))]

    assert code_classes(["person", "QR code", "bar code"]) == ["QR code"]
    (found,) = with_code_evidence(two_classes, classes=["QR code"])([rgb(photo())])
    assert found.boxes.cls.tolist() == [1, 0, 0]
    assert found.boxes.xyxy[0] == pytest.approx(box("code"), abs=3)
    assert found.boxes.xyxy[1:].tolist() == [list(row[:4]) for row in rows[:2]]
    assert found.boxes.conf[1:] == pytest.approx([0.9, 0.8])


def test_boxes_with_keypoints_are_refused() -> None:
    def detect(images: Sequence[np.ndarray]) -> list[Detections]:
        (found,) = detector((*box("code"), 0.9))(images)
        return [replace(found, keypoints=np.zeros((1, 4, 2), np.float32))]

    with pytest.raises(ValueError, match="without keypoints"):
        with_code_evidence(detect)([rgb(photo())])
