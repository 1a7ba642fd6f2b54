"""Compare scores, outputs, latency and size: ``arclight compare``, status 1 beyond a bound.

`command` calls `compare`. Two candidates come in; ``deploy.comparison`` measures, for detectors also `detectors`. A bound is a flag of
`_add_bounds` and a field of ``Bounds``. Scripts read the exit status and the JSON, so both stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arclight.cli.arguments import Parser, UsageError, add_trust, check_writable, count, runtimes, seed, write_json
from arclight.cli.comparing.candidates import Candidate, check_comparable, evaluation, open_candidate
from arclight.cli.runs import is_program
from arclight.cli.style import working
from arclight.cli.user_module import add_weights


def compare(arguments: list[str]) -> int:
    """Compare two candidates; return 1 if B is beyond a bound."""
    from arclight.deploy.comparison import Bounds

    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    parser.check_spelling(rest)
    for place, flag in ((options.report, "--report"), (options.json, "--json")):
        if place is not None:
            check_writable(place, flag)
    bounds = Bounds(
        metric=options.metric, max_drop=options.max_drop, min_sqnr_db=options.min_sqnr, max_latency=options.max_latency,
        max_size=options.max_size,
    )  # fmt: skip
    sources = (options.a, options.b)
    a, b = (
        open_candidate(parser, options, source, rest, runtime)
        for source, runtime in zip(sources, _runtimes(sources, options.runtime), strict=True)
    )
    if rest and not (a.own or b.own or options.module):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    check_comparable(a, b)
    if a.task == b.task == "detect":
        from arclight.cli.comparing.detectors import compare_detectors

        exceeded = compare_detectors(parser, options, a, b, bounds)
    else:
        exceeded = _compare(parser, options, rest, a, b)
    for sentence in exceeded:
        print(sentence)
    return 1 if exceeded else 0


def _compare(
    parser: Parser, options: argparse.Namespace, rest: list[str], a: Candidate, b: Candidate
) -> tuple[str, ...]:  # fmt: skip
    """Compare two networks of any task, and return the bounds that are broken."""
    from arclight.deploy import compare as compared

    if options.report is not None:
        raise UsageError(f"--report: a page is written for detectors, and these are of the task {a.task or b.task!r}")
    judged = evaluation(parser, options, rest, a, b).first(options.samples)
    with working(f"comparing {a.name} and {b.name}"):
        found = compared(
            a.network, b.network, judged.samples, scores=judged.scores, classes=judged.classes, parts=judged.parts,
            names=(a.name, b.name), rounds=options.rounds, threads=options.threads, metric=options.metric, max_drop=options.max_drop,
            min_sqnr_db=options.min_sqnr, max_latency=options.max_latency, max_size=options.max_size,
        )  # fmt: skip
    print("\n".join(found.lines()))
    write_json(options.json, {**found.to_json(), "data": options.data, "task": a.task or b.task})
    return found.exceeded


def _runtimes(sources: tuple[str, str], named: list[str] | None) -> tuple[str | None, str | None]:
    """Return the runtimes of A and B.

    Raises UsageError for more than two, and for the runtime of a checkpoint.
    """
    if named is None:
        return None, None
    programs = [is_program(Path(source)) for source in sources]
    if len(named) > 2 or not any(programs):
        raise UsageError(
            f"--runtime {','.join(named)}: name one for the programs among A and B, or one for each of the two"
        )
    if len(named) == 1:
        return (named[0] if programs[0] else None), (named[0] if programs[1] else None)
    for source, ran in zip(sources, programs, strict=True):
        if not ran:
            raise UsageError(
                f"--runtime {','.join(named)}: {source} is no program, so it has no runtime: name one alone"
            )
    return named[0], named[1]


def _parser() -> Parser:
    parser = Parser(
        prog="arclight compare",
        usage="arclight compare A B [--data DATA] [options]",
        description="Compare two networks of one task: scores in total and by class, the signal-to-noise ratio of B's outputs against A's, the "
        "samples that differ most, latency and size; of detectors also intervals of differences, errors and images. Exit status 1 "
        "where B is beyond a bound.",
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(),
            help="a program (folder or .onnx), a run, a checkpoint, a model file of YOLOv5 (.pt), or package.module:Model",
        )  # fmt: skip
    add_trust(parser)
    parser.add_argument(
        "--runtime", type=runtimes, metavar="NAME|A,B",
        help="what runs the programs, or A and B each (onnxruntime, openvino, openvino-bf16, torch, inductor, fastest; default: what they were exported for)",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="PATH|TARGET",
        help="images (a data.yaml or folder) or texts, or package.module:Class of a module of your own (default: what A or B was trained on)",
    )  # fmt: skip
    parser.add_argument(
        "--split", choices=("val", "test", "train"), default="val", help="images that are read (default: %(default)s)"
    )
    parser.add_argument("--samples", type=count, default=64, metavar="N", help="samples that outputs are compared on (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--module", metavar="TARGET", help="package.module:Model that gives inputs and metric for two programs of a task of your own"
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="settings of a module of your own"
    )
    add_weights(parser)
    _add_bounds(parser)
    parser.add_argument("--rounds", type=count, default=15, metavar="N", help="timed calls of each, in turn (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--resamples", type=count, default=1000, metavar="N", help="bootstrap samples for intervals of detectors (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of the bootstrap samples (default: %(default)s)"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write a page of the comparison of detectors to this file"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser


def _add_bounds(parser: Parser) -> None:
    parser.add_argument(
        "--metric", metavar="NAME", help="the score that --max-drop is about (default: the first; map50_95 of detectors)"
    )  # fmt: skip
    parser.add_argument("--max-drop", type=float, metavar="X", help="status 1 if B scores lower than A by more")
    parser.add_argument("--min-sqnr", type=float, metavar="DB", help="status 1 if an output of B has a lower ratio to its difference from A's")  # fmt: skip
    parser.add_argument(
        "--max-latency", type=float, metavar="X", help="status 1 if B takes more than X times as long as A"
    )
    parser.add_argument("--max-size", type=float, metavar="X", help="status 1 if B has more than X times the size of A")
