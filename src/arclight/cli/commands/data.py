"""``arclight data``: tokenize text into shards, generate payment-code scenes, lint a data set."""

from __future__ import annotations

import dataclasses
import time
from argparse import Namespace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.commands.corpora import add_verbs


def data(arguments: list[str]) -> int:
    about = (
        "Tokenize and inspect text, generate a data set of payment codes, or find and mend faults of an image data set."
    )
    parser = Parser(prog="arclight data", description=about)
    verbs = parser.add_subparsers(required=True, metavar="tokenize|retokenize|pack|inspect|qris|poster|lint|check")
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

    _add_poster(verbs.add_parser("poster", help="write a payment code as a printable sheet"))

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


def _add_poster(verb: Any) -> None:
    verb.add_argument("payload", metavar="TEXT", help="the payment code's text, as printed codes say it")
    verb.add_argument("--out", type=Path, required=True, metavar="FILE", help="sheet to write: .svg, .pdf or .png")
    verb.add_argument("--amount", metavar="N", help="make the code dynamic, for one payment of this amount")
    verb.add_argument("--bill", metavar="TEXT", help="number of the bill that --amount pays")
    verb.add_argument(
        "--tip", metavar="N|N%|ask", help="fixed or percentage tip on --amount, or one that the payer chooses"
    )
    verb.set_defaults(run=poster)


def poster(options: Namespace) -> int:
    """Write a sheet; with an amount, print the text of its dynamic code."""
    from arclight.vision.qris import Tip, to_dynamic
    from arclight.vision.qris.poster import write_poster

    text: str = options.payload
    if options.amount is None and (options.bill or options.tip):
        raise UsageError("--bill and --tip belong to a payment: give its --amount too")
    if options.amount is not None:
        tip = None
        if options.tip is not None:
            value = options.tip.removesuffix("%")
            try:
                number = None if options.tip == "ask" else Decimal(value)
            except InvalidOperation:
                raise UsageError(f"--tip {options.tip}: give an amount, a percentage such as 5%, or ask") from None
            tip = Tip("prompt" if number is None else "fixed" if value == options.tip else "percentage", number)
        text = to_dynamic(text, options.amount, tip=tip, bill=options.bill)
        print(text)
    print(f"poster: {write_poster(text, options.out)}")
    return 0


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
