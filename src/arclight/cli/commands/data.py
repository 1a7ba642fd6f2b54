"""Lint, convert and split image data sets, draw scenes and posters: ``arclight data``.

`command` calls `data`, which parses the options and calls the function of the verb; that returns the exit status. ``vision.data`` and
``vision.qris`` do the work; the verbs for text are in `corpora`. Names of verbs and options are public and stay.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from argparse import Namespace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.commands.corpora import add_verbs, show_corpus


def data(arguments: list[str]) -> int:
    about = "Tokenize and inspect text, generate payment codes, or find and mend faults of an image data set."
    parser = Parser(prog="arclight data", description=about)
    verbs = parser.add_subparsers(
        required=True, metavar="tokenize|retokenize|pack|inspect|qris|poster|lint|check|import|export|split|sets"
    )
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
    labels = verb.add_mutually_exclusive_group()
    labels.add_argument(
        "--corners",
        action="store_true",
        help="labels have the four corners of each code as keypoints, for kind = corners",
    )
    labels.add_argument(
        "--rotated", action="store_true", help="labels are the four corners of each code, for kind = obb"
    )
    verb.set_defaults(run=qris)

    _add_poster(verbs.add_parser("poster", help="write a payment code as a printable sheet"))

    verb = verbs.add_parser("lint", help="find faults of a data set before training; status 1 if there are errors")
    _add_lint(verb)

    verb = verbs.add_parser(
        "check", help="find files and rows that cannot be read, the quick part of lint; status 1 if there are any"
    )
    verb.add_argument("path", type=Path, metavar="data.yaml")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    verb.set_defaults(run=check)

    _add_import(
        verbs.add_parser("import", help="read COCO json, Pascal VOC xml or a folder of images into a YOLO data set")
    )
    _add_export(verbs.add_parser("export", help="write the labels of a YOLO data set as COCO json"))
    _add_split(
        verbs.add_parser("split", help="divide a data set into splits; near-duplicates and groups stay in one split")
    )

    verb = verbs.add_parser("sets", help="describe public image sets and text corpora, and print how they are fetched")
    verb.add_argument("name", nargs="?", metavar="NAME", help="one of them; default: list all")
    verb.add_argument(
        "--data-yaml", type=Path, metavar="DIR", help="also write the data.yaml of an image set into this folder"
    )
    verb.set_defaults(run=sets)

    options = parser.parse_args(arguments)
    return int(options.run(options))


def _add_import(verb: Any) -> None:
    verb.add_argument("source", type=Path, metavar="SOURCE", help="a .json file, or a folder of json, xml or images")
    verb.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write")
    verb.add_argument(
        "--images", type=Path, metavar="DIR", help="folder of the images; default: searched around SOURCE"
    )
    verb.add_argument("--polygons", action="store_true", help="rows are outlines, also of masks, instead of boxes")
    verb.add_argument(
        "--keypoints", action="store_true", help="COCO: rows have keypoints behind their boxes, for kind = pose"
    )
    verb.add_argument("--crowds", action="store_true", help="COCO: import crowd regions as objects; default: skip them")
    verb.add_argument("--difficult", action="store_true", help="VOC: import difficult objects too; default: skip them")
    verb.add_argument("--names", metavar="A,B,...", help="classes in order, for VOC and images; default: those found")
    verb.add_argument("--symlink", action="store_true", help="refer to the images instead of copying them")
    verb.set_defaults(run=import_)


def _add_export(verb: Any) -> None:
    verb.add_argument("path", type=Path, metavar="DATA.yaml")
    verb.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write instances_SPLIT.json into")
    verb.set_defaults(run=export)


def _add_split(verb: Any) -> None:
    verb.add_argument(
        "path", type=Path, metavar="DATA.yaml", help="data set whose images of all splits are divided again"
    )
    verb.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="folder for lists of images and a data.yaml"
    )
    verb.add_argument(
        "--fractions", type=float, nargs="+", default=[0.8, 0.2], metavar="F",
        help="shares of train, val and, if there are three, test (default: 0.8 0.2)",
    )  # fmt: skip
    verb.add_argument("--seed", type=int, default=0, help="same seed, same splits (default: %(default)s)")
    verb.add_argument(
        "--group",
        metavar="REGEX",
        help="keep images together in whose paths this finds the same text, such as '(shop\\d+)_'",
    )
    verb.add_argument(
        "--no-hashes", action="store_true", help="decode no image: only files of equal bytes stay together"
    )
    verb.set_defaults(run=split)


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
    verb.add_argument(
        "--obb", action="store_true", help="rows must be oriented boxes: class x1 y1 x2 y2 x3 y3 x4 y4, for kind = obb"
    )
    verb.add_argument("--no-cache", action="store_true", help="write no cache beside the labels, and use none")
    verb.add_argument("--sheet", type=Path, metavar="FILE.html", help="draw the worst findings on a page")
    verb.add_argument("--fix", type=Path, metavar="DIR", help="write a mended copy into this new folder")
    verb.add_argument("--json", type=Path, metavar="FILE", help="also write all findings to this file")
    verb.add_argument("--strict", action="store_true", help="status 1 for warnings, too")
    verb.set_defaults(run=lint)


def _add_poster(verb: Any) -> None:
    verb.add_argument("payload", metavar="TEXT", help="the payment code's text")
    verb.add_argument("--out", type=Path, required=True, metavar="FILE", help="sheet to write: .svg, .pdf or .png")
    verb.add_argument("--amount", metavar="N", help="make the code dynamic, for one payment of this amount")
    verb.add_argument("--bill", metavar="TEXT", help="number of the bill that --amount pays")
    verb.add_argument(
        "--tip", metavar="N|N%|ask", help="fixed or percentage tip on --amount, or one that the payer chooses"
    )
    verb.set_defaults(run=poster)


def poster(options: Namespace) -> int:
    """Write a printable sheet; with an amount, also print the text of its dynamic code."""
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
            corners=options.corners,
            rotated=options.rotated,
            progress=lambda done, _: progress.update(bar, completed=done),
        )
    seconds = time.monotonic() - started
    print(f"{options.count} images in {seconds:.1f} s ({options.count / seconds:.0f} per second): {description}")
    return 0


def lint(options: Namespace) -> int:
    from arclight.cli.arguments import UsageError
    from arclight.cli.style import counted
    from arclight.vision.data.data_yaml import first_names, read_data_yaml
    from arclight.vision.data.lint.checks import lint
    from arclight.vision.models.architectures import find_architecture

    if options.image_size < 32:
        raise UsageError(f"--image-size {options.image_size}: give 32 pixels or more")
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
            rows="oriented" if options.obb else "boxes",
        )
    print(f"{spec.file}: {first_names(spec.names)}")
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
    """Report every split of the data set, reading all labels without their cache."""
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
            images, rows = spec.images(split), spec.geometry()
            report = check_labels(images, len(spec.names), name=split, cache=False, geometry=rows).report
        except DatasetError as error:  # go on with the other splits
            print(f"{split}: {error}")
            found[split], wrong = {"error": str(error)}, True
            continue
        print(report)
        found[split] = dataclasses.asdict(report)
        wrong = wrong or bool(report.corrupt or report.malformed)
    write_json(options.json, found)
    return int(wrong)


def import_(options: Namespace) -> int:
    from arclight.cli.style import counted
    from arclight.vision.data.formats.annotations import read_images, write_yolo
    from arclight.vision.data.formats.coco import is_coco, read_coco
    from arclight.vision.data.formats.voc import is_voc, read_voc

    source, names = options.source, [name.strip() for name in options.names.split(",")] if options.names else []
    if not all(names):
        raise UsageError(f"--names {options.names}: a class has no name; write names between commas, such as cat,dog")
    if len(set(names)) < len(names):
        raise UsageError(f"--names {options.names}: a class is named twice, and nothing could tell the two apart")
    if not source.exists():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))
    if is_coco(source):
        _refuse_options(options, source, "COCO's json", ("names", "difficult"))
        found = read_coco(
            source,
            images=options.images,
            masks=options.polygons,
            keep_crowds=options.crowds,
            keypoints=options.keypoints,
        )
    elif is_voc(source):
        _refuse_options(options, source, "VOC's xml", ("crowds", "keypoints"))
        found = read_voc(source, images=options.images, names=names, keep_difficult=options.difficult)
    else:
        _refuse_options(options, source, "images without labels", ("images", "crowds", "difficult", "keypoints"))
        found = read_images(source, names)
    print(found)
    with counted("writing images") as progress:
        file = write_yolo(found, options.to, polygons=options.polygons, symlink=options.symlink, progress=progress)
    print(f"wrote {file}: {len(found.names)} classes. Check it: arclight data lint {file}")
    return 0


def _refuse_options(options: Namespace, source: Path, what: str, names: tuple[str, ...]) -> None:
    """Raise UsageError for an option that says nothing about such a source."""
    if given := [name for name in names if getattr(options, name)]:
        raise UsageError(f"--{given[0]} does nothing for {what}, which {source} holds: leave it out")


def export(options: Namespace) -> int:
    from arclight.vision.data.data_yaml import read_data_yaml
    from arclight.vision.data.formats.annotations import read_yolo
    from arclight.vision.data.formats.coco import write_coco

    found = read_yolo(read_data_yaml(options.path))
    print(found)
    for file in write_coco(found, options.to):
        print(f"wrote {file}")
    return 0


def split(options: Namespace) -> int:
    from arclight.cli.arguments import UsageError
    from arclight.cli.style import counted
    from arclight.vision.data.data_yaml import read_data_yaml
    from arclight.vision.data.splitting import class_folders, split_images, write_class_folders, write_split_lists

    if len(options.fractions) not in (2, 3):
        raise UsageError(f"--fractions has {len(options.fractions)} numbers: give two or three, of train, val and test")
    classes = class_folders(options.path)
    if classes:
        images = list(classes)
    else:
        spec = read_data_yaml(options.path)
        images = [image for part in ("train", "val", "test") if getattr(spec, part) for image in spec.images(part)]
    fractions = dict(zip(("train", "val", "test"), options.fractions))
    with counted("comparing images") as progress:
        found = split_images(
            images, fractions, seed=options.seed, group=options.group, look_alikes=not options.no_hashes,
            strata=classes or None, progress=progress,
        )  # fmt: skip
    if classes:
        write_class_folders(classes, found.images, options.path, options.to)
        written = options.to
    else:
        written = write_split_lists(spec, found.images, options.to)
    for part, members in found.images.items():
        print(f"{part}: {len(members):,} images")
    print(f"{found.groups:,} groups of several images stay together")
    for image, why in found.damaged.items():
        print(f"left out {image}: {why}")
    print(f"wrote {written}")
    return 0


def sets(options: Namespace) -> int:
    from arclight.text.data.public_corpora import public_corpora
    from arclight.vision.data.public_sets import find_public_set, public_sets

    if options.name is not None and options.name.lower() in (name.lower() for name in public_corpora()):
        return show_corpus(options)
    if options.name is None:
        for corpus in public_corpora().values():
            print(f"{corpus.name:<16}{'text':<16}{corpus.about}{f' ({corpus.size})' if corpus.size else ''}")
        for described in public_sets().values():
            images = ", ".join(f"{part} {number:,}" for part, number in described.images.items())
            print(f"{described.name:<16}{described.task:<16}{described.about}{f' ({images})' if images else ''}")
        return 0
    described = find_public_set(options.name)
    names = ", ".join(described.names[:8]) + (", ..." if len(described.names) > 8 else "")
    print(f"{described.name}: {described.about}; {described.page}")
    print(f"{described.task}, {len(described.names)} classes ({names})")
    print(
        ", ".join(
            [f"{part}: {number:,} images" for part, number in described.images.items()] + [described.size or ""]
        ).rstrip(", ")
    )
    print("\nNothing is fetched. Check the licence of the data set, then run:\n")
    print("\n".join(f"    {command}" for command in described.fetch_step()))
    if described.then:
        print(f"\n{described.then}")
    if options.data_yaml is not None:
        print(f"\nwrote {described.write_data_yaml(options.data_yaml)}")
    return 0
