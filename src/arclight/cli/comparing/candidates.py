"""Open the candidates of a comparison, and find the evaluation for both.

`compare` opens both sides with it; `compare` and `detectors` get samples and scores from `evaluation`. A new kind of task must be recognised in
`open_candidate` and needs an evaluation; what makes two of it incomparable belongs in `check_comparable`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli import user_module
from arclight.cli.arguments import Parser, UsageError, report_runtime, trusted
from arclight.cli.commands.export import opened, run_of_own_module
from arclight.cli.runs import is_program, load_vision_module, trained_language

if TYPE_CHECKING:
    from arclight.deploy.comparison import Evaluation

BATCHES = 8
"""Training batches that the deployment of a user's own module reads, as its samples if it has no validation data."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of two networks of a task."""

    name: str
    network: Any
    """A `Program`, or a model."""
    task: str | None
    """Its task, as the metadata of programs name it; None if unknown."""
    evaluation: Callable[[], Evaluation] | None = None
    """Makes an evaluation that can score both candidates; None for a program, which has no data."""
    module: Any = None
    """Its `VisionModule`; None for a program, and for other tasks."""
    own: bool = False
    """Whether it is a user's own module."""
    classes: Sequence[str] | None = None
    tokenizer: str | None = None
    """Digest of a language model's tokenizer."""
    cache: Sequence[tuple[Any, Any]] | None = None
    """Heads and channels of each tensor of a language model's cache."""


def open_candidate(
    parser: Parser, options: argparse.Namespace, source: str, rest: Sequence[str], runtime: Any = None
) -> Candidate:
    """Open a program, run, checkpoint, .pt file of YOLOv5, or ``package.module:Model``.

    Raises UsageError for something else.
    """
    place = Path(source)
    if is_program(place):
        return _of_program(source, options, runtime)
    own = user_module.named_module([source]) is not None or run_of_own_module(place) is not None
    if own or trained_language([source]):
        return _of_deployment(parser, options, source, rest, own=own)
    from arclight.vision.models.yolov5 import Yolo, fuse
    from arclight.vision.tasks.detection import Detector

    module: Any = Detector.load(place) if place.is_file() else load_vision_module(place)
    module.check_weights()
    network = fuse(module.model) if isinstance(module.model, Yolo) else module.model.eval()  # trained with rounding
    return Candidate(
        name=source, network=network, task=module.head, module=module, classes=list(module.names),
        evaluation=lambda: vision_evaluation(module, options, source),
    )  # fmt: skip


def _of_program(source: str, options: argparse.Namespace, runtime: Any) -> Candidate:
    from arclight.deploy import Program

    program = report_runtime(Program.load(source, trusted=trusted(options), runtime=runtime), runtime)
    described = program.metadata
    name = source if runtime is None else f"{source} ({program.runtime})"
    return Candidate(
        name=name, network=program, task=described.get("task"), classes=described.get("names"), tokenizer=described.get("tokenizer"),
        cache=cache_of(described.get("task"), [spec.shape for spec in program.inputs]),
    )  # fmt: skip


def _of_deployment(
    parser: Parser, options: argparse.Namespace, source: str, rest: Sequence[str], *, own: bool
) -> Candidate:
    from arclight.deploy.capture import as_inputs
    from arclight.deploy.deployment import configured, evaluation_of

    chosen = argparse.Namespace(source=source, data=options.data, config=options.config, ckpt_path=options.ckpt_path)
    module, data = opened(parser, chosen, rest if own else ())
    if options.split != "val":
        raise UsageError(f"--split {options.split} is of images, and {source} is judged on its validation data")
    deployment = configured(module, data, BATCHES if own else 1)
    return Candidate(
        name=source, network=deployment.model, task=deployment.metadata.get("task"), own=own,
        tokenizer=deployment.metadata.get("tokenizer"), evaluation=lambda: evaluation_of(deployment),
        cache=cache_of(deployment.metadata.get("task"), [tuple(value.shape) for value in as_inputs(deployment.example_inputs)]),
    )  # fmt: skip


def cache_of(task: str | None, shapes: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Any]] | None:
    """Return heads and channels of each tensor of a cache; None for other tasks.

    shapes: those of a language model's inputs.
    """
    from arclight.text.language_program import TASK

    return [(shape[1], shape[3]) for shape in shapes[2:] if len(shape) == 4] if task == TASK else None


def vision_evaluation(module: Any, options: argparse.Namespace, source: str) -> Evaluation:
    """Return the evaluation of vision modules: images of ``--data``, or those trained on."""
    settings = module.settings.with_data(str(options.data or module.settings.data))
    if not settings.data.exists():
        raise UsageError(f"{settings.data}, which {source} was trained on, is not here: name images with --data")
    data = settings.data_class()(settings)
    if list(data.names) != list(module.names):
        raise UsageError(
            f"{settings.data} has the classes {', '.join(data.names)}, and {source} finds {', '.join(module.names)}"
        )
    found: Evaluation = module.evaluation(data, options.split)
    return found


def check_comparable(a: Candidate, b: Candidate) -> None:
    """Raise UsageError or ComparisonError for candidates that cannot be compared.

    UsageError for different tasks, classes, tokenizers or caches, ComparisonError for programs of other inputs or
    outputs.
    """
    from arclight.deploy.comparison import check_alike

    if a.task != b.task and None not in (a.task, b.task):
        raise UsageError(f"A is of the task {a.task!r}, and B of {b.task!r}: compare two of one task")
    if a.classes != b.classes and None not in (a.classes, b.classes):
        assert a.classes is not None
        assert b.classes is not None
        raise UsageError(
            f"A finds {', '.join(a.classes)}, and B {', '.join(b.classes)}: compare networks of the same classes, in the same order"
        )
    if a.tokenizer != b.tokenizer and None not in (a.tokenizer, b.tokenizer):
        raise UsageError(
            "A and B have different tokenizers, so their tokens are not the same text: compare models of one"
        )
    check_alike(a.network, b.network)
    if a.cache != b.cache and a.cache is not None and b.cache is not None:
        differences = [
            f"{len(cache)} tensors of (heads, channels) {', '.join(map(str, dict.fromkeys(cache)))}"
            for cache in (a.cache, b.cache)
        ]
        raise UsageError(
            f"A keeps a cache of {differences[0]}, and B of {differences[1]}: compare language models of the same layers"
        )


def evaluation(
    parser: Parser, options: argparse.Namespace, rest: Sequence[str], a: Candidate, b: Candidate
) -> Evaluation:  # fmt: skip
    """Return the evaluation for both candidates; UsageError if there is none.

    It is that of A's or else B's model, else of ``--module``, else the one for programs of their task on ``--data``.
    """
    from arclight.text.embedding_program import TASK as EMBEDDING
    from arclight.text.language_program import TASK, program_evaluation
    from arclight.vision.tasks.processing import PROGRAM_TASKS

    found = next((one.evaluation for one in (a, b) if one.evaluation is not None), None)
    if found is not None:
        return found()
    if options.module is not None:
        judge = _of_deployment(parser, options, options.module, rest, own=True)
        assert judge.evaluation is not None
        return judge.evaluation()
    if a.task == EMBEDDING:
        raise UsageError(
            f"{a.name} and {b.name} embed texts, for which there is no score: compare their vectors in Python, by deploy.compare on batches "
            "of tokens and lengths"
        )
    if a.task not in (TASK, *PROGRAM_TASKS):
        raise UsageError(
            f"{a.name} and {b.name} are programs of a task of your own, and hold neither inputs nor metric: name their module, "
            "--module package.module:Model"
        )
    if options.data is None:
        raise UsageError(f"{a.name} and {b.name} are programs, which hold no data: name some with --data")
    if a.task == TASK:
        return program_evaluation(a.network, options.data)
    from arclight.vision.tasks.deployment import evaluation_of

    return evaluation_of(a.network, options.data, options.split)
