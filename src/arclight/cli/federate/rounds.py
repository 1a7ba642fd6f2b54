"""Manage a federated run's rounds: ``arclight checkpoint rounds|validate|edit|fork|prune``.

`commands.checkpoint` adds these verbs to its parser, and calls `inspect` for a run's folder; the functions of ``federated.rounds.tools`` do the
work. Verbs, options and the keys of ``--json`` are public and stay.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import Any

from arclight.cli.arguments import UsageError

RUN = "a federated run's folder, or its address such as s3://bucket/name"
DRY = "nothing was changed: add --yes to do it"


def add_verbs(verbs: Any) -> None:
    """Add the verbs on rounds to ``arclight checkpoint``."""
    verb = verbs.add_parser("rounds", help="list the rounds of a federated run")
    verb.add_argument("path", help=RUN)
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=rounds)

    verb = verbs.add_parser("validate", help="verify a round, or all rounds of a run; status 1 on damage")
    verb.add_argument("path", help=RUN)
    verb.add_argument("--round", type=int, metavar="N", help="only this round")
    verb.set_defaults(run=validate)

    verb = verbs.add_parser("edit", help="change numbers in the newest round of a run; a dry run without --yes")
    verb.add_argument("path", help=RUN)
    verb.add_argument("--round", type=int, required=True, metavar="N", help="round to edit")
    verb.add_argument("--number", type=int, metavar="N", help="new number of the round")
    verb.add_argument(
        "--clock", type=int, metavar="STEPS", help="optimizer steps of its weights, the position of schedules"
    )
    verb.add_argument("--seed", type=int, help="seed of the sampling of clients")
    verb.add_argument(
        "--client-steps",
        action="append",
        default=[],
        metavar="CLIENT=STEPS",
        help="progress of a client; may be repeated",
    )
    verb.add_argument("--no-backup", action="store_true", help="keep no backup of the round")
    verb.add_argument("--yes", action="store_true", help="apply the change")
    verb.set_defaults(run=edit)

    verb = verbs.add_parser("fork", help="start a new run from a round of another")
    verb.add_argument("path", help=RUN)
    verb.add_argument(
        "target",
        help="folder of the new run, for federate --resume; or an address to copy the round to",
    )
    verb.add_argument("--round", type=int, metavar="N", help="round to fork (default: the newest complete one)")
    verb.add_argument("--name", help="name of the new run (default: its folder's)")
    verb.add_argument("--dry-run", action="store_true", help="only print what would be done")
    verb.set_defaults(run=fork)

    verb = verbs.add_parser("prune", help="delete all but the newest rounds; a dry run without --yes")
    verb.add_argument("path", help=RUN)
    verb.add_argument("--keep", type=int, required=True, metavar="N", help="number of undamaged rounds to keep")
    verb.add_argument("--yes", action="store_true", help="apply the change")
    verb.set_defaults(run=prune)


def is_run(path: str) -> bool:
    """Return True if there are rounds of a federated run at ``path``."""
    from arclight.federated.rounds.store import Rounds

    return bool(Rounds(path).numbers())


def rounds(options: Namespace) -> int:
    from arclight.federated.rounds.tools import list_rounds

    found = list_rounds(options.path)
    if options.json:
        print(json.dumps([dataclasses.asdict(listed) for listed in found], indent=2))
        return 0
    import rich
    from rich.table import Table

    from arclight.trainer.run.curves import number_text
    from arclight.trainer.run.report import size_text

    table = Table(title=options.path, title_justify="left")
    for name in ("round", "step", "clients", "loss", "size", "written (UTC)"):
        table.add_column(name, justify="right")
    table.add_column("files")
    for listed in found:
        table.add_row(
            f"{listed.number:,}",
            "" if listed.clock is None else f"{listed.clock:,}",
            "" if listed.contributors is None else f"{listed.contributors:,}",
            "" if listed.loss is None else number_text(listed.loss),
            size_text(listed.bytes),
            listed.created.replace("T", " ")[:16],
            "sound" if listed.complete else "damaged",
        )
    rich.print(table)
    for listed in found:
        for problem in listed.problems:
            print(f"round {listed.number}: {problem}")
    return 0


def inspect(options: Namespace) -> int:
    """Print one round of a run in full."""
    from arclight.federated.rounds.tools import inspect_round

    found = inspect_round(options.path, options.round)
    if options.json:
        print(found.to_json())
        return 0
    import rich

    rich.print(found)
    return 0


def validate(options: Namespace) -> int:
    from arclight.federated.rounds.tools import validate as problems_of

    found = problems_of(options.path, options.round)
    wrong = {number: problems for number, problems in found.items() if problems}
    for number, problems in wrong.items():
        print("\n".join(f"round {number}: {problem}" for problem in problems))
    if not wrong:
        print(
            f"{len(found)} round{'s' * (len(found) != 1)} of {options.path} {'is' if len(found) == 1 else 'are'} sound: every "
            "file is what was written"
        )
    return 1 if wrong else 0


def edit(options: Namespace) -> int:
    from arclight.federated.rounds.tools import Edit
    from arclight.federated.rounds.tools import edit as edit_round

    wanted = Edit(
        number=options.number, clock=options.clock, seed=options.seed, client_steps=_steps(options.client_steps)
    )
    done = edit_round(options.path, options.round, wanted, dry_run=not options.yes, backup=not options.no_backup)
    for name, (before, after) in done.changes.items():
        print(f"{name}: {_shown(before)} -> {_shown(after)}")
    if not done.changes:
        print("nothing to change: the round has these values")
    elif not done.done:
        print(DRY)
    elif done.backup is not None:
        print(f"backup: {done.backup}")
    return 0


def fork(options: Namespace) -> int:
    from arclight.federated.rounds.tools import fork as fork_round

    path = fork_round(options.path, options.target, options.round, name=options.name, dry_run=options.dry_run)
    print(f"{'would write' if options.dry_run else 'wrote'} {path}")
    if "://" in options.target:
        print("a run needs a folder: fork from the address into one to resume it")
    elif not options.dry_run:
        print(f"resume it: arclight federate RECIPE --resume {options.target}")
    return 0


def prune(options: Namespace) -> int:
    from arclight.federated.rounds.tools import prune as prune_rounds

    try:
        gone = prune_rounds(options.path, keep=options.keep, dry_run=not options.yes)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    numbers = ", ".join(map(str, gone))
    print(f"{'removed' if options.yes else 'would remove'} rounds {numbers}" if gone else "nothing to remove")
    if gone and not options.yes:
        print(DRY)
    return 0


def _shown(value: Any) -> str:
    """Format a value for people; a history as the numbers of its rounds."""
    if not isinstance(value, list):
        return str(value)
    return "rounds " + (", ".join(str(entry["round"]) for entry in value) or "none")


def _steps(assignments: list[str]) -> dict[str, int]:
    """Parse ``client=steps`` arguments."""
    found = {}
    for word in assignments:
        client, equals, steps = word.rpartition("=")
        if not equals or not client or not steps.isdigit():
            raise UsageError(f"--client-steps {word}: write client=steps, as in 3=1000")
        found[client] = int(steps)
    return found
