"""Scanning: codes found, straightened and read where plain readers fail, and nothing called what it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

cv2 = pytest.importorskip("cv2")
segno = pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.vision.qris import Code, build, scan  # noqa: E402
from arclight.vision.qris.reading import decode, finder_patterns, grid, grid_search, scanner  # noqa: E402
from arclight.vision.qris.reading.decode import read_at, read_grid, read_opencv, read_view, read_zxing, views_of  # noqa: E402
from arclight.vision.qris.reading.evidence import CodeEvidence  # noqa: E402
from arclight.vision.qris.reading.grid import Grid, alignment_centres, side_in_modules, template  # noqa: E402
from arclight.vision.qris.reading.grid_search import rivals  # noqa: E402
from arclight.vision.qris.reading.refinement import Slopes  # noqa: E402
from arclight.vision.results.detections import Boxes, Detections  # noqa: E402

QRIS = build(merchant_name="KOPI SENJA", city="BANDUNG", mcc="5814", nmid="ID1020012345678", criteria="UMI")
EMVCO = (  # of another network: no tag 51
    "00020101021226380016ID.CO.SHOPEE.WWW010201020815863724530336054061440005802ID"
    "5921PT. SHOPPEE INDONESIA6007JAKARTA62180814gen by go-qris63049635"
)
LINK = "https://wallet.example/pay?id=ID.CO.QRIS.WWW"


def symbol(text: str | bytes, cell: int = 8, **options: object) -> np.ndarray:
    """A clean symbol with its quiet zone, grey."""
    made = segno.make(text, micro=False, boost_error=False, **({"error": "m"} | options))
    framed = np.pad(np.where(np.array(made.matrix) > 0, 0, 255).astype(np.uint8), 4, constant_values=255)
    return np.kron(framed, np.ones((cell, cell), np.uint8))


def placed(text: str | bytes, quad: object, shape: tuple[int, int] = (480, 640), **options: object) -> np.ndarray:
    """An RGB picture of one code whose own corners are ``quad`` (4, 2), on grey."""
    cell = 8
    picture = symbol(text, cell, **options)
    low, high = 4.0 * cell, picture.shape[0] - 4.0 * cell
    source = np.array([[low, low], [high, low], [high, high], [low, high]], np.float32)
    matrix = cv2.getPerspectiveTransform(source, np.array(quad, np.float32))
    canvas = np.full((*shape, 3), 150, np.uint8)
    large = cv2.warpPerspective(picture, matrix, shape[::-1], flags=cv2.INTER_AREA)
    mask = cv2.warpPerspective(np.full_like(picture, 255), matrix, shape[::-1])
    canvas[mask > 127] = large[mask > 127][:, None]
    return canvas


def framed_symbol(symbology: str, text: str) -> np.ndarray:
    """An RGB picture of a symbol by zxing-cpp's writer, on white, with room around it."""
    zxingcpp = pytest.importorskip("zxingcpp")
    made = zxingcpp.create_barcode(text, getattr(zxingcpp.BarcodeFormat, symbology))
    grey = np.array(zxingcpp.write_barcode_to_image(made, scale=3, add_quiet_zones=True))
    return np.repeat(np.pad(grey, 60, constant_values=255)[:, :, None], 3, 2)


def finder(*boxes: tuple[float, float, float, float], confidence: float = 0.9) -> Callable[[np.ndarray], Detections]:
    """A detector that always sees these boxes."""
    return lambda image: Detections(
        Boxes(np.array(boxes).reshape(-1, 4), np.full(len(boxes), confidence), np.zeros(len(boxes))), names=["qr_code"]
    )


def hull(quad: list[list[float]]) -> tuple[float, float, float, float]:
    (x0, y0), (x1, y1) = np.min(quad, 0), np.max(quad, 0)
    return float(x0), float(y0), float(x1), float(y1)


TILTED = [[200.0, 120.0], [420.0, 90.0], [440.0, 330.0], [180.0, 300.0]]


def test_a_payment_code_is_read_with_its_corners_and_payload() -> None:
    (code,) = scan(placed(QRIS, TILTED), finder(hull(TILTED), confidence=0.75))
    assert (code.text, code.kind, code.problems) == (QRIS, "qris", ())
    assert code.payload is not None
    assert code.payload.merchant_name == "KOPI SENJA"
    assert code.confidence == pytest.approx(0.75)
    assert code.box_xyxy_px == pytest.approx(hull(TILTED))
    assert np.abs(np.array(code.corners_px) - TILTED).max() < 5
    document = code.to_json()
    assert set(document) == {"corners_px", "box_xyxy_px", "confidence", "text", "kind", "payload", "problems"}
    assert document["payload"]["nmid"] == "ID1020012345678"


def test_corners_turn_with_the_code() -> None:
    turned = TILTED[2:] + TILTED[:2]
    (code,) = scan(placed(LINK, turned))
    assert np.abs(np.array(code.corners_px) - turned).max() < 5


def test_several_codes_are_distinguished() -> None:
    left, right = [[40, 60], [240, 60], [240, 260], [40, 260]], [[380, 160], [580, 160], [580, 360], [380, 360]]
    image = np.where(np.arange(640)[None, :, None] < 310, placed(EMVCO, left), placed(LINK, right)).astype(np.uint8)
    codes = scan(image, finder(hull(left), hull(right), (300.0, 400.0, 360.0, 460.0)))
    assert [(code.kind, code.text) for code in codes] == [("emvco", EMVCO), ("other", LINK), ("other", None)]
    assert codes[1].problems == (), "a link is not a damaged payload"
    assert codes[2].problems
    assert codes[2].box_xyxy_px == pytest.approx((300, 400, 360, 460))


@pytest.mark.parametrize(("version", "read"), [("M1", []), ("M2", ["12345"])])
def test_micro_codes_are_read_if_they_correct_errors(version: str, read: list[str]) -> None:
    image = 255 * (1 - np.array(segno.make("12345", version=version).matrix, np.uint8))
    assert [
        code.text for code in scan(np.kron(np.pad(image, 4, constant_values=255), np.ones((8, 8), np.uint8)))
    ] == read


def test_a_forged_payload_is_not_called_a_payment_code() -> None:
    forged = QRIS.replace("KOPI SENJA", "KOPI SENYA")
    (code,) = scan(placed(forged, TILTED))
    assert (code.kind, code.payload) == ("other", None)
    assert any("63" in problem for problem in code.problems)


def test_the_same_code_is_reported_once() -> None:
    shifted = tuple(value + 6 for value in hull(TILTED))
    codes = scan(placed(QRIS, TILTED), finder(hull(TILTED), shifted))  # type: ignore[arg-type]
    assert [code.text for code in codes] == [QRIS]


@pytest.mark.parametrize("payload", [bytes(range(256))[:60], b"\xff\xfe\x00\x01", "商店 ♥"])
def test_any_bytes_are_text_in_the_end(payload: str | bytes) -> None:
    (code,) = scan(placed(payload, TILTED))
    assert code.text is not None
    assert code.text == payload or code.text.encode("latin-1") == payload
    assert code.kind == "other"


def small(text: str, quad: list[list[float]], blur: float, seed: int) -> np.ndarray:
    """A code drawn large and reduced eightfold by averaging, blurred, with noise, as a phone sees a small label."""
    large = placed(text, (np.array(quad) * 8).tolist(), (960, 1280), error="m")
    image = cv2.GaussianBlur(cv2.resize(large, (160, 120), interpolation=cv2.INTER_AREA), (0, 0), blur)
    noise = np.random.default_rng(seed).normal(0, 3, image.shape)
    return np.clip(image + noise, 0, 255).astype(np.uint8)


def test_small_squeezed_codes_are_read_where_the_plain_reader_fails() -> None:
    plain = ours = 0
    for seed in range(12):
        turn = np.random.default_rng(seed).uniform(-0.5, 0.5)
        square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
        around = square @ np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        quad = (around * [20, 12] + [80, 60]).tolist()
        image = small(f"5a0S{seed:04d}", quad, 0.4, seed)
        plain += len(read_zxing(image))
        texts = [code.text for code in scan(image, finder(hull(quad)))]
        assert texts in ([f"5a0S{seed:04d}"], [None]), "what is read is true"
        ours += texts[0] is not None
    assert ours >= 8
    assert plain <= 2


def bent_and_blurred() -> np.ndarray:
    """A code around a can, (320, 320) grey, and blurred: its upright box is (60, 60, 260, 275)."""
    quad = [[60.0, 60.0], [260.0, 60.0], [260.0, 260.0], [60.0, 260.0]]
    flat = placed("HELLO CAN", quad, (320, 320))[..., 0]
    x, y = np.meshgrid(np.arange(320, dtype=np.float32), np.arange(320, dtype=np.float32))
    across = (x - 160) / 100
    source_x = 160 + 100 * np.arcsin(np.clip(across * 0.5, -1, 1)) / np.arcsin(0.5)
    bent = cv2.remap(flat, source_x.astype(np.float32), y - 15 * (1 - across**2), cv2.INTER_LINEAR)
    return cv2.GaussianBlur(bent.astype(np.uint8), (0, 0), 2.0)


def test_a_bent_blurred_code_is_read_module_by_module() -> None:
    """Around a can the finder patterns are no longer in line; the grid bends with the code."""
    image = bent_and_blurred()
    assert read_zxing(image) == []
    (read,) = read_grid(image, (60.0, 60.0, 260.0, 275.0)).codes
    assert read.text == "HELLO CAN"
    assert np.abs(read.corners - [[60, 60], [260, 60], [260, 260], [60, 260]]).max() < 20


def test_a_box_that_cuts_off_finder_patterns_is_widened() -> None:
    image = bent_and_blurred()
    tight = (100.0, 103.0, 220.0, 232.0)
    assert read_grid(image, tight).codes == []
    assert [code.text for code in scan(np.repeat(image[..., None], 3, 2), finder(tight))] == ["HELLO CAN"]


@pytest.mark.parametrize(
    "versions", [(1, 2, 6, 7, 14, 21), pytest.param(tuple(range(1, 41)), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_templates_are_the_fixed_modules_of_every_version(versions: tuple[int, ...]) -> None:
    """Against segno; what two different masks change is not fixed. Some: without and with alignment and version modules."""
    for version in versions:
        made = [np.array(segno.make("1", version=version, error="l", mask=mask, micro=False).matrix) for mask in (0, 1)]
        size = side_in_modules(version)
        assert made[0].shape == (size, size)
        fixed = template(version)
        cells = np.round(fixed.points.linear[:2].T * size - 0.5).astype(int)
        dark = fixed.expected < 0
        inside = ((cells >= 0) & (cells < size)).all(1)
        columns, rows = cells[inside].T
        for matrix in made:
            assert (matrix[rows, columns].astype(bool) == dark[inside]).all(), version
        assert not dark[~inside].any()
        assert len(alignment_centres(version)) == (0 if version == 1 else version // 7 + 2)


@given(
    st.integers(0, 70),
    st.integers(0, 70),
    st.sampled_from([(), (1,), (3,)]),
    st.integers(0, 3),
    st.lists(st.tuples(*[st.floats(-20, 90) | st.just(float("nan"))] * 4), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_no_image_and_no_box_raises(height: int, width: int, depth: tuple[int, ...], kind: int, boxes: list) -> None:  # type: ignore[type-arg]
    rng = np.random.default_rng(height * 71 + width)
    fills = (rng.integers(0, 256, (height, width, *depth)), np.zeros((height, width, *depth)))
    image = fills[kind % 2].astype(np.uint8)
    image = image[::-1, ::-1] if kind > 1 else image
    image.setflags(write=False)
    assert all(isinstance(code, Code) for code in scan(image, finder(*boxes)))
    assert isinstance(scan(image), list)


WRONG = (
    np.zeros((8, 8), np.float32),
    np.zeros((8, 8, 4), np.uint8),
    np.zeros(8, np.uint8),
    np.zeros((1, 8, 8, 3), np.uint8),
    "a.jpg",
    None,
)


@pytest.mark.parametrize("wrong", WRONG)
def test_inputs_that_are_not_images_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="need an image"):
        scan(wrong)  # type: ignore[arg-type]


def test_plain_readers_agree_on_an_easy_code() -> None:
    image = placed(LINK, [[100, 100], [300, 100], [300, 300], [100, 300]])
    assert [read.text for read in read_zxing(image)] == [read.text for read in read_opencv(image)] == [LINK]
    assert read_opencv(np.zeros((3, 3), np.uint8)) == []


def label_boxes(image: Path, width: int, height: int) -> list[tuple[float, float, float, float]]:
    """Boxes of a YOLO label of boxes or polygons, pixels."""
    boxes = []
    for row in Path(str(image).replace("/images/", "/labels/")).with_suffix(".txt").read_text().splitlines():
        values = np.array(row.split()[1:], float)
        if len(values) == 4:
            values = np.concatenate([values[:2] - values[2:] / 2, values[:2] + values[2:] / 2])
        points = values.reshape(-1, 2) * [width, height]
        boxes.append(hull(points.tolist()))
    return boxes


@pytest.mark.parametrize(
    ("group", "every", "least"),
    [
        ("packs", 30, 3.0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("phone", 6, 1.0), ("packs", 12, 3.0))),
    ],
)  # fmt: skip
def test_real_photos(shared_data: Path, group: str, every: int, least: float) -> None:
    photos = sorted((shared_data / "qr_photos" / "images").glob(f"*/{group}_*.jpg"))[::every]
    plain = ours = 0
    for photo in photos:
        image = cv2.cvtColor(cv2.imread(str(photo)), cv2.COLOR_BGR2RGB)
        boxes = label_boxes(photo, image.shape[1], image.shape[0])
        reads = read_zxing(image)
        codes = [code for code in scan(image, finder(*boxes)) if code.text is not None]
        assert {read.text for read in reads} <= {code.text for code in codes}, "nothing a plain reader reads is lost"
        plain += len(reads)
        ours += len(codes)
    assert len(photos) >= 5
    assert ours > least * plain


@pytest.mark.parametrize(
    ("name", "box", "text"),
    [
        ("phone_12", (238, 435, 415, 587), "http://cokeurl.com/q/2017-00776"),  # cut off at the bottom; a view shows it
        ("phone_35", (190, 429, 399, 634), "hudson"),  # a grid fits well, and is off by a share of a module
    ],
)
def test_codes_are_read_where_they_are_seen_in_a_wrong_box(
    shared_data: Path, name: str, box: tuple[float, ...], text: str
) -> None:
    photo = cv2.imread(str(shared_data / "qr_photos" / "images" / "test" / f"{name}.jpg"))
    assert text in {code.text for code in scan(cv2.cvtColor(photo, cv2.COLOR_BGR2RGB), finder(box))}


def test_reading_samples_truly(shared_data: Path) -> None:
    """The payloads of zxing-cpp's own samples: what is read is what its authors say is there."""
    checked = 0
    for expected in sorted((shared_data / "qr_codes").rglob("*.txt"))[::4]:
        pictures = (expected.with_suffix(suffix) for suffix in (".png", ".jpg", ".jpeg"))
        picture = next((path for path in pictures if path.is_file()), None)
        image = None if picture is None else cv2.imread(str(picture), cv2.IMREAD_GRAYSCALE)
        if image is None or expected.name.endswith(".result.txt"):
            continue
        texts = [code.text for code in scan(image) if code.text is not None]
        if texts:
            assert expected.read_text(encoding="utf-8").rstrip("\n") in [text.rstrip("\n") for text in texts], expected
            checked += 1
    assert checked >= 8


def test_a_box_with_nothing_in_it_is_read_as_nothing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    assert not any(map(read_view, views_of(noise, (20.0, 20.0, 180.0, 180.0))))
    nothing = decode.GridReading([], 1, score=pytest.approx(0.25, abs=0.05))
    assert read_grid(noise, (20.0, 20.0, 180.0, 180.0)) == nothing, (
        "nothing there is like a grid: no other view is tried"
    )


def test_modules_of_unlikely_grids_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "soft_modules", lambda *given: pytest.fail("they are decoded"))
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    assert 0 < (read_grid(noise, (20.0, 20.0, 180.0, 180.0)).score or 0) < decode.MIN_FINISHED_SCORE


@pytest.mark.parametrize(("least", "refined"), [(0.0, 1), (0.9, 0)])
def test_grids_are_refined_on_the_sharp_picture_if_they_fit_the_blurred_one(
    least: float, refined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    refine = grid_search.refined_grids
    monkeypatch.setattr(grid_search, "refined_grids", lambda *given: asked.append(given) or refine(*given))
    monkeypatch.setattr(grid_search, "MIN_SOFT_SCORE", least)
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    assert (read_grid(noise, (20.0, 20.0, 180.0, 180.0)).score or 0) > 0
    assert len(asked) == refined


def test_grids_that_are_hardly_like_a_code_are_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "finish_grids", lambda *given: pytest.fail("they are finished"))
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    assert 0 < (read_grid(noise, (20.0, 20.0, 180.0, 180.0)).score or 0) < decode.MIN_NEAR_SCORE


def test_contrast_is_stretched_between_the_percentiles_of_numpy() -> None:
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (37, 41)), draw.normal(90, 9, (64, 64)), np.full((5, 9), 77), np.array([[3, 250]])]
    for image in (one.astype(np.uint8) for one in images):
        low, high = np.percentile(image, (1, 99))
        wanted = ((image - low) * 255 / max(high - low, 1)).clip(0, 255)
        np.testing.assert_allclose(decode.contrast_stretched(image), wanted, atol=1e-3)


@pytest.mark.parametrize("definite", [True, False], ids=["ridge", "no ridge"])
def test_fitted_decisions_are_those_of_least_squares(definite: bool) -> None:
    draw = np.random.default_rng(0)
    features = draw.normal(size=(80, 12)).astype(np.float32)
    wanted = np.sign(draw.normal(size=80)).astype(np.float32)
    penalty = np.diag([4.0 if definite else -300.0] * 12)
    normal = features.T.astype(np.float64) @ features + penalty
    expected = features @ np.linalg.solve(normal, features.T @ wanted.astype(np.float64))
    np.testing.assert_allclose(decode._fitted(features, features, wanted, penalty), expected, atol=1e-5)


def test_no_grid_is_laid_where_no_two_finder_patterns_are_likely() -> None:
    bars = np.repeat(np.random.default_rng(1).choice([20, 220], 100)[None], 200, 0).repeat(2, 1).astype(np.uint8)
    assert read_grid(bars, (20.0, 20.0, 180.0, 180.0)) == decode.GridReading([], 1, 0.0)


def test_a_wider_box_is_searched_less_thoroughly_where_nothing_was_like_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    thorough: list[bool] = []
    find = decode.find_grids
    monkeypatch.setattr(decode, "find_grids", lambda *given: thorough.append(given[3] is not None) or find(*given))
    scan(noise, finder((20, 20, 180, 180)))
    assert thorough == [True, False]


def test_no_grid_is_searched_for_in_boxes_too_small_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "find_grids", lambda *given: pytest.fail("its grid is not searched for"))
    noise = np.random.default_rng(0).integers(0, 256, (80, 80), dtype=np.uint8)
    assert read_grid(noise, (20.0, 20.0, 49.0, 49.0)) == decode.GridReading([], 0, None), "others have its tries"


def test_boxes_too_small_for_a_grid_leave_their_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        scanner,
        "read_grid",
        lambda grey, box, tries, thorough: asked.append(box[0]) or decode.GridReading([], 1, 0.0),
    )
    small = [(20.0 + 30 * i, 20.0, 44.0 + 30 * i, 44.0) for i in range(9)]
    codes = scan(np.full((120, 600, 3), 128, np.uint8), finder(*small, (400.0, 20.0, 480.0, 100.0)))
    assert asked == [400.0]
    assert {code.problems for code in codes} == {(scanner.NOT_READ,)}, "no reader was left untried"


def test_a_box_whose_grid_is_read_costs_no_turn_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def read_left_ones(grey: np.ndarray, box: tuple[float, ...], tries: int, thorough: bool) -> decode.GridReading:
        asked.append(box[0])
        place = np.array([[box[0], box[1]], [box[2], box[3]]] * 2, np.float32)
        codes = [decode.DecodedCode(f"{box[0]:.0f}", place)] if box[0] < 300 else []
        return decode.GridReading(codes, 1, 0.9)

    monkeypatch.setattr(scanner, "read_grid", read_left_ones)
    boxes = [(20.0 + 50 * i, 20.0, 60.0 + 50 * i, 60.0) for i in range(20)]
    codes = scan(np.full((80, 1100, 3), 128, np.uint8), finder(*boxes))
    assert asked == [box[0] for box in boxes[: 6 + scanner.MAX_GRID_BOXES]], "six are read, then four fail"
    assert [code.problems for code in codes].count((scanner.NOT_TRIED,)) == 10
    monkeypatch.setattr(scanner, "MAX_GRID_READ", 5)
    asked.clear()
    scan(np.full((80, 1100, 3), 128, np.uint8), finder(*boxes))
    assert len(asked) == 5, "many codes are bounded, too"


@pytest.mark.parametrize(("version", "views"), [(3, 1), (6, 1), (7, 2), (10, 2)])
def test_another_view_is_tried_of_fine_codes_alone(version: int, views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = np.zeros((8, 2), np.float32)
    shape[:4] = [[30, 30], [170, 30], [170, 170], [30, 170]]
    monkeypatch.setattr(decode, "find_grids", lambda *given: [Grid(version, shape, 0.7)])
    monkeypatch.setattr(decode, "decode_grids", lambda *given: (None, 0.3))
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    assert read_grid(noise, (20.0, 20.0, 180.0, 180.0)) == decode.GridReading([], views, pytest.approx(0.7))


@pytest.mark.parametrize(("score", "searched"), [(0.0, 1), (0.25, 2), (0.5, 2), (0.72, 1), (0.9, 1)])
def test_a_wider_box_is_searched_where_that_may_show_a_better_grid(
    score: float, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        scanner,
        "read_grid",
        lambda grey, box, tries, thorough: asked.append(box) or decode.GridReading([], 1, score),
    )
    scan(np.full((120, 120, 3), 128, np.uint8), finder((20, 20, 100, 100)))
    assert len(asked) == searched


def photographed(
    text: str, *, module_px: float, blur: np.ndarray, hide: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """A tilted code of ``module_px`` pixels per module under a blur kernel, with its corners and modules; one finder hidden."""
    modules = len(segno.make(text, micro=False, boost_error=False, error="m").matrix)
    side = module_px * modules
    turn = np.radians(17)
    away = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) * side
    start = np.array([70.0, 120.0])
    corners = np.stack([start, start + away[0], start + away[0] + away[1] * 0.9, start + away[1]])
    image = placed(text, corners, (320, 360))
    if hide:  # a finger on the top right
        cv2.circle(image, tuple(int(v) for v in corners[1]), int(8 * module_px), (190, 140, 120), -1)
    blurred = cv2.filter2D(image, -1, (blur / blur.sum()).astype(np.float32))
    noise = np.random.default_rng(0).normal(0, 3, blurred.shape)
    return np.clip(blurred + noise, 0, 255).astype(np.uint8), corners.astype(np.float32), modules


def gaussian(sigma: float) -> np.ndarray:
    line = np.exp(-0.5 * (np.arange(-9, 10) / sigma) ** 2)
    return np.outer(line, line)


def motion(length: int) -> np.ndarray:
    return np.eye(length)


@pytest.mark.parametrize(
    "module_px, blur, hide",
    [(4.0, gaussian(2.6), False), (4.0, motion(8), False), (4.0, gaussian(0.5), True)],
    ids=["out of focus", "shaken", "finder hidden"],
)
def test_scan_reads_codes_that_plain_readers_miss(module_px: float, blur: np.ndarray, hide: bool) -> None:
    text = "https://example.org/a"
    image, corners, modules = photographed(text, module_px=module_px, blur=blur, hide=hide)
    box = hull(corners.tolist())
    assert not read_zxing(image)
    assert not any(map(read_view, views_of(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), box)))
    known = read_at(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), corners, modules)
    assert known is not None
    assert known.text == text
    assert [code.text for code in scan(image, finder(box))] == [text]


def test_a_reader_given_corners_reads_no_code_where_none_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    corners = np.array([[40, 40], [160, 40], [160, 160], [40, 160]], np.float32)
    assert read_at(noise, corners, 29) is None


def test_the_number_of_grids_tried_in_a_photo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from arclight.vision.qris.reading import scanner

    asked: list[int] = []

    def read_nothing(grey: np.ndarray, box: object, tries: int, thorough: bool) -> decode.GridReading:
        asked.append(tries)
        return decode.GridReading([], tries, 0.5)

    monkeypatch.setattr(scanner, "read_grid", read_nothing)
    boxes = [(20.0 + 60 * i, 20.0, 70.0 + 60 * i, 70.0) for i in range(9)]
    scan(np.full((120, 600, 3), 128, np.uint8), finder(*boxes))
    assert asked == [2, 2, 2]  # two views of each, six in all


def test_the_work_on_a_photo_is_bounded_and_what_was_left_untried_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (1200, 1600, 3)).astype(np.uint8)
    boxes = [(40.0 + 60 * i, 40.0, 540.0 + 60 * i, 540.0) for i in range(12)]
    read: list[int] = []

    def count(view: Any) -> list[Any]:
        read.append(view.image.size)
        return []

    monkeypatch.setattr(scanner, "read_view", count)
    monkeypatch.setattr(scanner, "read_grid", lambda grey, box, tries, thorough: decode.GridReading([], 1, 0.5))
    codes = scan(noise, finder(*boxes))
    assert len(codes) == len(boxes)
    assert sum(read) < scanner.MAX_VIEW_PIXELS + 12 * 1600**2
    assert {code.problems for code in codes} == {(scanner.NOT_TRIED,)}
    (code,) = scan(noise, finder(boxes[0]))
    assert code.problems == (scanner.NOT_READ,), "on one box all is tried"
    codes = scan(noise, finder(*[(40.0 + 90 * i, 40.0, 120.0 + 90 * i, 120.0) for i in range(6)]))
    assert [code.problems for code in codes] == [(scanner.NOT_READ,)] * 4 + [(scanner.NOT_TRIED,)] * 2


def test_few_boxes_are_searched_again_where_a_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 600, 3)).astype(np.uint8)
    boxes = [(20.0 + 140 * i, 100.0, 140.0 + 140 * i, 220.0) for i in range(4)]
    elsewhere = (5.0, 7.0, 130.0, 140.0)
    searched: list[object] = []

    def fails(grey: object, box: object, tries: int, thorough: bool) -> decode.GridReading:
        searched.append(box)
        return decode.GridReading([], 1, 0.9)

    monkeypatch.setattr(scanner, "read_view", lambda view: [])
    monkeypatch.setattr(scanner, "read_grid", fails)
    monkeypatch.setattr(scanner, "code_evidence", lambda grey, box: CodeEvidence(0.5, elsewhere))
    codes = scan(noise, finder(*boxes))
    assert searched == [*boxes, *[elsewhere] * scanner.MAX_PLACED_TRIES]
    problems = [code.problems for code in codes]
    assert problems == [(scanner.NOT_READ,)] * scanner.MAX_PLACED_TRIES + [(scanner.NOT_TRIED,)] * 2
    monkeypatch.setattr(scanner, "code_evidence", lambda grey, box: CodeEvidence(0.3, elsewhere))  # too weak to go by
    searched.clear()
    assert {code.problems for code in scan(noise, finder(*boxes))} == {(scanner.NOT_READ,)}
    assert searched == boxes


def test_a_scan_that_is_stopped_keeps_what_it_has_read_and_names_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[object] = []
    monkeypatch.setattr(scanner, "read_grid", lambda grey, box, tries: grids.append(box) or ([], 1))
    noise = np.random.default_rng(0).integers(0, 255, (600, 600, 3)).astype(np.uint8)
    boxes = [(20.0 + 190 * i, 20.0, 190.0 + 190 * i, 190.0) for i in range(3)]
    asked = iter([False] * 4 + [True] * 100)
    read: list[object] = []
    monkeypatch.setattr(scanner, "read_view", lambda view: read.append(view) or [])
    codes = scan(noise, finder(*boxes), stop=lambda: next(asked))
    assert (len(read), len(grids)) == (4, 0)
    assert [code.problems for code in codes] == [(scanner.NOT_TRIED,)] * 3


def cornered(box: tuple[float, ...], quad: np.ndarray) -> Callable[[np.ndarray], Detections]:
    """A detector that always sees this box with these corners, as one of kind corners does."""
    seen = np.concatenate([quad, np.full((4, 1), 0.9)], 1)[None]
    return lambda image: Detections.from_arrays([box], [0.9], [0], names=["qr_code"], keypoints=seen)


@pytest.fixture(scope="module")
def blurred() -> tuple[np.ndarray, np.ndarray]:
    """A code that views of its box do not show well enough, and its corners."""
    image, corners, _ = photographed("https://example.org/a", module_px=4.0, blur=gaussian(2.6))
    return image, corners


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_code_is_read_by_the_corners_that_a_detector_found(
    blurred: tuple[np.ndarray, np.ndarray], turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, corners = blurred
    monkeypatch.setattr(decode, "find_grids", lambda *given: pytest.fail("its grid is not searched for"))
    rough = np.roll(corners + np.random.default_rng(turn).normal(0, 2.0, (4, 2)), turn, axis=0)
    given = rough[::-1] if turn == 3 else rough  # either way round
    (code,) = scan(image, cornered(hull(corners.tolist()), given))
    assert code.text == "https://example.org/a"
    assert np.abs(np.array(code.corners_px) - corners).max() < 6


NONE = float("nan")


@pytest.mark.parametrize(
    "wrong",
    [
        [[10, 10], [40, 10], [40, 40], [10, 40]],
        [[100, 100], [200, 200], [200, 100], [100, 200]],
        [[NONE, 10], [40, 10], [40, 40], [10, 40]],
        [[-4000, -900], [9000, -800], [9000, 7000], [-3000, 8000]],
        [[50, 50], [50, 50], [50, 50], [50, 50]],
    ],
    ids=["elsewhere", "crossed", "NaN", "far outside", "no area"],
)
def test_wrong_corners_lose_nothing(blurred: tuple[np.ndarray, np.ndarray], wrong: list[list[float]]) -> None:
    image, corners = blurred
    codes = scan(image, cornered(hull(corners.tolist()), np.array(wrong, float)))
    assert [code.text for code in codes] == ["https://example.org/a"]


def test_codes_read_by_their_corners_are_bounded_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(scanner, "read_near", lambda grey, corners: asked.append(corners) or [])
    monkeypatch.setattr(scanner, "read_grid", lambda grey, box, tries, thorough: decode.GridReading([], 1, 0.5))
    boxes = np.array([(10.0 + 40 * i, 10.0, 40.0 + 40 * i, 40.0) for i in range(12)])
    quads = np.stack([boxes[:, [0, 2, 2, 0]], boxes[:, [1, 1, 3, 3]]], -1)
    found = Detections.from_arrays(boxes, np.linspace(0.9, 0.5, 12), np.zeros(12), names=["qr_code"], keypoints=quads)
    grey = np.full((60, 1300), 128, np.uint8)
    scan(grey, lambda image: found)
    assert len(asked) == scanner.MAX_CORNERED
    np.testing.assert_array_equal(asked[0], quads[0])
    asked.clear()
    scan(grey, lambda image: found, stop=lambda: True)
    assert not asked


def undecodable(side: float, columns: int, rows: int, seed: int = 0) -> tuple[np.ndarray, list[tuple[float, ...]]]:
    """Tilted version 3 symbols of random data under noise, RGB, and their boxes: all but what they say is as it should be."""
    draw = np.random.default_rng(seed)
    one, other = (np.array(segno.make("1", version=3, error="l", mask=mask, micro=False).matrix) for mask in (0, 1))
    canvas = np.full((round(2 * side * rows), round(2 * side * columns)), 170, np.uint8)
    boxes = []
    for row, column in np.ndindex(rows, columns):
        dark = one > 0
        dark[9:-8, 9:-8] = draw.random((12, 12)) < 0.5
        dark[7:-7, 7:-7] ^= (one != other)[7:-7, 7:-7] & (draw.random((15, 15)) < 0.5)
        framed = np.pad(np.where(dark, 0, 255).astype(np.uint8), 4, constant_values=255).repeat(8, 0).repeat(8, 1)
        quad = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * side / 2 + draw.uniform(-0.06, 0.06, (4, 2)) * side
        quad += [(2 * column + 1) * side, (2 * row + 1) * side]
        low, high = 32.0, len(framed) - 32.0
        own = np.array([[low, low], [high, low], [high, high], [low, high]], np.float32)
        matrix = cv2.getPerspectiveTransform(own, quad.astype(np.float32))
        cv2.warpPerspective(framed, matrix, canvas.shape[::-1], canvas, cv2.INTER_AREA, cv2.BORDER_TRANSPARENT)
        boxes.append(hull(quad.tolist()))
    noisy = canvas + draw.normal(0, 6, canvas.shape)
    return np.repeat(noisy.clip(0, 255).astype(np.uint8)[..., None], 3, 2), boxes


def test_a_plain_symbol_whose_data_are_random_is_given_up_at_the_first_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    image, (box,) = undecodable(100.0, 1, 1)
    corrected: list[object] = []
    read = decode.read_symbol
    monkeypatch.setattr(decode, "read_symbol", lambda *given: corrected.append(given) or read(*given))
    found = read_grid(image[..., 0], box)  # type: ignore[arg-type]
    assert found.codes == []
    assert (found.score or 0) > decode.PLAIN_SCORE
    assert len(corrected) == 1


@pytest.mark.slow
def test_forty_undecodable_symbols_take_bounded_work_and_are_named_as_left_untried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image, boxes = undecodable(60.0, 8, 5)
    searched: list[object] = []
    find = decode.find_grids
    monkeypatch.setattr(decode, "find_grids", lambda *given: searched.append(given) or find(*given))
    codes = scan(image, finder(*boxes))
    assert [code.text for code in codes] == [None] * 40, "what says nothing is read as nothing"
    named = [code.problems for code in codes]
    assert named.count((scanner.NOT_TRIED,)) >= 36
    assert {*named} <= {(scanner.NOT_TRIED,), (scanner.NOT_READ,)}
    assert len(searched) == scanner.MAX_GRID_BOXES + scanner.MAX_PLACED_TRIES, (
        "a plain grid is not looked for again in larger views or wider boxes, but in the places of two codes that are seen"
    )


@pytest.mark.slow
def test_a_readable_code_among_undecodable_ones_is_read() -> None:
    image, boxes = undecodable(100.0, 3, 2)
    image[:200, :200] = cv2.resize(placed(QRIS, [[50, 50], [350, 50], [350, 350], [50, 350]], (400, 400)), (200, 200))
    texts = [code.text for code in scan(image, finder(*boxes))]
    assert texts == [QRIS] + [None] * 5


def test_correlations_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    picture = cv2.GaussianBlur(rng.uniform(0, 255, (120, 140)).astype(np.float32), (0, 0), 2)
    square = np.array([[20, 20], [110, 25], [105, 100], [15, 90]])
    shapes = np.zeros((5, 8, 2), np.float32)
    shapes[:, :4] = square + rng.uniform(-8, 8, (5, 4, 2))
    shapes[3:, 4:] = rng.uniform(-3, 3, (2, 4, 2))
    for version in (1, 4):
        fixed = template(version)
        seen = [
            grid.sample_bilinear(picture, *grid.project_grid(one[None], fixed.points)).reshape(-1) for one in shapes
        ]
        expected = [np.corrcoef(one, fixed.expected)[0, 1] for one in seen]
        assert grid.template_correlation(picture, shapes, version) == pytest.approx(expected, abs=1e-4)
        maps = grid.homographies(shapes)
        assert grid.template_correlation(picture, shapes, version, maps=maps) == pytest.approx(expected, abs=1e-4)
        ends = fixed.points.linear[:2].T @ [1, 1]
        first = int(np.argmin(ends))  # the quiet module before the top left: the homography of four corners by OpenCV
        unit = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)
        matrix = cv2.getPerspectiveTransform(unit, shapes[0, :4])
        x, y = grid.project_grid(shapes[:1], fixed.points)
        there = cv2.perspectiveTransform(fixed.points.linear[:2, first].reshape(1, 1, 2), matrix).reshape(2)
        assert (x[0, first], y[0, first]) == pytest.approx(there, abs=0.01)


@pytest.mark.parametrize("contrast", [0, 1e-3, 0.1])
def test_a_plain_area_fits_no_grid(contrast: float) -> None:
    """Rounding alone gave plain areas scores in the millions, above those of all codes."""
    rng = np.random.default_rng(0)
    shapes = np.zeros((5, 8, 2), np.float32)
    shapes[:, :4] = np.array([[20, 20], [110, 25], [105, 100], [15, 90]]) + rng.uniform(-8, 8, (5, 4, 2))
    for grey in (3, 30, 128, 255):
        picture = (grey + contrast * rng.standard_normal((120, 140)) * (grey / 255)).astype(np.float32)
        for version in (1, 4, 10):
            assert not grid.template_correlation(picture, shapes, version).any()


def test_a_proposal_on_a_plain_area_does_not_hide_the_code_beside_it() -> None:
    modules = np.array(segno.make("A" * 20, version=2, error="l", micro=False).matrix, np.float32)
    picture = np.full((400, 700), 201, np.float32)
    picture[100 : 100 + 25 * 8, 80 : 80 + 25 * 8] = np.kron(201 - 180 * modules, np.ones((8, 8), np.float32))
    plain = np.array([[420, 100], [620, 103], [618, 302], [421, 299]], np.float32)
    box = (70.0, 90.0, 290.0, 310.0)
    best = decode.find_grids(Slopes(picture), box, 5, lambda: [plain])[0]
    assert best.version == 2
    assert 0.9 < best.score <= 1
    assert np.abs(best.corners.min(0) - [80, 100]).max() < 4


@pytest.mark.parametrize("module_px", [1.2, 2.5])
def test_finder_patterns_correlate_as_in_opencv(module_px: float) -> None:
    draw = np.random.default_rng(0)
    picture = cv2.GaussianBlur(draw.uniform(0, 255, (90, 110)).astype(np.float32), (0, 0), 1.0) * 4 - 380
    picture[:40, :40] = 30
    pattern, mask = finder_patterns._rings(module_px)
    wanted = cv2.matchTemplate(picture, pattern, cv2.TM_CCOEFF_NORMED, mask=mask)
    wanted[~np.isfinite(wanted)] = 0
    found = finder_patterns._correlation(picture, pattern, mask)
    textured = np.ones(found.shape, bool)
    textured[:40, :40] = False
    np.testing.assert_allclose(found[textured], wanted[textured], atol=1e-5)
    assert np.abs(found[:10, :10]).max() < 1e-3, "a plain area is like nothing"


def test_large_boxes_are_laid_on_pictures_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(decode, "find_grids", lambda slopes, *_: sizes.append(slopes.picture.shape) or [])
    for side in (100, 500, 900, 2000):
        photo = np.random.default_rng(0).integers(0, 256, (3000, 3000), dtype=np.uint8)
        decode.read_grid(photo, (200.0, 200.0, 200.0 + side, 200.0 + side), 1)
    assert [max(size) for size in sizes] == [200, 350, 400, 400]


def test_sharp_views_are_those_that_an_unsharp_mask_of_the_enlarged_picture_gives() -> None:
    image = cv2.cvtColor(placed(QRIS, TILTED), cv2.COLOR_RGB2GRAY)
    crop = cv2.GaussianBlur(image[60:360, 150:470], (0, 0), 1)
    for size, amount, radius in (((640, 600), 1.5, 2.0), ((400, 400), 2.5, 8.0), ((1280, 1200), 1.5, 4.0)):
        quick = decode.enlarged_sharp(crop, np.zeros(2, np.float32), size, amount, radius).image
        large = cv2.resize(crop, size, interpolation=cv2.INTER_CUBIC)
        slow = decode.sharpened(large, amount, radius)
        apart = np.abs(quick.astype(int) - slow)
        assert apart.mean() < 2
        assert np.percentile(apart, 99) < 12
        assert np.abs(large.astype(int) - slow).mean() > 2 * apart.mean(), (
            "sharpening changes more than the shortcut does"
        )


def test_the_whole_picture_sharpened_before_it_is_enlarged_is_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(scanner, "read_view", lambda view: seen.append(view) or [])
    blurred = cv2.GaussianBlur(placed(QRIS, TILTED), (0, 0), 6)
    scan(blurred)
    (view,) = seen
    slow = decode.enlarged_sharp(decode.to_grey(blurred), np.zeros(2, np.float32), (1280, 960), 1.5, 2)
    assert view.image.shape == slow.image.shape
    assert np.abs(view.image.astype(int) - slow.image).mean() < 1
    assert (view.origin == 0).all()
    assert (view.scale == 2).all()


def test_the_same_grid_found_twice_and_grids_far_behind_are_no_rivals() -> None:
    square = np.concatenate([np.array([[0, 0], [100, 0], [100, 100], [0, 100]]), np.zeros((4, 2))]).astype(np.float32)
    best, again, moved = Grid(1, square, 0.9), Grid(1, square + 2, 0.88), Grid(1, square + 9, 0.8)
    other, behind = Grid(2, square, 0.79), Grid(1, square + 30, 0.6)
    assert rivals([best, again, moved, other, behind]) == [best, moved, other]
    assert rivals([]) == []


# ------------------------------------------------------------------------------------------------- other symbologies


@pytest.mark.parametrize(
    ("symbology", "text"),
    [
        ("EAN13", "8991234567891"),
        ("Code128", "SN-0042"),
        ("DataMatrix", "LOT 42"),
        ("Aztec", "BOARDING"),
        ("PDF417", "a licence"),
        ("DataMatrix", QRIS),
    ],
)
def test_other_symbologies_are_named_and_pay_nobody(symbology: str, text: str) -> None:
    picture = framed_symbol(symbology, text)
    (code,) = scanner.other_symbols(picture)
    assert (code.symbology, code.text, code.kind, code.payload, code.problems) == (symbology, text, "other", None, ())
    assert code.to_json()["symbology"] == symbology
    height, width = picture.shape[:2]
    left, top, right, bottom = code.box_xyxy_px
    assert 40 <= left < right <= width - 40
    assert 0 <= top < bottom <= height
    assert scan(picture) == []


def test_a_qr_code_has_no_other_symbology() -> None:
    picture = placed(QRIS, [[100, 100], [400, 100], [400, 400], [100, 400]])
    assert scanner.other_symbols(picture) == []
    assert scanner.other_symbols(picture[:4, :4]) == []
    assert "symbology" not in scan(picture)[0].to_json()
    with pytest.raises(ValueError, match="uint8"):
        scanner.other_symbols(picture.astype(np.float32))
