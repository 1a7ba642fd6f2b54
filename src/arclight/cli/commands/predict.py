"""``arclight predict``: run a detector or an exported program on images, folders and videos."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.commands import language
from arclight.cli.runs import load_vision_module, run_folder
from arclight.cli.style import progressed
from arclight.cli.user_module import named_module

if TYPE_CHECKING:
    from arclight.vision.results.detections import Detections

Finder = Callable[[Any], "Detections"]


def predict(arguments: list[str]) -> int:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.user_run import run_user_module

        run_user_module("predict", own, arguments[1:])
        return 0
    if language.trained_language(arguments):
        language.predict(arguments)
        return 0
    if "--prompt" in arguments:
        raise UsageError(
            "--prompt needs the run of a language model first, as in: arclight predict runs/lm-debug/1 --prompt TEXT"
        )
    options = _parser().parse_args(arguments)
    find, sources = finder(options)

    from arclight.vision.data.image_source import ImageSource

    frames = ImageSource(sources, vid_stride=options.stride)
    found: dict[str, list[dict[str, Any]]] = {}
    names = Counter[str]()
    for frame in progressed(frames, len(frames.inputs), "looking", lambda frame: frame.path):
        detections = find(frame.image)
        name = frame.path if frame.index is None else f"{frame.path}#{frame.index}"
        found[name] = detections.to_json()
        print(f"{name}: {summary(detections.labels)}")
        if options.out is not None:
            detections.save(options.out / f"{len(found):06d}-{Path(frame.path).stem}.jpg")
        stem = Path(frame.path).stem + ("" if frame.index is None else f"-{frame.index}")
        names[stem] += 1  # images of several folders may have one name
        stem = stem if names[stem] == 1 else f"{stem}-{names[stem]}"
        if options.save_txt is not None:
            write_labels(options.save_txt / f"{stem}.txt", detections, frame.image.shape)
        if options.save_crop is not None:
            write_crops(options.save_crop, stem, detections)
    if options.save_csv is not None:
        write_csv(options.save_csv, found)
    print(f"{len(found)} images, {sum(map(len, found.values()))} objects, {len(frames.skipped)} files skipped")
    write_json(options.json, found)
    return int(not found)  # all were skipped


def _parser() -> Parser:
    parser = Parser(
        prog="arclight predict",
        usage="arclight predict RUN SOURCE [SOURCE ...] [options], or arclight predict SOURCE [SOURCE ...] --program FILE [options]",
        description="Find objects in images, folders, patterns and videos, with the best checkpoint of a detector's run or with an exported "
        "program; or, with package.module:Model first, predict with a module of your own. With the run of a language model first, generate text: "
        "arclight predict RUN --prompt TEXT; RUN --help says more.",
    )
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="an image, a folder, a pattern such as 'a/*.jpg', or a video; before them, without --program, a run folder or a checkpoint",
    )
    parser.add_argument("--program", type=Path, metavar="FILE", help="exported detector (.onnx)")
    parser.add_argument(
        "--conf", type=_share, metavar="P", help="confidence threshold, in [0, 1] (default: as in training)"
    )
    parser.add_argument(
        "--iou",
        type=_share,
        metavar="P",
        help="IoU threshold of non-maximum suppression, in [0, 1] (default: as in training)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the images with their boxes to this folder")
    parser.add_argument(
        "--save-txt",
        type=Path,
        metavar="DIR",
        help="write labels in YOLO format to this folder",
    )
    parser.add_argument(
        "--save-crop",
        type=Path,
        metavar="DIR",
        help="write each object as an image to this folder, in a folder of its class",
    )
    parser.add_argument("--save-csv", type=Path, metavar="FILE", help="write a row for each object to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the detections to this file")
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="keep objects of these classes only")
    parser.add_argument("--agnostic-nms", action="store_true", help="let boxes suppress those of other classes too")
    parser.add_argument("--max-det", type=_count, metavar="N", help="most objects of one image (default: 300)")
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="use every N-th frame of a video")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1]")
    return value


def finder(options: argparse.Namespace) -> tuple[Finder, list[str]]:
    """Make what finds objects in an image, of a program or a run, and say which words name images."""
    from arclight.vision.boxes import TOP_K

    given = {
        "conf_threshold": options.conf, "iou_threshold": options.iou, "agnostic": options.agnostic_nms or None,
        "max_det": options.max_det if options.classes is None else TOP_K,  # other classes take no places
    }  # fmt: skip
    changed = {name: value for name, value in given.items() if value is not None}
    if options.program is not None:
        from arclight.vision.tasks.processing import load_detector_program

        program = load_detector_program(options.program, **changed)
        return _chosen(program.predict_one, options, program.metadata["names"]), options.source
    first, *sources = options.source
    place = Path(first)
    if run_folder(place) is None and not (place / "manifest.json").is_file():
        if not place.exists() and "*" not in first and not place.suffix:
            raise UsageError(f"there is no run folder {first}, nor images of this name")
        raise UsageError(
            f"{first} is no run: name the run of a detector first, as in arclight predict runs/detect-qris/1 {first}, or a program with --program"
        )
    if not sources:
        raise UsageError(f"name images after the run, as in arclight predict {first} photos")

    import torch

    detector = load_vision_module(place).to("cuda" if torch.cuda.is_available() else "cpu")
    used = dataclasses.replace(detector.processing, **changed)
    return _chosen(lambda image: detector.predict([image], used)[0], options, detector.names), sources


def _chosen(find: Finder, options: argparse.Namespace, names: list[str]) -> Finder:
    """Keep objects of the classes named alone, if any are; UsageError for one that the detector does not know."""
    from arclight.vision.boxes import MAX_DET

    if options.classes is None:
        return find
    if unknown := [name for name in options.classes if name not in names]:
        raise UsageError(f"--classes: {unknown[0]!r} is no class of this detector: it finds {', '.join(names)}")
    return lambda image: find(image).of(*options.classes)[: options.max_det or MAX_DET]


def write_crops(folder: Path, stem: str, detections: Detections) -> None:
    """Write what is in each box to a folder of its class; boxes without pixels in the image are left out."""
    from arclight.vision.results.detections import write_image

    for number, (label, crop) in enumerate(zip(detections.labels, detections.crops())):
        if crop.size:
            place = re.sub(r"[^\w-]", "_", label) or "_"  # a class may have any name, ".." as well
            write_image(folder / place / f"{stem}-{number}.jpg", crop)


def write_csv(file: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Write a row for each object: image, label, confidence, left, top, right, bottom in pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["image", "label", "confidence", "left", "top", "right", "bottom"])
        rows.writerows(
            [name, one["label"], one["confidence"], *one["box_xyxy_px"]] for name, of in found.items() for one in of
        )


def write_labels(file: Path, detections: Detections, shape: tuple[int, ...]) -> None:
    """Write a line for each box: class, then centre and size as shares of the image's width and height."""
    file.parent.mkdir(parents=True, exist_ok=True)
    height, width = shape[:2]
    lines = [
        " ".join([str(int(cls)), *(f"{share:.6g}" for share in (x / width, y / height, w / width, h / height))])
        for cls, (x, y, w, h) in zip(detections.boxes.cls, detections.boxes.xywh)
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def summary(labels: list[str]) -> str:
    """Counts by class, as in "2 person, 1 dog"."""
    return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)) or "nothing"
