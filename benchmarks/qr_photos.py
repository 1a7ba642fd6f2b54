"""Real photographs of QR codes: how well codes are found and read by what was trained on drawn scenes alone, and after fine-tuning.

The photos are the folder `qr_photos` of the data beside the project (or --photos). (a) A detector is trained on generated
scenes only, as `arclight demo` does it, or taken with --detector; (b) it is fine-tuned on the `train` photos with as many of
the scenes mixed into each epoch, so that it keeps what only the scenes show. Both are
measured on the `test` photos, (b) also with passes at two sizes of the input, which were chosen on the `val` photos, and with
their boxes weighed and placed by the evidence of codes in them (`qris.reading.evidence`). Then `scan`, guided by
(b) at these two sizes, reads the codes of the test photos beside plain zxing-cpp and
OpenCV. A code counts as read once: by its text and place. The CPU time of `scan` is that of its readers, on labelled boxes, and with (b) before them.

No photos of sticker fraud and no labelled videos are at hand: both are drawn, with another seed than what was calibrated or trained on.
--drawn measures these alone; --calibrate N fits the weights of `verification.tampering` anew on N pairs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported, as the command `arclight` does

import numpy as np
from torch.utils.data import Subset

from arclight.cli.commands.demo import EPOCHS, SCENES, Demo, recipe_for
from arclight.cli.run_setup import build_task, callbacks, make_trainer
from arclight.cli.runs import best_checkpoint
from arclight.cli.schema import Recipe
from arclight.optim.schedule_settings import Cosine
from arclight.optim.settings import AdamW
from arclight.trainer.callbacks.settings import EMA, Checkpointing
from arclight.trainer.settings import TrainerSettings
from arclight.vision import qris
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.data.images import decode_image
from arclight.vision.data.mix import MixedData
from arclight.vision.inference.fusion import Detect
from arclight.vision.inference.test_time import multi_scale
from arclight.vision.qris.reading.decode import read_opencv, read_zxing
from arclight.vision.qris.reading.evidence import with_code_evidence
from arclight.vision.qris.reading.grid import cv2, fixed_modules
from arclight.vision.qris.reading.scanner import DetectFn
from arclight.vision.qris.reading.video import VideoScanner
from arclight.vision.qris.scenes.contents import qris_content
from arclight.vision.qris.scenes.fraud import draw_pair
from arclight.vision.qris.scenes.motion import REACH, draw_clip
from arclight.vision.qris.scenes.scene import SceneCode
from arclight.vision.qris.verification import tampering
from arclight.vision.qris.verification.registry import Place, Registry
from arclight.vision.qris.verification.tampering import FALSE_ALARMS, FILE, fit
from arclight.vision.results.detections import Boxes, Detections
from arclight.vision.results.metrics import CONFIDENCE_FLOOR, EVALUATION_IOU, DetectionMetrics
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.module import evaluate
from arclight.vision.tasks.settings import DetectionTask
from benchmarks.results import Ratio, parser, publish, said, totals, versions

GROUPS = ("phone", "packs")
FINE_SIZE = 640
SIZES = (320, 768)
"""Sizes of the input for two passes: of 320, 416, 512, 640 and 768, alone and by two to four, the best on the `val` photos."""


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--photos",
        type=Path,
        default=Path(__file__).resolve().parents[2] / "shared" / "data" / "qr_photos",
        metavar="DIR",
    )
    arguments.add_argument(
        "--detector",
        type=Path,
        metavar="CHECKPOINT",
        help="the detector trained on generated scenes; default: train one",
    )
    arguments.add_argument(
        "--tuned",
        type=Path,
        metavar="CHECKPOINT",
        help="that detector fine-tuned on the photos, as a run of this benchmark left it; default: fine-tune it",
    )
    arguments.add_argument(
        "--work", type=Path, default=None, metavar="DIR", help="where runs are written (default: a temporary folder)"
    )
    arguments.add_argument("--drawn", action="store_true", help="measure sticker fraud and video alone, and print them")
    arguments.add_argument("--hostile", action="store_true", help="measure the worst photos alone, and print them")
    arguments.add_argument(
        "--calibrate", type=int, metavar="N", help="fit the weights that judge pasted codes on N drawn pairs"
    )
    options = arguments.parse_args()
    if options.calibrate:
        calibrate(options.calibrate)
        return
    if options.hostile:
        print(f"scan_hostile_ms = {hostile_ms():.0f}")
        return
    if options.drawn:
        print("\n".join(f"{name} = {said(value)}" for name, value in drawn_figures(options.quick, told_boxes).items()))
        return
    if not (options.photos / "data.yaml").exists():
        sys.exit(f"there are no photos at {options.photos}; name their folder with --photos")
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, options.work or Path(scratch))


def measure(options: Any, work: Path) -> None:
    scenes = draw_scenes(work, quick=options.quick)
    start = options.detector or train_on_scenes(work, quick=options.quick)
    generated = Detector.load_from_checkpoint(start)
    if options.tuned:
        tuned = Detector.load_from_checkpoint(options.tuned)
    else:
        tuned = fine_tune(start, options.photos, scenes, work, epochs=1 if options.quick else 12)
    found = {("generated scenes only", 320): generated, ("fine-tuned on photos", FINE_SIZE): tuned}
    spec = read_data_yaml(options.photos / "data.yaml")
    rows, precision = [], {}
    for (name, size), detector in found.items():
        photos = DetectionDataset.open(spec, "test", image_size=size, cache_labels=False)
        values = precision_by_group(photos, partial(evaluated, detector, photos))
        precision[name] = values
        rows.append((f"mAP50, {name}, {size} px", *(f"{values[g]:.3f}" for g in (*GROUPS, ""))))
    photos = DetectionDataset.open(spec, "test", image_size=FINE_SIZE, cache_labels=False)
    passes = two_sizes(tuned, CONFIDENCE_FLOOR)
    both, weighed = (
        precision_by_group(photos, partial(evaluated_passes, detect, photos))
        for detect in (passes, with_code_evidence(passes))
    )
    for name, values in (("", both), (", weighed by code evidence", weighed)):
        row = f"mAP50, fine-tuned on photos, {SIZES[0]} and {SIZES[1]} px{name}"
        rows.append((row, *(f"{values[g]:.3f}" for g in (*GROUPS, ""))))
    counts = {name: read_all(reader, spec.images("test")) for name, reader in readers(tuned).items()}
    for name, value in counts.items():
        read = [sum(value[group]) for group in GROUPS]
        rows.append((f"codes read, {name}", *map(str, read), str(sum(read))))
    took = scan_ms_by_group(photos, multi_scale(tuned.eval(), SIZES))
    for number, name in enumerate(("labelled boxes", f"the detector at {SIZES[0]} and {SIZES[1]} px")):
        rows.append((f"CPU ms a photo, scan, {name}", *(f"{took[group][number]:.0f}" for group in GROUPS), ""))
    ours, zxing, opencv = counts["scan"], counts["zxing-cpp alone"], counts["OpenCV alone"]
    figures: dict[str, float | Ratio] = {
        "map50_generated_only_phone": precision["generated scenes only"]["phone"],
        "map50_finetuned": precision["fine-tuned on photos"][""],
        "map50_finetuned_phone": precision["fine-tuned on photos"]["phone"],
        "map50_finetuned_two_sizes": both[""],
        "map50_finetuned_two_sizes_phone": both["phone"],
        "map50_code_evidence": weighed[""],
        "map50_code_evidence_phone": weighed["phone"],
        "scan_over_zxing_phone": totals(ours["phone"], zxing["phone"]),
        "scan_over_zxing_packs": totals(ours["packs"], zxing["packs"]),
        "scan_over_opencv": totals(*([count for group in GROUPS for count in one[group]] for one in (ours, opencv))),
        **{f"scan_{group}_ms": took[group][0] for group in GROUPS},
        "scan_hostile_ms": hostile_ms(),
        **drawn_figures(options.quick, lambda codes: lambda image: generated.detect([image])[0]),
    }
    publish(
        "qr_photos", "QR codes in real photographs", ("on the test photos", "phone_", "packs_", "all"), rows, figures,
        options=options, packages=versions("torch", "zxing-cpp", "opencv-python-headless"),
        notes="Intervals are those of other photos like these: photos are drawn again, with what every reader read on them.",
    )  # fmt: skip


def draw_scenes(work: Path, quick: bool) -> Path:
    """The data.yaml of scenes as the demo draws them; those drawn before are used again."""
    from rich.console import Console

    demo = Demo(work, scenes=60 if quick else SCENES, epochs=1, seed=0, console=Console())
    return demo.draw()


def train_on_scenes(work: Path, quick: bool) -> Path:
    """A checkpoint of a detector that has never seen a photo."""
    recipe = recipe_for(draw_scenes(work, quick), work, epochs=1 if quick else EPOCHS)
    module, data = build_task(recipe)
    trainer = make_trainer(recipe, callbacks=callbacks(recipe))
    trainer.fit(module, datamodule=data)
    return best_checkpoint(trainer.run_folder.path)


def fine_tune(start: Path, photos: Path, scenes: Path, work: Path, epochs: int) -> Detector:
    """The detector after a few epochs on the `train` photos and drawn scenes; the best on the `val` photos is kept."""
    recipe = Recipe(
        name="photos", root=work,
        task=DetectionTask(
            data=photos / "data.yaml", image_size=FINE_SIZE, batch_size=8, workers=1, cache_labels=False, weights=start,
            mix=(MixedData(data=scenes, classes={"qr_code": "qr"}),),
            optimizer=AdamW(lr=1e-3), schedule=Cosine(warmup=0.05, final=0.02), augment=Augment(mosaic=0.6, close_mosaic=0.3, degrees=8.0),
        ),
        trainer=TrainerSettings(max_epochs=epochs, precision="auto", gradient_clip_val=10.0, check_val_every_n_epoch=min(4, epochs)),
        checkpoint=Checkpointing(monitor="val/map50", mode="max"), ema=EMA(decay=0.998, ramp_steps=100),
    )  # fmt: skip
    module, data = build_task(recipe)
    trainer = make_trainer(recipe, callbacks=callbacks(recipe))
    trainer.fit(module, datamodule=data)
    return Detector.load_from_checkpoint(best_checkpoint(trainer.run_folder.path))  # type: ignore[no-any-return]


def precision_by_group(
    photos: DetectionDataset, evaluated: Callable[[list[int]], DetectionMetrics]
) -> dict[str, float]:
    """mAP50 by the group of photos, "" for all; ``evaluated`` collects predictions on those of the given numbers.

    Each photo is predicted once.
    """
    every, values = DetectionMetrics(num_classes=1), {}
    for group in GROUPS:
        metrics = evaluated([i for i, path in enumerate(photos.images) if path.name.startswith(group)])
        values[group] = metrics.compute().map50
        every.merge(metrics.state_dict())
    if len(every) != len(photos.images):
        raise ValueError(f"{len(every)} of {len(photos.images)} photos were scored: their names begin with {GROUPS}")
    return {**values, "": every.compute().map50}


def evaluated(detector: Detector, photos: DetectionDataset, chosen: list[int]) -> DetectionMetrics:
    """Predictions on the ``chosen`` photos, as training validates them."""
    metrics = DetectionMetrics(num_classes=1)
    evaluate(detector.eval().model, Subset(photos, chosen), metrics, collate)
    return metrics


def evaluated_passes(detect: Detect, photos: DetectionDataset, chosen: list[int]) -> DetectionMetrics:
    """Predictions on the ``chosen`` photos, in pixels of the photos."""
    metrics = DetectionMetrics(num_classes=1)
    for path, rows in ((photos.images[i], photos.labels[i]) for i in chosen):
        photo = decode_image(path)
        boxes = detect([photo])[0].boxes
        truths = np.concatenate((rows[:, :1], labelled_boxes(rows, photo)), axis=1)
        metrics.update([np.column_stack((boxes.xyxy, boxes.conf, boxes.cls))], [truths])
    return metrics


def labelled_boxes(rows: np.ndarray, photo: np.ndarray) -> np.ndarray:
    """The corners (n, 4) of labelled boxes in pixels, from rows (class, x, y, width, height) in shares of the photo."""
    centre, size = (rows[:, a : a + 2] * photo.shape[1::-1] for a in (1, 3))
    return np.concatenate((centre - size / 2, centre + size / 2), axis=1)


def detected(boxes: np.ndarray) -> Detections:
    """What a detector gives that is sure of these boxes (n, 4), in pixels."""
    return Detections(Boxes(boxes, np.full(len(boxes), 0.9), np.zeros(len(boxes))), names=["qr_code"])


def scan_ms_by_group(photos: DetectionDataset, detect: Detect) -> dict[str, tuple[float, float]]:
    """Mean CPU milliseconds of `scan` on a photo, by group: with the labelled boxes, and with those of ``detect``."""
    taken: dict[str, list[tuple[float, float]]] = {group: [] for group in GROUPS}
    for path, rows in zip(photos.images, photos.labels, strict=True):
        photo = decode_image(path)
        labelled = detected(labelled_boxes(rows, photo))
        group = next(group for group in GROUPS if path.name.startswith(group))
        detectors = (lambda _, found=labelled: found, lambda p: detect([p])[0])
        taken[group].append(tuple(scan_ms(photo, detector, rounds=3) for detector in detectors))
    return {group: tuple(np.mean(values, axis=0)) for group, values in taken.items()}


def two_sizes(detector: Detector, confidence: float) -> Detect:
    """Passes at `SIZES` with the boxes from ``confidence`` on, as they are scored."""
    kept = replace(detector.processing, conf_threshold=confidence, iou_threshold=EVALUATION_IOU)
    return multi_scale(detector.eval(), SIZES, kept)


def readers(detector: Detector) -> dict[str, Callable[[np.ndarray], list[tuple[str, np.ndarray]]]]:
    """Each reader as photo -> (text, corners) of the codes it read."""
    detect = multi_scale(detector.eval(), SIZES)
    return {
        "scan": lambda photo: [
            (code.text, np.array(code.corners_px))
            for code in qris.scan(photo, lambda p: detect([p])[0])
            if code.text is not None
        ],
        "zxing-cpp alone": lambda photo: [(read.text, np.asarray(read.corners)) for read in read_zxing(photo)],
        "OpenCV alone": lambda photo: [(read.text, np.asarray(read.corners)) for read in read_opencv(photo)],
    }


def read_all(reader: Callable[[np.ndarray], list[tuple[str, np.ndarray]]], paths: list[Path]) -> dict[str, list[int]]:
    """Count the codes read on each photo, per group of photos."""
    return {
        group: [distinct(reader(decode_image(path))) for path in paths if path.name.startswith(group)]
        for group in GROUPS
    }


def distinct(codes: list[tuple[str, np.ndarray]]) -> int:
    """Codes that differ in text or lie apart: half a code's size or more between their centres."""
    kept: list[tuple[str, np.ndarray, float]] = []
    for text, corners in codes:
        centre, size = corners.mean(0), float(np.ptp(corners, axis=0).max())
        if not any(text == other and np.abs(centre - place).max() < max(size, side) / 2 for other, place, side in kept):
            kept.append((text, centre, size))
    return len(kept)


# ---------------------------------------------------------------------------------------------------- hostile and drawn


HOSTILE_SIZE = (3000, 4000)
HOSTILE_SYMBOLS = ((50, 3, 0.8), (110, 10, 0.8), (110, 10, 0.9), (330, 16, 1.9), (440, 8, 4.1))
"""Photos of undecodable symbols: side in pixels, version, sigma of the blur."""


def hostile_ms(rounds: int = 3) -> float:
    """CPU milliseconds for the worst of some photos of 12 million pixels in which detectors see codes that cannot be read.

    One is noise with twenty boxes; the others hold forty symbols each that are right in all but their data, which are random.
    """
    photos = [hostile_noise(), *(hostile_symbols(*symbols) for symbols in HOSTILE_SYMBOLS)]
    return max(scan_ms(photo, lambda _, found=found: found, rounds) for photo, found in photos)


def scan_ms(photo: np.ndarray, detector: DetectFn, rounds: int) -> float:
    """Median CPU milliseconds of `scan` on one photo."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        qris.scan(photo, detector)
        taken.append(1000 * (time.process_time() - started))
    return float(np.median(taken))


def hostile_noise() -> tuple[np.ndarray, Detections]:
    """Noise, and twenty large boxes."""
    draw = np.random.default_rng(0)
    photo = draw.integers(0, 256, (*HOSTILE_SIZE, 3), dtype=np.uint8)
    corners = draw.uniform(0, (3100, 2100), (20, 2))
    return photo, detected(np.concatenate([corners, corners + 900], 1))


def hostile_symbols(side: int, version: int, blur: float) -> tuple[np.ndarray, Detections]:
    """Forty tilted symbols of random data on a grey wall, blurred and noisy, and their boxes."""
    draw = np.random.default_rng(0)
    photo = np.full(HOSTILE_SIZE, 170, np.uint8)
    fixed = fixed_modules(version)[1:-1, 1:-1]
    quiet = 1 + 8 / len(fixed)
    boxes = []
    for row, column in np.ndindex(5, 8):
        dark = np.where(fixed == 0, draw.random(fixed.shape) < 0.5, fixed > 0)
        symbol = np.pad(np.where(dark, 0, 255).astype(np.uint8), 4, constant_values=255).repeat(8, 0).repeat(8, 1)
        turn = draw.uniform(-0.5, 0.5)
        around = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        quad = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) @ around * draw.uniform(0.85, 1, 2) * side / 2 * quiet
        quad += draw.uniform(-0.05, 0.05, (4, 2)) * side + [500 * column + 250, 600 * row + 300]
        low, far = 32.0, len(symbol) - 32.0
        own = [[0, 0], [len(symbol), 0], [len(symbol), len(symbol)], [0, len(symbol)]]
        matrix = cv2.getPerspectiveTransform(np.array(own, np.float32), quad.astype(np.float32))
        cv2.warpPerspective(symbol, matrix, photo.shape[::-1], photo, cv2.INTER_AREA, cv2.BORDER_TRANSPARENT)
        corners = np.array([[[low, low], [far, low], [far, far], [low, far]]], np.float32)
        inner = cv2.perspectiveTransform(corners, matrix)[0]
        boxes.append(np.concatenate([inner.min(0), inner.max(0)]))
    noisy = cv2.GaussianBlur(photo, (0, 0), blur) + draw.normal(0, 6, photo.shape)
    seen = Boxes(np.array(boxes), np.linspace(0.95, 0.5, len(boxes)), np.zeros(len(boxes)))
    return np.repeat(noisy.clip(0, 255).astype(np.uint8)[..., None], 3, 2), Detections(seen, names=["qr_code"])


CALIBRATION_SEED, FRAUD_SEED, VIDEO_SEED = 11, 2, 3
DECOYS = 20
CAMERAS = {
    "video_over_single_frame": {"reach": 0.5},
    "video_hovering_over_single_frame": {"reach": REACH},
    "video_long_counter_over_single_frame": {"reach": 0.5, "world": 3.0, "codes": 12},
}
"""Clips by the name of what they measure: a camera that walks past a counter, some of whose frames show all of it; one that hovers over the codes;
and one that walks past a counter of which no frame shows all."""


DetectorOf = Callable[[Sequence[SceneCode]], DetectFn]
"""The codes of a drawn picture -> the detector that is to look at it."""


def drawn_figures(quick: bool, detector_of: DetectorOf) -> dict[str, float | Ratio]:
    """Sticker fraud on drawn pairs, and video against the best of its frames."""
    clips = 2 if quick else 16
    figures: dict[str, float | Ratio] = fraud(20 if quick else 300, detector_of)
    for name, camera in CAMERAS.items():
        figures[name], figures[f"{name}_at_most"] = video(clips, detector_of, **camera)
    return figures


def fraud(pairs: int, detector_of: DetectorOf) -> dict[str, float | Ratio]:
    """Recall of stickers at 1 % false alarms, from the score of `verify`: over all pairs, and by whether the place is registered.

    Every second place is registered, honest photos are of registered and unregistered places alike, and half of the stickers name
    the shop that they steal from. No place is named to `verify`. A photo in which no payment code is read scores 0.
    """
    decoys = tuple(
        Place.of(qris.parse(qris_content(np.random.default_rng([FRAUD_SEED, 0, n])).text)) for n in range(DECOYS)
    )
    rows = []
    for number in range(pairs):
        pair = draw_pair(np.random.default_rng([FRAUD_SEED, 1, number]))
        own = (Place.of(qris.parse(pair.own.text)),) if number % 2 else ()
        table = Registry((*own, *decoys))
        scenes = (pair.clean, pair.forged)
        found = [qris.verify(scene.image, table, detector=detector_of(scene.codes)) for scene in scenes]
        rows.append([one.score for one in found] + [found[0].verdict == "mismatch", not found[1].checked])
    scores = np.array(rows, np.float64)

    def recall(honest: np.ndarray, forged: np.ndarray) -> float:
        return float((forged > np.quantile(honest, 1 - FALSE_ALARMS)).mean())

    honest, forged, alarms, unread = scores.T
    return {
        "fraud_recall_at_1pct": recall(honest, forged),
        "fraud_recall_registered": recall(honest, forged[1::2]),
        "fraud_recall_unregistered": recall(honest[0::2], forged[0::2]),
        "fraud_false_alarms": float(alarms.mean()),
        "fraud_unread": float(unread.mean()),
    }


def calibrate(pairs: int) -> None:
    """Write the weights of `verification.tampering` from drawn pairs of which both codes were read."""
    measured: list[dict[str, float]] = []
    for number in range(pairs):
        pair = draw_pair(np.random.default_rng([CALIBRATION_SEED, number]))
        both = []
        for scene, content in ((pair.clean, pair.own), (pair.forged, pair.sticker)):
            codes = [code for code in qris.scan(scene.image) if code.text == content.text]
            both += [tampering.measure(scene.image, codes[0].corners_px)] if codes else []
        measured += both if len(both) == 2 else []
    model = fit(measured, [number % 2 == 1 for number in range(len(measured))])
    model.save()
    print(f"{len(measured) // 2} pairs, threshold {model.threshold:.2f}: {FILE}")


def told_boxes(codes: Sequence[SceneCode]) -> DetectFn:
    """A detector that sees every code of a drawn picture."""
    found = detected(np.array([code.box for code in codes]).reshape(-1, 4))
    return lambda image: found


def video(clips: int, detector_of: DetectorOf, **camera: Any) -> tuple[Ratio, float]:
    """Codes read in drawn clips over those that `scan` reads in the best frame of each; a wrong text counts as none.

    Also what that ratio would be if all codes were read that are whole in any frame.
    """
    whole, best, every = [], [], 0
    for number in range(clips):
        frames = draw_clip(np.random.default_rng([VIDEO_SEED, number]), **camera)
        truth = {code.content.text for frame in frames for code in frame.codes}
        scanner = VideoScanner()
        single = []
        for frame in frames:
            scanner.detector = detector_of(frame.codes)
            scanner.add(frame.image)
            single.append(len({code.text for code in qris.scan(frame.image, scanner.detector)} & truth))
        whole.append(len({track.text for track in scanner.tracks} & truth))
        best.append(max(single))
        every += len(truth)
    return totals(whole, best), every / sum(best)


if __name__ == "__main__":
    main()
