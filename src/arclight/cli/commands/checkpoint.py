"""Inspect, verify and convert checkpoints, and federated rounds: ``arclight checkpoint``.

`command` calls `checkpoint`. ``arclight.checkpoint`` does the work for checkpoints, ``cli.federate.rounds`` for the rounds of a federated run.
Verbs, options and status 1 for damage are public and stay.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from arclight.cli.arguments import Parser
from arclight.cli.federate import rounds
from arclight.cli.runs import checkpoint_of


def checkpoint(arguments: list[str]) -> int:
    about = "Inspect, verify or convert a checkpoint; manage the rounds of a federated run. Nothing is ever unpickled."
    parser = Parser(prog="arclight checkpoint", description=about)
    verbs = parser.add_subparsers(required=True, metavar="inspect|verify|convert|rounds|validate|edit|fork|prune")

    verb = verbs.add_parser(
        "inspect", help="summarise a checkpoint, or a round of a federated run, without reading tensors"
    )
    verb.add_argument("path", help="a folder, or an address such as s3://bucket/name")
    verb.add_argument(
        "--round", type=int, metavar="N", help="round of a federated run (default: the newest complete one)"
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=inspect)

    verb = verbs.add_parser("verify", help="verify every file; status 1 on damage")
    verb.add_argument("path", help="a folder, or an address such as s3://bucket/name")
    verb.set_defaults(run=verify)

    verb = verbs.add_parser(
        "convert",
        help="convert between a checkpoint folder, .safetensors, .dcp folders, and foreign .pt or .ckpt files",
    )
    verb.add_argument("source", type=Path)
    verb.add_argument("target", type=Path)
    verb.set_defaults(run=convert)

    rounds.add_verbs(verbs)
    options = parser.parse_args(arguments)
    return int(options.run(options))


def inspect(options: Namespace) -> int:
    if options.round is not None or rounds.is_run(options.path):
        return rounds.inspect(options)
    import rich

    from arclight.checkpoint import inspect as summary_of

    found = summary_of(_checkpoint(options.path))
    if options.json:
        print(found.to_json())
    else:
        rich.print(found)
    return 0


def _checkpoint(place: str) -> str:
    """Return the checkpoint or address ``place``, or the best checkpoint of a run's folder."""
    return place if "://" in place else str(checkpoint_of(Path(place)))


def verify(options: Namespace) -> int:
    from arclight.checkpoint import verify as problems_of

    path = _checkpoint(options.path)
    problems = problems_of(path)
    print("\n".join(problems) or f"{path} is sound: every file is what was written")
    return 1 if problems else 0


def convert(options: Namespace) -> int:
    from arclight.checkpoint import convert as convert_checkpoint

    print(f"wrote {convert_checkpoint(checkpoint_of(options.source), options.target)}")
    return 0
