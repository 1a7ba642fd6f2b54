"""``arclight scan``: find and read the payment codes in images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, write_json
from arclight.cli.style import console_of, progressed

if TYPE_CHECKING:
    from rich.console import RenderableType


def scan(arguments: list[str]) -> int:
    parser = Parser(prog="arclight scan", description="Find and read codes in images, and validate payment codes.")
    parser.add_argument(
        "source", nargs="+", metavar="SOURCE", help="an image, a folder, a pattern such as 'a/*.jpg', or a video"
    )
    parser.add_argument(
        "--program",
        type=Path,
        metavar="FILE",
        help="exported detector of codes (.onnx); default: a reader without a detector",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a JSON object to this file: image to list of codes"
    )
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="use every N-th frame of a video")
    options = parser.parse_args(arguments)

    from arclight.vision import qris
    from arclight.vision.inputs.image_source import ImageSource
    from arclight.vision.tasks.processing import load_detector_program

    console = console_of()
    detector = load_detector_program(options.program).predict_one if options.program is not None else None
    frames = ImageSource(options.source, vid_stride=options.stride)
    found: dict[str, list[dict[str, Any]]] = {}
    for frame in progressed(frames, len(frames.inputs), "scanning", lambda frame: frame.path):
        codes = qris.scan(frame.image, detector)
        name = frame.path if frame.index is None else f"{frame.path}#{frame.index}"
        found[name] = [code.to_json() for code in codes]
        console.print(listing(name, found[name]))
    every = [code for codes in found.values() for code in codes]
    read = [code for code in every if code["text"] is not None]
    payments = [code for code in every if code["kind"] == "qris"]
    summary = (
        f"{len(found)} images, {len(every)} codes found, {len(read)} read, {len(payments)} are payment codes (QRIS), "
        f"{len(frames.skipped)} files skipped"
    )
    console.print(summary, highlight=False)
    write_json(options.json, found, escaped=False)
    return int(not found)  # all were skipped


def listing(name: str, codes: list[dict[str, Any]]) -> RenderableType:
    """Show one image and its codes. Their text is a stranger's: it is shown as text, never as markup."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(name, style="bold"))
    if not codes:
        tree.add(Text("no code", style="dim"))
    for code in codes:
        kind = "not readable" if code["text"] is None else str(code["kind"])
        at = ", ".join(f"{value:.0f}" for value in code["box_xyxy_px"])
        branch = tree.add(Text.assemble((kind, "bold"), f"  confidence {code['confidence']:.2f} at {at}"))
        for field, value in (code["payload"] or {}).items():
            if isinstance(value, str) and value:
                branch.add(Text.assemble((f"{field} ", "dim"), printable(value)))
        if code["text"] is not None and not code["payload"]:
            branch.add(Text(printable(code["text"])))
        for problem in code["problems"]:
            branch.add(Text(printable(problem), style="red"))
    return tree


def printable(value: Any) -> str:
    """Text on one line and without control characters, which could command the terminal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.splitlines()))
