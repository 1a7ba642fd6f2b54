"""Run a detector, language model or module of your own on new inputs: ``arclight predict``.

`command` calls `predict`. Detectors and vision programs take images, videos, cameras and streams; runs and programs of language models go to
``commands.language``, and ``package.module:Model`` to ``cli.user_run``. Flags, and the JSON that ``vision.results.writers`` writes, stay; lines
printed for people may change.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, add_runtime, add_trust, count, report_runtime, share, trusted
from arclight.cli.commands import language
from arclight.cli.interruption import stopping
from arclight.cli.runs import checkpoint_of, load_vision_module, run_folder, step_of, trained_language
from arclight.cli.style import progressed
from arclight.cli.user_module import named_module

if TYPE_CHECKING:
    from arclight.vision.data.images import Image
    from arclight.vision.inference.fusion import Detect
    from arclight.vision.inputs.image_source import Frame, ImageSource
    from arclight.vision.results.detections import Detections
    from arclight.vision.results.writers import Prediction, Writer
    from arclight.vision.tasks.module import VisionModule
    from arclight.vision.tracking.counting import Count

    Follow = Callable[[Frame, Detections], tuple[Detections, tuple[Count, ...]]]

Points = list[tuple[float, float]]


def predict(arguments: list[str]) -> int:
    if (own := named_module(arguments)) is not None:
        from arclight.cli.user_run import run_user_module

        run_user_module("predict", own, arguments[1:])
        return 0
    if trained_language(arguments) or language.names_program(arguments):
        language.predict(arguments)
        return 0
    if "--prompt" in arguments:
        raise UsageError(
            "--prompt needs the run or the program of a language model first, as in: arclight predict runs/lm-debug/1 --prompt TEXT"
        )
    options = _parser().parse_args(arguments)
    _check_flags(options)
    counting = TrackCounting.from_options(options)
    options.doubt, thresholds = doubt_of(options)
    detect, sources, confidence, names = finder(options)
    if thresholds is not None and thresholds.keys() - set(names):
        strange = ", ".join(sorted(thresholds.keys() - set(names)))
        raise UsageError(f"--thresholds: {strange} is not a class of this detector: it finds {', '.join(names)}")

    from arclight.vision.inputs.image_source import ImageSource
    from arclight.vision.inputs.memory_images import SourceError
    from arclight.vision.results.labelling import MostUncertain, PseudoLabels

    source = ImageSource(
        sources if len(sources) > 1 else sources[0], vid_stride=options.vid_stride, max_frames=options.max_frames,
        every_frame=options.every_frame, prefetch=2 * options.batch,
    )  # fmt: skip
    if source.live and options.max_frames is None:
        print("until ctrl-C:", ", ".join(one.name for one in source.live))
    counts, lost = Counter[str](), None
    uncertain = MostUncertain(options.uncertain or 0)
    listed = [*writers_of(options), *([uncertain] if options.uncertain is not None else [])]
    if thresholds is not None:
        listed.append(PseudoLabels(options.save_labels, thresholds))
    surely = confidence if options.doubt is not None else 0.0
    with stopping(source.stop) as interrupts, ExitStack() as stack:
        writers = [stack.enter_context(writer) for writer in listed]
        try:
            for prediction in predictions(source, detect, options.batch, counting.start(confidence), surely):
                for writer in writers:
                    writer.write(prediction)
                print(f"{prediction.name}: {prediction.found.summary()}")
                counts.update(images=1, objects=len(prediction.found))
        except SourceError as error:
            lost = error  # what was found before is kept
    for line in counting.summary():
        print(line)
    for score, name in uncertain.ranking:
        print(f"label next: {name} (uncertainty {score:.2f})")
    print(f"{counts['images']} images, {counts['objects']} objects, {len(source.skipped)} files skipped")
    if lost is not None:
        raise lost
    if interrupts and not source.live:  # which are ended so
        raise KeyboardInterrupt("the files hold what was found until then")
    return int(not counts["images"])  # all were skipped


def _check_flags(options: argparse.Namespace) -> None:
    """Raise UsageError for a flag that would do nothing without another."""
    for flag in ("trust", "runtime"):
        if getattr(options, flag) is not None and options.program is None:
            raise UsageError(f"--{flag} is about programs, and a run is none: name a program with --program")
    if options.overlap is not None and options.slice is None:
        raise UsageError("--overlap is that of slices: give their size, too, as --slice 320")


def predictions(
    source: ImageSource, detect: Detect, batch: int, follow: Follow, surely: float = 0.0
) -> Iterator[Prediction]:
    """Detect in the images of a source, ``batch`` at a time, and track what was found.

    With ``surely`` above 0, less confident objects are only in a prediction's ``candidates``.
    """
    from arclight.vision.results.writers import Names, Prediction

    names = Names()
    with closing(source.batches(batch)) as batches:
        for frames in progressed(batches, len(source.inputs), "looking", lambda frames: frames[-1].path):
            for frame, found in zip(frames, detect([frame.image for frame in frames]), strict=True):
                name, stem = names.of(frame.path, frame.index)
                fps = None if frame.fps is None else frame.fps / source.vid_stride
                candidates = found if surely else None
                own = dataclasses.replace(frame, path=name.removesuffix(f"#{frame.index}"))  # counted, if read again
                found, counts = follow(own, found[found.boxes.conf >= surely] if surely else found)
                yield Prediction(name, stem, frame.path, frame.index, fps, frame.image, found, counts, candidates)


class TrackCounting:
    """Track objects and count them at lines and in zones.

    Counts begin at zero in each video, and in each folder of images.
    """

    def __init__(self, tracker: str | None, lines: list[Points], zones: list[Points]) -> None:
        self.tracker, self.lines, self.zones = tracker, lines, zones
        self.counts: dict[str, tuple[Count, ...]] = {}

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> TrackCounting:
        """Build from options.

        Raises UsageError for invalid lines and zones, or without a tracker.
        """
        lines, zones = options.count_line or [], options.count_zone or []
        if (lines or zones) and options.track is None:
            raise UsageError("only tracked objects are counted: give --track bytetrack or --track ocsort, too")
        counting = cls(options.track, lines, zones)
        try:
            counting._new_counts()
        except ValueError as error:
            raise UsageError(f"--count-line, --count-zone: {error}") from None
        return counting

    def _new_counts(self) -> tuple[Count, ...]:
        from arclight.vision.tracking.counting import LineCount, ZoneCount

        return (*map(LineCount, self.lines), *map(ZoneCount, self.zones))

    def start(self, confidence: float) -> Follow:
        """Return a function that tracks and counts objects; ``confidence`` starts a track."""
        if (name := self.tracker) is None:
            return lambda frame, found: (found, ())
        from arclight.vision.tracking.tracks import Trackers, make_tracker

        trackers = Trackers(lambda: make_tracker(name, confidence))

        def follow(frame: Frame, found: Detections) -> tuple[Detections, tuple[Count, ...]]:
            tracked = trackers.update(frame, found)
            place = frame.path if frame.index is not None else str(Path(frame.path).parent)
            counts = self.counts.setdefault(place, self._new_counts()) if self.lines or self.zones else ()
            for counter in counts:
                counter.update(tracked)
            return tracked, counts

        return follow

    def summary(self) -> Iterator[str]:
        """Yield lines of text with the counts."""
        for place, counts in self.counts.items():
            kinds = [f"line {n + 1}" for n in range(len(self.lines))] + [
                f"zone {n + 1}" for n in range(len(self.zones))
            ]
            yield from (f"{place}, {kind}: {counter}" for kind, counter in zip(kinds, counts, strict=True))


def writers_of(options: argparse.Namespace) -> list[Writer]:
    """Make a writer for each output that was asked for."""
    from arclight.vision.results import writers

    made: list[tuple[Path | None, Callable[[Path], Writer]]] = [
        (options.out, writers.MarkedImages),
        (options.save_video, writers.Videos),
        (options.save_txt, writers.Labels),
        (options.save_crop, writers.Crops),
        (options.save_csv, lambda path: writers.CsvFile(path, tracked=options.track is not None)),
        (options.save_jsonl, writers.JsonLines),
        (options.json, writers.JsonFile),
    ]
    if options.heatmap is not None:
        made.append((options.heatmap, lambda path: writers.HeatMaps(path, options.heated)))
    return [make(path) for path, make in made if path is not None]


def _parser() -> Parser:
    parser = Parser(
        prog="arclight predict",
        usage="arclight predict RUN SOURCE [SOURCE ...] [options], or arclight predict SOURCE [SOURCE ...] --program FILE [options]",
        description="Find objects in images, videos, cameras and streams, or say their class, with the best checkpoint of a run or with an exported "
        "program; or, with package.module:Model first, predict with a module of your own. With the run of a language model first, generate text: "
        "arclight predict RUN --prompt TEXT; RUN --help says more.",
    )
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="an image, a folder, a pattern such as 'a/*.jpg', a video, the number of a camera, an address (rtsp://, http://), "
        "'screen', a file of sources by line (.streams), or - for paths by line of standard input; before them, without --program, "
        "a run folder or a checkpoint, or several, whose boxes are fused",
    )
    parser.add_argument("--program", type=Path, metavar="PATH", help="exported program (a folder or .onnx)")
    parser.add_argument(
        "--conf", type=share, metavar="P", help="confidence threshold, in [0, 1] (default: as in training)"
    )
    parser.add_argument(
        "--iou", type=share, metavar="P",
        help="IoU threshold of non-maximum suppression, in [0, 1] (default: as in training)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the images with their boxes to this folder")
    parser.add_argument(
        "--save-video",
        type=Path,
        metavar="DIR",
        help="write videos and streams with their boxes to this folder, as .mp4",
    )
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
    parser.add_argument(
        "--save-jsonl",
        type=Path,
        metavar="FILE",
        help="write a line of JSON for each image to this file, as soon as it is done",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the detections to this file, as one object")
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="keep objects of these classes only")
    parser.add_argument("--agnostic-nms", action="store_true", help="let boxes suppress those of other classes too")
    parser.add_argument("--max-det", type=count, metavar="N", help="most objects of one image (default: 300)")
    add_trust(parser)
    add_runtime(parser)
    _add_label_options(parser)
    _add_input_options(parser)
    _add_inference_options(parser)
    return parser


def _add_label_options(parser: Parser) -> None:
    parser.add_argument(
        "--uncertain", type=count, metavar="N", help="name the N images that are most worth labelling next"
    )
    parser.add_argument(
        "--save-labels", type=Path, metavar="DIR",
        help="write labels in YOLO format to this folder, of objects above the best threshold of its class (as arclight validate found it)",
    )  # fmt: skip
    parser.add_argument(
        "--thresholds", type=Path, metavar="FILE", help="the validate.json of these thresholds (default: that of the run)"
    )  # fmt: skip


def _add_inference_options(parser: Parser) -> None:
    parser.add_argument(
        "--slice",
        type=count,
        metavar="PX",
        help="look at overlapping slices of this many pixels, too, for small objects",
    )
    parser.add_argument(
        "--overlap", type=_overlap, metavar="P", help="share of a slice that overlaps the next (default: 0.2)"
    )
    parser.add_argument(
        "--augment", action="store_true", help="look at a smaller and a mirrored copy of each image, too"
    )
    parser.add_argument(
        "--sizes", type=count, nargs="+", metavar="PX",
        help="look at each image at these sizes of the input in place of the one of training, and keep the best of equal boxes",
    )  # fmt: skip
    parser.add_argument(
        "--code-evidence", action="store_true",
        help="for detectors of QR codes: weigh and place each box by what is seen of a code in it, such as its finder patterns",
    )  # fmt: skip
    parser.add_argument(
        "--heatmap",
        type=Path,
        metavar="DIR",
        help="write what the network looks at, as a .png for each image, to this folder",
    )
    parser.add_argument(
        "--track", choices=["bytetrack", "ocsort"], help="number objects and follow them through videos"
    )
    parser.add_argument(
        "--count-line", type=_points, action="append", metavar="X1,Y1,X2,Y2",
        help="count tracked objects that cross this line, to the right and to the left of who walks from its first point to its second",
    )  # fmt: skip
    parser.add_argument(
        "--count-zone", type=_points, action="append", metavar="X1,Y1,X2,Y2,X3,Y3,...",
        help="count tracked objects in the polygon of these corners, pixels",
    )  # fmt: skip


def _add_input_options(parser: Parser) -> None:
    parser.add_argument(
        "--vid-stride",
        "--stride",
        type=count,
        default=1,
        metavar="N",
        help="use every N-th frame of a video or stream",
    )
    parser.add_argument("--max-frames", type=count, metavar="N", help="end after this many images and frames")
    parser.add_argument(
        "--every-frame",
        action="store_true",
        help="look at each frame of a stream, with a delay where the detector is slower (default: the newest)",
    )
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="images that are looked at together")


def _overlap(text: str) -> float:
    if (value := share(text)) == 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _points(text: str) -> Points:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) < 2 or len(values) % 2:
        raise argparse.ArgumentTypeError(f"{text} is not a list of points: write pixels as x1,y1,x2,y2")
    return list(zip(values[::2], values[1::2], strict=True))


def doubt_of(options: argparse.Namespace) -> tuple[float | None, dict[str, float] | None]:
    """Return the least confidence of doubtful boxes, and each class's threshold for labels.

    Either is None if no option needs it. Raises UsageError if there are no thresholds, or with a tracker.
    """
    if options.save_labels is None and options.thresholds is not None:
        raise UsageError("--thresholds are those of --save-labels: give it a folder, too")
    if options.uncertain is None and options.save_labels is None:
        return None, None
    if options.track is not None:
        raise UsageError("--track follows doubtful boxes itself: run --uncertain and --save-labels without it")
    from arclight.vision.results.labelling import DOUBT_FLOOR, read_thresholds

    if options.save_labels is None:
        return DOUBT_FLOOR, None
    place = options.thresholds
    if place is None:
        several = len(list(itertools.takewhile(_is_run, options.source))) > 1
        if moved := "--code-evidence" if options.code_evidence else "an ensemble" if several else None:
            raise UsageError(
                f"--save-labels takes thresholds that arclight validate has measured of one run as it is, and {moved} has other confidences: "
                "leave it out, or give --thresholds of your own"
            )
        run = run_folder(Path(options.source[0])) if options.program is None else None
        if run is None or not (run / "validate.json").is_file():
            whose = f"arclight validate {run}" if run is not None else "arclight validate RUN"
            raise UsageError(
                f"--save-labels needs each class's threshold: {whose} writes them, or give --thresholds FILE"
            )
        place = run / "validate.json"
    try:
        thresholds = read_thresholds(place)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.thresholds is None:
        _check_measured(place, Path(options.source[0]))
    return min(DOUBT_FLOOR, *thresholds.values()), thresholds


def _check_measured(numbers: Path, run: Path) -> None:
    """Raise UsageError if thresholds were measured at another step than the run predicts at."""
    measured, used = json.loads(numbers.read_text(encoding="utf-8")), checkpoint_of(run)
    if measured.get("step") not in (None, step := step_of(used)):
        raise UsageError(
            f"--save-labels: the thresholds of {numbers} were measured on {measured.get('checkpoint')} (step {measured['step']}), and "
            f"{used.name} (step {step}) predicts: run arclight validate {run}, or give --thresholds of your own"
        )


def finder(options: argparse.Namespace) -> tuple[Detect, list[str], float, list[str]]:
    """Build the detector of the program or the runs that are named.

    Also returns the words that name images, the confidence threshold, and the names of classes.
    """
    from arclight.vision.boxes import MAX_DET, TOP_K

    given = {
        "conf_threshold": options.conf, "iou_threshold": options.iou, "agnostic": options.agnostic_nms or None,
        "max_det": options.max_det if options.classes is None and not options.code_evidence else max(TOP_K, options.max_det or 0),
    }  # fmt: skip  # other classes take no places, and evidence may put another box first
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        members, sources = (_program if options.program is not None else _runs)(options, changed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _check_head(options, members)
    names, confidence = members[0].names, members[0].confidence
    if options.classes is not None and (unknown := [name for name in options.classes if name not in names]):
        raise UsageError(f"--classes: {unknown[0]!r} is not a class of this detector: it finds {', '.join(names)}")
    if other := next((member.names for member in members if member.names != names), None):
        raise UsageError(
            f"these detectors find other classes: {', '.join(names)} and {', '.join(other)}; their boxes cannot be fused"
        )
    detect = _widened(options, [member.detect for member in members])
    if members[0].head == "classify":
        return detect, sources, confidence, names
    if options.code_evidence:
        from arclight.vision.data.data_yaml import first_names
        from arclight.vision.qris.reading.evidence import code_classes, with_code_evidence

        weighed = code_classes(names)
        if not weighed:
            warnings.warn(
                f"--code-evidence takes all boxes for QR codes, as no class is called qr: {first_names(names)}. "
                "Those without a code fall",
                stacklevel=2,
            )
        detect = with_code_evidence(
            detect, _lowest(options, confidence), classes=weighed or None, **_suppression(options)
        )
    kept = options.max_det or MAX_DET  # of all slices and copies together

    def chosen(images: Sequence[Any]) -> list[Detections]:
        answers = detect(images)
        if options.classes is not None:
            answers = [found.of(*options.classes) for found in answers]
        return [found[:kept] for found in answers]

    return chosen, sources, confidence, names


@dataclasses.dataclass(frozen=True)
class _Member:
    """Model with its network's head, its classes, and its confidence threshold."""

    detect: Detect
    head: str
    names: list[str]
    confidence: float
    processing: Any

    @property
    def suppresses(self) -> bool:
        """Return True if its boxes suppress each other (NMS)."""
        return getattr(self.processing, "iou_threshold", None) is not None


def _check_head(options: argparse.Namespace, members: list[_Member]) -> None:
    """Raise UsageError for options that a network's head does not support."""
    again = {
        "--slice": options.slice is not None, "--augment": options.augment, "--sizes": options.sizes is not None,
        "--code-evidence": options.code_evidence, "several runs": len(members) > 1,
    }  # fmt: skip
    boxes = {
        "--classes": options.classes is not None, "--save-crop": options.save_crop is not None, "--track": options.track is not None,
        "--uncertain": options.uncertain is not None, "--save-labels": options.save_labels is not None,
    }  # fmt: skip
    heads = {member.head for member in members}
    if options.agnostic_nms and "classify" not in heads and not (members[0].suppresses or any(again.values())):
        raise UsageError(
            "--agnostic-nms: this network predicts each object once, and its boxes suppress none: leave it out, or give --iou, too"
        )
    if "classify" in heads and (flags := [flag for flag, given in (boxes | again).items() if given]):
        raise UsageError(f"{flags[0]}: that is for boxes, and a classifier finds none: leave it out")
    for head, part in (("segment", "masks"), ("pose", "keypoints"), ("corners", "corners"), ("obb", "angles")):
        if head in heads and (flags := [flag for flag, given in again.items() if given]):
            raise UsageError(f"{flags[0]}: fused boxes lose their {part}: leave it out, or use a detector")


def _widened(options: argparse.Namespace, detectors: list[Detect]) -> Detect:
    """Combine detectors, augmentation and slicing, as far as these are asked for."""
    from arclight.vision.inference.fusion import ensemble
    from arclight.vision.inference.slicing import sliced
    from arclight.vision.inference.test_time import augmented

    detect = detectors[0] if len(detectors) == 1 else ensemble(detectors, agnostic=options.agnostic_nms)
    if options.augment:
        detect = augmented(detect, **_suppression(options))
    if options.slice is None:
        return detect
    overlap = {} if options.overlap is None else {"overlap": options.overlap}
    return sliced(detect, options.slice, **overlap, **_suppression(options))


def _suppression(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options by which boxes of several passes suppress each other (NMS)."""
    given: dict[str, Any] = {"agnostic": options.agnostic_nms}
    return given if options.iou is None else {**given, "iou_threshold": options.iou}


def _wanted(options: argparse.Namespace, processing: Any, head: str) -> tuple[Any, float]:
    """Return processing that keeps the doubtful boxes for a tracker or labeller.

    Also returns the confidence threshold without them. A classifier finds no boxes: its processing stays, and its threshold is 0.
    """
    if head == "classify":
        return processing, 0.0
    confidence: float = processing.conf_threshold
    lowest = _lowest(options, confidence)
    if options.code_evidence:
        from arclight.vision.qris.reading.evidence import threshold_before

        lowest = threshold_before(lowest)
    return dataclasses.replace(processing, conf_threshold=lowest), confidence


def _lowest(options: argparse.Namespace, confidence: float) -> float:
    """Return the least confidence of the boxes that a tracker or labeller gets."""
    if options.track is not None:
        from arclight.vision.tracking.tracks import lowest_confidence

        return lowest_confidence(options.track, confidence)
    return confidence if options.doubt is None else min(confidence, options.doubt)


def _program(options: argparse.Namespace, changed: dict[str, Any]) -> tuple[list[_Member], list[str]]:
    if options.sizes is not None:
        raise UsageError("--sizes: a program has the input size of its export; name the run, or a checkpoint")
    if options.heatmap is not None:
        raise UsageError("--heatmap needs gradients, which a program does not have: name the run, or a checkpoint")
    from arclight.vision.tasks.processing import load_vision_program

    program = load_vision_program(options.program, trusted=trusted(options), runtime=options.runtime, **changed)
    report_runtime(program, options.runtime)
    head, names = program.metadata["task"], program.metadata["names"]
    processing, confidence = _wanted(options, program.processing, head)
    return [_Member(program.with_processing(processing).predict, head, names, confidence, processing)], options.source


def _runs(options: argparse.Namespace, changed: dict[str, Any]) -> tuple[list[_Member], list[str]]:
    """Open the runs that are named first, one or more."""
    first = options.source[0]
    sources = list(itertools.dropwhile(_is_run, options.source))
    runs = options.source[: len(options.source) - len(sources)]
    if not runs:
        if not Path(first).exists() and "*" not in first and not Path(first).suffix:
            raise UsageError(f"there is no run folder {first}, nor images of this name")
        raise UsageError(
            f"{first} is not a run: name the run of a detector first, as in arclight predict runs/detect-qris/1 {first}, or a program with --program"
        )
    if not sources:
        raise UsageError(f"name images after the run, as in arclight predict {first} photos")

    import torch

    from arclight.vision.inference.test_time import multi_scale
    from arclight.vision.tasks.detection import Detector
    from arclight.vision.tasks.processing import with_fields

    members = []
    for run in runs:
        detector = load_vision_module(Path(run)).to("cuda" if torch.cuda.is_available() else "cpu")
        processing, confidence = _wanted(options, with_fields(detector.processing, changed), detector.head)
        predict: Detect = functools.partial(detector.predict, processing=processing)
        if options.sizes is not None and isinstance(detector, Detector) and detector.head == "detect":
            predict = multi_scale(detector, options.sizes, processing, **_suppression(options))
        members.append(_Member(predict, detector.head, detector.names, confidence, processing))
        options.heated = functools.partial(_heated, detector, confidence)
    if options.heatmap is not None and len(members) > 1:
        raise UsageError(f"--heatmap is of one network, and these are {len(members)}: name one run")
    return members, sources


def _heated(module: VisionModule, confidence: float, image: Image) -> Image:
    """Draw the activation map of ``image``, in one pass over all of it."""
    from arclight.vision.inference.heat_map import heat_map, heated

    return heated(image, heat_map(module, image, confidence))


def _is_run(word: str) -> bool:
    return run_folder(Path(word)) is not None or (Path(word) / "manifest.json").is_file()
