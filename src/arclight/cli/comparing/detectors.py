"""Compare two detectors on one data set: scores with intervals, errors and images.

`compare` calls `compare_detectors` if both sides have the task "detect". Out: printed tables, ``--json`` and a page, of ``deploy.comparison`` and
``vision.results.comparison``. Keys of the JSON are public and stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, write_json
from arclight.cli.comparing.candidates import Candidate, evaluation
from arclight.cli.style import working

if TYPE_CHECKING:
    from arclight.deploy.comparison import Bounds
    from arclight.deploy.comparison import Comparison as NetworkComparison
    from arclight.vision.results.comparison import Comparison, Evaluated, Interval
    from arclight.vision.results.metrics import DetectionResults

TIMED = 32
"""Most images whose stages of prediction are timed, in turns."""
IMAGES_PER_TURN = 8
"""Images on which one detector is timed before the other has its turn."""


@dataclass(frozen=True, kw_only=True)
class ComparedDetector:
    """A detector under comparison, from a module or a program alike."""

    name: str
    names: list[str]
    image_size: int
    size_bytes: int
    one_to_one: bool
    """True if it reports each object once, so that its boxes need no suppression."""
    network: Callable[[Any], Any]
    """Images (N, 3, S, S) in [0, 1] to decoded predictions."""
    stage_times: Callable[[Sequence[str]], dict[str, list[float]]]
    """Paths of photos to milliseconds of each photo by stage; the first photo is a warm-up (`analysis.stage_times`)."""


def compare_detectors(
    parser: Parser, options: argparse.Namespace, a: Candidate, b: Candidate, bounds: Bounds
) -> tuple[str, ...]:
    """Print and write the comparison; return the bounds that B breaks."""
    from arclight.deploy.comparison import bounded
    from arclight.vision.results.comparison import METRICS, as_json, write_comparison

    options.data = Path(_data(options, a, b))
    first, second = compared_detector(a), compared_detector(b)
    found, one, other = measured(first, second, options)
    networks = compared(parser, options, (a, b), (first, second), (one, other))
    scores = {name: (found.metrics[name].a, found.metrics[name].b) for name in METRICS}
    networks = bounded(replace(networks, scores=scores), replace(bounds, metric=bounds.metric or next(iter(METRICS))))
    print_scores(found, first.names)
    print("\n".join(networks.lines(scores=False)))
    if options.report is not None:
        facts = {"data": str(options.data), "split": options.split}
        write_comparison(options.report, found, one, other, first.names, facts=facts)
        print(f"The report is {options.report}")
    numbers = networks.to_json()
    shared = ("samples", "outputs", "worst", "latency", "size", "exceeded")
    write_json(options.json, as_json(found, one, other, first.names) | {name: numbers[name] for name in shared})
    return networks.exceeded


def _data(options: argparse.Namespace, a: Candidate, b: Candidate) -> str:
    """Return the data.yaml that is named, or that A or B was trained on.

    Raises UsageError for none.
    """
    if options.data is not None:
        return str(options.data)
    for module in (a.module, b.module):
        if module is not None and module.settings.data.exists():
            return str(module.settings.data)
    raise UsageError(f"the data of {a.name} and {b.name} is not here: name a data.yaml with --data")


def compared_detector(candidate: Candidate) -> ComparedDetector:
    """Return a detector that runs on images: a module's on the GPU, if there is one."""
    from arclight.vision.results.analysis import stage_times

    module = candidate.module
    if module is None:
        program = candidate.network
        processing: Any = program.processing
        return ComparedDetector(
            name=candidate.name, names=list(processing.names), image_size=processing.image_size, size_bytes=program.nbytes,
            one_to_one=processing.iou_threshold is None, network=program, stage_times=lambda paths: stage_times(paths, processing, program),
        )  # fmt: skip
    import torch

    from arclight.vision.tasks.module import inference_network

    module.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.model.state_dict().values())
    return ComparedDetector(
        name=candidate.name, names=list(module.names), image_size=module.settings.image_size, size_bytes=weights,
        one_to_one=module.one_to_one, network=inference_network(module.model), stage_times=module.stage_times,
    )  # fmt: skip


def compared(
    parser: Parser,
    options: argparse.Namespace,
    candidates: tuple[Candidate, Candidate],
    detectors: tuple[ComparedDetector, ComparedDetector],
    sides: tuple[Evaluated, Evaluated],
) -> NetworkComparison:
    """Compare outputs, latency and size of the networks.

    With other input or output shapes, latency and size alone.
    """
    from arclight.deploy import compare
    from arclight.deploy.comparison import Comparison as NetworkComparison

    a, b = candidates
    if _alike(candidates, detectors):
        judged = evaluation(parser, options, (), a, b).first(options.samples)
        with working("comparing outputs"):
            return compare(
                a.network, b.network, judged.samples, parts=judged.parts, names=(a.name, b.name), rounds=options.rounds,
                threads=options.threads,
            )  # fmt: skip
    import numpy as np
    import torch

    times = [np.asarray(side.stage_ms["network"]) for side in sides]
    pairs = times[1] / times[0]
    low, high = (float(np.quantile(pairs, share)) for share in (0.1, 0.9))
    return NetworkComparison(
        names=(a.name, b.name), samples=0, outputs={}, worst=(), latency_ms=(float(np.median(times[0])), float(np.median(times[1]))),
        latency=(float(np.median(pairs)), low, high), batch=1, threads=torch.get_num_threads(),
        nbytes=(detectors[0].size_bytes, detectors[1].size_bytes),
    )  # fmt: skip


def _alike(candidates: tuple[Candidate, Candidate], detectors: tuple[ComparedDetector, ComparedDetector]) -> bool:
    """Return True for two networks of the same inputs and outputs; two programs are known to be."""
    if candidates[0].module is candidates[1].module is None:
        return True
    first, second = detectors
    if first.image_size != second.image_size or first.one_to_one != second.one_to_one:
        return False
    import torch

    with torch.inference_mode():
        image = torch.zeros(1, 3, first.image_size, first.image_size)
        shapes = {tuple(one.network(image).shape) for one in detectors}
    return len(shapes) == 1


def measured(
    a: ComparedDetector, b: ComparedDetector, options: argparse.Namespace
) -> tuple[Comparison, Evaluated, Evaluated]:
    """Evaluate both on the images of a split.

    Raises UsageError if these have other classes, or none can be read.
    """
    from arclight.vision.data.data_yaml import merges_classes, read_data_yaml
    from arclight.vision.results.comparison import Evaluated, compare

    spec = read_data_yaml(options.data)
    if list(spec.names) != a.names and not merges_classes(a.names, spec.names):
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
    for start in range(0, max(len(paths) - 1, 1), IMAGES_PER_TURN):
        for kept, candidate in zip(times, (a, b)):
            for stage, more in candidate.stage_times(paths[start : start + IMAGES_PER_TURN + 1]).items():
                kept.setdefault(stage, []).extend(more)
    one, other = (
        Evaluated(
            name=candidate.name, results=scored, stage_ms=kept, size_bytes=candidate.size_bytes, image_size=candidate.image_size
        )
        for candidate, scored, kept in zip((a, b), results, times)
    )  # fmt: skip
    return found, one, other


def evaluated(candidate: ComparedDetector, options: argparse.Namespace) -> DetectionResults:
    """Score a detector, and keep what it found in each image."""
    from arclight.vision.data.data_yaml import merges_classes, read_data_yaml
    from arclight.vision.data.dataset import DetectionDataset, collate
    from arclight.vision.results.metrics import EVALUATION_IOU
    from arclight.vision.results.records import RecordingMetrics
    from arclight.vision.tasks.module import evaluate

    spec = read_data_yaml(options.data)
    dataset = DetectionDataset.open(
        spec, options.split, image_size=candidate.image_size, cache_labels=False,
        single_class=merges_classes(candidate.names, spec.names),
    )  # fmt: skip
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
