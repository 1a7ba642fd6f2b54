"""The guide's examples run as they stand."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from tests import warm
from tests.test_readme import ROOT, block
from tests.vision.conftest import write_dataset
from tests.vision.drawn import corner_row, cornered_row, draw_folders, draw_objects, keypoint_row, polygon_row
from tests.vision.mjpeg import Camera
from tests.vision.test_tasks import CASES, SHALLOW

import arclight as al
from arclight.cli.command import main
from arclight.deploy import ProgramError
from arclight.vision import Detector
from arclight.vision.tasks.processing import load_detector_program
from arclight.vision.tasks.settings import DetectionTask

GUIDE = ROOT / "docs" / "vision.md"
TASKS = {"segment": "segmentation", "pose": "pose", "corners": "corners", "obb": "obb", "classify": "classification"}
HEADS = {verb: CASES[task].head for verb, task in TASKS.items()}


def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/vision.md"))
    lines = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert sum(line.endswith("('qr_code',)") for line in lines) == 6
    assert (tmp_path / "detector.ckpt").is_dir()


def test_commands_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block("sh", "docs/vision.md").splitlines():
        verb, *words = line.partition("  #")[0].split()
        assert verb == "arclight"
        assert main(words) == 0, line
    assert (tmp_path / "worst.html").is_file()
    assert (tmp_path / "mended/data.yaml").is_file()


def test_a_recipe_that_mixes_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, names in (("photos", "[qr, text]"), ("scenes", "[qr_code, text]")):
        yaml = write_dataset(tmp_path / folder, 3)
        write_dataset(tmp_path / folder, 2, split="val")
        yaml.write_text(f"train: images/train\nval: images/val\nnames: {names}\n")
    recipe = block("toml", "docs/vision.md").replace(
        'weights = "runs/detect-qris/1"', "image_size = 64\nworkers = 0\nmemory_format = 'contiguous'"
    )
    Path("photos.toml").write_text(recipe)
    flags = "--trainer.max_epochs 1 --task.batch_size 2 --trainer.log_every_n_steps 1"
    assert main(["train", "photos.toml", *flags.split()]) == 0
    rows = Path("runs/photos/1/metrics.csv").read_text().splitlines()
    steps = [row.split(",")[1] for row in rows[1:]]
    assert "val/map50" in rows[0]
    assert len(steps) >= 3  # six images in batches of two


def commands(heading: str) -> list[list[str]]:
    """The words of each command that the guide shows under a heading."""
    section = GUIDE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    arclight ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_commands_of_videos_and_tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, but for the addresses of cameras, which are cameras of the test here, and end after some frames."""
    monkeypatch.chdir(tmp_path)
    settings = DetectionTask(data=Path("none.yaml"), image_size=64, memory_format="contiguous")
    trainer = al.Trainer(max_epochs=0, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(Detector(settings, names=["qr_code"]), torch.utils.data.DataLoader([0]))
    trainer.save_checkpoint("runs/detect-qris/1/checkpoints/last.ckpt")
    for name in ("clip.mp4", "counter.mp4"):
        writer = cv2.VideoWriter(name, cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"mp4v"), 25, (640, 480))
        for level in range(0, 60, 10):
            writer.write(np.full((480, 640, 3), level, np.uint8))
        writer.release()
    shown = commands("Photos, videos, cameras") + commands("Tracks and counts")
    assert len(shown) >= 3
    with Camera() as one, Camera() as other:
        cameras = {"rtsp://camera/1": one.address, "rtsp://camera/2": other.address}
        for words in shown:
            assert main([*(cameras.get(word, word) for word in words), "--max-frames", "4"]) == 0
    for name, frames in (("clip", 3), ("counter", 4)):
        video = cv2.VideoCapture(f"marked/{name}.mp4")
        assert video.get(cv2.CAP_PROP_FRAME_COUNT) == frames
    assert len(Path("found.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("tiny", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tasks(tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the section run one after the other, on drawn shapes and for a step, with a tiny network or that of the task.

    Tiny ones leave out programs, which are what is dear: `test_detector` and the tests of each task write them.
    """
    shown = commands("Tasks")
    assert len(shown) == 19
    monkeypatch.chdir(tmp_path)
    draw_objects(Path("shapes"), polygon_row)
    draw_objects(Path("dots"), keypoint_row, head="kpt_shape: [3, 3]\n")
    draw_objects(Path("codes"), cornered_row, head="kpt_shape: [4, 3]\n")
    draw_objects(Path("turned"), corner_row, same=False)
    draw_folders(Path("folders"))
    shutil.copytree("codes/images/val", "photos")
    short = ["--trainer.max_steps", "1", "--task.batch_size", "4", "--task.workers", "0", "--task.image_size", "64"]
    short += ["--task.memory_format", "contiguous"]
    quick = ["--trainer.check_val_every_n_epoch", "1", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"]
    for verb, *words in shown:
        if tiny and any(word.endswith(".onnx") for word in words):
            continue
        if words[0] == "qris":  # in the place of the drawn ones, and not a thousand
            shutil.rmtree("turned")
            words[words.index("--count") + 1] = "4"
        added = short + quick if verb == "train" else []
        if tiny and verb == "train":
            kind = Path(words[0]).stem
            Path(f"{kind}.yaml").write_text(SHALLOW.replace("HEAD", HEADS[kind]))
            added = [*added, "--task.model", f"{kind}.yaml"]
        if words[0].startswith("recipes/"):
            words[0] = str(GUIDE.parents[1] / words[0])
        assert not main([verb, *words, *added]), (verb, words)
    assert len(list(Path("marked").iterdir())) == 6
    assert all(Path(name).stat().st_size for name in ("found.json", "corners.json", "classes.json"))
    if tiny:
        return
    assert all(Path(name).stat().st_size for name in ("segmenter.onnx", "classifier.onnx"))
    with pytest.raises(ProgramError, match="its task is 'segment'"):  # what scans and compares reads one output
        load_detector_program("segmenter.onnx")
