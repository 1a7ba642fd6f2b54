"""``arclight data``: tokenize text into shards, generate payment-code scenes, lint a data set."""

from __future__ import annotations

import dataclasses
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from arclight.cli.arguments import Parser, write_json
from arclight.cli.commands.corpora import add_verbs


def data(arguments: list[str]) -> int:
    about = (
        "Tokenize and inspect text, generate a data set of payment codes, or find and mend faults of an image data set."
    )
    parser = Parser(prog="arclight data", description=about)
    verbs = parser.add_subparsers(required=True, metavar="tokenize|retokenize|pack|inspect|qris|lint|check")
    add_verbs(verbs)

    verb = verbs.add_parser("qris", help="generate labelled scenes with payment codes")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    verb.add_argument("--count", type=int, required=True, metavar="N", help="number of images")
    verb.add_argument("--seed", type=int, default=0, help="same seed, same images (default: %(default)s)")
    verb.add_argument("--size", type=int, default=640, help="side of an image, pixels (default: %(default)s)")
    verb.add_argument(
        "--merchants",
        type=int,
        metavar="N",
        help="number of merchants, each with a look of its own; see merchants.json",
    )
    verb.set_defaults(run=qris)

    verb = verbs.add_parser("lint", help="find faults of a data set before training; status 1 if there are errors")
    _add_lint(verb)

    verb = verbs.add_parser("check", help="only what cannot be read: the quick part of lint; status 1 if there is any")
    verb.add_argument("path", type=Path, metavar="data.yaml")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    verb.set_defaults(run=check)

    options = parser.parse_args(arguments)
    return int(options.run(options))


def _add_lint(verb: Any) -> None:
    verb.add_argument("path", type=Path, metavar="DATA.yaml")
    verb.add_argument(
        "--image-size", type=int, default=640, metavar="N", help="training size, pixels (default: %(default)s)"
    )
    verb.add_argument(
        "--model", default="yolov5n", help="architecture whose anchors are measured (default: %(default)s)"
    )
    verb.add_argument(
        "--no-hashes", action="store_true", help="decode no image: only files of equal bytes are duplicates"
    )
    verb.add_argument("--no-cache", action="store_true", help="write no cache beside the labels, and use none")
    verb.add_argument("--sheet", type=Path, metavar="FILE.html", help="draw the worst findings on a page")
    verb.add_argument("--fix", type=Path, metavar="DIR", help="write a mended copy into this new folder")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write all findings to this file")
    verb.add_argument("--strict", action="store_true", help="status 1 for warnings, too")
    verb.set_defaults(run=lint)


def qris(options: Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from arclight.vision.qris.scenes.generate import generate

    started = time.monotonic()
    columns = (TextColumn("drawing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("", total=options.count)
        description = generate(
            options.out,
            options.count,
            options.seed,
            size=options.size,
            merchants=options.merchants,
            progress=lambda done, _: progress.update(bar, completed=done),
        )
    seconds = time.monotonic() - started
    print(f"{options.count} images in {seconds:.1f} s ({options.count / seconds:.0f} per second): {description}")
    return 0


def lint(options: Namespace) -> int:
    from arclight.cli.arguments import UsageError
    from arclight.cli.style import counted
    from arclight.vision.data.data_yaml import read_data_yaml
    from arclight.vision.data.lint.checks import lint
    from arclight.vision.models.architectures import find_architecture

    if options.image_size < 32:
        raise UsageError(f"--image-size {options.image_size}: a training size is 32 pixels or more")
    try:
        anchors = [anchor for level in find_architecture(options.model).anchors_px for anchor in level]
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    spec = read_data_yaml(options.path)
    hashes: Any = "none" if options.no_hashes else "all"
    with counted("comparing images") as progress:
        report = lint(
            spec,
            image_size=options.image_size,
            anchors=anchors,
            hashes=hashes,
            cache=not options.no_cache,
            progress=progress,
        )
    print(f"{spec.file}: {', '.join(spec.names[:8])}{', ...' * (len(spec.names) > 8)}")
    print(report)
    write_json(options.json, report.as_dict())
    if options.sheet is not None:
        from arclight.vision.data.lint.sheet import write_sheet

        write_sheet(report, options.sheet)
        print(f"pictures of the worst: {options.sheet}")
    if options.fix is not None:
        from arclight.vision.data.lint.mend import CHANGES, mend

        mended = mend(report, options.fix)
        print(f"mended copy: {mended.file}, {len(mended.changes):,} changes, listed in {options.fix / CHANGES}")
        for change in mended.changes[:5]:
            print(f"    {change}")
        if mended.left:
            print(f"left for you to decide: {', '.join(mended.left)}")
    return int(report.errors > 0 or (options.strict and report.warnings > 0))


def check(options: Namespace) -> int:
    """Report every split of the data set, from labels read afresh; nothing is written beside them."""
    from arclight.vision.data.data_yaml import read_data_yaml
    from arclight.vision.data.labels import DatasetError, check_labels

    spec = read_data_yaml(options.path)
    names = ", ".join(spec.names[:8]) + (", ..." if len(spec.names) > 8 else "")
    print(f"{options.path}: {len(spec.names)} class{'es' * (len(spec.names) != 1)} ({names})")
    found: dict[str, Any] = {}
    wrong = False
    for split in ("train", "val", "test"):
        if not getattr(spec, split):
            continue
        try:
            report = check_labels(spec.images(split), len(spec.names), name=split, cache=False).report
        except DatasetError as error:  # the other splits are looked at as well
            print(f"{split}: {error}")
            found[split], wrong = {"error": str(error)}, True
            continue
        print(report)
        found[split] = dataclasses.asdict(report)
        wrong = wrong or bool(report.corrupt or report.malformed)
    write_json(options.json, found)
    return int(wrong)
