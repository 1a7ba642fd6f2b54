"""Detectors at work: small codes by slices, codes followed through drawn scenes, and the time that detection takes.

(a) Pictures of nine drawn scenes each, where codes are small: average precision of a detector that sees the picture at once, and in
slices. (b) IDF1 and MOTA of the trackers on moving scenes with occlusion: over boxes as a detector gives them that misses few and knows
the extent of what is half hidden, and over this detector's boxes of drawn cards that hide each other and pass behind a pillar.
(c) CPU milliseconds of `Detector.detect` and of non-maximum suppression at its worst, on one thread. The detector of (a) and (b) is
trained on drawn scenes as `arclight demo` does it, or taken with --detector. (d) Both families of detectors after equal CPU time of
training from scratch on drawn scenes, three seeds; see `equal_minutes`. (e) Seconds of `arclight data lint` on 10,000 images: what
headers and labels say, and once more with every image decoded and compared. (f) YOLOv5 and ultralytics beside (d), their steps and
loaders, and a file of YOLOv5's opened here; see `vision_peers`. They are installed by `make bench-peers`, and left out where they are not.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from arclight.vision.boxes import nms
from arclight.vision.data.data_yaml import read_data_yaml, write_data_yaml
from arclight.vision.data.images import encode_jpeg
from arclight.vision.data.lint.checks import lint
from arclight.vision.inference.slicing import sliced
from arclight.vision.qris.scenes.scene import draw_scene
from arclight.vision.results.detections import Detections
from arclight.vision.results.metrics import CONFIDENCE_FLOOR, DetectionMetrics, DetectionResults
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.settings import DetectionTask
from arclight.vision.tracking.assignment import overlaps
from arclight.vision.tracking.mot_metrics import TrackingScores, score_tracks
from arclight.vision.tracking.tracks import TRACKERS, lowest_confidence, make_tracker
from benchmarks.equal_minutes import equal_minutes, row_of, rows_of
from benchmarks.moving_boxes import Scene, score
from benchmarks.moving_codes import MovingFrame, frames
from benchmarks.qr_photos import draw_scenes, train_on_scenes
from benchmarks.results import PEERS, Ratio, median, paired, parser, publish, totals, versions

Figures = dict[str, float | Ratio]
Rows = list[tuple[str, ...]]
HEADER = ("what", "value", "beside")
SLICE = 320
"""Side of slices: the input of the detector, so that codes are as large in it as they were drawn."""


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--detector", type=Path, metavar="CHECKPOINT", help="a detector trained on generated scenes; default: train one"
    )
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = options.detector or train_on_scenes(Path(scratch), quick=options.quick)
        detector = Detector.load(checkpoint).eval()
    parts: list[Callable[[Detector, bool], tuple[Rows, Figures]]] = [
        small_codes,
        moving_codes,
        speed,
        lint_time,
        from_scratch,
    ]
    rows, figures = [], {}
    for part in parts:
        found_rows, found_figures = part(detector, options.quick)
        rows += found_rows
        figures |= found_figures
    publish(
        "vision", "Detectors at work", HEADER, rows, figures, options=options,
        packages=versions("torch", "opencv-python-headless", "numpy"),
        notes="Times are CPU time of one thread, measured in turns.",
    )  # fmt: skip


# -- small codes by slices -----------------------------------------------------------------------------------------


def small_codes(detector: Detector, quick: bool) -> tuple[Rows, Figures]:
    """Average precision on pictures of 960 pixels, at once and in slices."""
    pictures = [_sheet(seed) for seed in range(2 if quick else 24)]
    results, found = {}, {}
    for name, detect in {"whole": lowered(detector), "sliced": sliced(lowered(detector), SLICE)}.items():
        answers = [detect([image])[0] for image, _ in pictures]
        results[name] = average_precision(answers, [boxes for _, boxes in pictures])
        found[name] = [_hits(answer[answer.boxes.conf >= 0.25], boxes) for answer, (_, boxes) in zip(answers, pictures)]
    whole, parts = results["whole"], results["sliced"]
    rows = [
        (f"small codes, {name}: mAP50-95", f"{of.map50_95:.3f}", f"mAP50 {of.map50:.3f}")
        for name, of in results.items()
    ]
    rows.append(
        (
            f"small codes found, of {sum(len(b) for _, b in pictures)}",
            str(sum(found["sliced"])),
            f"{sum(found['whole'])} at once",
        )
    )
    return rows, {
        "sliced_small_ap_over_whole": parts.map50_95 / max(whole.map50_95, 1e-3),
        "sliced_small_codes_found_over_whole": totals(found["sliced"], found["whole"]),
    }


def _sheet(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Nine scenes of 640 pixels drawn at half their size, three by three, and the boxes (k, 4) of their codes."""
    image, boxes = np.empty((3 * SLICE, 3 * SLICE, 3), np.uint8), []
    for number in range(9):
        scene = draw_scene(np.random.default_rng([seed, number]), 2 * SLICE)
        x, y = SLICE * (number % 3), SLICE * (number // 3)
        image[y : y + SLICE, x : x + SLICE] = cv2.resize(scene.image, (SLICE, SLICE), interpolation=cv2.INTER_AREA)
        boxes += [np.array(code.box) / 2 + np.tile([x, y], 2) for code in scene.codes]
    return image, np.array(boxes).reshape(-1, 4)


def lowered(detector: Detector) -> Callable[[Sequence[np.ndarray]], list[Detections]]:
    """The detector with the confidence threshold that average precision is measured at."""

    return partial(
        detector.detect, processing=dataclasses.replace(detector.processing, conf_threshold=CONFIDENCE_FLOOR)
    )


def average_precision(answers: list[Detections], truths: list[np.ndarray]) -> DetectionResults:
    metrics = DetectionMetrics(num_classes=1)
    for answer, boxes in zip(answers, truths):
        found = np.column_stack((answer.boxes.xyxy, answer.boxes.conf, np.zeros(len(answer))))
        metrics.update([found[:300]], [np.column_stack((np.zeros(len(boxes)), boxes))])
    return metrics.compute()


def _hits(answer: Detections, boxes: np.ndarray) -> int:
    """True boxes that a box overlaps by half."""
    return int((overlaps(boxes, answer.boxes.xyxy) >= 0.5).any(axis=1).sum()) if len(answer) else 0


# -- codes followed through moving scenes --------------------------------------------------------------------------


def moving_codes(detector: Detector, quick: bool) -> tuple[Rows, Figures]:
    """IDF1 and MOTA of each tracker, over boxes that are nearly right and over the detector's."""
    boxed = [Scene.drawn(seed, frames=30 if quick else 150) for seed in range(2 if quick else 20)]
    scenes = [list(frames(seed, 12 if quick else 120, pillar=seed % 2 == 0)) for seed in range(1 if quick else 6)]

    low = dataclasses.replace(
        detector.processing, conf_threshold=lowest_confidence("bytetrack", detector.processing.conf_threshold)
    )
    boxes = [[detector.detect([frame.image], low)[0] for frame in scene] for scene in scenes]
    rows: Rows = []
    figures: Figures = {}
    for name in TRACKERS:
        ending = "" if name == TRACKERS[0] else f"_{name}"
        for what, key, scores in (
            ("boxes", "idf1", [score(make_tracker(name), scene) for scene in boxed]),
            ("codes", "idf1_with_detector", [_score(name, scene, found) for scene, found in zip(scenes, boxes)]),
        ):
            idf1, mota, switches = _pooled(scores)
            rows.append((f"{what} followed, {name}: IDF1", f"{idf1:.3f}", f"MOTA {mota:.3f}, {switches} switches"))
            figures[f"{key}{ending}"] = idf1
    return rows, figures


def _pooled(scores: list[TrackingScores]) -> tuple[float, float, int]:
    """IDF1, MOTA and switches of several scenes together."""
    truths, found = sum(one.truths for one in scores), sum(one.found for one in scores)
    right, switches = sum(one.identity_true_positives for one in scores), sum(one.switches for one in scores)
    wrong = sum(one.misses + one.false_positives for one in scores) + switches
    return 2 * right / max(truths + found, 1), 1 - wrong / max(truths, 1), switches


def _score(name: str, scene: list[MovingFrame], found: list[Detections]) -> TrackingScores:
    tracker = make_tracker(name)

    def labelled() -> Iterator[Any]:
        for frame, boxes in zip(scene, found):
            tracks = tracker.update(boxes)
            free = (overlaps(tracks.boxes.xyxy, frame.boxes) >= 0.5).any(axis=1)
            counted = tracks[free | ~(_share_inside(tracks.boxes.xyxy, frame.hidden) >= 0.5).any(axis=1)]
            yield (frame.ids, frame.boxes), (counted.ids, counted.boxes.xyxy)

    return score_tracks(labelled())


def _share_inside(boxes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    """Share (n, m) of each box's area that lies in each region."""
    low, high = np.maximum(boxes[:, None, :2], regions[:, :2]), np.minimum(boxes[:, None, 2:], regions[:, 2:])
    return (high - low).clip(0).prod(axis=2) / (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)[:, None]


# -- time ----------------------------------------------------------------------------------------------------------


def speed(detector: Detector, quick: bool) -> tuple[Rows, Figures]:
    """CPU milliseconds of detection at 640 pixels and of suppression at its worst, in turns, on one thread."""
    rounds = 3 if quick else 40
    fresh = Detector(DetectionTask(data=Path("none.yaml"), image_size=640), names=detector.names).eval()
    photo = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    works: dict[str, Callable[[], object]] = {"detect": lambda: fresh.detect([photo])}
    works |= {f"nms, {name}": partial(nms, boxes, CONFIDENCE_FLOOR, 0.6) for name, boxes in hard_boxes().items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    times: dict[str, list[float]] = {name: [] for name in works}
    try:
        for turn in range(rounds + 1):
            for name, work in works.items():
                start = time.thread_time()
                work()
                if turn:  # the first one warms up
                    times[name].append(1000 * (time.thread_time() - start))
    finally:
        torch.set_num_threads(threads)
        cv2.setNumThreads(-1)
    spread = {name: median(values) for name, values in times.items()}
    rows = [
        (f"{name}: CPU ms", f"{of.value:.1f}", f"{of.smallest:.1f} to {of.largest:.1f}") for name, of in spread.items()
    ]
    worst = max((of for name, of in spread.items() if name != "detect"), key=lambda of: of.value)
    return rows, {"detect_ms_640": spread["detect"], "nms_worst_ms": worst}


def lint_time(detector: Detector, quick: bool) -> tuple[Rows, Figures]:
    """Seconds of linting a data set that nothing is known of yet: by headers and labels alone, and with the images compared."""
    count = 100 if quick else 10_000
    seconds = {}
    with tempfile.TemporaryDirectory() as scratch:
        spec = read_data_yaml(unlike_images(Path(scratch), count))
        for hashes in ("none", "all"):
            start = time.perf_counter()
            report = lint(spec, hashes=hashes, cache=False)
            seconds[hashes] = time.perf_counter() - start
            if report.errors:
                raise RuntimeError(f"images made to be sound are not: {report.findings[0]}")
    rows = [
        (
            f"lint of {count} images: seconds",
            f"{seconds['none']:.1f}",
            f"{seconds['all']:.1f} with every image compared",
        )
    ]
    return rows, {"lint_seconds_10k": seconds["none"], "lint_compared_seconds_10k": seconds["all"]}


def unlike_images(folder: Path, count: int, size: int = 320) -> Path:
    """The data.yaml of ``count`` images of coloured patches, a tenth of them for validation, each with one box."""
    for split, share in (("train", range(count // 10, count)), ("val", range(count // 10))):
        images, labels = (folder / part / split for part in ("images", "labels"))
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for number in share:
            rng = np.random.default_rng(number)
            patches = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            image = cv2.resize(patches, (size, size), interpolation=cv2.INTER_CUBIC)
            (images / f"{number:05d}.jpg").write_bytes(encode_jpeg(image, 90))
            x, y = rng.uniform(0.25, 0.75, 2)
            (labels / f"{number:05d}.txt").write_text(f"0 {x:.6f} {y:.6f} 0.2 0.2\n")
    return write_data_yaml(folder, ["patch"], {split: f"images/{split}" for split in ("train", "val")})


def from_scratch(detector: Detector, quick: bool) -> tuple[Rows, Figures]:
    """Average precision of both families after equal CPU time of training from scratch on drawn scenes, and of peers."""
    minutes, seeds = (0.05, 1) if quick else (4.2, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as beside:
            scenes = draw_scenes(Path(scratch), quick=quick)
            peers = beside.submit(beside_peers, scenes, 2 if quick else 20, minutes, seeds)  # on another core
            found = equal_minutes(scenes, minutes, range(seeds))
            measured = peers.result()
    finally:
        torch.set_num_threads(threads)
    means = {name: float(np.mean([results.map50 for results, _ in runs])) for name, runs in found.items()}
    rows: Rows = list(rows_of(found, minutes))
    figures: Figures = {"map50_equal_minutes": means["yolov5n"], "map50_equal_minutes_arc_n": means["arc-n"]}
    if measured is not None:
        more, added = peer_figures(measured, minutes, means["yolov5n"])
        rows, figures = rows + more, figures | added
    return rows, figures


# -- beside peers --------------------------------------------------------------------------------------------------


PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "coco128"


def beside_peers(scenes: Path, rounds: int, minutes: float, seeds: int) -> dict[str, Any] | None:
    """What `vision_peers` measures; None where the peers or the photos are not at hand."""
    if not (PEERS.exists() and PHOTOS.exists()):
        return None
    words = [PEERS, "-m", "benchmarks.vision_peers", scenes, PHOTOS, "--rounds", rounds, "--minutes", minutes]
    done = subprocess.run(
        [*map(str, words), "--seeds", *map(str, range(seeds))], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{PEERS} -m benchmarks.vision_peers failed; run make bench-peers again?\n{done.stderr[-2000:]}"
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peer_figures(peers: dict[str, Any], minutes: float, ours_map50: float) -> tuple[Rows, Figures]:
    """The rows and figures of what `vision_peers` measured; ``ours_map50``: that of yolov5n here after as many minutes."""
    step, (small, large) = peers["step"], (peers["loader_320"], peers["loader_640"])
    rows: Rows = [
        (
            f"training step, {name}: CPU ms an image",
            f"{np.median(values):.1f}",
            f"{min(values):.1f} to {max(values):.1f}",
        )
        for name, values in step.items()
    ]
    rows += [
        (f"loader, {name}, 320: CPU ms an image", f"{np.median(values):.1f}", f"{np.median(large[name]):.1f} at 640")
        for name, values in small.items()
    ]
    rows += [row_of(name, minutes, scores) for name, scores in peers["map50"].items()]
    opened, installed = peers["converted"], peers["versions"]
    tensors = f"{opened['equal']} of {opened['tensors']}"
    rows += [
        ("yolov5s.pt opened: equal tensors", tensors, f"outputs {opened['outputs_apart']:.1g} apart"),
        ("versions beside", f"ultralytics {installed['ultralytics']}", f"yolov5 {installed['yolov5']}"),
    ]
    best = max(float(np.mean([map50 for map50, _ in runs])) for runs in peers["map50"].values())
    ours = step["arclight yolov5n"]
    return rows, {
        "train_images_over_yolov5n": paired(step["yolov5n"], ours),
        "train_images_over_yolo11n": paired(step["yolo11n"], ours),
        "train_images_over_yolo26n": paired(step["yolo26n"], ours),
        "loader_over_yolov5": paired(small["yolov5"], small["arclight"]),
        "loader_over_ultralytics": paired(small["ultralytics"], small["arclight"]),
        "loader_over_yolov5_640": paired(large["yolov5"], large["arclight"]),
        "loader_over_ultralytics_640": paired(large["ultralytics"], large["arclight"]),
        "map_at_equal_minutes_minus_best_peer": ours_map50 - best,
        "converted_tensors_equal": opened["equal"] / opened["tensors"],
    }


def hard_boxes() -> dict[str, torch.Tensor]:
    """Decoded predictions (1, 25200, 5 + C) that suppression takes long for."""
    numbers = torch.Generator().manual_seed(0)

    def made(classes: int, centres: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        scores = torch.rand(len(centres), 1 + classes, generator=numbers)
        return torch.cat((centres, sizes, scores), dim=1)[None]

    count = 25_200
    anywhere, any_size = (
        640 * torch.rand(count, 2, generator=numbers),
        10 + 90 * torch.rand(count, 2, generator=numbers),
    )
    chain = torch.stack((torch.arange(count) * 3.0, torch.full((count,), 320.0)), dim=1)
    return {
        "one class": made(1, anywhere, any_size),
        "80 classes": made(80, anywhere, any_size),
        "chains": made(1, chain, torch.full((count, 2), 16.0)),
    }


if __name__ == "__main__":
    main()
