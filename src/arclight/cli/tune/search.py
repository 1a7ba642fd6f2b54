"""Run trials until the budget is spent, and write the best recipe: ``arclight tune``.

`command` calls `tune`. In: a recipe, or a user's module, with a space (`space`); out: a folder of ordinary runs (`trial`), Optuna's database
(`study`), ``best.toml`` with the best values and a page (`search_report`). A stopped search is resumed from its folder, so the names of files and
settings in it stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import (
    RECIPE,
    Parser,
    UsageError,
    check_short_flags,
    check_writable,
    read_recipe,
    recipe_parser,
)
from arclight.cli.schema import UserRun
from arclight.cli.tune.space import OF_THE_RUN, Parameter, Range, TunedRun, leaves, parameters, start
from arclight.cli.user_module import config_text, named_module, read_run, target_of
from arclight.fabric.atomic_replace import replace_text
from arclight.recipe import write

if TYPE_CHECKING:
    from arclight.cli.tune.trial import Search

TRIALS = 20
OF_USER_MODULE = "config.toml"
SETTINGS = "search.json"
KEPT = ("study", "monitor", "mode", "sampler", "pruner", "jobs")
"""Fields of a `Search` in ``search.json``; ``--resume`` reads them."""
OF_RECIPE = "recipe"
"""Attribute of a study in the database: the recipe with which it was begun."""
CHECKED_FIRST = 3
"""A search ends with an error if so many first trials have all failed, or so many processes in succession have begun none."""


def tune(arguments: list[str]) -> None:
    own = named_module(arguments)
    parser = tune_parser(own is not None)
    if "-h" not in arguments and "--help" not in arguments:
        resumed, _ = parser.parse_known_args(arguments)
        if resumed.resume is not None:
            return run_search(*resume(parser, arguments))
    if own is not None:
        options, flags = user_options(parser, own, arguments[1:])
        run: Any = read_run(own, options, flags)
        text, target = config_text(dataclasses.replace(run, search=None)), target_of(own)
    else:
        run, options = read_recipe(parser, arguments)
        text, target = write(dataclasses.replace(run, search=None)), None
    return run_search(*begin(run, TunedRun(text, target), options))


def tune_parser(of_user_module: bool) -> Parser:
    parser = recipe_parser("tune", "Search the settings of a recipe, or of a module of your own, for the best ones.")
    parser.usage = "arclight tune [recipe.toml | package.module:Model] --search.FIELD low:high[:log] ... [options]"
    if of_user_module:
        parser.add_argument("--data", metavar="TARGET", help="package.module:Class of the data")
        parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help="settings in TOML")
    parser.add_argument("--trials", type=_positive, metavar="N", help=f"trials that shall end (default: {TRIALS})")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="TIME", help="start no trial after this time, as 90s, 30m or 8h"
    )
    parser.add_argument("--jobs", type=_positive, metavar="N", help="trials at a time, a process each (default: 1)")
    parser.add_argument("--sampler", choices=("tpe", "cmaes", "random"), help="how values are drawn (default: tpe)")
    parser.add_argument(
        "--pruner", choices=("median", "hyperband", "none"), help="which trials end early (default: median)"
    )
    parser.add_argument(
        "--monitor", metavar="NAME", help="logged value to improve (default: that of [checkpoint] or [stopping])"
    )
    parser.add_argument("--mode", choices=("min", "max"), help="whether lower or higher is better (default: as there)")
    parser.add_argument(
        "--storage", metavar="URL", help="database of the trials, for several machines (default: a file of SQLite)"
    )
    parser.add_argument("--study", metavar="NAME", help="name of the search in that database (default: the recipe's)")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="go on with the search in this folder")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"need a whole number above 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"need a time above 0, such as 90s, 30m or 8h, got {text!r}")
    return seconds


def user_options(parser: Parser, model: type, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of a search over a user's own module."""
    from arclight.cli.user_run import user_help

    words_without_help = [word for word in words if word not in ("-h", "--help")]
    options, flags = parser.parse_known_args(words_without_help)
    if len(words_without_help) < len(words):
        print(user_help(parser, model, options))
        raise SystemExit(0)
    check_short_flags(flags, UserRun)
    return options, flags


def begin(run: Any, subject: TunedRun, options: argparse.Namespace) -> tuple[Search, dict[str, Any]]:
    """Check a new search, make its folder, and write what repeats and resumes it."""
    from arclight.cli.tune import study as studies
    from arclight.cli.tune.trial import Search, check_one_process

    space = parameters(subject, run.search)
    if options.sampler == "cmaes" and not any(isinstance(one, Range) for one in space):
        raise UsageError("--sampler cmaes evolves ranges, and there are choices only: leave it at tpe")
    check_one_process(run)
    monitor, mode = goal(run, options)
    name = run.name or str(subject.target).rpartition(":")[2].rpartition(".")[2].lower()
    check_writable(run.root / name, "root")
    folder = next_search(run.root / name)
    storage = options.storage or studies.local_database(folder)
    study_name = options.study or (name if options.storage else folder.name)
    search = Search(
        subject=subject, parameters=tuple(space), folder=folder, storage=storage, study=study_name, monitor=monitor, mode=mode,
        sampler=options.sampler or "tpe", pruner=options.pruner or "median", seed=run.seed, jobs=options.jobs or 1,
    )  # fmt: skip
    try:
        agree_with_study(search, start(space, subject.read()))
    except UsageError:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise
    kept = {name: getattr(search, name) for name in KEPT}
    limits = {"trials": options.trials or TRIALS, "timeout": options.timeout}
    settings = {
        "target": subject.target,
        "storage": options.storage and studies.without_password(storage),
        **kept,
        **limits,
    }
    text = f"# arclight tune --resume {folder} goes on with this search.\n\n{subject.write(run)}"
    replace_text(folder / (OF_USER_MODULE if subject.target else RECIPE), text)
    replace_text(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")  # last: with it the folder is a search
    return search, limits


def goal(run: Any, options: argparse.Namespace) -> tuple[str, str]:
    """Return the value to improve and its mode. Raises UsageError if nothing names it."""
    from arclight.trainer.run.curves import mode_of

    known = {part.monitor: part.mode for part in (run.stopping, run.checkpoint) if part is not None and part.monitor}
    monitor = options.monitor or next(reversed(known), None)
    if monitor is None:
        raise UsageError("name the value to improve, as in --monitor val/loss, or set checkpoint.monitor")
    mode = options.mode or known.get(monitor) or mode_of(monitor)
    if mode is None:
        raise UsageError(f"say whether lower or higher values of {monitor} are better: --mode min or --mode max")
    return monitor, mode


def next_search(parent: Path) -> Path:
    """Make the folder tune-n with the next free number."""
    taken = [int(path.name[5:]) for path in parent.glob("tune-*") if path.name[5:].isdigit()]
    number = max(taken, default=0)
    while True:
        number += 1
        try:
            (parent / f"tune-{number}").mkdir(parents=True)
        except FileExistsError:
            continue
        return parent / f"tune-{number}"


def agree_with_study(search: Search, own: dict[str, Any] | None) -> None:
    """Record in a new study what is searched; UsageError if the database has another search.

    own: the recipe's own values, which the first trial gets; None if they are not in the space.
    """
    from arclight.cli.tune import study as studies

    study = search.open()
    if "search" not in study.user_attrs:
        if study.get_trials(deepcopy=False):
            raise UsageError(
                f"--study {search.study}: the database has a study of this name that arclight did not create; give another name"
            )
        study.set_user_attr(studies.START, own)  # before what says that all of it is noted
        study.set_user_attr(OF_RECIPE, search.subject.text)
        study.set_user_attr("search", _described(search))
    elif differs := _difference(search, study):
        raise UsageError(
            f"--study {search.study}: the search of this name in the database has another {differs}. Give this one a name of its own"
        )
    else:
        warn_of_other_recipe(search, study)


def agree_with_folder(search: Search) -> None:
    """Raise UsageError unless the database has the search of the folder, with its ranges."""
    from arclight.cli.tune import study as studies

    study = search.open()
    if "search" not in study.user_attrs:
        raise UsageError(
            f"--resume {search.folder}: the database {studies.without_password(search.storage)} has no search {search.study}: name the one that "
            "has, with --storage"
        )
    if differs := _difference(search, study):
        raise UsageError(
            f"--resume {search.folder}: the search has another {differs}. Put back the ranges of its file, or start a new search"
        )
    warn_of_other_recipe(search, study)


def _described(search: Search) -> dict[str, Any]:
    return {"monitor": search.monitor, "mode": search.mode, "space": [_describe(one) for one in search.parameters]}


def _difference(search: Search, study: Any) -> str:
    """Describe how the search of ``study`` differs from ``search``; "" if it does not."""
    before, here = study.user_attrs["search"], _described(search)
    for name in ("monitor", "mode"):
        if before.get(name) != here[name]:
            return f"{name}: {before.get(name)}; here it is {here[name]}"
    there, space = set(before["space"]), set(here["space"])
    if there != space:
        only_there, only_here = (", ".join(sorted(one)) or "none" for one in (there - space, space - there))
        return f"space: {only_there}; here it is {only_here}"
    return ""


def warn_of_other_recipe(search: Search, study: Any) -> None:
    """Warn of fields in which the study's other trials differ, as objectives do not compare."""
    kept = study.user_attrs.get(OF_RECIPE)  # missing in searches of earlier versions
    there, here = (_fields(text) for text in (kept or search.subject.text, search.subject.text))
    names = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
    if names:
        shown = ", ".join(f"{name} = {here.get(name)} (there {there.get(name)})" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"the trials of {search.study} so far had other settings: {shown}{more}; their values may not compare",
            stacklevel=2,
        )


def _fields(text: str) -> dict[str, Any]:
    """Return the fields of a run by dotted name, without those that a search sets itself."""
    return {
        field: value
        for field, value in leaves(tomllib.loads(text))
        if not any(f"{field}.".startswith(f"{name}.") for name in OF_THE_RUN)
    }


def _describe(parameter: Parameter) -> str:
    fields = dataclasses.asdict(parameter)
    name = fields.pop("field")
    shown = ":".join(str(value) for value in fields.values() if value not in (None, False))
    return f"{name} = {shown}"


def resume(parser: Parser, words: Sequence[str]) -> tuple[Search, dict[str, Any]]:
    """Open the search that ``--resume`` names; options that are given replace those it had.

    Its monitor, mode and name, its recipe and ranges are fixed: UsageError if they are given.
    """
    from arclight.cli.tune import study as studies
    from arclight.cli.tune.trial import Search
    from arclight.recipe import read

    options, others = parser.parse_known_args(words)
    folder: Path = options.resume
    fixed = [name for name in ("monitor", "mode", "study") if getattr(options, name) is not None]
    if others or fixed:
        given = others[0] if others else f"--{fixed[0]}"
        raise UsageError(f"--resume: the search has its recipe and ranges in its folder; leave out {given}")
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        missing = {"target", "storage", *KEPT, "trials", "timeout"} - settings.keys()
        if missing:
            raise ValueError(f"{SETTINGS} lacks {', '.join(sorted(missing))}")
        target = settings["target"]
        path = folder / (OF_USER_MODULE if target else RECIPE)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--resume {folder} is not a search: name a folder as runs/<name>/tune-<n>") from error
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    subject = TunedRun(text, target)
    run = read(subject.schema, path)
    storage = options.storage or settings["storage"] or studies.local_database(folder)
    if ":***@" in storage:
        raise UsageError(f"--resume: give --storage again, {storage} was kept without its password")
    chosen = {name: getattr(options, name) or settings[name] for name in KEPT}
    space = tuple(parameters(subject, run.search))
    search = Search(subject=subject, parameters=space, folder=folder, storage=storage, seed=run.seed, **chosen)
    agree_with_folder(search)
    return search, {"trials": options.trials or settings["trials"], "timeout": options.timeout or settings["timeout"]}


def run_search(search: Search, limits: dict[str, Any]) -> None:
    """Run trials until enough have ended or the time is over; then print which was the best."""
    from arclight.cli.tune import study as studies

    study = search.open()
    deadline = time.monotonic() + (limits["timeout"] or float("inf"))
    watch = Watch(search, study)
    again = f"arclight tune --resume {search.folder} goes on with the search"
    try:
        try:
            run_trials(search, study, limits["trials"], deadline, watch.report_ended)
            watch.keep()  # if the process that ran the last trial was killed before it could
            found = studies.best(study)
            ended = len(studies.finished(study))
        except KeyboardInterrupt:
            watch.report_ended()
            raise KeyboardInterrupt(f"{len(studies.finished(study))} trials have ended; {again}") from None
    except studies.DATABASE_ERRORS as error:
        raise UsageError(f"the database of the search does not answer: {studies.cause(error)}; {again}") from error
    if found is None:
        raise UsageError(f"no trial came to its end; {again}, with other ranges start a new one. {watch.first_error()}")
    print(
        f"\nThe best {search.monitor} is {found.value:.6g}, of trial {found.number}; its run is {search.folder / str(found.number)}"
    )
    for name, value in found.params.items():
        print(f"  {name} = {value}")
    print(
        f"The best settings are in {search.folder / 'best.toml'}: {search.subject.command(search.folder / 'best.toml')}"
    )
    print(f"The report is {search.folder / 'report.html'}")
    if ended < limits["trials"]:
        why = "The time was over" if time.monotonic() >= deadline else "Other processes were still running theirs"
        print(f"{why} after {ended} of {limits['trials']} trials; {again}")


def run_trials(search: Search, study: Any, budget: int, deadline: float, look: Callable[[], None]) -> None:
    """Keep ``search.jobs`` trials running until ``budget`` have ended.

    ``look`` is called after each trial, with several jobs after each process that has ended.
    """
    from arclight.cli.tune import study as studies
    from arclight.cli.tune.trial import TrialProcess, run_trial

    active: list[TrialProcess] = []
    idle = 0
    try:
        while True:
            own = [one.identity for one in active]
            studies.fail_stale_trials(study, own)
            others = _elsewhere(study, own)
            left = budget - len(studies.finished(study)) - others - len(active)
            if time.monotonic() >= deadline:
                left = 0
            if search.jobs == 1:
                if left <= 0:
                    return
                run_trial(search)
            else:
                free = sorted(set(range(search.jobs)) - {one.slot for one in active})
                active += [TrialProcess(search, slot) for slot in free[: max(0, left)]]
                if not active:
                    return
                ended = wait([one.sentinel for one in active])
                for one in [one for one in active if one.sentinel in ended]:
                    active.remove(one)
                    idle = 0 if one.close(study) else idle + 1
                if idle >= CHECKED_FIRST:
                    raise UsageError(
                        f"{idle} processes in succession ended before they had begun a trial, the last with {one.process.exitcode}; "
                        f"what they said is above. arclight tune --resume {search.folder} goes on with the search"
                    )
            look()
    finally:
        for one in active:
            one.stop()


def _elsewhere(study: Any, own: Sequence[list[str | int]]) -> int:
    """Count the trials that run in processes of others, on this machine or another."""
    from arclight.cli.tune import study as studies

    running = study.get_trials(deepcopy=False, states=(studies.RUNNING,))
    return sum(one.user_attrs.get(studies.PROCESS) not in own for one in running)


class Watch:
    """Report each trial's outcome; write the best settings and the page of the search."""

    def __init__(self, search: Search, study: Any) -> None:
        from arclight.cli.tune import study as studies

        self._search, self._study = search, study
        self._seen = {one.number for one in studies.finished(study)}
        self._warned = False

    def report_ended(self) -> None:
        """Report trials that have ended since the last call.

        Raises UsageError if `CHECKED_FIRST` trials or more have ended, and all have failed.
        """
        from arclight.cli.tune import study as studies

        ended = studies.finished(self._study)
        best = studies.best(self._study)
        for one in (one for one in ended if one.number not in self._seen):
            self._seen.add(one.number)
            print(self._line(one, best), flush=True)
        self.keep()
        if len(ended) >= CHECKED_FIRST and all(one.state == studies.FAILED for one in ended):
            raise UsageError(f"the first {len(ended)} trials have all failed. {self.first_error()}")

    def keep(self) -> None:
        """Write the best settings and the page; only warn if that fails, as on a full disk."""
        from arclight.cli.tune import study as studies
        from arclight.cli.tune.search_report import write_search_report

        best = studies.best(self._study)
        try:
            if best is not None:
                self._keep(best)
            if studies.finished(self._study):
                write_search_report(self._search, self._study)
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"the page or the best settings of {self._search.folder} were not written ({error}); the search goes on",
                    stacklevel=2,
                )
            self._warned = True

    def first_error(self) -> str:
        from arclight.cli.tune import study as studies

        failed = [one for one in studies.finished(self._study) if one.state == studies.FAILED]
        return f"Trial {failed[0].number}: {failed[0].user_attrs['error']}" if failed else ""

    def _line(self, one: Any, best: Any) -> str:
        from arclight.cli.tune import study as studies

        values = ", ".join(f"{name.rpartition('.')[2]} {_short(value)}" for name, value in one.params.items())
        if one.state == studies.FAILED:
            return f"trial {one.number} failed: {one.user_attrs['error']}  ({values})"
        outcome = "nothing" if one.value is None else f"{self._search.monitor} {one.value:.6g}"
        pruned = ", ended early" if one.state == studies.PRUNED else ""
        leads = ", the best so far" if best is not None and best.number == one.number else ""
        return f"trial {one.number}: {outcome}{pruned}{leads}  ({values})"

    def _keep(self, best: Any) -> None:
        from arclight.cli.tune.space import flags_of

        subject, path = self._search.subject, self._search.folder / "best.toml"
        text = subject.write(subject.read(flags_of(self._search.parameters, best.params)))
        about = f"# Trial {best.number}: {self._search.monitor} {best.value:.6g}. {subject.command(path)} trains with these settings."
        replace_text(path, f"{about}\n\n{text}", durable=False)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
