"""Inputs for prediction: what is found, in which order, and what is said about what cannot be read."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from arclight.vision.inputs.image_source import ImageSource
from arclight.vision.inputs.memory_images import SourceError


def draw(path: Path, value: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((20, 30, 3), value, np.uint8))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, value in (("b.png", 2), ("a.png", 1), ("deep/er/c.PNG", 3)):
        draw(tmp_path / name, value)
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """Ten frames, each of one level: 20, 40, ... 200 in red."""
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for level in range(20, 220, 20):
        frame = np.zeros((48, 64, 3), np.uint8)
        frame[..., 2] = level
        writer.write(frame)
    writer.release()
    return path


def values(frames: ImageSource) -> list[int]:
    return [int(frame.image[0, 0, 0]) for frame in frames]


def test_a_folder_is_searched_recursively_and_sorted(folder: Path) -> None:
    frames = ImageSource(folder)
    assert [frame.path for frame in frames] == [str(folder / name) for name in ("a.png", "b.png", "deep/er/c.PNG")]
    assert values(frames) == [1, 2, 3]
    assert frames.skipped == []


def test_one_file_with_any_ending(folder: Path) -> None:
    renamed = (folder / "a.png").rename(folder / "upload")
    (frame,) = ImageSource(str(renamed))
    assert (frame.path, frame.index, frame.image.shape) == (str(renamed), None, (20, 30, 3))


def test_patterns_are_sorted_and_may_be_deep(folder: Path) -> None:
    assert values(ImageSource(f"{folder}/*.png")) == [1, 2]
    assert values(ImageSource(f"{folder}/**/*.PNG")) == [3]
    with pytest.raises(SourceError, match=r"no file matches .*\*\.webp"):
        ImageSource(f"{folder}/*.webp")


def test_a_name_with_brackets_is_a_file_first(folder: Path) -> None:
    assert values(ImageSource(draw(folder / "photo[1].png", 9))) == [9]


def test_lists_may_mix_everything(folder: Path) -> None:
    grey = np.full((5, 6), 77, np.uint8)
    frames = ImageSource([folder / "b.png", grey, str(folder / "*.png"), np.full((5, 6, 3), 8, np.uint8)])
    assert values(frames) == [2, 77, 1, 2, 8]
    assert [frame.path for frame in frames][1::3] == ["array 0", "array 1"]
    assert values(frames) == [2, 77, 1, 2, 8]  # it can be iterated again


def test_colours_are_rgb(folder: Path) -> None:
    red = np.zeros((8, 8, 3), np.uint8)
    red[..., 2] = 250  # OpenCV writes blue first
    cv2.imwrite(str(folder / "red.png"), red)
    (frame,) = ImageSource(folder / "red.png")
    assert frame.image[0, 0].tolist() == [250, 0, 0]


def test_frames_of_a_video(video: Path) -> None:
    frames = list(ImageSource(video))
    assert [frame.index for frame in frames] == list(range(10))
    assert all(frame.path == str(video) for frame in frames)
    np.testing.assert_allclose([frame.image[..., 0].mean() for frame in frames], range(20, 220, 20), atol=4)
    assert max(frame.image[..., 2].mean() for frame in frames) < 10


def test_every_third_frame_keeps_its_number(video: Path) -> None:
    frames = list(ImageSource(video, vid_stride=3))
    assert [frame.index for frame in frames] == [0, 3, 6, 9]
    np.testing.assert_allclose([frame.image[..., 0].mean() for frame in frames], [20, 80, 140, 200], atol=4)
    with pytest.raises(SourceError, match="vid_stride is 0"):
        ImageSource(video, vid_stride=0)


def test_unreadable_files_are_skipped_and_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:50])
    (folder / "fake.jpg").write_text("hello")
    (folder / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "fake.mp4").write_text("no video")
    frames = ImageSource(folder)
    assert values(frames) == [1, 2, 3]
    reasons = {Path(problem.path).name: problem.reason for problem in frames.skipped}
    assert set(reasons) == {"broken.png", "fake.jpg", "phone.heic", "fake.mp4"}
    assert "truncated" in reasons["broken.png"]
    assert "not an image" in reasons["fake.jpg"]
    assert "HEIC" in reasons["phone.heic"]
    assert "not a video" in reasons["fake.mp4"]
    assert "broken.png" in caplog.text
    values(frames)
    assert len(frames.skipped) == 4  # counted anew each time


def test_a_file_that_vanishes_is_skipped(folder: Path) -> None:
    frames = ImageSource(folder)
    (folder / "a.png").unlink()
    assert values(frames) == [2, 3]
    assert [problem.reason for problem in frames.skipped] == ["No such file or directory"]


def test_a_missing_source_is_named_with_what_is_there(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"photos/aa\.png does not exist \(nor does .*photos\)"):
        ImageSource(folder / "photos" / "aa.png")
    with pytest.raises(SourceError, match=r"aa\.png does not exist; did you mean a\.png"):
        ImageSource(folder / "aa.png")


def test_sources_without_images_are_errors_at_once(folder: Path) -> None:
    (folder / "empty").mkdir()
    for source, message in (
        (folder / "empty", "no image or video in"),
        ([], "the list of sources is empty"),
        ("ftp://example.com/a.jpg", "addresses start with rtsp, rtsps, http, https"),
        (
            "rtsp://me:secret@[::1/door",
            r"^the rtsp address cannot be read \(Invalid IPv6 URL\): write it as rtsp://host/path$",
        ),
        (7.0, "float is not a source"),
        (True, "bool is not a source"),
        (np.zeros((4, 4, 3), np.float32), "type float32: give uint8"),
        (np.zeros((1, 4, 4, 3), np.uint8), r"shape \(1, 4, 4, 3\)"),
    ):
        with pytest.raises(SourceError, match=message):
            ImageSource(source)  # type: ignore[arg-type]
