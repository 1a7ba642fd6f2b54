"""``arclight predict``: what a program finds in images, folders and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arclight.cli import language
from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.own_module import named_module


def predict(arguments: list[str]) -> None:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.own_run import own_run

        return own_run("predict", own, arguments[1:])
    if language.trained_language(arguments):
        return language.predict(arguments)
    if "--prompt" in arguments:
        raise UsageError(
            "--prompt needs the run of a language model first, as in: arclight predict runs/lm-debug/1 --prompt TEXT"
        )
    parser = Parser(
        prog="arclight predict",
        description="Find objects in images, folders, patterns and videos; or, with package.module:Model first, let a module of your own predict. "
        "With a language model's run first, let it write: arclight predict RUN --prompt TEXT; RUN --help says more.",
    )
    parser.add_argument(
        "source", nargs="+", metavar="SOURCE", help="an image, a folder, a pattern such as 'a/*.jpg', or a video"
    )
    parser.add_argument("--program", type=Path, required=True, metavar="FILE", help="an exported detector (.onnx)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the images with their boxes here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here")
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="of a video, look at every N-th frame")
    options = parser.parse_args(arguments)

    from arclight.deploy import Program
    from arclight.vision.sources import Frames

    program = Program.load(options.program)
    frames = Frames(options.source, vid_stride=options.stride)
    found: dict[str, list[dict[str, Any]]] = {}
    for frame in frames:
        (detections,) = program.predict([frame.image])
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
    print(f"{len(found)} images, {sum(map(len, found.values()))} objects, {len(frames.skipped)} files skipped")
    write_json(options.json, found)
    return None


def summary(labels: list[str]) -> str:
    """Counts by class, as in "2 person, 1 dog"."""
    return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels)) or "nothing"
