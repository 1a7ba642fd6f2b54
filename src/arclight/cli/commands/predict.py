"""``arclight predict``: what a detector or a program finds in images, folders and videos."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.commands import language
from arclight.cli.runs import load_detector, run_folder
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
    labels = Counter[str]()
    for frame in progressed(frames, len(frames.inputs), "looking", lambda frame: frame.path):
        detections = find(frame.image)
        name = frame.path if frame.index is None else f"{frame.path}#{frame.index}"
        found[name] = [
            {
                "label": label,
                "confidence": round(float(confidence), 4),
                "box_xyxy_px": [round(x, 1) for x in box.tolist()],
            }
            for label, confidence, box in zip(detections.labels, detections.boxes.conf, detections.boxes.xyxy)
        ]
        print(f"{name}: {summary(detections.labels)}")
        if options.out is not None:
            detections.save(options.out / f"{len(found):06d}-{Path(frame.path).stem}.jpg")
        if options.save_txt is not None:
            stem = Path(frame.path).stem + ("" if frame.index is None else f"-{frame.index}")
            labels[stem] += 1  # images of several folders may have one name
            file = f"{stem}.txt" if labels[stem] == 1 else f"{stem}-{labels[stem]}.txt"
            write_labels(options.save_txt / file, detections, frame.image.shape)
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the detections to this file")
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="use every N-th frame of a video")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1]")
    return value


def finder(options: argparse.Namespace) -> tuple[Finder, list[str]]:
    """Make what finds objects in an image, of a program or a run, and say which words name images."""
    thresholds = {"conf_threshold": options.conf, "iou_threshold": options.iou}
    changed = {name: value for name, value in thresholds.items() if value is not None}
    if options.program is not None:
        from arclight.vision.tasks.processing import load_detector_program

        return load_detector_program(options.program, **changed).predict_one, options.source
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

    detector = load_detector(place).to("cuda" if torch.cuda.is_available() else "cpu")
    used = dataclasses.replace(detector.processing, **changed)
    return lambda image: detector.detect([image], used)[0], sources


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
