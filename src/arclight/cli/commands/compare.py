"""``arclight compare``: two runs, checkpoints or programs on one data set, with intervals, images, speed and size."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, check_writable, count, share, write_json
from arclight.cli.style import working

if TYPE_CHECKING:
    from arclight.vision.results.comparison import Comparison, Evaluated, Interval
    from arclight.vision.results.metrics import DetectionResults

TIMED = 32
"""Images whose stages of prediction are timed, in turns."""
TURN = 8
"""Images that one of the two is timed on before the other has its turn."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A detector to compare, from a module or a program alike."""

    name: str
    names: list[str]
    image_size: int
    size_bytes: int
    one_to_one: bool
    """Whether it names an object once: its boxes are not suppressed."""
    network: Callable[[Any], Any]
    """Images (N, 3, S, S) in [0, 1] to decoded predictions."""
    stage_times: Callable[[Sequence[str]], dict[str, list[float]]]


def compare(arguments: list[str]) -> int:
    """Compare; 1 if B scores lower than A by more than ``--max-drop``."""
    options = _parser().parse_args(arguments)
    for place, flag in ((options.report, "--report"), (options.json, "--json")):
        if place is not None:
            check_writable(place, flag)
    a, b = open_candidate(options.a), open_candidate(options.b)
    if a.names != b.names:
        raise UsageError(
            f"A finds {', '.join(a.names)}, and B {', '.join(b.names)}: compare detectors of the same classes, in the same order"
        )
    found, one, other = measured(a, b, options)
    print_scores(found, a.names)
    drop = -found.metrics[options.metric].difference
    from arclight.vision.results.comparison import METRICS, as_json, write_comparison

    if options.report is not None:
        facts = {"data": str(options.data), "split": options.split}
        write_comparison(options.report, found, one, other, a.names, facts=facts)
        print(f"The report is {options.report}")
    write_json(options.json, as_json(found, one, other, a.names))
    if options.max_drop is not None and not drop <= options.max_drop:
        print(f"B is lower by {drop:.4f} in {METRICS[options.metric]}: more than --max-drop {options.max_drop:g}")
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="arclight compare",
        description="Compare two detectors on one data set: scores in total and by class with intervals of their difference, errors, "
        "the images that they differ on, speed and size. Exit status 1 where B is lower than A by more than --max-drop.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, type=Path, metavar=name.upper(), help="a run, a checkpoint, a model file of YOLOv5 (.pt) or a program (.onnx)"
        )  # fmt: skip
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="the data.yaml of the images")
    parser.add_argument("--split", choices=("val", "test", "train"), default="val", help="default: %(default)s")
    parser.add_argument(
        "--metric", choices=("map50_95", "map50"), default="map50_95", help="what --max-drop is about (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--max-drop", type=share, metavar="X", help="exit with status 1 if B scores lower than A by more than this"
    )
    parser.add_argument(
        "--resamples", type=count, default=1000, metavar="N", help="bootstrap samples for intervals (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples (default: %(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page of the comparison to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser


def open_candidate(place: Path) -> Candidate:
    """Open the detector of a run, a checkpoint, a .pt file or a program. Raises UsageError for something else."""
    from arclight.vision.results.analysis import stage_times

    if place.suffix == ".onnx":
        from arclight.vision.tasks.processing import load_detector_program

        program = load_detector_program(place)
        processing: Any = program.processing
        return Candidate(
            name=str(place), names=list(processing.names), image_size=processing.image_size, size_bytes=program.nbytes,
            one_to_one=processing.iou_threshold is None, network=program, stage_times=lambda paths: stage_times(paths, processing, program),
        )  # fmt: skip
    import torch

    from arclight.cli.runs import load_vision_module
    from arclight.vision.tasks.detection import Detector
    from arclight.vision.tasks.module import InferenceCopy

    module: Any = Detector.load(place) if place.is_file() else load_vision_module(place)
    if not isinstance(module, Detector) or module.head != Detector.head:
        raise UsageError(f"{place} holds a {type(module).__name__}: only detectors are compared")
    module.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    module.check_weights()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.model.state_dict().values())
    return Candidate(
        name=str(place), names=list(module.names), image_size=module.settings.image_size, size_bytes=weights,
        one_to_one=module.one_to_one, network=InferenceCopy(module.model), stage_times=module.stage_times,
    )  # fmt: skip


def measured(a: Candidate, b: Candidate, options: argparse.Namespace) -> tuple[Comparison, Evaluated, Evaluated]:
    """Run both on the images of a split. Raises UsageError where these have other classes, or none can be read."""
    from arclight.vision.data.data_yaml import read_data_yaml
    from arclight.vision.results.comparison import Evaluated, compare

    spec = read_data_yaml(options.data)
    if list(spec.names) != a.names:
        raise UsageError(
            f"{options.data} has the classes {', '.join(spec.names)}, the detectors find {', '.join(a.names)}"
        )
    results = []
    for candidate in (a, b):
        with working(f"running {candidate.name}"):
            results.append(evaluated(candidate, options))
    records = results[0].records
    if not records:
        raise UsageError(f"no image of the {options.split} split can be read")
    with working("drawing samples"):
        found = compare(records, results[1].records, len(a.names), resamples=options.resamples, seed=options.seed)
    paths = [record.path for record in records[: TIMED + 1]]
    times: list[dict[str, list[float]]] = [{}, {}]
    for start in range(0, max(len(paths) - 1, 1), TURN):
        for kept, candidate in zip(times, (a, b)):
            for stage, more in candidate.stage_times(paths[start : start + TURN + 1]).items():
                kept.setdefault(stage, []).extend(more)
    one, other = (
        Evaluated(
            name=candidate.name, results=scored, stage_ms=kept, size_bytes=candidate.size_bytes, image_size=candidate.image_size
        )
        for candidate, scored, kept in zip((a, b), results, times)
    )  # fmt: skip
    return found, one, other


def evaluated(candidate: Candidate, options: argparse.Namespace) -> DetectionResults:
    """Score a detector, and keep what it found in each image."""
    from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
    from arclight.vision.results.metrics import EVALUATION_IOU
    from arclight.vision.results.records import RecordingMetrics
    from arclight.vision.tasks.module import evaluate

    dataset = DetectionDataset.open(
        read_data_yaml(options.data), options.split, image_size=candidate.image_size, cache_labels=False
    )
    metrics = RecordingMetrics(len(candidate.names), None if candidate.one_to_one else EVALUATION_IOU)
    results: DetectionResults = evaluate(candidate.network, dataset, metrics, collate)
    return results


def print_scores(found: Comparison, names: Sequence[str]) -> None:
    """Print a table of scores, and of the classes if there are several."""
    from arclight.vision.results.comparison import METRICS

    rows: list[tuple[str, Interval]] = [(title, found.metrics[name]) for name, title in METRICS.items()]
    classes = [(name, one) for name, one in zip(names, found.classes) if one is not None]
    if len(classes) > 1:
        rows += sorted(classes, key=lambda row: row[1].difference)
    width = max(len(title) for title, _ in rows)
    print(f"{'':<{width}}       A       B     B - A   95 % interval")
    for title, one in rows:
        print(
            f"{title:<{width}}  {one.a:6.3f}  {one.b:6.3f}  {one.difference:+8.3f}   {one.low:+.3f} to {one.high:+.3f}"
        )
