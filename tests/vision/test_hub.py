"""torch.hub serves this checkout: its models, and files of the user's own."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from arclight.trainer import Trainer
from arclight.vision import Detector
from arclight.vision.tasks.settings import DetectionTask

ROOT = Path(__file__).resolve().parents[2]


def load(name: str, **options: object) -> torch.nn.Module:
    return torch.hub.load(str(ROOT), name, source="local", **options)


def test_every_size_can_be_asked_for() -> None:
    served = runpy.run_path(str(ROOT / "hubconf.py"))
    for name in ("custom", *(f"yolov5{size}{level}" for size in "nsmlx" for level in ("", "6"))):
        assert served[name].__name__ == name
        assert served[name].__doc__


def test_a_model_has_its_classes_and_takes_tensors() -> None:
    torch.manual_seed(0)
    model = load("yolov5n", classes=["qr", "poster"])
    assert model.names == ["qr", "poster"]
    assert sum(p.numel() for p in model.parameters()) == 1_765_270 + 3 * (
        64 + 128 + 256 + 3
    )  # of one class, and one more
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 252, 7)
    levels = load("yolov5n", classes=1, autoshape=False)(torch.zeros(1, 3, 64, 64))
    assert [level.shape for level in levels] == [(1, 3, side, side, 6) for side in (8, 4, 2)]


def test_pretrained_weights_and_images_are_not_downloaded() -> None:
    with pytest.raises(ValueError, match="nothing is downloaded"):
        load("yolov5s", pretrained=True)
    with pytest.raises(ValueError, match="nothing is downloaded"):
        load("yolov5n", classes=1)("https://example.org/photo.jpg")


def test_pictures_of_pillow_are_seen_as_their_files_are(tmp_path: Path) -> None:
    """A photo that its EXIF turns, one that is transparent, one of 16 bits, and an array in grey."""
    photo = runpy.run_path(str(ROOT / "hubconf.py"))["_photo"]
    noise = np.random.default_rng(0).integers(0, 255, (20, 40, 4), np.uint8)
    exif = PILImage.Exif()
    exif[0x0112] = 6
    PILImage.fromarray(noise[..., :3]).save(tmp_path / "turned.png", exif=exif)
    PILImage.fromarray(noise).save(tmp_path / "clear.png")
    PILImage.fromarray(noise[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    for name in ("turned", "clear", "deep"):
        file = tmp_path / f"{name}.png"
        np.testing.assert_array_equal(photo(PILImage.open(file)), photo(str(file)), err_msg=name)
    assert photo(tmp_path / "turned.png").shape == (40, 20, 3)
    np.testing.assert_array_equal(photo(noise[..., 0]), np.repeat(noise[..., :1], 3, 2))
    with pytest.raises(ValueError, match="give uint8"):
        photo(noise.astype(np.float32))


def test_a_file_of_the_user_s_own_detects_as_the_detector_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    detector = Detector(
        DetectionTask(data=Path("none"), model="yolov5n", image_size=64, conf_threshold=0.0), names=["a", "b"]
    )
    for conv in detector.model.head.m:
        torch.nn.init.normal_(conv.weight, std=0.5)  # so that both classes are found
    trainer = Trainer(
        accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_steps=1,
    )  # fmt: skip
    batch = {"images": torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "targets": torch.zeros(0, 6), "paths": ["a", "b"]}
    trainer.fit(detector, [batch])
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    photo = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "photo.png"), photo[..., ::-1])
    served = load("custom", path=str(tmp_path / "mine.ckpt"))
    (expected,) = detector.eval().detect([photo])
    for found in (served(photo)[0], served(str(tmp_path / "photo.png"))[0], served([photo, photo])[1]):
        np.testing.assert_allclose(found.boxes.xyxy, expected.boxes.xyxy, rtol=1e-5, atol=1e-4)
        assert list(found.names) == ["a", "b"]
    assert set(expected.boxes.cls.tolist()) == {0, 1}
    assert len(expected) > 7
    served.classes, served.max_det = [1], 7
    assert served(photo)[0].boxes.cls.tolist() == [1] * 7
    np.testing.assert_allclose(served(photo)[0].boxes.xyxy, expected.of("b").boxes.xyxy[:7], rtol=1e-5, atol=1e-4)
    served.classes, served.agnostic, served.max_det = None, True, 300
    assert 0 < len(served(photo)[0]) < len(expected)
    served.conf = 1.0
    assert len(served(photo)[0].boxes.conf) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("classes", [2]), ("classes", [-1]), ("classes", []), ("classes", ["a"]), ("classes", 0), ("max_det", 0), ("max_det", -1), ("max_det", 1.5),
     ("conf", float("nan")), ("conf", "0.5"), ("iou", 2.0)],
)  # fmt: skip
def test_settings_that_would_find_nothing_are_refused(name: str, value: object) -> None:
    served = runpy.run_path(str(ROOT / "hubconf.py"))["_HubDetector"]
    model = served(Detector(DetectionTask(data=Path("none"), model="yolov5n", image_size=64), names=["a", "b"]))
    setattr(model, name, value)
    with pytest.raises(ValueError, match=f"^{name} is .*: give "):
        model(np.zeros((64, 64, 3), np.uint8))


def test_a_network_that_names_objects_once_is_served_without_suppression() -> None:
    served = runpy.run_path(str(ROOT / "hubconf.py"))["_HubDetector"]
    detector = Detector(DetectionTask(data=Path("none"), model="arc-n", image_size=64), names=["a"])
    model = served(detector)
    assert model.iou is detector.processing.iou_threshold is None
    model.conf, model.max_det, model.classes = np.float32(0), np.int64(5), np.array([0])
    assert len(model(np.zeros((64, 64, 3), np.uint8))[0]) == 5


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_serves_its_models(tmp_path: Path) -> None:
    program = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'arclight' and not any('src' in p for p in sys.path[:1]) else find(name, *rest)\n"
        f"spec = u.spec_from_file_location('hubconf', {str(ROOT / 'hubconf.py')!r})\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(sys.path[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "src")
