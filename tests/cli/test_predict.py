"""predict: videos, streams and what is written of them."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

cv2 = pytest.importorskip("cv2")

import numpy as np  # noqa: E402
from tests.vision.mjpeg import Camera  # noqa: E402

from arclight.cli.command import main  # noqa: E402
from arclight.vision.results.writers import Names  # noqa: E402

Typed = Callable[[str], tuple[int, str, str]]


def write_video(path: str, frames: int, size: tuple[int, int] = (96, 64)) -> None:
    """A white square that moves 4 pixels to the right with each frame, on dark ground."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(path, cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"MJPG"), 10, size)
    for number in range(frames):
        image = np.full((size[1], size[0], 3), 30, np.uint8)
        image[20:40, 4 * number : 4 * number + 20] = 250
        writer.write(image)
    writer.release()


def bright(self, images, processing=None):
    """Find bright rectangles: what a trained detector would, without the training."""
    from arclight.vision import Detections

    results = []
    for image in images:
        count, _, stats, _ = cv2.connectedComponentsWithStats((image[..., 0] > 150).astype(np.uint8))
        boxes = [[x, y, x + w, y + h] for x, y, w, h, area in stats[1:count] if area > 20]
        results.append(
            Detections.from_arrays(boxes, [0.9] * len(boxes), [0] * len(boxes), names=self.names, image=image)
        )
    return results


@pytest.fixture
def run(detector: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from arclight.vision import Detector

    monkeypatch.setattr(Detector, "predict", bright)
    return detector


def read_video(path: str) -> list[np.ndarray]:
    capture, frames = cv2.VideoCapture(path), []
    while (found := capture.read())[0]:
        frames.append(found[1])
    return frames


def test_a_video_is_marked_cut_out_and_listed(run: Path, typed: Typed) -> None:
    write_video("clip.avi", 12)
    status, out, err = typed(
        f"predict {run} clip.avi --batch 5 --save-video marked --save-txt labels --save-crop crops --save-csv found.csv "
        "--save-jsonl found.jsonl --json found.json"
    )
    assert (status, err) == (0, "")
    assert "clip.avi#11: 1 cat\n12 images, 12 objects, 0 files skipped\n" in out
    marked = read_video("marked/clip.mp4")
    assert len(marked) == 12
    assert marked[0].shape == (64, 96, 3)
    original = read_video("clip.avi")
    changed = (np.abs(marked[5].astype(int) - original[5]).max(axis=2) > 60).nonzero()[1]
    assert 10 < changed.min() < 30, "the box is drawn where the square is"
    capture = cv2.VideoCapture("marked/clip.mp4")
    assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(10)
    assert sorted(path.name for path in Path("labels").iterdir())[:2] == ["clip-0.txt", "clip-1.txt"]
    assert len(list(Path("crops/cat").iterdir())) == 12
    lines = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [line["frame"] for line in lines] == list(range(12))
    assert lines[3]["objects"][0]["box_xyxy_px"][0] == pytest.approx(12, abs=2)
    assert {key: lines[0][key] for key in ("image", "width", "height")} == {
        "image": "clip.avi",
        "width": 96,
        "height": 64,
    }
    found = json.loads(Path("found.json").read_text())
    assert Path("found.json").read_text() == json.dumps(found, indent=2) + "\n"
    assert list(found) == [f"clip.avi#{number}" for number in range(12)]
    rows = list(csv.DictReader(io.StringIO(Path("found.csv").read_text())))
    assert [row["image"] for row in rows] == list(found)


def test_heat_maps_are_written_beside_what_was_found(detector: Path, typed: Typed) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    cv2.imwrite("photo.jpg", photo)
    status, _, err = typed(f"predict {detector} photo.jpg --conf 0 --heatmap heat --json found.json")
    assert (status, err) == (0, "")
    drawn = cv2.imread("heat/photo.png")
    assert drawn.shape == (48, 80, 3)
    assert not np.array_equal(drawn, cv2.imread("photo.jpg"))
    assert (drawn[..., 2].astype(int) - drawn[..., 0]).min() < 0  # blue where it looks at nothing
    status, _, err = typed(f"predict {detector} {detector} photo.jpg --heatmap heat")
    assert (status, err) == (2, "arclight: --heatmap is of one network, and these are 2: name one run\n")
    status, _, err = typed("predict photo.jpg --program none.onnx --heatmap heat")
    assert (status, "--heatmap needs gradients" in err) == (2, True)


def test_every_third_frame_is_written_at_a_third_of_the_rate(run: Path, typed: Typed) -> None:
    write_video("clip.avi", 12)
    _, out, _ = typed(f"predict {run} clip.avi --vid-stride 3 --max-frames 3 --save-video marked")
    assert "clip.avi#6: 1 cat\n3 images" in out
    capture = cv2.VideoCapture("marked/clip.mp4")
    assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(10 / 3, rel=0.01)
    assert len(read_video("marked/clip.mp4")) == 3


def test_odd_frames_and_equal_names(run: Path, typed: Typed) -> None:
    for place in ("a", "b"):
        write_video(f"{place}/clip.avi", 3, size=(97, 65))
    cv2.imwrite("a/clip-1.png", np.full((30, 30, 3), 250, np.uint8))
    status, _, _ = typed(
        f"predict {run} a/clip.avi b/clip.avi a/clip-1.png a/clip.avi --save-video marked --save-txt labels --json all.json"
    )
    assert status == 0
    assert sorted(path.name for path in Path("marked").iterdir()) == ["clip 2.mp4", "clip 3.mp4", "clip.mp4"]
    assert all(len(read_video(str(path))) == 3 for path in Path("marked").iterdir())
    assert len(list(Path("labels").iterdir())) == 3 * 3 + 1, "no file has overwritten another"
    assert [name for name in json.loads(Path("all.json").read_text()) if "(2)" in name][0] == "a/clip.avi (2)#0"


def test_videos_of_files_are_closed_when_the_next_begins(
    run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arclight.vision.results import writers

    held: list[int] = []
    write = writers.Videos.write

    def counted(self: writers.Videos, prediction: writers.Prediction) -> None:
        write(self, prediction)
        held.append(len(self._open))

    monkeypatch.setattr(writers.Videos, "write", counted)
    for number in range(4):
        write_video(f"{number}.avi", 2)
    assert typed(f"predict {run} 0.avi 1.avi 2.avi 3.avi --save-video marked")[0] == 0
    assert held == [1] * 8
    assert [len(read_video(f"marked/{number}.mp4")) for number in range(4)] == [2] * 4


def test_two_channels_of_a_recorder_are_two_videos(run: Path, typed: Typed) -> None:
    with Camera() as camera:
        status, _, _ = typed(
            f"predict {run} {camera.address}?channel=1 {camera.address}?channel=2 --every-frame --max-frames 12 --save-video marked"
        )
    assert status == 0
    videos = sorted(Path("marked").iterdir())
    assert len(videos) <= 2
    assert sum(len(read_video(str(path))) for path in videos) == 12


def test_names_are_unlike_each_other_whatever_the_sources_are_called() -> None:
    names = Names()
    order = [("a/v.mp4", 0), ("a/v.mp4", 2), ("v-2.jpg", None), ("v.jpg", None), ("x/v.jpg", None), ("w-3.jpg", None),
             ("w.mp4", 3), ("w.mp4", 3), ("rtsp://cam/../etc/passwd", 0), ("camera 0", 0), ("v 2.jpg", None)]  # fmt: skip
    found = [names.of(path, index) for path, index in order]
    assert len({name for name, _ in found}) == len(order)
    assert len({stem for _, stem in found}) == len(order)
    assert not any("/" in stem for _, stem in found)


def test_memory_does_not_grow_with_the_frames(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that are looked at and written are let go: at no time do more than a few exist."""
    import weakref

    from arclight.vision.inputs import image_source

    alive, most = 0, 0
    make = image_source.Frame.__init__

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def counted(self, *arguments, **options):
        nonlocal alive, most
        make(self, *arguments, **options)
        weakref.finalize(self.image, gone)
        alive += 1
        most = max(most, alive)

    monkeypatch.setattr(image_source.Frame, "__init__", counted)
    write_video("clip.avi", 60)
    status, _, _ = typed(
        f"predict {run} clip.avi --batch 2 --save-video v --json a.json --save-csv a.csv --save-jsonl a.jsonl"
    )
    assert status == 0
    assert most <= 12  # the batch, those read ahead, and the one in hand


def test_a_stream_until_ctrl_c(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from arclight.vision import Detector

    calls = 0

    def interrupted(self, images, processing=None):
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return bright(self, images)

    monkeypatch.setattr(Detector, "predict", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with Camera() as camera:
        status, out, err = typed(f"predict {run} {camera.address} --every-frame --save-video marked --json found.json")
    assert (status, err) == (0, "")
    assert f"until ctrl-C: {camera.address}" in out
    assert "4 images" in out
    assert len(json.loads(Path("found.json").read_text())) == 4
    assert len(read_video("marked/stream.mp4")) == 4
    assert signal.getsignal(signal.SIGINT) is before
    write_video("clip.avi", 12)
    calls = 0
    status, out, err = typed(f"predict {run} clip.avi --json found.json")
    assert (status, err) == (130, "arclight: interrupted: the files hold what was found until then\n")
    assert len(json.loads(Path("found.json").read_text())) == 4


def test_a_lost_stream_keeps_what_was_found(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from arclight.vision.inputs import image_source, live

    monkeypatch.setattr(live, "_FIRST_DELAY_S", 0.05)
    make = image_source.ImageSource.__init__
    monkeypatch.setattr(
        image_source.ImageSource, "__init__", lambda self, *a, **o: make(self, *a, **{**o, "reconnect_s": 0.2})
    )
    with Camera(frames=6, once=True) as camera:
        status, out, err = typed(
            f"predict {run} {camera.address} --every-frame --save-video marked --save-csv found.csv"
        )
    assert status == 2
    assert err.splitlines()[-1].startswith(f"arclight: {camera.address} was cut, and no frame came for 0.2 s")
    assert "6 images" in out
    assert len(read_video("marked/stream.mp4")) == 6
    assert Path("found.csv").exists()


def test_an_error_leaves_former_files_as_they_were(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from arclight.vision import Detector

    write_video("clip.avi", 6)
    assert typed(f"predict {run} clip.avi --save-video marked --json found.json --save-csv found.csv")[0] == 0
    kept = {path: path.read_bytes() for path in (Path("found.json"), Path("found.csv"), Path("marked/clip.mp4"))}
    calls = 0

    def failing(self, images, processing=None):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError
        return bright(self, images)

    monkeypatch.setattr(Detector, "predict", failing)
    with pytest.raises(ZeroDivisionError):
        typed(f"predict {run} clip.avi --save-video marked --json found.json --save-csv found.csv")
    assert {path: path.read_bytes() for path in kept} == kept
    assert sorted(path.name for path in Path("marked").iterdir()) == ["clip.mp4"]
    assert not list(Path().glob(".found*"))


def test_paths_from_standard_input(
    run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cv2.imwrite("a.png", np.full((30, 30, 3), 250, np.uint8))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a.png\ngone.png\n"))
    status, out, _ = typed(f"predict {run} -")
    assert status == 0
    assert "a.png: 1 cat\n1 images, 1 objects, 1 files skipped\n" in out
    assert "skipped line 2 of standard input: gone.png does not exist" in caplog.text


# -- tracks and counts, slices, copies, several detectors ----------------------------------------------------------


def test_tracked_objects_are_numbered_counted_and_drawn(run: Path, typed: Typed) -> None:
    write_video("clip.avi", 20, size=(160, 64))
    status, out, err = typed(
        f"predict {run} clip.avi --track bytetrack --count-line 50,64,50,0 --count-zone 0,0,160,0,160,64,0,64 "
        "--save-csv found.csv --save-txt labels --save-jsonl found.jsonl --save-video marked"
    )
    assert (status, err) == (0, "")
    assert "clip.avi, line 1: 1 cat to the right, 0 to the left\nclip.avi, zone 1: 1 cat inside, 1 cat in all\n" in out
    rows = list(csv.DictReader(io.StringIO(Path("found.csv").read_text())))
    assert {row["id"] for row in rows} == {"1"}
    assert Path("labels/clip-5.txt").read_text().split()[-1] == "1"
    lines = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [line["counts"][0]["to_right"] for line in (lines[2], lines[-1])] == [{}, {"cat": 1}]
    assert len(read_video("marked/clip.mp4")) == 20


def test_a_video_that_is_named_twice_is_counted_twice(run: Path, typed: Typed) -> None:
    write_video("clip.avi", 20, size=(160, 64))
    _, out, _ = typed(f"predict {run} clip.avi clip.avi --track bytetrack --count-line 50,64,50,0")
    one = "clip.avi{}, line 1: 1 cat to the right, 0 to the left\n"
    assert one.format("") + one.format(" (2)") in out


def test_trackers_get_the_doubtful_boxes_they_want(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    from arclight.vision import Detector

    asked = []

    def noted(self, images, processing=None):
        asked.append(processing.conf_threshold)
        return bright(self, images)

    monkeypatch.setattr(Detector, "predict", noted)
    write_video("clip.avi", 2)
    for words, expected in (
        ("--track bytetrack", 0.1), ("--track ocsort", 0.25), ("--track bytetrack --conf 0.6", 0.1),
        ("--track ocsort --conf 0.6", 0.6), ("--track bytetrack --conf 0.05", 0.05), ("--conf 0.6", 0.6),
    ):  # fmt: skip
        asked.clear()
        assert typed(f"predict {run} clip.avi {words}")[0] == 0
        assert set(asked) == {expected}, words


def test_detector_track(run: Path) -> None:
    from arclight.vision import Detector

    write_video("clip.avi", 12)
    detector = Detector.load(run / "checkpoints" / "last.ckpt")
    tracked = list(detector.track("clip.avi", "ocsort", vid_stride=2))
    assert [found.path for found in tracked] == [f"clip.avi#{number}" for number in range(0, 12, 2)]
    assert [found.ids.tolist() for found in tracked] == [[1]] * 6
    with pytest.raises(ValueError, match="'sort' is not a tracker"):
        detector.track("clip.avi", "sort")


def test_slices_and_copies_find_the_same_square_once(run: Path, typed: Typed) -> None:
    image = np.full((300, 500, 3), 30, np.uint8)
    image[140:170, 230:260] = 250  # on a seam
    cv2.imwrite("a.png", image)
    for words in ("--slice 160", "--slice 160 --overlap 0.5", "--augment", "--slice 160 --augment", "--sizes 160 320"):
        status, _, err = typed(f"predict {run} a.png {words} --json found.json")
        assert (status, err) == (0, "")
        (found,) = json.loads(Path("found.json").read_text())["a.png"]
        assert found["box_xyxy_px"] == pytest.approx([230, 140, 260, 170], abs=1), words


def test_sizes_of_the_input_are_for_detectors_in_python(detector: Path, typed: Typed) -> None:
    cv2.imwrite("a.png", np.full((40, 60, 3), 250, np.uint8))
    status, _, err = typed(f"predict {detector} a.png --sizes 320 100")
    assert (status, "positive multiples of 16 for this detector, got 100" in err) == (2, True)
    status, _, err = typed("predict a.png --program none.onnx --sizes 320 640")
    assert (status, "has the input size of its export" in err) == (2, True)


def test_code_evidence_lifts_codes_over_the_threshold_and_drops_plain_boxes(
    detector: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detector that is nearly sure of a plain square, and doubts the code beside it."""
    segno = pytest.importorskip("segno")
    from arclight.vision import Detections, Detector

    modules = np.array(segno.make("KOPI SENJA 3", micro=False, error="m", version=1).matrix)
    image = np.full((140, 300, 3), 220, np.uint8)
    image[28:112, 28:112] = np.kron(np.where(modules > 0, 30, 220), np.ones((4, 4)))[..., None]
    image[28:112, 180:264] = 30
    cv2.imwrite("a.png", image)

    def doubtful(self, images, processing=None):
        boxes, sure = np.array([[180, 28, 264, 112], [28, 28, 112, 112]]), np.array([0.6, 0.2])
        used = processing or self.processing
        kept = (sure >= used.conf_threshold) & (np.arange(2) < used.max_det)
        return [
            Detections.from_arrays(boxes[kept], sure[kept], np.zeros(kept.sum()), names=self.names, image=image)
            for image in images
        ]

    monkeypatch.setattr(Detector, "predict", doubtful)
    for words, left in (("", 180), ("--code-evidence", 28), ("--code-evidence --max-det 1", 28)):
        with warnings.catch_warnings(record=True) as warned:
            status, _, err = typed(f"predict {detector} a.png --conf 0.5 {words} --json found.json")
        assert (status, err) == (0, "")
        told = [str(one.message) for one in warned if "no class is called qr: cat, dog. Those" in str(one.message)]
        assert len(told) == (words != "")
        (found,) = json.loads(Path("found.json").read_text())["a.png"]
        assert found["box_xyxy_px"][0] == pytest.approx(left, abs=1), words


def test_most_objects_of_an_image_count_over_all_slices(run: Path, typed: Typed) -> None:
    image = np.full((300, 500, 3), 30, np.uint8)
    for number in range(8):
        image[20:40, 20 + 55 * number : 50 + 55 * number] = 250
    cv2.imwrite("a.png", image)
    for words, expected in (("--max-det 3", 3), ("--max-det 3 --slice 160", 3), ("--slice 160", 8)):
        typed(f"predict {run} a.png {words} --json found.json")
        assert len(json.loads(Path("found.json").read_text())["a.png"]) == expected, words


def test_names_of_files_need_not_be_text(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    data = cv2.imencode(".png", np.pad(np.full((20, 20, 3), 250, np.uint8), ((5, 5), (5, 5), (0, 0))))[1].tobytes()
    Path("photos").mkdir()
    Path(os.fsdecode(b"photos/caf\xe9.png")).write_bytes(data)
    output = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", output)
    files = "--save-csv found.csv --json found.json --save-jsonl found.jsonl --save-txt labels --save-crop crops"
    assert main(f"predict {run} photos {files}".split()) == 0
    output.flush()
    assert b"photos/caf\\udce9.png: 1 cat\n" in output.buffer.getvalue()  # type: ignore[attr-defined]
    assert Path("found.csv").read_bytes().splitlines()[1].startswith(b"photos/caf\xe9.png,cat,")
    assert list(json.loads(Path("found.json").read_text())) == [os.fsdecode(b"photos/caf\xe9.png")]


def test_several_runs_are_one_ensemble(run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from arclight.vision import Detector

    shutil.copytree(run, "other")
    cv2.imwrite("a.png", np.pad(np.full((20, 20, 3), 250, np.uint8), ((5, 5), (5, 5), (0, 0))))
    typed(f"predict {run} other a.png --json both.json")
    (both,) = json.loads(Path("both.json").read_text())["a.png"]
    assert (both["confidence"], both["box_xyxy_px"]) == (0.9, [5, 5, 25, 25])
    calls = []

    def one_of_two(self, images, processing=None):
        calls.append(self)
        found = bright(self, images)
        return found if self is calls[0] else [one[:0] for one in found]

    monkeypatch.setattr(Detector, "predict", one_of_two)
    typed(f"predict {run} other a.png --json half.json")
    assert json.loads(Path("half.json").read_text())["a.png"][0]["confidence"] == 0.45


def test_boxes_of_several_runs_suppress_those_of_other_classes_if_asked(
    detector: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from arclight.vision import Detections, Detector

    shutil.copytree(detector, "other")
    cv2.imwrite("a.png", np.zeros((40, 40, 3), np.uint8))
    classes: dict[int, int] = {}

    def each_another_class(self, images, processing=None):
        label = classes.setdefault(id(self), len(classes))
        arrays = [[5, 5, 25, 25]], [0.9 - 0.1 * label], [label]
        return [Detections.from_arrays(*arrays, names=self.names, image=image) for image in images]

    monkeypatch.setattr(Detector, "predict", each_another_class)
    for flags, labels in (("", ["cat", "dog"]), ("--agnostic-nms", ["cat"])):
        classes.clear()
        typed(f"predict {detector} other a.png --json found.json {flags}")
        assert [one["label"] for one in json.loads(Path("found.json").read_text())["a.png"]] == labels


def test_boxes_that_suppress_none_refuse_an_option_of_their_suppression(
    run: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of arc-n to arc-x, which predict each object once."""
    from arclight.vision import Detector

    cv2.imwrite("a.png", np.zeros((40, 40, 3), np.uint8))
    monkeypatch.setattr(Detector, "one_to_one", True)
    status, _, err = typed(f"predict {run} a.png --agnostic-nms")
    assert (status, err.startswith("arclight: --agnostic-nms: this network predicts each object once")) == (2, True)
    for words in ("--iou 0.5", "--slice 20", "--augment"):
        assert typed(f"predict {run} a.png --agnostic-nms {words}")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count-line 0,0,9,9", "only tracked objects are counted: give --track bytetrack or --track ocsort, too"),
        ("--track bytetrack --count-line 0,0,9", "argument --count-line: 0,0,9 is not a list of points: write pixels as x1,y1,x2,y2"),
        ("--track bytetrack --count-line 0,0,9,9,9,9", "--count-line, --count-zone: a line has 2 points"),
        ("--track bytetrack --count-zone 0,0,10,10,10,0,0,10", "--count-line, --count-zone: the sides of a zone must not cross"),
        ("--track sort", "argument --track: invalid choice: 'sort'"),
        ("--slice 0", "argument --slice: 0 is not 1 or more"),
        ("--slice 9 --overlap 1", "argument --overlap: 1 is not in [0, 1)"),
        ("--overlap 0.5", "--overlap is that of slices: give their size, too, as --slice 320"),
        ("--max-frames 0", "argument --max-frames: 0 is not 1 or more"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(words: str, message: str, run: Path, typed: Typed) -> None:
    cv2.imwrite("a.png", np.zeros((20, 20, 3), np.uint8))
    status, _, err = typed(f"predict {run} a.png {words}")
    assert status == 2
    assert err.startswith(f"arclight: {message}")
