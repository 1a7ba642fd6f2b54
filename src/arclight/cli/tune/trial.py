"""Run one trial of a search: an ordinary run with sampled values.

`search` calls `run_trial` in its own process or, with several jobs, in a `TrialProcess` for each trial. In: a `Search`; out: value or error in the
study, and an ordinary run folder. `Search` is pickled for the processes. The study is found by its name in the database, the run by the trial's
number: both stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from arclight.cli.arguments import UsageError
from arclight.cli.command import is_fault_of_use, sentence
from arclight.cli.tune import study as studies
from arclight.cli.tune.space import Parameter, TunedRun, flags_of
from arclight.fabric.errors import SIGTERMException
from arclight.fabric.extras import require

optuna = require("optuna", extra="tune")


@dataclass(frozen=True)
class Search:
    """Everything that a process needs to know to run a trial."""

    subject: TunedRun
    parameters: tuple[Parameter, ...]
    folder: Path
    """Folder of the search; its trials are runs in it, with their numbers as names."""
    storage: str
    study: str
    monitor: str
    mode: str
    sampler: str
    pruner: str
    seed: int
    jobs: int = 1

    def open(self) -> Any:
        return studies.open_study(self.storage, self.study, self.mode, self.pruner)


def run_trial(search: Search, *, own_process: bool = False) -> None:
    """Train with a new trial's values, and report the outcome to the study.

    An error of the trial is stored in the study and ends only that trial.
    """
    study = search.open()
    study.sampler = studies.TrialSampler(study, search.sampler, search.seed, search.parameters, search.jobs > 1)
    begun: list[int] = []

    def objective(trial: Any) -> float:
        begun.append(trial.number)
        folder = search.folder / str(trial.number)
        try:
            values = {one.field: one.suggest(trial) for one in search.parameters}
            with _output_into(folder / "output.txt") if own_process else contextlib.nullcontext():
                return _train(search, trial, values, folder)
        except (KeyboardInterrupt, SIGTERMException) as stop:
            raise KeyboardInterrupt from stop  # the study marks it as failed, without an error of its own
        except optuna.TrialPruned:
            raise
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception) and is_fault_of_use(error):
                text = sentence(error)
            trial.set_user_attr("error", text[:500].encode(errors="backslashreplace").decode())
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            if isinstance(error, SystemExit):
                raise RuntimeError(f"the trial called sys.exit({error.code!r})") from error
            raise

    try:
        study.optimize(objective, n_trials=1, catch=(Exception,))
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        if not begun or study.trials[begun[0]].state == studies.RUNNING:
            raise
        warnings.warn(
            f"trial {begun[0]} was ended by another process, which had no heartbeat of it for {studies.GRACE_S} s: "
            "its result does not count, and it is run again",
            stacklevel=2,
        )


def _train(search: Search, trial: Any, values: dict[str, Any], folder: Path) -> float:
    from arclight.cli.interruption import Interruption
    from arclight.cli.run_record import RunRecord
    from arclight.cli.run_setup import build_task, callbacks, make_trainer
    from arclight.cli.user_run import ConfigRecord, build
    from arclight.trainer import RunFolder
    from arclight.trainer.callbacks import RunReport
    from arclight.trainer.callbacks.monitoring.metric_report import MetricReport

    run = search.subject.read(flags_of(search.parameters, values))
    bars = run.trainer.enable_progress_bar and search.jobs == 1
    settings = dataclasses.replace(run.trainer, devices=1, enable_progress_bar=bars)
    target = search.subject.target
    text = search.subject.write(run)
    record = RunRecord(text) if target is None else ConfigRecord(text, target)

    def loses(value: float, number: int) -> bool:
        """Report a value to the study; return True if it prunes the trial."""
        trial.report(value, number)
        return bool(trial.should_prune())

    report, interruption = MetricReport(search.monitor, search.mode, loses), Interruption()
    module, data = build_task(run) if target is None else build(run)
    place = RunFolder(search.folder.parent, search.folder.name, number=trial.number)
    own = [] if search.jobs > 1 else [interruption]
    trainer = make_trainer(
        dataclasses.replace(run, trainer=settings),
        callbacks=[*callbacks(run), record, RunReport(f"{search.folder.name}, trial {trial.number}"), report, *own],
        run_folder=place,
    )
    with interruption.explained(trainer.paths, "{run}"):
        trainer.fit(module, datamodule=data)
    if report.stopped:
        raise optuna.TrialPruned
    return report.best()


@contextlib.contextmanager
def _output_into(path: Path) -> Iterator[None]:
    """Send all that this process prints to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with open(_beside(path), "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept):
            os.dup2(before, number)
            os.close(before)
        _keep_output(path)


def _beside(path: Path) -> Path:
    """Return the path of a trial's output beside its folder, which the run makes."""
    return path.parent.with_name(f".{path.parent.name}.txt")


def _keep_output(path: Path) -> None:
    """Move the output of a trial that has ended into its folder, if it had any."""
    if (written := _beside(path)).exists():
        path.parent.mkdir(exist_ok=True)
        written.replace(path)


class TrialProcess:
    """A process that runs one trial; it ends with the one that started it."""

    def __init__(self, search: Search, slot: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.slot, self._folder = slot, search.folder
        self.process = context.Process(target=_run_alone, args=(search, slot), daemon=False)
        self.process.start()
        assert self.process.pid is not None
        self.identity = studies.process_of(self.process.pid)

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    def close(self, study: Any) -> bool:
        """Record the error of a trial whose process ended early; return True if it had begun one."""
        self.process.join()
        own = [one for one in study.get_trials(deepcopy=False) if one.user_attrs.get(studies.PROCESS) == self.identity]
        for one in [one for one in own if one.state == studies.RUNNING]:
            code = self.process.exitcode
            reason = (
                f"its process was ended by signal {-code}" if code and code < 0 else f"its process ended with {code}"
            )
            studies.fail(study, one, error=reason)
            _keep_output(self._folder / str(one.number) / "output.txt")
        return bool(own)

    def stop(self) -> None:
        """Terminate the process, which lets a step finish; kill it after half a minute."""
        self.process.terminate()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _run_alone(search: Search, slot: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    use_part_of_machine(slot, search.jobs)
    with contextlib.suppress(KeyboardInterrupt):
        run_trial(search, own_process=True)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def use_part_of_machine(slot: int, jobs: int) -> None:
    """Limit a trial to its share of threads, and to one of several GPUs."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    if (count := torch.cuda.device_count()) > 1:  # asks the driver alone: CUDA starts later, and sees one
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot % count]


def check_one_process(run: Any) -> None:
    """Raise UsageError for a run of several processes: trials run side by side instead."""
    of_plan = run.plan.world_size if run.plan is not None else 1
    if of_plan > 1 or run.trainer.num_nodes > 1 or run.trainer.devices not in ("auto", 1):
        raise UsageError(
            "each trial trains in one process: set --trainer.devices 1 and leave out plan and trainer.num_nodes; "
            "--jobs N trains several trials side by side"
        )
