"""``arclight scan`` with ``--registry``, ``--watch`` and ``--follow``: verdicts, the page, tracks, JSON and the exit status."""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from tests.vision.mjpeg import Camera  # noqa: E402

from arclight.cli.arguments import UsageError  # noqa: E402
from arclight.cli.commands import scan as scan_command  # noqa: E402
from arclight.cli.commands.scan import MISMATCH_STATUS, WatchedCodes, scan  # noqa: E402
from arclight.vision import qris  # noqa: E402
from arclight.vision.inputs import image_source, live  # noqa: E402
from arclight.vision.inputs.memory_images import SourceError  # noqa: E402
from arclight.vision.qris.reading.scanner import Code  # noqa: E402
from arclight.vision.qris.scenes.fraud import Pair, draw_pair  # noqa: E402
from arclight.vision.qris.scenes.motion import draw_clip  # noqa: E402
from arclight.vision.qris.verification import report  # noqa: E402
from arclight.vision.qris.verification.registry import RegistryError  # noqa: E402
from arclight.vision.qris.verification.verifier import CheckedCode, Verdict  # noqa: E402


@pytest.fixture(scope="module")
def pair() -> Pair:
    return draw_pair(np.random.default_rng([21, 6]))


@pytest.fixture
def photos(tmp_path: Path, pair: Pair) -> Path:
    """A folder with a stand's own code and the same stand with a sticker, and the registry of that place beside it."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, scene in (("monday.png", pair.clean), ("tuesday.png", pair.forged)):
        cv2.imwrite(str(folder / name), cv2.cvtColor(scene.image, cv2.COLOR_RGB2BGR))
    cv2.imwrite(str(tmp_path / "poster.png"), cv2.cvtColor(pair.poster, cv2.COLOR_RGB2BGR))
    pan = qris.parse(pair.own.text).accounts[0].fields["01"]
    (tmp_path / "places.csv").write_text(
        f"name,nmid,pan,poster\n{pair.own.merchant},{pair.own.nmid},{pan},poster.png\n"
    )
    return folder


def test_a_sticker_in_a_folder_ends_with_a_status_a_page_and_json(
    photos: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos.parent
    files = ["--json", str(root / "found.json"), "--report", str(root / "page.html")]
    status = scan([str(photos), "--registry", str(root / "places.csv"), "--place", str(pair.own.nmid), *files])
    assert status == MISMATCH_STATUS
    printed = capsys.readouterr().out
    assert "verified: 1 mismatch, 0 unknown, 1 match" in " ".join(printed.split())
    found = json.loads((root / "found.json").read_text())
    assert {Path(name).name: one["verdict"] for name, one in found.items()} == {
        "monday.png": "match",
        "tuesday.png": "mismatch",
    }
    (checked,) = found[str(photos / "tuesday.png")]["checked"]
    against = {one["check"]: one["message"] for one in checked["evidence"] if one["weight"] > 0}
    assert f"registered is {pair.own.nmid}" in against["NMID"]
    assert "not where the registered print has it" in against["print"]
    page = (root / "page.html").read_text()
    assert page.index("tuesday.png") < page.index("monday.png")


def test_matches_end_with_status_0(photos: Path) -> None:
    assert scan([str(photos / "monday.png"), "--registry", str(photos.parent / "places.csv")]) == 0


def test_mistakes_are_named_before_anything_is_scanned(photos: Path) -> None:
    with pytest.raises(UsageError, match="--registry FILE"):
        scan([str(photos), "--report", "page.html"])
    with pytest.raises(UsageError, match="--watch needs --registry FILE"):
        scan([str(photos), "--watch"])
    (photos.parent / "file").touch()
    with pytest.raises(UsageError, match="is not a folder; name another place"):
        scan([str(photos), "--registry", str(photos.parent / "places.csv"), "--report", f"{photos.parent}/file/p.html"])
    with pytest.raises(RegistryError, match="no place has the NMID or name 'ELSEWHERE'"):
        scan([str(photos), "--registry", str(photos.parent / "places.csv"), "--place", "ELSEWHERE"])
    (photos.parent / "places.csv").write_text("name,nmid\nX,Y\n")
    with pytest.raises(RegistryError, match=r"places\.csv line 2: nmid"):
        scan([str(photos), "--registry", str(photos.parent / "places.csv")])


def test_a_photo_that_is_named_twice_is_scanned_twice(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo, file = str(photos / "monday.png"), photos.parent / "codes.json"
    assert scan([photo, photo, "--json", str(file)]) == 0
    assert "2 images, 2 codes found" in " ".join(capsys.readouterr().out.split())
    assert list(json.loads(file.read_text())) == [photo, f"{photo} (2)"]


def test_a_bar_code_is_named_beside_the_payment_code(
    photos: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    zxingcpp = pytest.importorskip("zxingcpp")
    made = zxingcpp.create_barcode("899123456789", zxingcpp.BarcodeFormat.EAN13)
    bars = np.pad(
        np.array(zxingcpp.write_barcode_to_image(made, scale=2, add_quiet_zones=True)), 20, constant_values=255
    )
    picture = np.full(
        (pair.clean.image.shape[0] + bars.shape[0], max(bars.shape[1], pair.clean.image.shape[1]), 3), 255, np.uint8
    )
    picture[: pair.clean.image.shape[0], : pair.clean.image.shape[1]] = pair.clean.image
    picture[-bars.shape[0] :, : bars.shape[1]] = bars[:, :, None]
    photo, file = str(photos / "shelf.png"), photos.parent / "codes.json"
    cv2.imwrite(photo, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    assert scan([photo, "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "EAN13 confidence 1.00" in printed
    assert "2 codes found, 2 read, 1 are payment codes (QRIS)" in printed
    payment, other = json.loads(file.read_text())[photo]
    assert (payment["text"], payment["kind"]) == (pair.own.text, "qris")
    assert (other["symbology"], other["kind"], other["text"]) == ("EAN13", "other", "8991234567891")


def write_clip(path: Path, frames: list[np.ndarray]) -> None:
    height, width = frames[0].shape[:2]
    video = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (width, height))
    assert video.isOpened()
    for frame in frames:
        video.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    video.release()


def test_a_watched_counter_tells_of_a_sticker_once(
    photos: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos.parent
    write_clip(root / "counter.avi", [pair.clean.image] * 3 + [pair.forged.image] * 3 + [pair.clean.image])
    files = ["--json", str(root / "found.json"), "--report", str(root / "page.html")]
    status = scan([str(root / "counter.avi"), "--registry", str(root / "places.csv"), "--watch", *files])
    printed = " ".join(capsys.readouterr().out.split())
    assert status == MISMATCH_STATUS
    assert "watched: 7 frames, 2 codes: 1 match, 0 unknown, 1 mismatch" in printed
    found = json.loads((root / "found.json").read_text())
    assert [(name.rpartition("#")[2], one["verdict"]) for name, one in found.items()] == [
        ("0", "match"),
        ("3", "mismatch"),
    ]
    assert printed.count("counter.avi#") == 2
    page = (root / "page.html").read_text()
    assert page.index("counter.avi#3") < page.index("counter.avi#0")


def test_a_watched_code_has_the_verdict_of_most_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(text: str, verdict: Verdict) -> tuple[CheckedCode, ...]:
        code = Code(((0, 0), (9, 0), (9, 9), (0, 9)), (0, 0, 9, 9), 1.0, text, "qris")
        return (CheckedCode(code, verdict, 0.5, None, ()),)

    watched = WatchedCodes()
    told = [
        watched.update("camera 0", seen("a", verdict)) for verdict in ("unknown", "unknown", "mismatch", "mismatch")
    ]
    assert told == [True, False, False, False], "as many frames say otherwise, and not more"
    assert watched.update("camera 0", seen("a", "mismatch"))
    assert watched.update("camera 1", seen("a", "unknown")), "another place"
    assert not watched.update("camera 0", ())
    assert watched.standing() == {"mismatch": 1, "unknown": 1}
    monkeypatch.setattr(scan_command, "MAX_WATCHED", 2)
    assert watched.update("camera 0", seen("b", "match"))
    assert not watched.update("camera 1", seen("a", "unknown")), "what was seen last is remembered"
    assert watched.standing() == {"match": 1, "unknown": 1}


@pytest.mark.parametrize("mode", ["--watch", "--follow", None])
def test_a_lost_camera_leaves_what_was_seen(
    photos: Path, pair: Pair, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_FIRST_DELAY_S", 0.05)
    make = image_source.ImageSource.__init__
    monkeypatch.setattr(
        image_source.ImageSource, "__init__", lambda self, *a, **o: make(self, *a, **{**o, "reconnect_s": 0.2})
    )
    file = photos.parent / "found.json"
    options = [] if mode == "--follow" else ["--registry", str(photos.parent / "places.csv")]
    options += [] if mode is None else [mode]
    picture = cv2.cvtColor(pair.clean.image, cv2.COLOR_RGB2BGR)
    with Camera(frames=5, once=True, picture=picture) as camera, pytest.raises(SourceError, match="was cut"):
        scan([camera.address, *options, "--json", str(file)])
    found = list(json.loads(file.read_text()).values())
    assert found
    if mode == "--follow":
        assert [track["text"] for track in found[0]] == [pair.own.text]
    else:
        assert {one["verdict"] for one in found} == {"match"}
    assert len(found) == 1 or mode is None


@pytest.mark.parametrize("registered", [False, True])
def test_results_of_a_stream_do_not_stay_in_memory(
    photos: Path, registered: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[weakref.ref[object]] = []
    alive: list[int] = []

    class Found(dict[str, object]):
        pass

    class Seen:
        def to_json(self) -> Found:
            code = Code(((0, 0), (9, 0), (9, 9), (0, 9)), (0, 0, 9, 9), 1.0, "ü", "other")
            return noted(Found(code.to_json()))

    def noted(found: Any) -> Any:
        kept.append(weakref.ref(found))
        alive.append(sum(one() is not None for one in kept))
        return found

    verified = qris.verify
    monkeypatch.setattr(qris, "verify", lambda *a, **o: noted(verified(*a, **o)))
    monkeypatch.setattr(qris, "scan", lambda *a: [Seen()])
    monkeypatch.setattr(report, "MAX_LISTED", 2)
    root = photos.parent
    write_clip(root / "clip.avi", [np.full((64, 64, 3), 200, np.uint8)] * 12)
    files = ["--json", str(root / "found.json")]
    if registered:
        files += ["--registry", str(root / "places.csv"), "--report", str(root / "page.html")]
    assert scan([str(root / "clip.avi"), *files]) == 0
    assert len(alive) == 12
    assert max(alive) <= (4 if registered else 2)  # the page lists two
    text = (root / "found.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert list(found) == [f"{root / 'clip.avi'}#{index}" for index in range(12)]
    assert text == json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    printed = " ".join(capsys.readouterr().out.split())
    if registered:
        page = (root / "page.html").read_text()
        assert "12 images, 0 codes found" in printed
        assert "verified: 0 mismatch, 12 unknown, 0 match" in printed
        assert (page.count("<article"), "12 photos held" in page, "And 10 more" in page) == (2, True, True)
    else:
        assert "12 images, 12 codes found, 12 read, 0 are payment codes" in printed


def test_json_goes_through_a_pipe(photos: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert scan([str(photos / "monday.png"), "--json", str(pipe)]) == 0
    reader.join(60)
    assert list(json.loads(read[0])) == [str(photos / "monday.png")]
    assert pipe.is_fifo()


@pytest.mark.slow
def test_codes_are_followed_through_a_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = draw_clip(np.random.default_rng(6), size=480, frames=6, codes=3)
    write_clip(tmp_path / "clip.avi", [frame.image for frame in clip])
    assert scan([str(tmp_path / "clip.avi"), "--follow", "--json", str(tmp_path / "tracks.json")]) == 0
    (tracks,) = json.loads((tmp_path / "tracks.json").read_text()).values()
    truth = {code.content.text for frame in clip for code in frame.codes}
    read = [track for track in tracks if track["text"] is not None]
    assert read
    assert all(track["text"] in truth and track["code"]["text"] == track["text"] for track in read)
    assert f"1 videos, {len(tracks)} codes followed, {len(read)} read" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UsageError, match="one of them"):
        scan([str(tmp_path / "clip.avi"), "--follow", "--registry", "places.csv"])
