"""Run a federated recipe in one process, and dispatch the verbs: ``arclight federate``.

`command` calls `federate`, which calls `run_here` or one of `VERBS`. `network` serves a run by `open_run`; `flower` takes `record_run` and
`first_weights`. A run's folder gets recipe, environment, log, report and last weights here, the rest by ``federated.server.server_run`` and
the clients; ``--resume`` must find what older versions left.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import queue
import shutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, read_as, recipe_file, recipe_parser, shipped_recipes
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.fabric.atomic_replace import replace_text
from arclight.federated.errors import FederatedError, SettingsError

if TYPE_CHECKING:
    from arclight.cli.federate.progress import Progress
    from arclight.cli.federate.sites import ServerEvaluation
    from arclight.federated.rounds.history import History
    from arclight.federated.server.server import RecordOrCommand, Server
    from arclight.federated.server.server_run import ServerRun
    from arclight.trainer import RunFolder
    from arclight.trainer.loggers import Logger

log = logging.getLogger(__name__)

VERBS = {
    "serve": "arclight.cli.federate.network",
    "join": "arclight.cli.federate.network",
    "keys": "arclight.cli.federate.keys",
    "flower": "arclight.cli.federate.flower",
    "report": "arclight.cli.federate.run_report",
}
SHUTDOWN_S = 30.0
"""Seconds that a run has to end after its clients in this process, and its loggers after it."""
ABOUT = """
Train one model on the data of many sites, which exchange updates of the weights. This command runs server and clients in one
process. Across processes and machines: `arclight federate serve` on the server, `arclight federate join` at each site, `arclight
federate keys` for certificates and keys, `arclight federate flower` for an app that Flower launches, `arclight federate report` to
write a run's report again; each has a --help of its own.
"""


def federate(arguments: list[str]) -> None:
    """Run one of `VERBS`, or a recipe in this process."""
    if arguments and arguments[0] in VERBS:
        module = importlib.import_module(VERBS[arguments[0]])
        return getattr(module, arguments[0])(arguments[1:])  # type: ignore[no-any-return]
    if not arguments:
        raise UsageError(
            f"name a recipe, as recipes/fed-lm.toml, or one of {', '.join(VERBS)} (see arclight federate --help)"
        )
    word = recipe_file(arguments[0])
    if not word.startswith("-") and ":" not in word and not Path(word).suffix:
        near = "".join(
            f"; did you mean {verb}?" for verb in difflib.get_close_matches(word, [*VERBS, *shipped_recipes()], 1)
        )
        raise UsageError(f"{word} is neither a recipe, as recipes/fed-lm.toml, nor one of {', '.join(VERBS)}{near}")
    parser = run_parser("federate", ABOUT)
    recipe, options = read_as(FederatedRecipe, parser, arguments)
    return run_here(recipe, options)


def run_parser(verb: str, about: str) -> Parser:
    from arclight.cli.federate.run_report import with_curves

    parser = recipe_parser(verb, about)
    parser.own_tables = ("federation", "partition")
    parser.add_argument(
        "--resume",
        metavar="last|PATH",
        help="resume a run: last for the newest run of this name, or the PATH of a run folder",
    )
    parser.add_argument(
        "--beside", type=with_curves, metavar="RUN", help="centralised run to compare with in the report"
    )
    parser.add_argument(
        "--centralised", action="store_true",
        help="also train the same recipe without a federation, on as many samples, and compare",
    )  # fmt: skip
    return parser


def run_here(recipe: FederatedRecipe, options: Namespace) -> None:
    """Run server and clients in this process."""
    from arclight.cli.federate.progress import ObservedServer
    from arclight.cli.federate.sites import (
        check_devices,
        check_division,
        check_masks,
        check_vocabularies,
        client_names,
        in_process_node,
        recipe_at_site,
    )

    check_devices(recipe)
    check_division(recipe)  # before anything is written
    check_vocabularies(recipe, {name: recipe_at_site(recipe, int(name)) for name in client_names(recipe)})
    check_masks(recipe)
    if options.centralised and recipe.federation.masks.personal_from == "client":
        raise UsageError(
            '--centralised: masks.personal_from = "client" makes a model of each site, and one run cannot be all of them'
        )
    folder = folder_of(recipe, options)
    with open_run(recipe, folder, options) as (run, progress):
        node = in_process_node(recipe, ObservedServer(run.service, progress), folder.path)
        worker = Worker(node.run)
        worker.start()
        try:
            while not run.runtime.wait(1.0):
                worker.check()
                if not worker.is_alive() and not run.runtime.wait(SHUTDOWN_S):
                    raise FederatedError(
                        f"the run continues, but its clients have ended: {node.closed or 'they were stopped'}"
                    )
        finally:
            node.stop()
            worker.join(60.0)
        worker.check()
        run.wait(0.0)  # raises the run's error


class Worker(threading.Thread):
    """Run a function in a thread and keep its error."""

    def __init__(self, function: Any) -> None:
        super().__init__(name="arclight-node", daemon=True)
        self._function = function
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # raised again by `check`
            self._error = error

    def check(self) -> None:
        """Raise the thread's error, if there is one."""
        if self._error is not None:
            raise self._error


@contextmanager
def open_run(recipe: FederatedRecipe, folder: RunFolder, options: Namespace) -> Iterator[tuple[ServerRun, Progress]]:
    """Open a run for the block; afterwards write its results, or a report of its failure."""
    from arclight.cli.federate.progress import Progress, print_warnings
    from arclight.cli.federate.sites import ServerEvaluation, client_names, with_vocabulary
    from arclight.cli.run_setup import build_loggers
    from arclight.federated.coordination.run_database import has_begun
    from arclight.federated.server.server import Server

    begun = has_begun(folder.path)
    kept = options.resume is not None
    rounds = RoundLogging(build_loggers(recipe), folder.path)
    with (
        remove_unless_begun(folder, kept), Progress(recipe.federation.rounds) as progress, print_warnings(progress),
        record_run(recipe, folder),
    ):  # fmt: skip
        if recipe.unused:
            log.warning(
                "%s: not used in a federated run, whose rounds are its checkpoints (federation.keep_rounds) and are evaluated every "
                "federation.evaluate_every rounds", ", ".join(recipe.unused),
            )  # fmt: skip

        def observe(event: RecordOrCommand) -> None:
            progress.observe(event)
            rounds.observe(event)

        evaluation = ServerEvaluation(recipe, folder.path) if recipe.federation.evaluate_on == "server" else None
        server = Server(
            recipe.federation,
            None if begun else first_weights(recipe, evaluation),
            folder=folder.path,
            clients=client_names(recipe),
            evaluate=evaluation,
            run=run_name(recipe, folder),
            seed=recipe.seed,
            recipe=as_tables(with_vocabulary(recipe)),
            observer=observe,
        )
        try:
            with server.opened() as run, rounds.opened(run.history, as_tables(recipe)):
                progress.sent_down = run.service.history.sent_down
                progress.resume(list(run.coordinator.state.open.values()))
                with explain_resume(folder):
                    yield run, progress
        except KeyboardInterrupt as error:
            report_failure(folder, options, f"It was interrupted. --resume {folder.path} resumes it.")
            done = len([round for round in server.history if round.contributors])
            raise KeyboardInterrupt(
                f"{done} of {recipe.federation.rounds} rounds are done, and saved in {folder.path} with the updates received since. "
                f"The same command with --resume {folder.path} resumes it"
            ) from error
        except BaseException as error:
            report_failure(folder, options, str(error) or type(error).__name__)
            raise
        write_results(recipe, folder, server, options, evaluation)


class RoundLogging:
    """Log a row for each committed round, and one for each evaluation of its weights.

    Each logger is called from a thread of its own: a service that is slow or does not answer delays neither rounds nor other loggers,
    and its errors do not end the run.
    """

    def __init__(self, loggers: list[Logger], folder: Path, patience_s: float = SHUTDOWN_S) -> None:
        self._patience_s = patience_s
        self._calls: list[tuple[Logger, _Calls]] = [(logger, queue.SimpleQueue()) for logger in loggers]
        self._history: History | None = None
        self._lock = threading.Lock()
        self._early: list[RecordOrCommand] = []
        """Records observed before `opened`; the run's threads start earlier."""
        for logger in loggers:
            if logger.needs_folder:
                logger.use_folder(folder)

    def observe(self, record: RecordOrCommand) -> None:
        """Log a record of the journal if it says that a round was committed or evaluated."""
        if not self._calls:
            return
        with self._lock:
            if self._history is None:
                self._early.append(record)
                return
        self._log(record, self._history)

    def _log(self, record: RecordOrCommand, history: History) -> None:
        from arclight.federated.coordination import records
        from arclight.federated.rounds.history import metrics_row

        match record:
            case records.RoundCommitted():
                committed = history.at(record.round)
                # without its evaluation, which may be known already and has a row of its own
                row = metrics_row(replace(committed, metrics={}))
                row = {name: value for name, value in row.items() if name != "step"}
                self._row(record.round, row, committed.clock)
            case records.RoundEvaluated(client=None):
                self._row(record.round, {"round": record.round, **record.metrics}, history.at(record.round).clock)

    def _row(self, number: int, row: dict[str, Any], step: int) -> None:
        self._call(f"round {number} could not be logged", lambda logger: logger.log_metrics(dict(row), step))

    def _call(self, what: str, make: Callable[[Logger], None]) -> None:
        for _, calls in self._calls:
            calls.put((what, make))

    @contextmanager
    def opened(self, history: History, recipe: dict[str, Any]) -> Iterator[None]:
        """Log what is observed inside the block, except rounds that ``history`` has already."""
        steps = max((round.clock for round in history.rounds), default=0)
        self._call("the recipe could not be logged", lambda logger: logger.log_hyperparams(recipe))
        self._call(f"logging could not go on from step {steps}", lambda logger: logger.resume(steps))
        self._log_early(history)
        threads = [
            threading.Thread(target=_log_until_end, args=pair, name="arclight-loggers", daemon=True)
            for pair in self._calls
        ]
        for thread in threads:
            thread.start()
        status = "failed"
        try:
            yield
            status = "success"
        finally:
            self._call("logging could not be ended", lambda logger: logger.finalize(status))
            for _, calls in self._calls:
                calls.put(None)
            deadline = time.monotonic() + self._patience_s
            for (logger, _), thread in zip(self._calls, threads, strict=True):
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning(
                        "%s is not done after %g s: some rounds may be missing there; metrics.csv has all of them",
                        type(logger).__name__,
                        self._patience_s,
                    )

    def _log_early(self, history: History) -> None:
        """Log what was observed before `opened`, and from then on directly."""
        while True:
            with self._lock:
                early, self._early = self._early, []
                if not early:
                    self._history = history
                    return
            for record in early:
                self._log(record, history)


_Calls = queue.SimpleQueue[tuple[str, Callable[["Logger"], None]] | None]


def _log_until_end(logger: Logger, calls: _Calls) -> None:
    """Run the queued calls of one logger, until None ends the queue."""
    while (call := calls.get()) is not None:
        what, make = call
        try:
            make(logger)
        except Exception as error:  # of any tracking service: the run goes on
            log.warning("%s with %s: %s", what, type(logger).__name__, error)


@contextmanager
def remove_unless_begun(folder: RunFolder, kept: bool) -> Iterator[None]:
    """Remove a new run's folder, unless ``kept``, if an error comes before the run has begun."""
    from arclight.federated.coordination.run_database import has_begun

    try:
        yield
    except BaseException:
        if not kept and not has_begun(folder.path):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextmanager
def explain_resume(folder: RunFolder) -> Iterator[None]:
    """Append to an error how to resume the run, unless resuming would repeat it."""
    try:
        yield
    except SettingsError:
        raise
    except FederatedError as error:
        raise FederatedError(
            f"{error}. Updates received so far are kept: the same command with --resume {folder.path} resumes it"
        ) from error


def first_weights(recipe: FederatedRecipe, evaluation: ServerEvaluation | None) -> Any:
    """Build the module with the initial weights that a centralised run would start from."""
    if evaluation is not None:
        return evaluation.begin()
    from arclight.cli.run_setup import build_task

    module, _ = build_task(recipe)
    if not any(True for _ in module.parameters()):
        module.configure_model()
    weights, start = getattr(recipe.task, "weights", None), getattr(module, "start_from", None)
    if weights is not None and start is not None:  # usually done at the start of fit, which the server does not run
        start(weights)
    return module


def write_results(
    recipe: FederatedRecipe, folder: RunFolder, server: Server, options: Namespace, evaluation: ServerEvaluation | None
) -> None:
    """Write the report, and with ``evaluation`` the final weights as an ordinary checkpoint."""
    from arclight.cli.federate.run_report import federated_report

    print(f"\nThe run is in {folder.path}")
    if evaluation is None:
        newest = server.rounds.newest()
        assert newest is not None
        print(f"Its weights are in {server.rounds.path(newest)}")
    else:
        print(f"Its weights are in {evaluation.keep(server.weights(), server.history[-1].clock)}")
    beside = centralised(recipe) if options.centralised else options.beside
    print(f"The report is {federated_report(folder.path, beside=beside)}")
    if (folder.path / "node").is_dir():
        print(describe_node_folder(folder.path / "node"))


def describe_node_folder(node: Path) -> str:
    """Describe what a node's folder keeps after the run, with its size; hard links count once."""
    from arclight.trainer.run.report import size_text

    found = (path.stat() for path in node.rglob("*") if path.is_file())
    size = sum({stat.st_ino: stat.st_size for stat in found}.values())
    return (
        f"{node} keeps {size_text(size)} for a longer run (--resume with more federation.rounds): optimizer states, data positions and "
        "personal layers of clients; delete it if there will be none"
    )


def report_failure(folder: RunFolder, options: Namespace, why: str) -> None:
    """Write the report of a failed run, and log any error in that."""
    from arclight.cli.federate.run_report import federated_report
    from arclight.federated.coordination.run_database import RunDatabaseError
    from arclight.federated.rounds.history import read_rounds

    try:
        if read_rounds(folder.path):
            federated_report(folder.path, beside=options.beside, failure=why)
    except (OSError, RunDatabaseError) as error:
        logging.getLogger("arclight").warning("the report could not be written: %s", error)


def centralised(recipe: FederatedRecipe) -> Path:
    """Train the same task without a federation; return the run's folder."""
    from arclight.cli.run_record import Preparation, RunRecord
    from arclight.cli.run_setup import build_task, callbacks, make_trainer
    from arclight.trainer.callbacks import RunReport

    central = recipe.central()
    module, data = build_task(central)
    trainer = make_trainer(central, callbacks=[*callbacks(central), RunRecord(central), RunReport()])
    with Preparation():
        trainer.fit(module, datamodule=data)
    return trainer.run_folder.path


# -- the run's folder ----------------------------------------------------------------------------------------------


def folder_of(recipe: FederatedRecipe, options: Namespace) -> RunFolder:
    """Return a new run folder, or the one to resume in."""
    from arclight.federated.coordination.run_database import RUN_FILES
    from arclight.trainer import RunFolder

    if options.resume is None:
        last = RunFolder.newest(recipe.root, recipe.name, having=RUN_FILES)
        if last is not None and is_unfinished(last):
            print(f"{last.path} is not finished: --resume last would resume it. This is a new run")
        return RunFolder(recipe.root, recipe.name)
    if options.resume != "last":
        if "://" in options.resume:
            raise UsageError(
                f"--resume {options.resume}: a run needs a folder of this machine: `arclight checkpoint fork "
                f"{options.resume} FOLDER` makes one of its newest round"
            )
        return RunFolder.open(options.resume)
    found = RunFolder.newest(recipe.root, recipe.name, having=RUN_FILES)
    if found is None:
        raise UsageError(f"--resume last: {recipe.root / recipe.name} has no run to resume")
    return found


def is_unfinished(folder: RunFolder) -> bool:
    """Return True if a run has begun and not ended: it was killed or interrupted, or still runs."""
    from arclight.federated.coordination.records import RunEnded, RunOpened
    from arclight.federated.coordination.run_database import RunDatabaseError, read_journal
    from arclight.federated.coordination.run_state import StateSaved

    ended = False
    try:
        for record in read_journal(folder.path):
            if isinstance(record, StateSaved):
                ended = record.state.ended is not None
            elif isinstance(record, RunEnded | RunOpened):
                ended = isinstance(record, RunEnded)
    except RunDatabaseError:  # a damaged run cannot be resumed
        return False
    return not ended


def run_name(recipe: FederatedRecipe, folder: RunFolder) -> str:
    """Name the run by recipe and first start, the same after --resume: nodes tell runs by it."""
    import json

    started = json.loads(folder.environment.read_text(encoding="utf-8"))["started"]
    return f"{recipe.name}-{started.partition('+')[0].replace(':', '')}"


def as_tables(recipe: FederatedRecipe) -> dict[str, Any]:
    """Return the recipe as tables, as nodes receive it."""
    import tomllib

    from arclight.recipe import write

    return tomllib.loads(write(recipe))


@contextmanager
def record_run(recipe: FederatedRecipe, folder: RunFolder) -> Iterator[None]:
    """Keep recipe, environment and log in the run's folder."""
    from arclight.recipe import write

    log = logging.getLogger("arclight")
    text = write(recipe)
    replace_text(folder.recipe, f"# arclight federate {folder.recipe} repeats this run.\n\n{text}", durable=False)
    folder.write_environment(command=sys.argv)
    handler = folder.log_handler()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
