"""Digest a tiny detector from the shell, outputs of the zoo, and codes that are read.

`digests` runs `values`: scenes are drawn, a few epochs trained, and the detector scored, exported in float32 and int8, and run; two networks of the
zoo run plain and with fused batch norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from tests.house.digested.common import newest, rows, typed

from arclight.deploy import Program
from arclight.vision import Detector, build_model, fuse, letterbox, qris

RECIPE = """
name = "detector"
seed = 3
[task]
kind = "detection"
data = "scenes/data.yaml"
image_size = 96
batch_size = 4
workers = 0
memory_format = "contiguous"
[task.augment]
mixup = 0.3
degrees = 5.0
close_mosaic = 0.5
[task.optimizer]
kind = "adamw"
lr = 2e-3
[trainer]
accelerator = "cpu"
max_epochs = 2
log_every_n_steps = 1
gradient_clip_val = 10.0
enable_progress_bar = false
[ema]
decay = 0.9
"""


def values(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    typed("data", "qris", "--out", "scenes", "--count", "16", "--seed", "0", "--size", "192")
    pictures = {path.name: path.read_bytes() for path in sorted(Path("scenes").rglob("*.jpg"))}
    Path("detector.toml").write_text(RECIPE)
    typed("train", "detector.toml")
    run = Path("runs/detector/1")
    found: dict[str, Any] = {"pictures": pictures, "trained": newest(run), "rows": rows(run)}
    typed("validate", run, "--json", "scores.json")
    found["scores"] = Path("scores.json").read_text()
    typed("export", run, "--out", "float.onnx")
    typed("quantize", run, "--out", "int8.onnx", "--observer", "minmax")
    images = torch.rand(3, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    for name in ("float", "int8"):
        found[f"program-{name}"] = Program.load(f"{name}.onnx")(images)
    detector = Detector.load_from_checkpoint(sorted((run / "checkpoints").iterdir())[-1]).eval()
    with torch.inference_mode():
        found["detector"] = detector(images)
    for name in ("yolov5n", "yolov5s"):
        torch.manual_seed(4)
        model = build_model(name, 3).eval()
        with torch.inference_mode():
            found[f"zoo-{name}"] = {"plain": model(images), "fused": fuse(model)(images)}
    pixels = np.random.default_rng(0).integers(0, 256, (60, 100, 3), dtype=np.uint8)
    scenes = [cv2.imread(str(path))[:, :, ::-1] for path in sorted(Path("scenes").rglob("*.jpg"))]
    found["codes"] = [
        sorted(f"{code.kind} {code.text}" for code in qris.scan(np.ascontiguousarray(scene))) for scene in scenes
    ]
    found["letterbox"] = letterbox(pixels, 96)[0]
    return found
