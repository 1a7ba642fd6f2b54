"""Find and read the payment codes in images, videos and cameras: ``arclight scan``.

`command` calls `scan`. ``vision.qris.reading`` finds and reads codes, ``vision.qris.verification`` judges them. Text of codes is untrusted: it
is printed by `printable` only. Flags, keys of the JSON and the exit status `MISMATCH_STATUS` stay.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import (
    Parser,
    UsageError,
    add_runtime,
    add_trust,
    check_writable,
    count,
    report_runtime,
    trusted,
    write_json,
)
from arclight.cli.style import console_of, printable, progressed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from arclight.vision.inputs.image_source import Frame, ImageSource
    from arclight.vision.inputs.memory_images import SourceError
    from arclight.vision.qris.verification.verifier import CheckedCode, Verdict, Verification

MISMATCH_STATUS = 3
"""Exit status if a code in a photo does not belong to its place."""
MAX_WATCHED = 10_000
"""Most codes whose verdicts are remembered, and most frames that the page and the JSON of a watched camera have: cameras have no end."""


def scan(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    _check_flags(options)
    from arclight.cli.interruption import stopping
    from arclight.vision import qris
    from arclight.vision.inputs.image_source import ImageSource
    from arclight.vision.qris.reading.scanner import other_symbols
    from arclight.vision.results.writers import JsonObject, Names
    from arclight.vision.tasks.processing import load_detector_program

    console = console_of()
    verifier = None if options.registry is None else _Verifier(options.registry, options.place, options.report, console)
    detector = None
    if options.program is not None:
        program = load_detector_program(
            options.program, trusted=trusted(options), runtime=options.runtime, tasks=("detect", "corners")
        )
        detector = report_runtime(program, options.runtime).predict_one
    frames = ImageSource(options.source, vid_stride=options.stride)
    if options.follow:
        return follow(frames, detector, options.json, console)
    if verifier is not None and options.watch:
        return watch(frames, verifier, detector, options.json, console)
    names, counts = Names(), Counter[str]()  # results are written as they come: cameras have no end
    file = None if options.json is None else JsonObject(options.json, escaped=False)
    shown = UntilLost(progressed(frames, len(frames.inputs), "scanning", lambda frame: frame.path))
    with stopping(frames.stop), file or nullcontext():
        for frame in shown:
            name, _ = names.of(frame.path, frame.index)
            if verifier is not None:
                found: Any = verifier(name, frame.image, detector)
                codes = [one["code"] for one in found["checked"]] + found["others"]
            else:
                read = qris.scan(frame.image, detector) + other_symbols(frame.image)
                found = codes = [code.to_json() for code in read]
                console.print(listing(name, codes))
            if file is not None:
                file.add(name, found)
            counts.update(
                images=1,
                codes=len(codes),
                read=sum(code["text"] is not None for code in codes),
                payments=sum(code["kind"] == "qris" for code in codes),
            )
    summary = (
        f"{counts['images']} images, {counts['codes']} codes found, {counts['read']} read, "
        f"{counts['payments']} are payment codes (QRIS), {len(frames.skipped)} files skipped"
    )
    console.print(summary, highlight=False)
    return _status(shown.lost, verifier is not None and verifier.finish(), counts["images"])


def _check_flags(options: argparse.Namespace) -> None:
    """Raise UsageError for flags that need another, or contradict each other."""
    if options.runtime is not None and options.program is None:
        raise UsageError("--runtime is about programs: name a detector with --program")
    if options.registry is None and (options.report or options.place):
        raise UsageError("--report and --place need --registry FILE, the places that codes are held against")
    if options.report is not None:
        check_writable(options.report, "--report")
    if options.registry is None and options.watch:
        raise UsageError(
            "--watch needs --registry FILE, the places that codes are held against; --follow reads codes without one"
        )
    if options.follow and options.registry is not None:
        raise UsageError(
            "--follow reads videos and --registry verifies images: give one of them, or --watch in place of --follow"
        )


class UntilLost:
    """Frames of images, videos and cameras up to their end, or until one is lost.

    What was found before is kept: the error is in ``lost`` then, for `_status`.
    """

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = frames
        self.lost: SourceError | None = None

    def __iter__(self) -> Iterator[Frame]:
        from arclight.vision.inputs.memory_images import SourceError

        try:
            yield from self._frames
        except SourceError as error:
            self.lost = error


def _status(lost: SourceError | None, mismatch: bool, found: Any) -> int:
    """Return the exit status, once all is written; raise what ended the last stream."""
    if lost is not None:
        raise lost
    return MISMATCH_STATUS if mismatch else int(not found)  # all were skipped


def _parser() -> Parser:
    parser = Parser(
        prog="arclight scan",
        description="Find and read codes in images, and validate payment codes; with --registry, verify that they are those of "
        f"registered places (status {MISMATCH_STATUS} if one is not).",
    )
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="an image, a folder, a pattern such as 'a/*.jpg', a video, the number of a camera, or an address (rtsp://, http://)",
    )
    parser.add_argument(
        "--program",
        type=Path,
        metavar="PATH",
        help="exported detector of codes, or of codes and their corners (a folder or .onnx); default: a reader without a detector",
    )
    add_trust(parser)
    add_runtime(parser)
    parser.add_argument(
        "--registry",
        type=Path,
        metavar="FILE",
        help="places and their codes (.csv, .json or .toml: name, nmid, guids, pan, city, terminal, kind, poster)",
    )
    parser.add_argument("--place", metavar="NMID", help="NMID or name of the registered place that all images show")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page of verified images, mismatches first")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write a JSON object to this file: image to list of codes, with --registry to its verification",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="follow codes through the frames of videos and read each from several frames together",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="verify the codes that cameras and videos show (--registry): a frame is printed, and kept for --report and --json, when a "
        "code is new or its verdict, that of most of its frames, changes; ctrl-C ends it",
    )
    parser.add_argument("--stride", type=count, default=1, metavar="N", help="use every N-th frame of a video")
    return parser


def follow(frames: ImageSource, detector: Any, json_file: Path | None, console: Console) -> int:
    """Print the codes of each video, one for all frames in which it is seen."""
    from rich.text import Text
    from rich.tree import Tree

    from arclight.cli.interruption import stopping
    from arclight.vision.qris.reading.video import VideoScanner
    from arclight.vision.results.writers import Names

    scanners: dict[str, VideoScanner] = {}
    names = Names()
    shown = UntilLost(progressed(frames, len(frames.inputs), "following", lambda frame: frame.path))
    with stopping(frames.stop):  # cameras have no end: what was read until ctrl-C, or until they were lost, is written
        for frame in shown:
            name = names.of(frame.path, frame.index)[0].removesuffix(f"#{frame.index}")
            scanner = scanners.setdefault(name, VideoScanner(detector))
            if min(frame.image.shape[:2]) >= 8:
                scanner.add(frame.image)
    for path, scanner in scanners.items():
        tree = Tree(Text(printable(path), style="bold"))
        for track in scanner.tracks:
            text = "not readable" if track.text is None else printable(track.text)
            tree.add(Text.assemble((f"{track.id} ", "bold"), f"in {track.sightings} frames  ", text))
        if scanner.dropped:
            tree.add(f"and {scanner.dropped} lost earlier, of which nothing was kept")
        console.print(tree)
    tracks = {path: [track.to_json() for track in scanner.tracks] for path, scanner in scanners.items()}
    every = [track for found in tracks.values() for track in found]
    read = sum(track["text"] is not None for track in every)
    console.print(f"{len(tracks)} videos, {len(every)} codes followed, {read} read", highlight=False)
    write_json(json_file, tracks, escaped=False)
    return _status(shown.lost, False, tracks)


def watch(frames: ImageSource, verifier: _Verifier, detector: Any, json_file: Path | None, console: Console) -> int:
    """Verify the frames of cameras and videos, and print those that say something new of a code."""
    from arclight.cli.interruption import stopping
    from arclight.vision.results.writers import Names

    watched, found, looked_at = WatchedCodes(), dict[str, Any](), 0
    names, shown = Names(), UntilLost(frames)
    with stopping(frames.stop):
        for frame in shown:
            name, _ = names.of(frame.path, frame.index)
            verification = verifier.verify(frame.image, detector)
            looked_at += 1
            if not watched.update(frame.path, verification.checked):
                continue
            console.print(verdicts(name, verification))
            if len(found) < MAX_WATCHED:
                verifier.keep(name, frame.image, verification)
                found[name] = verification.to_json()
    standing = watched.standing()
    listed = ", ".join(f"{standing[verdict]} {verdict}" for verdict in _STYLES)
    console.print(f"watched: {looked_at} frames, {standing.total()} codes: {listed}", highlight=False)
    write_json(json_file, found, escaped=False)
    verifier.write()
    return _status(shown.lost, standing["mismatch"] > 0, looked_at)


class WatchedCodes:
    """Verdicts on each code that cameras show: of all its frames, the one that most gave.

    One frame may be blurred, or show a hand beside a code. At most `MAX_WATCHED` codes are remembered, those seen last.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counter[Verdict]] = {}
        self._standing: dict[tuple[str, str], Verdict] = {}

    def update(self, source: str, checked: tuple[CheckedCode, ...]) -> bool:
        """Add the codes of a frame; return True if one of them is new, or has another verdict now."""
        news = False
        for one in checked:
            key = (source, one.code.text or "")
            counts = self._counts[key] = self._counts.pop(key, Counter())  # the last in order is the one seen last
            counts[one.verdict] += 1
            before = self._standing.get(key)
            verdict = max(counts, key=lambda verdict: (counts[verdict], verdict == before))
            news = news or verdict != before
            self._standing[key] = verdict
        while len(self._counts) > MAX_WATCHED:
            oldest = next(iter(self._counts))
            del self._counts[oldest], self._standing[oldest]
        return news

    def standing(self) -> Counter[Verdict]:
        """Count the codes by verdict."""
        return Counter(self._standing.values())


class _Verifier:
    """Verify images one by one, print each verdict, and collect the report."""

    def __init__(self, registry: Path, place: str | None, report: Path | None, console: Console) -> None:
        from arclight.vision.qris.verification.registry import Registry
        from arclight.vision.qris.verification.report import VerificationReport

        self.registry, self.place, self.console, self.file = Registry.read(registry), place, console, report
        if place is not None:
            self.registry.named(place)  # an error before the first image
        self.report = VerificationReport(f"{len(self.registry.places)} rows of {registry.name}") if report else None
        self.found: Counter[Verdict] = Counter()

    def __call__(self, name: str, image: Any, detector: Any) -> dict[str, Any]:
        verification = self.verify(image, detector)
        self.found[verification.verdict] += 1
        self.console.print(verdicts(name, verification))
        self.keep(name, image, verification)
        return verification.to_json()

    def verify(self, image: Any, detector: Any) -> Verification:
        from arclight.vision.qris import verify

        return verify(image, self.registry, place=self.place, detector=detector)

    def keep(self, name: str, image: Any, verification: Verification) -> None:
        """Add an image to the report, if one is wanted."""
        if self.report is not None:
            self.report.add(name, image, verification)

    def finish(self) -> bool:
        """Print the counts and write the report; return whether there was a mismatch."""
        from arclight.vision.qris.verification.report import listed

        self.console.print(f"verified: {listed(self.found)}", highlight=False)
        self.write()
        return self.found["mismatch"] > 0

    def write(self) -> None:
        """Write the report, if one is wanted."""
        if self.report is not None and self.file is not None:
            self.console.print(f"report: {self.report.write(self.file)}", highlight=False, soft_wrap=True)


_STYLES: dict[Verdict, str] = {"match": "green", "unknown": "yellow", "mismatch": "bold red"}


def verdicts(name: str, verification: Verification) -> RenderableType:
    """Show one image, the verdict on each of its payment codes, and the evidence against it."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(printable(name), style="bold"))
    for one in verification.checked:
        payee = one.code.payload.merchant_name if one.code.payload else "damaged payment code"
        style = _STYLES[one.verdict]
        branch = tree.add(Text.assemble((one.verdict, style), f"  {printable(payee)}  score {one.score:.2f}"))
        for evidence in one.evidence:
            if evidence.weight > 0:
                branch.add(Text(f"{evidence.check}: {printable(evidence.message)}"))
    if not verification.checked:
        tree.add(Text("no payment code was read", style="dim"))
    return tree


def listing(name: str, codes: list[dict[str, Any]]) -> RenderableType:
    """Show one image and its codes, whose text is untrusted and never read as markup."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(printable(name), style="bold"))
    if not codes:
        tree.add(Text("no code", style="dim"))
    for code in codes:
        kind = "not readable" if code["text"] is None else str(code.get("symbology", code["kind"]))
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
