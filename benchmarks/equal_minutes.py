"""Train detectors from scratch side by side, on drawn scenes and for equal CPU time; part of `vision`, and a script of its own.

Contenders take turns within one process, the one that has used least CPU time next, so that whatever slows the machine strikes all
alike. Each has the recipe of `arclight demo`: AdamW, 320 pixels, batches of 16, bf16 autocast, averaged weights. The learning rate
follows the share of the budget that is used up. Loading and augmentation count, decoding does not: images are decoded before.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from arclight import seed_everything
from arclight.fabric.memory import keep_freed_memory
from arclight.optim.settings import AdamW
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.results.metrics import DetectionResults
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.module import evaluate
from arclight.vision.tasks.settings import DetectionTask

SIZE, BATCH, LR, DECAY = 320, 16, 2e-3, 0.998
CONTENDERS = ("yolov5n", "arc-n")


class Contender:
    """One detector in training: its data, optimizer, averaged weights and the CPU time that it has used."""

    def __init__(self, model: str, scenes: Path, seed: int, budget_s: float) -> None:
        seed_everything(seed)
        task = DetectionTask(data=scenes, model=model, image_size=SIZE, batch_size=BATCH)
        spec = read_data_yaml(scenes)
        self.detector = Detector(task, names=list(spec.names))
        self.detector.model.to(memory_format=torch.channels_last)
        self.detector.memory_format = torch.channels_last
        self.average = copy.deepcopy(self.detector.model)
        trained, averaged = (model.state_dict().values() for model in (self.detector.model, self.average))
        pairs = list(zip(averaged, trained, strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self.optimizer: Any = AdamW(lr=LR).build(self.detector.model.named_parameters())
        self.data = DetectionDataset.open(
            spec, "train", image_size=SIZE, augment=Augment(), cache=True, cache_labels=False
        )
        loader = DataLoader(
            self.data, BATCH, shuffle=True, drop_last=True, collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        self.batches = (batch for _ in iter(int, 1) for batch in loader)  # epochs without end
        self.random, self.budget_s, self.used_s, self.steps = random.Random(seed).getstate(), budget_s, 0.0, 0

    def step(self) -> None:
        random.setstate(self.random)
        start = time.process_time()
        share = self.used_s / self.budget_s
        self.data.mosaic_open = share < 0.75
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(share / 0.05, 0.02 + 0.98 * (1 + math.cos(math.pi * min(share, 1))) / 2)
        batch = next(self.batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = self.detector.loss(self.detector.model.raw(self.detector.prepare(batch["images"])), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.detector.model.parameters(), 10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        decay = min(DECAY, self.steps / (self.steps + 10))
        with torch.no_grad():  # as EMAWeightAveraging does
            torch._foreach_lerp_(*map(list, zip(*self.floats)), 1 - decay)
            torch._foreach_copy_(*map(list, zip(*self.counters)))
        self.used_s += time.process_time() - start
        self.random = random.getstate()

    def score(self, scenes: Path) -> DetectionResults:
        held_out = DetectionDataset.open(read_data_yaml(scenes), "val", image_size=SIZE, cache_labels=False)
        metrics = self.detector._build_metrics()
        results: DetectionResults = evaluate(self.average.eval(), held_out, metrics, collate)
        return results


def equal_minutes(
    scenes: Path, minutes: float, seeds: Sequence[int], models: Sequence[str] = CONTENDERS
) -> dict[str, list[tuple[DetectionResults, int]]]:
    """Scores on the scenes held out, and steps, of each model and seed after ``minutes`` of CPU time each."""
    keep_freed_memory()  # as a trainer does
    found: dict[str, list[tuple[DetectionResults, int]]] = {name: [] for name in models}
    for seed in seeds:
        running = {name: Contender(name, scenes, seed, minutes * 60) for name in models}
        while any(one.used_s < one.budget_s for one in running.values()):
            min(running.values(), key=lambda one: one.used_s).step()
        for name, one in running.items():
            found[name].append((one.score(scenes), one.steps))
    return found


def rows_of(found: dict[str, list[tuple[DetectionResults, int]]], minutes: float) -> list[tuple[str, ...]]:
    return [
        row_of(name, minutes, [(one.map50, one.map50_95) for one, _ in runs], f", {runs[0][1]} steps")
        for name, runs in found.items()
    ]


def row_of(name: str, minutes: float, scores: Sequence[tuple[float, float]], more: str = "") -> tuple[str, ...]:
    """The row of one model; ``scores``: mAP50 and mAP50-95 of each seed."""
    values, strict = ", ".join(f"{map50:.3f}" for map50, _ in scores), np.mean([map50_95 for _, map50_95 in scores])
    return f"{name} from scratch, {minutes:g} CPU minutes: mAP50", values, f"mAP50-95 {strict:.3f}{more}"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("scenes", type=Path, help="the data.yaml of drawn scenes")
    arguments.add_argument("--minutes", type=float, default=4.2)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--models", nargs="+", default=CONTENDERS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    for number in range(options.seeds):
        for row in rows_of(equal_minutes(options.scenes, options.minutes, [number], options.models), options.minutes):
            print(f"seed {number}:", *row, sep="  ", flush=True)
