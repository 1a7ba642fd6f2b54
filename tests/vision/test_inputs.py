"""Inputs beside files and arrays: memory, standard input, videos as they are, cameras and streams."""

from __future__ import annotations

import functools
import http.server
import io
import re
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from tests.vision.mjpeg import Camera
from tests.waiting import LIMIT

from arclight.fabric.extras import MissingExtraError
from arclight.vision.inputs import live
from arclight.vision.inputs.image_source import ImageSource, prefetch
from arclight.vision.inputs.live import LiveInput, LiveStreams, live_input
from arclight.vision.inputs.memory_images import SourceError


def solid(*rgb: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.full((height, width, 3), rgb, np.uint8)


def first(source: ImageSource) -> np.ndarray:
    return next(iter(source)).image


# -- memory --------------------------------------------------------------------------------------------------------


def test_bytes_tensors_and_pil_images_are_the_same_picture() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    encoded = cv2.imencode(".png", cv2.cvtColor(photo, cv2.COLOR_RGB2BGR))[1].tobytes()
    tensor = torch.from_numpy(photo).permute(2, 0, 1)
    source = ImageSource([encoded, bytearray(encoded), tensor, tensor.float() / 255, PILImage.fromarray(photo)])
    frames = list(source)
    assert [frame.name for frame in frames] == ["image 0", "image 1", "array 2", "array 3", "image 4"]
    for frame in frames:
        np.testing.assert_array_equal(frame.image, photo)
    batch = list(ImageSource(torch.stack([tensor, tensor.flip(2)])))
    np.testing.assert_array_equal(batch[1].image, photo[:, ::-1])
    np.testing.assert_array_equal(first(ImageSource(tensor[:1])), np.repeat(photo[..., :1], 3, axis=2))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.full((3, 4, 4), 1.5), r"holds 1.5 to 1.5: give floats in \[0, 1\]"),
        (torch.full((3, 4, 4), float("nan")), "holds nan to nan"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), r"tensor of shape \(4, 4, 3\) and type uint8: give \(3, height"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "type int64: give uint8, or floats"),
        (torch.zeros(0, 3, 4, 4), r"shape \(0, 3, 4, 4\)"),
    ],
)
def test_tensors_that_are_no_images_are_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        ImageSource(tensor)


def pil(kind: str) -> PILImage.Image:
    if kind == "deep":  # 16 bits of grey, 0x4000
        return PILImage.fromarray(np.full((4, 4), 0x4000, np.uint16))
    if kind == "cmyk":
        return PILImage.new("CMYK", (4, 4), (0, 255, 255, 0))
    if kind == "alpha":
        return PILImage.new("RGBA", (4, 4), (0, 0, 255, 127))
    if kind == "palette":
        palette = PILImage.new("RGBA", (4, 4), (0, 0, 0, 0)).quantize()
        palette.info["transparency"] = 0
        return palette
    return PILImage.new("L", (1, 1), 7)


@pytest.mark.parametrize(
    ("kind", "rgb"),
    [
        ("deep", (64,) * 3),
        ("cmyk", (255, 0, 0)),
        ("alpha", (128, 128, 255)),
        ("palette", (255,) * 3),
        ("one", (7,) * 3),
    ],
)
def test_pil_images_of_all_modes_become_rgb(kind: str, rgb: tuple[int, ...]) -> None:
    assert first(ImageSource(pil(kind)))[0, 0].tolist() == list(rgb)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (np.full((4, 4), 0.5, np.float32), "mode F holds 0.5 to 0.5, which have no 8-bit meaning"),
        (np.array([[0, 65536]], np.int32), "mode I holds 0 to 65536"),
        (np.array([[-1, 5]], np.int32), "mode I holds -1 to 5"),
        (np.array([[0, 200]], np.int32), "mode I holds 0 to 200, which are levels of 8 bits or a black picture of 16"),
    ],
)
def test_pil_images_of_numbers_without_a_meaning_are_named(numbers: np.ndarray, reason: str) -> None:
    """Floats in [0, 1] and small integers became black."""
    source = ImageSource([PILImage.fromarray(numbers), solid(5, 5, 5)])
    assert [frame.name for frame in source] == ["array 1"]
    assert reason in source.skipped[0].reason
    for number, level in ((0x4000, 64), (256, 1), (0, 0)):
        deep = PILImage.fromarray(np.full((4, 4), number, np.int32))
        assert first(ImageSource(deep))[0, 0].tolist() == [level] * 3
    dark = PILImage.fromarray(np.full((4, 4), 200, np.int32))
    dark.format = "PNG"  # as Pillow 10 opened a file of 16 bits
    assert first(ImageSource(dark))[0, 0].tolist() == [0] * 3


def test_pil_images_are_turned_and_animations_stand_still(tmp_path: Path) -> None:
    exif = PILImage.Exif()
    exif[0x0112] = 6
    PILImage.new("RGB", (30, 10)).save(tmp_path / "turned.jpg", exif=exif)
    assert first(ImageSource(PILImage.open(tmp_path / "turned.jpg"))).shape == (30, 10, 3)
    pictures = [PILImage.new("L", (8, 8), level) for level in (0, 255)]
    pictures[0].save(tmp_path / "moving.gif", save_all=True, append_images=pictures[1:])
    moving = PILImage.open(tmp_path / "moving.gif")
    assert first(ImageSource(moving))[0, 0, 0] == 0
    moving.seek(1)
    assert first(ImageSource(moving))[0, 0, 0] == 255


def test_images_in_memory_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    cut = tmp_path / "cut.png"
    PILImage.effect_noise((64, 64), 50).save(cut)
    cut.write_bytes(cut.read_bytes()[:900])
    giant = PILImage.new("1", (10_000, 10_000))
    source = ImageSource([giant, PILImage.open(cut), b"GIF but not", solid(5, 5, 5)])
    assert [frame.name for frame in source] == ["array 3"]
    reasons = [problem.reason for problem in source.skipped]
    assert re.search(r"10000 x 10000 pixels \(100.0 million\) is too large", reasons[0])
    assert "PIL image that cannot be read" in reasons[1]
    assert "not an image" in reasons[2]


# -- images of every kind as files ---------------------------------------------------------------------------------


def test_odd_images_are_read_as_they_look(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "deep.png"), np.full((4, 4, 3), 0x8000, np.uint16))
    PILImage.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    PILImage.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "alpha.png")
    pictures = [PILImage.new("L", (8, 8), level) for level in (40, 200)]
    for name in ("moving.gif", "moving.webp", "moving.png"):
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:])
    PILImage.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "one.png")
    found = {Path(frame.path).name: frame.image for frame in ImageSource(tmp_path)}
    assert found["deep.png"][0, 0].tolist() == [128] * 3
    red = found["cmyk.jpg"][0, 0].astype(int)
    assert red[0] > 200
    assert max(red[1:]) < 60
    assert found["alpha.png"][0, 0].tolist() == [255] * 3  # on white paper
    for name in ("moving.gif", "moving.webp", "moving.png"):
        assert abs(int(found[name][0, 0, 0]) - 40) < 4, f"{name}: the first picture"
    assert found["one.png"].tolist() == [[[9, 8, 7]]]


def test_a_hundred_megapixels_are_refused_with_a_sentence(tmp_path: Path) -> None:
    PILImage.new("1", (10_000, 10_000)).save(tmp_path / "giant.png")
    source = ImageSource([tmp_path / "giant.png", solid(1, 1, 1)])
    assert [frame.name for frame in source] == ["array 0"]
    assert source.skipped[0].reason == (
        "PNG image of 10000 x 10000 pixels (100.0 million) is too large: at most 50 million are read; scale it down"
    )


@pytest.mark.slow
def test_a_hundred_megapixels_are_read_where_they_are_allowed(tmp_path: Path) -> None:
    PILImage.new("1", (10_000, 10_000)).save(tmp_path / "giant.png")
    assert first(ImageSource(tmp_path / "giant.png", max_pixels=100_000_000)).shape == (10_000, 10_000, 3)


# -- lists ---------------------------------------------------------------------------------------------------------


def test_paths_by_line_of_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "with blank .png"):
        cv2.imwrite(str(tmp_path / name), solid(3, 3, 3))
    lines = [f"{tmp_path}/a.png", "", f"{tmp_path}/gone.png", "rtsp://camera/1", f"{tmp_path}/with blank .png"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    source = ImageSource("-")
    assert [Path(frame.path).name for frame in source] == ["a.png", "with blank .png"]
    assert [(problem.path, problem.line) for problem in source.skipped] == [
        ("standard input", 3),
        ("standard input", 4),
    ]
    assert "gone.png does not exist" in source.skipped[0].reason
    assert "is an address" in source.skipped[1].reason


def test_lines_are_read_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), solid(3, 3, 3))

    def endless():
        while True:
            yield f"{tmp_path}/a.png\n"

    monkeypatch.setattr(sys, "stdin", endless())
    assert len(list(ImageSource("-", max_frames=3))) == 3


def test_a_file_of_sources(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), solid(3, 3, 3))
    cameras = tmp_path / "shop.streams"
    cameras.write_text(f"# the shop\nrtsp://user:secret@10.0.0.7/door?key=1\n\n{tmp_path}/a.png\n0\n")
    source = ImageSource(cameras)
    assert [one.name for one in source.live] == ["rtsp://10.0.0.7/door", "camera 0"]
    assert tmp_path / "a.png" in source.inputs
    cameras.write_bytes(b"\xef\xbb\xbfrtsp://10.0.0.7/door\r\n")  # as Notepad writes it
    assert [one.name for one in ImageSource(cameras).live] == ["rtsp://10.0.0.7/door"]
    for text, message in (
        (b"\n", "names no source"),
        (f"{cameras}\n".encode(), "name standard input and lists themselves"),
        (b"\xff\xfe0\0", "bad.streams is not UTF-8 text"),
    ):
        (tmp_path / "bad.streams").write_bytes(text)
        with pytest.raises(SourceError, match=message):
            ImageSource(tmp_path / "bad.streams")


def test_a_file_comes_before_a_camera_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("0.png", solid(3, 3, 3))
    Path("0.png").rename("0")
    assert ImageSource("0").live == []
    assert [one.name for one in ImageSource(["1", 2]).live] == ["camera 1", "camera 2"]


# -- videos --------------------------------------------------------------------------------------------------------


def write_video(path: Path, levels: list[int], fourcc: str = "MJPG", size: tuple[int, int] = (64, 48)) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*fourcc), 25, size)
    assert writer.isOpened()
    for level in levels:
        writer.write(np.full((size[1], size[0], 3), level, np.uint8))
    writer.release()
    return path


@pytest.mark.parametrize(
    ("name", "fourcc"), [("a.mp4", "mp4v"), ("a.avi", "MJPG"), ("a.mkv", "mp4v"), ("a.mov", "mp4v"), ("a.webm", "VP80"),
                         ("a.mpg", "MPG1"), ("a.wmv", "WMV2"), ("a.ts", "MPG2"), ("a.m4v", "mp4v"), ("a.asf", "WMV2"), ("a.mpeg", "MPG1")],
)  # fmt: skip
def test_containers(name: str, fourcc: str, tmp_path: Path) -> None:
    levels = list(range(20, 220, 20))
    write_video(tmp_path / name, levels, fourcc)
    source = ImageSource(tmp_path / name)
    frames = list(source)
    assert source.skipped == []
    np.testing.assert_allclose([frame.image[..., 0].mean() for frame in frames], levels, atol=8)
    assert frames[0].fps == pytest.approx(25, rel=0.01)


def test_stereo_pictures_give_their_first_view(tmp_path: Path) -> None:
    left, right = (PILImage.new("RGB", (64, 48), colour) for colour in ((200, 0, 0), (0, 200, 0)))
    left.save(tmp_path / "both.mpo", save_all=True, append_images=[right])
    (tmp_path / "cut.mpo").write_bytes((tmp_path / "both.mpo").read_bytes()[:300])
    source = ImageSource(tmp_path)
    (frame,) = source
    assert frame.image.shape == (48, 64, 3)
    np.testing.assert_allclose(frame.image.reshape(-1, 3).mean(0), (200, 0, 0), atol=2)
    assert [Path(problem.path).name for problem in source.skipped] == ["cut.mpo"]


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXTINF:1,\n{file}\n#EXT-X-ENDLIST\n",
    "hls behind a mark": "\ufeff#EXTM3U\n#EXTINF:1,\n{file}\n",
    "concat": "ffconcat version 1.0\nfile '{file}'\n",
    "dash": '<?xml version="1.0"?><MPD profiles="urn:mpeg:dash:profile:isoff-main:2011"></MPD>',
    "sdp": "v=0\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    "polyglot": "RIFFaaaaAVI <MPD profiles='urn:mpeg:dash:profile:isoff-main:2011'></MPD>",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_playlists_named_as_videos_are_refused_before_ffmpeg_sees_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = write_video(tmp_path / "inner.avi", [50] * 3)
    playlist = tmp_path / "film.mp4"
    playlist.write_text(PLAYLISTS[kind].format(file=inner))
    monkeypatch.setattr(cv2, "VideoCapture", lambda *_: pytest.fail("FFmpeg was asked"))
    source = ImageSource([playlist, solid(1, 1, 1)])
    assert [frame.name for frame in source] == ["array 0"]
    assert "not a video: it is a playlist or description" in source.skipped[0].reason


def test_a_truncated_video_gives_its_frames_with_a_warning(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.avi", [50] * 60)
    cut = tmp_path / "cut.avi"
    cut.write_bytes(whole.read_bytes()[: len(whole.read_bytes()) // 2])
    source = ImageSource(cut)
    seen = len(list(source))
    assert 10 < seen < 40
    assert source.skipped[0].reason == f"the video ends after {seen} of 60 frames: it is cut or damaged"


def test_a_video_whose_name_is_a_protocol_or_pattern_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "a.avi", [50] * 4).rename(tmp_path / "concat:a%03d.avi")
    assert len(list(ImageSource(Path("concat:a%03d.avi")))) == 4


def test_video_frames_above_the_limit_are_refused(tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.avi", [50] * 4)
    source = ImageSource([video, solid(1, 1, 1)], max_pixels=1000)
    assert len(list(source)) == 1
    assert "too large" in source.skipped[0].reason


# -- reading ahead, batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 3])
def test_batches_keep_order_and_end_at_max_frames(ahead: int, tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.avi", list(range(0, 250, 10)))
    source = ImageSource([solid(1, 1, 1), video], prefetch=ahead)
    assert [len(batch) for batch in source.batches(4)] == [4] * 6 + [2]
    capped = ImageSource([solid(1, 1, 1), video], prefetch=ahead, max_frames=6)
    assert [[frame.index for frame in batch] for batch in capped.batches(4)] == [[None, 0, 1, 2], [3, 4]]
    assert [frame.index for frame in capped] == [None, 0, 1, 2, 3, 4]
    with pytest.raises(SourceError, match="max_frames is 0"):
        ImageSource(video, max_frames=0)


def test_reading_ahead_is_bounded_and_ends_with_the_consumer() -> None:
    read: list[int] = []

    def numbers():
        for number in range(1000):
            read.append(number)
            yield number

    before = set(threading.enumerate())
    items = prefetch(numbers(), 3)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    (reader,) = set(threading.enumerate()) - before
    until = time.monotonic() + 30
    while len(read) < 9 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(read) == 9  # five taken, three in the queue, one in hand
    items.close()
    reader.join(30)
    assert not reader.is_alive()
    assert len(read) == 9


def test_silent_standard_input_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), solid(3, 3, 3))
    ended = threading.Event()

    def silent():
        yield f"{tmp_path}/a.png\n"
        source.stop()  # while the second line is waited for
        ended.wait(30)

    source = ImageSource("-", prefetch=2)
    monkeypatch.setattr(sys, "stdin", silent())
    try:
        assert [len(batch) for batch in source.batches(2)] == [1]
        assert not ended.is_set()
        assert any(thread.name == "arclight-prefetch" for thread in threading.enumerate()), "it still waits for a line"
    finally:
        ended.set()


@pytest.mark.slow
def test_a_program_may_end_while_frames_are_decoded(tmp_path: Path) -> None:
    """A thread that comes back from OpenCV into an interpreter that is torn down aborts the process."""
    noise = np.random.default_rng(0).integers(0, 255, (8, 2160, 3840, 3), np.uint8)
    writer = cv2.VideoWriter(str(tmp_path / "a.mp4"), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"mp4v"), 10, (3840, 2160))
    for frame in noise:
        writer.write(frame)
    writer.release()
    script = (
        "import sys; from arclight.vision.inputs.image_source import ImageSource; "
        "print([frame.index for frame in ImageSource(sys.argv[1], prefetch=2, max_frames=2)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a.mp4"], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_errors_of_the_reading_thread_are_raised_behind_the_items_before_them() -> None:
    def numbers():
        yield 1
        raise OSError("the disk is gone")

    items = prefetch(numbers(), 2)
    assert next(items) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_FIRST_DELAY_S", 0.05)
    monkeypatch.setattr(live, "_LONGEST_DELAY_S", 0.1)


def test_every_frame_of_a_stream_in_order() -> None:
    with Camera(frames=None) as camera:
        frames = list(ImageSource(camera.address, every_frame=True, max_frames=20))
    assert [frame.index for frame in frames] == list(range(20))
    assert {frame.path for frame in frames} == {camera.address}
    np.testing.assert_allclose([frame.image.mean() for frame in frames], range(8, 88, 4), atol=2)


def test_the_newest_frame_of_a_stream_is_never_far_behind() -> None:
    with Camera(period_s=0.005) as camera:
        frames = []
        for frame in ImageSource(camera.address, max_frames=6):
            frames.append(frame)
            sent = camera.sent
            time.sleep(0.15)  # a slow detector
    gaps = np.diff([frame.index for frame in frames])
    assert gaps.max() > 1, "frames in between were left out"
    assert all(gap > 0 for gap in gaps)
    assert sent - frames[-1].index < 60, "no queue of old frames has built up"


def test_a_full_queue_holds_the_reader_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUEUE_FRAMES", 4)
    with Camera(period_s=0.001, frames=None) as camera:
        frames = iter(ImageSource(camera.address, every_frame=True))
        next(frames)
        reader = next(thread for thread in threading.enumerate() if thread.name == f"arclight-{camera.address}")
        state = reader._target.__self__  # type: ignore[attr-defined]
        until = time.monotonic() + 30
        while len(state.waiting) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(state.waiting) == 4
        assert [next(frames).index for _ in range(12)] == list(range(1, 13))
        frames.close()
        reader.join(LIMIT)
        assert not reader.is_alive()


def test_a_stream_that_is_cut_and_restored_goes_on(impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    with Camera(period_s=0.005) as camera:
        frames = iter(ImageSource(camera.address, every_frame=True, reconnect_s=30))
        before = [next(frames) for _ in range(5)]
        camera.refusing = True
        camera.cut.set()
        until = time.monotonic() + 30
        while "trying again" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        last = camera.sent
        camera.cut.clear()
        camera.refusing = False
        after = next(frame for frame in frames if frame.index >= last)
        frames.close()
    assert camera.connections == 2
    assert after.index > before[-1].index
    assert after.path == before[0].path
    assert f"{camera.address} was cut; trying again in 0.05 s" in caplog.text


def test_a_stream_that_stays_away_is_an_error_that_names_it(impatient: None) -> None:
    with Camera(period_s=0.001, frames=5) as camera:
        source = ImageSource(camera.address, every_frame=True, reconnect_s=0.3)
        frames = iter(source)
        seen = [next(frames) for _ in range(3)]
        camera.refusing = True
        with pytest.raises(SourceError, match=f"{re.escape(camera.address)} was cut, and no frame came for 0.3 s"):
            for frame in frames:
                seen.append(frame)
    assert len(seen) >= 5, "the frames before are not lost"
    assert source.skipped[0].path == camera.address


def test_an_unreachable_stream_is_an_error_without_its_credentials(impatient: None) -> None:
    with pytest.raises(SourceError, match=r"http://127.0.0.1:9/x cannot be opened, and no frame came for 0.2 s"):
        list(ImageSource("http://who:secret@127.0.0.1:9/x?key=1", reconnect_s=0.2))


def test_one_lost_stream_does_not_end_the_others(impatient: None) -> None:
    with Camera(period_s=0.002) as camera:
        source = ImageSource(["http://127.0.0.1:9/x", camera.address], reconnect_s=0.2, max_frames=300)
        seen = []
        for frame in source:
            seen.append(frame.path)
            if source.skipped and len(seen) > 5:
                break
    assert set(seen) == {camera.address}
    assert [problem.path for problem in source.skipped] == ["http://127.0.0.1:9/x"]


def test_several_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with Camera(period_s=0.002) as one, Camera(period_s=0.002) as other:
        seen: dict[str, int] = {}
        for batch in ImageSource([one.address, other.address], every_frame=True, max_frames=60).batches(2):
            assert len(batch) <= 2
            for frame in batch:
                assert frame.index == seen.get(frame.path, -1) + 1
                seen[frame.path] = frame.index
    assert min(seen[camera.address] for camera in (one, other)) >= 15


def test_streams_of_equal_shown_addresses_are_distinguished() -> None:
    """Recorders name their channels in the query, which is not shown."""
    with Camera(period_s=0.002) as camera:
        addresses = [f"{camera.address}?channel={number}" for number in (1, 2)]
        seen: dict[str, int] = {}
        for frame in ImageSource(addresses, every_frame=True, max_frames=20):
            assert frame.index == seen.get(frame.path, -1) + 1
            seen[frame.path] = frame.index
    assert set(seen) <= {camera.address, f"{camera.address} (2)"}
    names = [one.name for one in ImageSource([*addresses, "0", "http://127.0.0.1:9/x", addresses[0]]).live]
    assert names == [
        camera.address,
        f"{camera.address} (2)",
        "camera 0",
        "http://127.0.0.1:9/x",
        f"{camera.address} (3)",
    ]


def test_streams_stop_when_asked() -> None:
    with Camera() as camera:
        source = ImageSource(camera.address, every_frame=True)
        seen = 0
        for _ in source:
            seen += 1
            if seen == 3:
                source.stop()
        assert seen == 3
        assert [frame.index for frame in ImageSource(camera.address, every_frame=True, max_frames=2)] == [0, 1]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Address of tmp_path, served over HTTP."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_video_at_an_address_ends(address: str, tmp_path: Path) -> None:
    write_video(tmp_path / "clip.avi", [50] * 12)
    source = ImageSource(f"{address}/clip.avi", every_frame=True)
    assert len(list(source)) == 12
    assert source.skipped == []


@pytest.mark.parametrize("name", ["photo.JPG", "photo.png?size=large", "animation.gif"])
def test_an_image_at_an_address_is_read_once(name: str, address: str, tmp_path: Path) -> None:
    red, blue = (PILImage.new("RGB", (32, 24), colour) for colour in ("red", "blue"))
    file = tmp_path / name.partition("?")[0]
    red.save(file, **({"save_all": True, "append_images": [blue]} if file.suffix == ".gif" else {}))
    source = ImageSource(f"{address}/{name}", max_frames=3, reconnect_s=1)
    (frame,) = source
    assert (frame.path, frame.index, frame.image.shape) == (f"{address}/{file.name}", 0, (24, 32, 3))
    assert frame.image.mean(axis=(0, 1)) == pytest.approx([255, 0, 0], abs=3)
    assert source.skipped == []


def test_an_image_that_is_damaged_or_missing_at_its_address_is_named(address: str, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_bytes(b"no image")
    (tmp_path / "empty.png").write_bytes(b"")
    PILImage.new("RGB", (32, 24)).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:40])
    for name in ("text.jpg", "empty.png", "cut.png", "missing.jpg"):
        with pytest.raises(
            SourceError,
            match=rf"{re.escape(name)}(: not an image that can be read| cannot be opened: is it there, and an image)",
        ):
            list(ImageSource(f"{address}/{name}"))


def test_a_missing_camera_is_reported_at_once() -> None:
    with pytest.raises(SourceError, match="camera 97 cannot be opened: is it there, and used by no other program"):
        list(ImageSource(97))


def test_the_screen_needs_mss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mss", None)
    with pytest.raises(MissingExtraError, match="pip install mss"):
        ImageSource("screen")


def test_the_screen_with_a_grabber_like_that_of_mss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grabber:
        monitors = [{"left": 0}, {"left": 0}]

        def grab(self, monitor: dict[str, int]) -> np.ndarray:
            assert monitor is self.monitors[1]
            return np.full((10, 12, 4), (30, 20, 10, 255), np.uint8)  # blue first

        def close(self) -> None:
            self.closed = True

    grabber = Grabber()
    monkeypatch.setitem(sys.modules, "mss", types.SimpleNamespace(mss=lambda: grabber))
    frames = list(ImageSource("screen 1", max_frames=3))
    assert frames[0].path == "screen 1"
    assert frames[2].image[0, 0].tolist() == [10, 20, 30]
    assert grabber.closed
    with pytest.raises(SourceError, match="screen 4 cannot be opened"):
        list(ImageSource("screen 4"))


def test_a_part_of_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    desktop = np.random.default_rng(0).integers(0, 255, (40, 100, 4), np.uint8)
    whole = {"left": 0, "top": 0, "width": 100, "height": 40}
    second = {"left": 60, "top": 10, "width": 40, "height": 30}

    def grab(area: dict[str, int]) -> np.ndarray:
        return desktop[area["top"] : area["top"] + area["height"], area["left"] : area["left"] + area["width"]]

    grabber = types.SimpleNamespace(monitors=[whole, second, second], grab=grab, close=lambda: None)
    monkeypatch.setitem(sys.modules, "mss", types.SimpleNamespace(mss=lambda: grabber))
    (frame,) = ImageSource("screen 2 5 4 35 20", max_frames=1)
    assert frame.path == "screen 2 5 4 35 20"
    np.testing.assert_array_equal(frame.image, desktop[14:34, 65:100, 2::-1])
    (frame,) = ImageSource("screen 50 0 10 10", max_frames=1)
    np.testing.assert_array_equal(frame.image, desktop[:10, 50:60, 2::-1])
    for outside in ("screen 2 5 4 36 20", "screen 2 5 4 35 27", "screen 2 5 4 0 20", "screen 2 99 99 1 1"):
        with pytest.raises(SourceError, match=f"{outside} cannot be opened"):
            list(ImageSource(outside))


def test_frames_of_a_stream_above_the_limit_are_refused() -> None:
    with Camera() as camera, pytest.raises(SourceError, match=r"frames of 0\.0 million pixels are too large"):
        list(ImageSource(camera.address, max_pixels=100))


def test_oversized_png_headers_are_refused_before_decoding(tmp_path: Path) -> None:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 10_000, 10_000, 8, 2, 0, 0, 0, 0)
    source = ImageSource([header, solid(1, 1, 1)])
    assert len(list(source)) == 1
    assert "too large" in source.skipped[0].reason


def test_a_lost_stream_is_reported_where_another_ended_well(impatient: None, tmp_path: Path) -> None:
    file = str(tmp_path / "clip.avi")
    writer = cv2.VideoWriter(file, cv2.VideoWriter.fourcc(*"MJPG"), 10, (32, 32))
    for _ in range(5):
        writer.write(np.zeros((32, 32, 3), np.uint8))
    writer.release()
    lost: list[str] = []
    absent = live_input("http://127.0.0.1:9/x")
    assert absent is not None
    inputs = [LiveInput("clip", lambda: cv2.VideoCapture(file)), absent]
    streams = LiveStreams(
        inputs, problem=lambda name, why: lost.append(name), max_pixels=10_000, every_frame=True, reconnect_s=0.2
    )
    with streams:
        frames = [frame.index for batch in streams.batches(4, stopped=lambda: False) for frame in batch]
    assert (frames, lost) == ([0, 1, 2, 3, 4], ["http://127.0.0.1:9/x"])
