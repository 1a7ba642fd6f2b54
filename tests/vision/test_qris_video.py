"""Codes in video: one track per code while the camera moves, and texts that no single frame gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
segno = pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.vision.qris import build, scan  # noqa: E402
from arclight.vision.qris.reading import video  # noqa: E402
from arclight.vision.qris.reading.decode import read_zxing  # noqa: E402
from arclight.vision.qris.reading.video import (  # noqa: E402
    MAX_GAP,
    MAX_UNLIKELY_VOTES,
    VideoScanner,
    WeightedSum,
    camera_motion,
    scan_video,
)
from arclight.vision.qris.scenes.motion import draw_clip  # noqa: E402
from arclight.vision.results.detections import Boxes, Detections  # noqa: E402

QRIS = build(merchant_name="KOPI SENJA", city="BANDUNG", mcc="5814", nmid="ID1020012345678")
Detect = Callable[[np.ndarray], Detections]


def symbol(text: str, cell: int, error: str = "m") -> np.ndarray:
    made = segno.make(text, micro=False, boost_error=False, error=error)
    framed = np.pad(np.where(np.array(made.matrix) > 0, 20, 235).astype(np.uint8), 4, constant_values=235)
    return np.kron(framed, np.ones((cell, cell), np.uint8))


def table(*texts: str) -> np.ndarray:
    """Codes in a row on a speckled table, grey; the camera has something to follow."""
    draw = np.random.default_rng(0)
    ground = cv2.resize(draw.integers(90, 170, (60, 120), dtype=np.uint8), (1200, 600), interpolation=cv2.INTER_LINEAR)
    for number, text in enumerate(texts):
        code = symbol(text, 3)
        ground[200 : 200 + len(code), 120 + 330 * number :][:, : len(code)] = code
    return np.asarray(ground)


def seen(world: np.ndarray, x: float, y: float, zoom: float = 1.0, turn: float = 0.0) -> np.ndarray:
    """A frame of 640 x 480 pixels whose top left is at (x, y) of the world, RGB."""
    matrix = cv2.getRotationMatrix2D((x + 320, y + 240), turn, zoom)
    matrix[:, 2] -= (x, y)
    frame = cv2.warpAffine(world, matrix, (640, 480), borderMode=cv2.BORDER_REFLECT)
    return np.repeat(frame[..., None], 3, axis=2)


def box_of(*xyxy: float) -> Detect:
    return lambda image: Detections(Boxes(np.array([xyxy]), np.array([0.9]), np.zeros(1)), names=["qr_code"])


TEXTS = ("https://shop.example/one", "https://shop.example/two", "https://shop.example/three")


def test_a_code_keeps_its_id_while_the_camera_moves() -> None:
    world = table(*TEXTS)
    frames = [seen(world, 18 * step, 5 * step, 1 + 0.01 * step, 0.8 * step) for step in range(20)]
    scanner = VideoScanner()
    ids: dict[str, set[int]] = {}
    for frame in frames:
        for track in scanner.add(frame):
            ids.setdefault(str(track.text), set()).add(track.id)
    assert all(len(ids[text]) == 1 for text in TEXTS)
    assert sorted(track.text for track in scanner.tracks if track.text) == sorted(TEXTS)


def test_equal_codes_side_by_side_are_two_tracks() -> None:
    world = table(TEXTS[0], TEXTS[0])
    tracks = scan_video(seen(world, 10 * step, 30) for step in range(8))
    assert [track.text for track in tracks] == [TEXTS[0]] * 2
    assert all(len(track.frames) == 8 for track in tracks)


def test_a_code_that_comes_back_is_the_same() -> None:
    world = table(TEXTS[0])
    away = np.full((480, 640, 3), 120, np.uint8)
    frames = [seen(world, 0, 0)] * 2 + [away] * (MAX_GAP + 3) + [seen(world, 60, 60)] * 2
    (track,) = scan_video(frames)
    assert len(track.frames) == 4


def noisy(frame: np.ndarray, seed: int, strength: float) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, strength, frame.shape[:2])
    return np.repeat(np.clip(frame[..., 0] + noise, 0, 255).astype(np.uint8)[..., None], 3, axis=2)


@pytest.mark.slow
def test_frames_that_nothing_reads_are_read_together() -> None:
    code = cv2.GaussianBlur(symbol(QRIS, 4, "l"), (0, 0), 1.2)
    clean = np.full((480, 640), 235, np.uint8)
    clean[100 : 100 + len(code), 200 : 200 + len(code)] = code
    low, high = 100 + 16, 100 + len(code) - 16
    detector = box_of(low + 100, low, high + 100, high)
    frames = [noisy(np.repeat(clean[..., None], 3, axis=2), seed, 90) for seed in range(10)]
    assert all(code.text is None for frame in frames[:2] for code in scan(frame, detector))
    (track,) = scan_video(frames, detector)
    assert track.text == QRIS
    assert 2 <= track.votes < 10


def test_sightings_vote_by_the_ratio_of_signal_to_noise() -> None:
    votes = WeightedSum(np.zeros((2, 2)))
    assert votes.add(np.full((2, 2), 5.0, np.float32), 0.6) == pytest.approx(1.5), "one sighting says no more than this"
    mean = votes.add(np.full((2, 2), -1.0, np.float32), 0.8)
    assert mean == pytest.approx((1.5 * 0.36 / 0.64 - 0.64 / 0.36) / (0.36 / 0.64 + 0.64 / 0.36))
    assert (votes.add(np.full((2, 2), 1.0, np.float32), 1.0) > 0.5).all(), "a perfect grid has a finite weight"


def test_boxes_that_cut_off_finder_patterns_are_widened_in_every_second_vote() -> None:
    clean = np.full((480, 640), 235, np.uint8)
    code = cv2.GaussianBlur(symbol("HELLO VIDEO", 6), (0, 0), 4.5)
    clean[100 : 100 + len(code), 200 : 200 + len(code)] = code
    low, high = 24 + 20, len(code) - 24 - 20
    frame = np.repeat(clean[..., None], 3, axis=2)
    (track,) = scan_video([frame] * 4, box_of(200 + low, 100 + low, 200 + high, 100 + high))
    assert track.text == "HELLO VIDEO"


def test_unlikely_tracks_leave_their_votes_to_others() -> None:
    frames = [noisy(np.full((480, 640, 3), 128, np.uint8), seed, 60) for seed in range(MAX_UNLIKELY_VOTES + 2)]
    (track,) = scan_video(frames, box_of(100, 100, 260, 260))
    assert (len(track.frames), track.votes) == (len(frames), MAX_UNLIKELY_VOTES)


@pytest.mark.parametrize("blurred", [MAX_UNLIKELY_VOTES, 4 * MAX_UNLIKELY_VOTES])
def test_a_camera_that_finds_its_focus_late_reads_the_code(blurred: int) -> None:
    """The blurred sightings use up all votes of what does not look like a code; those after them are much clearer."""
    code = cv2.GaussianBlur(symbol(QRIS, 4, "l"), (0, 0), 1.2)
    clean = np.full((480, 640, 3), 235, np.uint8)
    clean[100 : 100 + len(code), 200 : 200 + len(code)] = code[..., None]
    detector = box_of(216, 116, 200 + len(code) - 16, 100 + len(code) - 16)
    scanner = VideoScanner(detector)
    for seed in range(blurred):
        (track,) = scanner.add(noisy(cv2.GaussianBlur(clean, (0, 0), 12), seed, 12))
    assert not track.is_likely
    assert MAX_UNLIKELY_VOTES <= track.votes <= MAX_UNLIKELY_VOTES + 2, "few more as the track grows older"
    for seed in range(3):
        scanner.add(noisy(clean, seed, 80))
    assert (track.text, len(scanner.tracks)) == (QRIS, 1)


def test_the_text_of_most_frames_stands() -> None:
    first, second = table(TEXTS[0]), table(TEXTS[1])
    (track,) = scan_video([seen(first, 0, 0)] * 2 + [seen(second, 0, 0)] * 3)
    assert (track.text, dict(track.texts)) == (TEXTS[1], {TEXTS[0]: 2, TEXTS[1]: 3})
    assert track.best is not None
    assert track.best.text == TEXTS[1]


def test_tracks_of_endless_cameras_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_FRAMES", 4)
    monkeypatch.setattr(video, "MAX_TEXTS", 2)
    shown = [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2], TEXTS[0], TEXTS[2]]
    (track,) = scan_video(seen(table(text), 0, 0) for text in shown)
    assert (list(track.frames), track.sightings) == ([2, 3, 4, 5], 6)
    assert dict(track.texts) == {TEXTS[0]: 3, TEXTS[2]: 2}, "the text that was read least has left"
    assert (track.to_json()["frames"], track.to_json()["sightings"]) == ([2, 3, 4, 5], 6)


def test_a_screen_that_changes_its_code_has_the_sighting_of_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is read once: the first, which stands, is not the one that leaves."""
    monkeypatch.setattr(video, "MAX_TEXTS", 2)
    (track,) = scan_video(seen(table(text), 0, 0) for text in (TEXTS[0], TEXTS[1], TEXTS[2]))
    assert dict(track.texts) == {TEXTS[0]: 1, TEXTS[2]: 1}
    assert track.best is not None
    assert track.text == track.best.text == TEXTS[0]


def test_a_box_in_which_nothing_is_read_is_a_track_without_text() -> None:
    blank = seen(table(), 0, 0)
    (track,) = scan_video([blank] * 3, box_of(100, 100, 220, 220))
    assert (track.text, len(track.frames)) == (None, 3)
    assert track.best is not None
    assert track.best.problems


def test_frames_that_are_no_images_are_refused() -> None:
    scanner = VideoScanner()
    with pytest.raises(ValueError, match="at least 8 x 8"):
        scanner.add(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(ValueError, match="need an image"):
        scanner.add(np.zeros((100, 100)))
    assert scan_video([]) == []
    sizes = scan_video([seen(table(TEXTS[0]), 0, 0), seen(table(TEXTS[0]), 0, 0)[:400, :500]])
    assert [track.text for track in sizes] == [TEXTS[0]]


def test_the_way_of_the_camera_is_measured() -> None:
    world = table(*TEXTS)
    before, after = seen(world, 100, 50)[..., 0], seen(world, 112, 45)[..., 0]
    matrix = camera_motion(before, after)
    assert matrix is not None
    assert matrix[:, 2] == pytest.approx([-12, 5], abs=1)
    assert camera_motion(np.zeros((100, 100), np.uint8), np.zeros((100, 100), np.uint8)) is None


def test_drawn_clips_give_the_place_of_each_code() -> None:
    clip = draw_clip(np.random.default_rng(8), size=480, frames=6, codes=4)
    again = draw_clip(np.random.default_rng(8), size=480, frames=6, codes=4)
    assert all(np.array_equal(a.image, b.image) for a, b in zip(clip, again, strict=True))
    assert not np.array_equal(clip[0].image, clip[1].image)
    by_id: dict[int, set[str]] = {}
    for frame in clip:
        assert frame.image.shape == (480, 480, 3)
        assert len(frame.codes) == len(frame.ids)
        for number, code in zip(frame.ids, frame.codes, strict=True):
            by_id.setdefault(number, set()).add(code.content.text)
            assert 0 <= code.box[0] < code.box[2] <= 480
        places = {code.content.text: np.array(code.corners) for code in frame.codes}
        for read in read_zxing(frame.image):
            if read.text in places:
                assert np.abs(read.corners.mean(0) - places[read.text].mean(0)).max() < 12
    assert by_id
    assert all(len(texts) == 1 for texts in by_id.values())


def test_no_frame_of_a_wide_world_shows_all_of_its_codes() -> None:
    clip = draw_clip(np.random.default_rng(1), size=320, frames=12, codes=12, reach=0.5, world=4.0)
    shown = [set(frame.ids) for frame in clip]
    every = set().union(*shown)
    assert len(every) > max(map(len, shown)) > 0
    assert all(frame.image.shape == (320, 320, 3) for frame in clip)


def test_a_long_video_keeps_a_bounded_number_of_tracks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MAX_TRACKS", 3)
    blank = np.full((480, 640, 3), 120, np.uint8)
    scanner = VideoScanner()
    scanner.add(seen(table(TEXTS[0]), 0, 0))
    for step in range(6):  # what a detector takes for a code, each time elsewhere, and long enough apart to be lost
        scanner.detector = box_of(80 * step, 300, 80 * step + 60, 360)
        scanner.add(blank)
        scanner.detector = None
        for _ in range(MAX_GAP + 1):
            scanner.add(blank)
    assert [track.id for track in scanner.tracks] == [0, 5, 6]
    assert scanner.tracks[0].text == TEXTS[0], "what was read is kept longer than what was not"
    assert scanner.dropped == 4
    assert not any(track.sums for track in scanner.tracks)
