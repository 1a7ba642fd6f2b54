"""Real photographs of QR codes: how well codes are found and read by what was trained on drawn scenes alone, and after fine-tuning.

The photos are the folder `qr_photos` of the data beside the project (or --photos). (a) A detector is trained on generated
scenes only, as `arclight demo` does it, or taken with --detector; (b) it is fine-tuned on the `train` photos with as many of
the scenes mixed into each epoch, so that it keeps what only the scenes show. Both are
measured on the `test` photos. Then `scan`, guided by (b), reads the codes of the test photos beside plain zxing-cpp and
OpenCV. A code counts as read once: by its text and place.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from arclight.vision.qris.reading.decode import read_opencv, read_zxing
from arclight.vision.results.metrics import DetectionMetrics
from arclight.vision.tasks.detection import Detector
from arclight.vision.tasks.module import evaluate
from arclight.vision.tasks.settings import DetectionTask
from benchmarks.results import Ratio, parser, publish, totals, versions

GROUPS = ("phone", "packs")
FINE_SIZE = 640


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
        "--work", type=Path, default=None, metavar="DIR", help="where runs are written (default: a temporary folder)"
    )
    options = arguments.parse_args()
    if not (options.photos / "data.yaml").exists():
        sys.exit(f"there are no photos at {options.photos}; name their folder with --photos")
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, options.work or Path(scratch))


def measure(options: Any, work: Path) -> None:
    scenes = draw_scenes(work, quick=options.quick)
    start = options.detector or train_on_scenes(work, quick=options.quick)
    generated = Detector.load_from_checkpoint(start)
    tuned = fine_tune(start, options.photos, scenes, work, epochs=1 if options.quick else 12)
    found = {("generated scenes only", 320): generated, ("fine-tuned on photos", FINE_SIZE): tuned}
    spec = read_data_yaml(options.photos / "data.yaml")
    rows, precision = [], {}
    for (name, size), detector in found.items():
        photos = DetectionDataset.open(spec, "test", image_size=size, cache_labels=False)
        values = {group: average_precision(detector, photos, group) for group in (*GROUPS, "")}
        precision[name] = values
        rows.append((f"mAP50, {name}, {size} px", *(f"{values[g]:.3f}" for g in (*GROUPS, ""))))
    counts = {name: read_all(reader, spec.images("test")) for name, reader in readers(tuned).items()}
    for name, value in counts.items():
        read = [sum(value[group]) for group in GROUPS]
        rows.append((f"codes read, {name}", *map(str, read), str(sum(read))))
    ours, zxing, opencv = counts["scan"], counts["zxing-cpp alone"], counts["OpenCV alone"]
    figures: dict[str, float | Ratio] = {
        "map50_generated_only_phone": precision["generated scenes only"]["phone"],
        "map50_finetuned": precision["fine-tuned on photos"][""],
        "map50_finetuned_phone": precision["fine-tuned on photos"]["phone"],
        "scan_over_zxing_phone": totals(ours["phone"], zxing["phone"]),
        "scan_over_zxing_packs": totals(ours["packs"], zxing["packs"]),
        "scan_over_opencv": totals(*([count for group in GROUPS for count in one[group]] for one in (ours, opencv))),
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


def average_precision(detector: Detector, photos: DetectionDataset, group: str) -> float:
    """mAP50 on the photos whose names begin with ``group``."""
    chosen = [i for i, path in enumerate(photos.images) if path.name.startswith(group)]
    metrics = DetectionMetrics(num_classes=1)
    return evaluate(detector.eval().model, Subset(photos, chosen), metrics, collate).map50  # type: ignore[no-any-return]


def readers(detector: Detector) -> dict[str, Callable[[np.ndarray], list[tuple[str, np.ndarray]]]]:
    """Each reader as photo -> (text, corners) of the codes it read."""
    return {
        "scan": lambda photo: [
            (code.text, np.array(code.corners_px))
            for code in qris.scan(photo, lambda p: detector.detect([p])[0])
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


if __name__ == "__main__":
    main()
