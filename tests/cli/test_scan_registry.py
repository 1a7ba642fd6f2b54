"""``arclight scan`` with ``--registry`` and ``--follow``: verdicts, the page, tracks, JSON and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.cli.arguments import UsageError  # noqa: E402
from arclight.cli.commands.scan import MISMATCH_STATUS, scan  # noqa: E402
from arclight.vision import qris  # noqa: E402
from arclight.vision.qris.scenes.fraud import Pair, draw_pair  # noqa: E402
from arclight.vision.qris.scenes.motion import draw_clip  # noqa: E402
from arclight.vision.qris.verification.registry import RegistryError  # noqa: E402


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
    with pytest.raises(RegistryError, match="no place has the NMID or name 'ELSEWHERE'"):
        scan([str(photos), "--registry", str(photos.parent / "places.csv"), "--place", "ELSEWHERE"])
    (photos.parent / "places.csv").write_text("name,nmid\nX,Y\n")
    with pytest.raises(RegistryError, match=r"places\.csv line 2: nmid"):
        scan([str(photos), "--registry", str(photos.parent / "places.csv")])


@pytest.mark.slow
def test_codes_are_followed_through_a_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = draw_clip(np.random.default_rng(6), size=480, frames=6, codes=3)
    video = cv2.VideoWriter(str(tmp_path / "clip.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 10, (480, 480))
    assert video.isOpened()
    for frame in clip:
        video.write(cv2.cvtColor(frame.image, cv2.COLOR_RGB2BGR))
    video.release()
    assert scan([str(tmp_path / "clip.avi"), "--follow", "--json", str(tmp_path / "tracks.json")]) == 0
    (tracks,) = json.loads((tmp_path / "tracks.json").read_text()).values()
    truth = {code.content.text for frame in clip for code in frame.codes}
    read = [track for track in tracks if track["text"] is not None]
    assert read
    assert all(track["text"] in truth and track["code"]["text"] == track["text"] for track in read)
    assert f"1 videos, {len(tracks)} codes followed, {len(read)} read" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UsageError, match="one of them"):
        scan([str(tmp_path / "clip.avi"), "--follow", "--registry", "places.csv"])
