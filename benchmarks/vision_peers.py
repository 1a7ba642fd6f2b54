"""Train beside YOLOv5 and ultralytics: their steps, loaders and what equal CPU time teaches; `vision` runs it where they are installed.

Everything is one process and one thread in the environment of `make bench-peers`. Steps and loaders take turns, so that whatever slows
the machine strikes all alike; a figure is CPU time. (a) Training steps as each library makes them on a CPU, at 320 pixels in batches of 16
with images in memory: mosaics, forward, loss, backward, clipped gradients, optimizer, averaged weights. (b) Loaders that read files:
augmented mosaics of coco128, whose 128 photos fit into what ultralytics and arclight keep decoded of the batches before; YOLOv5 decodes
each again. (c) ultralytics' own training from scratch for equal CPU minutes, its warm-up shortened to what so few steps bear (as it comes,
three epochs of warm-up outlast them); scored by the same judge and images as `equal_minutes`.

torchvision has no build for CPUs: its Python part is used, and the two operators that it looks for are declared and never called.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from arclight import seed_everything
from arclight.fabric.memory import keep_freed_memory
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import DataSpec, read_data_yaml
from arclight.vision.data.dataset import DetectionDataset, collate
from arclight.vision.results.metrics import CONFIDENCE_FLOOR, DetectionMetrics
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.module import evaluate
from benchmarks.equal_minutes import BATCH, SIZE, Contender
from benchmarks.results import timed_in_turns

LOADER_SIZES = (320, 640)
ULTRALYTICS = ("yolo11n", "yolo26n")

Work = Callable[[], object]
"""Does something with `BATCH` images."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("scenes", type=Path, help="the data.yaml of drawn scenes; it is copied")
    arguments.add_argument(
        "photos", type=Path, help="folder of the photos that loaders read, as coco128 has them; it is copied"
    )
    arguments.add_argument("--rounds", type=int, default=20, help="turns of each step and loader")
    arguments.add_argument("--minutes", type=float, default=4.2, help="CPU minutes of each training from scratch")
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options = arguments.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    keep_freed_memory()  # as a trainer of ours does, and here for all alike
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        prepare_libraries(work)
        # the peers write caches of labels beside the images
        names = list(read_data_yaml(options.scenes).names)
        scenes = copied(options.scenes.parent, work / "scenes", names, "images/train", "images/val")
        photos = copied(
            options.photos, work / "photos", list(map(str, range(80))), "images/train2017", "images/val2017"
        )
        found: dict[str, Any] = {"versions": installed_versions()}
        if options.rounds:
            found |= {"step": in_turns(steps(scenes), options.rounds)}
            for size in LOADER_SIZES:
                found |= {f"loader_{size}": in_turns(loaders(photos, size), options.rounds)}
        found["converted"] = converted_tensors(work / "yolov5s.pt")
        found["map50"] = {name: [] for name in ULTRALYTICS}
        for seed in options.seeds:
            for name in ULTRALYTICS:
                results = trained_from_scratch(name, scenes, seed, options.minutes)
                found["map50"][name].append([results.map50, results.map50_95])
                print(f"{name}, seed {seed}: mAP50 {results.map50:.3f}", file=sys.stderr, flush=True)
    print("\n" + json.dumps(found))  # the last line: the libraries print above it


def prepare_libraries(work: Path) -> None:
    """Make the peers importable and silent: settings in ``work``, no telemetry, no downloads."""
    os.environ |= {
        "YOLO_CONFIG_DIR": str(work),
        "YOLO_AUTOINSTALL": "false",
        "YOLO_VERBOSE": "false",
        "YOLO_OFFLINE": "true",
    }
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(operators)
    from ultralytics import settings

    settings.update({"sync": False})
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    logging.getLogger("yolov5").setLevel(logging.ERROR)


_KEPT: list[torch.library.Library] = []
"""Operators are declared for as long as their library object lives."""


def installed_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("ultralytics", "yolov5")}


def of_yolov5(file: str) -> Path:
    """A file that YOLOv5's package brings."""
    import yolov5

    return Path(yolov5.__file__).parent / file


def settings_of_yolov5() -> dict[str, Any]:
    """YOLOv5's settings of a training from scratch."""
    return dict(yaml.safe_load(of_yolov5("data/hyps/hyp.scratch-low.yaml").read_text()))


def copied(source: Path, folder: Path, names: list[str], train: str, val: str) -> Path:
    """Copy a data set without its caches of labels; gives a data.yaml that all libraries resolve alike, with its whole path."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.cache", "*.yaml"))
    spec = {"path": str(folder), "train": train, "val": val, "names": dict(enumerate(names))}
    (folder / "data.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return folder / "data.yaml"


def in_turns(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds an image of each, round by round."""
    taken = timed_in_turns(works, rounds)
    return {name: [1000 * seconds / BATCH for seconds in values] for name, values in taken.items()}


# -- training steps ------------------------------------------------------------------------------------------------


def steps(scenes: Path) -> dict[str, Work]:
    """A training step of each library, with its loader over images in memory."""
    ours = Contender("yolov5n", scenes, seed=0, budget_s=math.inf)
    works: dict[str, Work] = {"arclight yolov5n": ours.step, "yolov5n": yolov5_step(scenes)}
    return works | {name: ultralytics_step(name, scenes) for name in ULTRALYTICS}


def yolov5_step(scenes: Path) -> Work:
    """A step of YOLOv5's ``train.py``: its network, loss, three groups of SGD and averaged weights."""
    from yolov5.models.yolo import Model
    from yolov5.utils.loss import ComputeLoss
    from yolov5.utils.torch_utils import ModelEMA, smart_optimizer

    spec = read_data_yaml(scenes)
    settings = settings_of_yolov5()
    settings |= {
        "label_smoothing": 0.0,
        "cls": settings["cls"] * len(spec.names) / 80,
        "obj": settings["obj"] * (SIZE / 640) ** 2,
    }
    model = Model(of_yolov5("models/yolov5n.yaml"), ch=3, nc=len(spec.names))
    model.hyp, model.nc = settings, len(spec.names)
    loss_of, average = ComputeLoss(model), ModelEMA(model)
    optimizer = smart_optimizer(model, "SGD", settings["lr0"], settings["momentum"], settings["weight_decay"])
    batches = endless(yolov5_loader(spec, SIZE, cache="ram"))

    def step() -> None:
        model.train()
        images, targets, _, _ = next(batches)
        loss, _ = loss_of(model(images.float() / 255), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)

    return step


def ultralytics_step(name: str, scenes: Path) -> Work:
    """A step of ultralytics' trainer."""
    trainer = ultralytics_trainer(name, scenes, seed=0)
    trainer._setup_train()
    batches = endless(trainer.train_loader)

    def step() -> None:
        trainer._model_train()
        loss, _ = trainer.model(trainer.preprocess_batch(next(batches)))
        loss.sum().backward()
        trainer.optimizer_step()

    return step


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# -- loaders -------------------------------------------------------------------------------------------------------


def loaders(photos: Path, size: int) -> dict[str, Work]:
    """The next augmented batch of photos of each library, from files."""
    spec = read_data_yaml(photos)
    ours = DetectionDataset.open(spec, "train", image_size=size, augment=Augment(fliplr=0.5), cache_labels=False)
    named = {
        "arclight": DataLoader(ours, BATCH, shuffle=True, drop_last=True, collate_fn=collate),
        "yolov5": yolov5_loader(spec, size),
        "ultralytics": ultralytics_loader(photos, size),
    }
    return {name: partial(next, endless(loader)) for name, loader in named.items()}


def yolov5_loader(spec: DataSpec, size: int, cache: str | None = None) -> DataLoader[Any]:
    from yolov5.utils.dataloaders import LoadImagesAndLabels

    folder = str(spec.images("train")[0].parent)
    images = LoadImagesAndLabels(
        folder, size, BATCH, augment=True, hyp=settings_of_yolov5(), cache_images=cache, workers=1
    )
    return DataLoader(images, BATCH, shuffle=True, drop_last=True, collate_fn=LoadImagesAndLabels.collate_fn)


def ultralytics_loader(photos: Path, size: int) -> DataLoader[Any]:
    from ultralytics.cfg import get_cfg
    from ultralytics.data.build import build_yolo_dataset
    from ultralytics.data.utils import check_det_dataset

    data = check_det_dataset(str(photos), autodownload=False)
    settings = get_cfg(overrides={"imgsz": size, "task": "detect", "cache": False})
    images = build_yolo_dataset(settings, data["train"], BATCH, data)
    return DataLoader(images, BATCH, shuffle=True, drop_last=True, collate_fn=images.collate_fn)


# -- files of YOLOv5 -----------------------------------------------------------------------------------------------


def converted_tensors(file: Path) -> dict[str, float]:
    """Tensors of a network that YOLOv5 pickles whole, how many of them arclight reads as they are, and how far decoded outputs lie apart."""
    from yolov5.models.yolo import Model

    torch.manual_seed(0)
    model = Model(of_yolov5("models/yolov5s.yaml"), ch=3, nc=80)
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 128, 128))  # statistics of batch norms that are not those of a fresh network
    model.names = {number: f"class {number}" for number in range(80)}
    model = model.half().eval()
    torch.save({"epoch": -1, "model": model, "ema": None, "optimizer": None}, file)
    opened = Detector.load(file).eval().model
    theirs, ours = model.float().state_dict(), opened.state_dict()
    images = torch.rand(2, 3, SIZE, SIZE)
    with torch.no_grad():
        apart = (model(images)[0] - opened(images)).abs().max().item()
    equal = sum(name in ours and torch.equal(value, ours[name].float()) for name, value in theirs.items())
    return {"equal": equal, "tensors": len(theirs), "more_here": len(set(ours) - set(theirs)), "outputs_apart": apart}


# -- from scratch --------------------------------------------------------------------------------------------------


def ultralytics_trainer(name: str, scenes: Path, seed: int, **settings: Any) -> Any:
    """ultralytics' trainer of a network without weights, on one thread: no validation, no plots, nothing saved."""
    from ultralytics.models.yolo.detect import DetectionTrainer

    class Trainer(DetectionTrainer):  # type: ignore[misc]
        def validate(self) -> tuple[dict[str, float], float]:
            return {}, 0.0

        def save_model(self) -> bool:
            return False

        def final_eval(self) -> None:
            pass

    common = {
        "model": f"{name}.yaml", "data": str(scenes), "imgsz": SIZE, "batch": BATCH, "workers": 0, "cache": "ram", "device": "cpu",
        "pretrained": False, "val": False, "plots": False, "save": False, "verbose": False, "seed": seed, "project": str(scenes.parent / "runs"),
    }  # fmt: skip
    trainer = Trainer(overrides=common | settings)
    torch.set_num_threads(1)  # it took all
    return trainer


def trained_from_scratch(name: str, scenes: Path, seed: int, minutes: float) -> Any:
    """Scores of the averaged weights on the scenes held out, after ``minutes`` of CPU time of ultralytics' own training."""
    from ultralytics.engine import trainer as engine

    seed_everything(seed)
    wall = engine.time
    # its limit of time is one of the wall's clock
    engine.time = SimpleNamespace(time=time.process_time, sleep=wall.sleep, perf_counter=wall.perf_counter)
    try:
        trainer = ultralytics_trainer(
            name, scenes, seed, time=minutes / 60, warmup_epochs=0.3, nbs=BATCH, close_mosaic=1
        )
        trainer.train()
    finally:
        engine.time = wall
    spec = read_data_yaml(scenes)
    held_out = DetectionDataset.open(spec, "val", image_size=SIZE, cache_labels=False)
    return evaluate(trainer.ema.ema.eval(), held_out, UltralyticsMetrics(num_classes=len(spec.names)), collate)


class UltralyticsMetrics(DetectionMetrics):
    """Score the decoded output of ultralytics' heads."""

    def update_output(self, output: tuple[Tensor, Any], batch: dict[str, Any]) -> None:
        """Add a batch, from boxes (N, 300, 6) that are chosen already, or from (N, 4 + classes, boxes) that are not."""
        decoded, _ = output
        if decoded.shape[-1] == 6:  # x1 y1 x2 y2 confidence class, the surest first
            self.observe_batch([rows[rows[:, 4] >= CONFIDENCE_FLOOR] for rows in decoded], batch)
            return
        centres, scores = decoded.transpose(1, 2).split((4, self.num_classes), dim=2)
        super().update_output(torch.cat((centres, torch.ones_like(scores[..., :1]), scores), dim=2), batch)


if __name__ == "__main__":
    main()
