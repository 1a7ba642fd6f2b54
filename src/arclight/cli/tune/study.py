"""Keep the trials of a search in Optuna's database, sample their values, and count them.

`search` and `trial` open the study, `trial` draws values by `TrialSampler`, `search_report` shows the trials. The state of every sampler is a
function of the seed and the earlier trials: nothing is pickled, and with one job a resumed search draws what one without interruption would
have drawn, which tests compare. Names of trial and study attributes are in users' databases and stay.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arclight.cli.arguments import UsageError
from arclight.cli.tune.space import Parameter, Range
from arclight.fabric.extras import require

optuna = require("optuna", extra="tune")
optuna.logging.set_verbosity(optuna.logging.ERROR)

HEARTBEAT_S = 30
GRACE_S = 180
"""Seconds without a heartbeat after which a trial of another machine is marked as failed."""
OPEN_ATTEMPTS = 10
"""Attempts to open a database while other processes create its tables."""
SIGMA = 0.2
"""Initial standard deviation of CMA-ES, as a share of each range."""
PROCESS, PLACE, FATAL, START = "process", "place", "fatal", "start"
"""Stored attributes. Of a trial: the process that runs it, its place in the order of draws, and that place again once its process was killed.
Of a study: the values of the first trial."""
DEATHS = 3
"""Values are not drawn again after this many processes were killed with them."""
COMPLETE, PRUNED = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
FAILED, RUNNING = optuna.trial.TrialState.FAIL, optuna.trial.TrialState.RUNNING

SQL_ERROR = require("sqlalchemy", extra="tune").exc.SQLAlchemyError
DATABASE_ERRORS = (SQL_ERROR, optuna.exceptions.StorageInternalError)

log = logging.getLogger(__name__)


def cause(error: BaseException) -> str:
    """Return the first line of a database's error, which Optuna's errors have as their cause."""
    return str(error.__cause__ or error).strip().partition("\n")[0]


class TrialStorage(optuna.storages.RDBStorage):  # type: ignore[name-defined]
    """Optuna's database, in which no trial is stale while its process on this machine lives."""

    _missed = False

    def record_heartbeat(self, trial_id: int) -> None:
        """Write a heartbeat; only warn of a database error, and try again at the next one."""
        try:
            super().record_heartbeat(trial_id)
            self._missed = False
        except DATABASE_ERRORS as error:
            if not self._missed:
                log.warning("the search's database did not take the heartbeat of trial %s: %s", trial_id, cause(error))
            self._missed = True

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Leave out living trials of this machine, whose heartbeats are late after a suspension."""
        stale: list[int] = super()._get_stale_trial_ids(study_id)
        return [one for one in stale if not _is_alive_here(self.get_trial(one).user_attrs.get(PROCESS))]


def open_study(url: str, name: str, mode: str, pruner: str = "none") -> Any:
    """Open the study ``name`` in the database at ``url``, or create it.

    Raises UsageError if the database cannot be opened.
    """
    direction = "maximize" if mode == "max" else "minimize"
    if re.fullmatch(r"sqlite(\+\w+)?:/*|sqlite.*(:memory:|mode=memory).*", url):
        raise UsageError(
            f"--storage {url} is forgotten when it is closed: name a file, as sqlite:////home/me/search.db"
        )
    try:
        storage = _open_storage(url)
        study = optuna.create_study(
            storage=storage, study_name=name, direction=direction, pruner=_pruner(pruner), load_if_exists=True
        )
    except (ImportError, ValueError, RuntimeError, SQL_ERROR, optuna.exceptions.OptunaError) as error:
        raise UsageError(f"--storage {without_password(url)} cannot be opened: {cause(error)}") from error
    if [one.name.lower() for one in study.directions] != [direction]:
        kept = " and ".join(one.name.lower() for one in study.directions)
        raise UsageError(
            f"--study {name}: the search of this name in the database has to {kept}; give this one a name of its own"
        )
    return study


def _open_storage(url: str) -> TrialStorage:
    """Open a database and create its tables; retry if another process creates them too."""
    wait = {"connect_args": {"timeout": 120}} if url.startswith("sqlite:") else {}
    attempt = 0
    while True:
        attempt += 1
        try:
            with _ignore_experimental_warnings():
                return TrialStorage(url, engine_kwargs=wait, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
        except SQL_ERROR as error:
            if attempt == OPEN_ATTEMPTS or not re.search("already exists|unique", str(error), re.IGNORECASE):
                raise
            time.sleep(random.uniform(0.1, 0.5))


@contextmanager
def _ignore_experimental_warnings() -> Iterator[None]:
    """Ignore Optuna's warnings that heartbeats and parallel sampling are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def local_database(folder: Path) -> str:
    """Return the address of a search's default database, a file in its folder."""
    return f"sqlite:///{folder.absolute() / 'search.db'}"


def without_password(url: str) -> str:
    """Return a database's address with its password masked."""
    head, at, rest = url.rpartition("@")
    scheme, slashes, account = head.partition("://")
    return f"{scheme}{slashes}{account.partition(':')[0]}:***{at}{rest}" if at and ":" in account else url


def _pruner(kind: str) -> Any:
    pruners = optuna.pruners
    if kind == "hyperband":
        return pruners.HyperbandPruner(min_resource=1)
    return pruners.MedianPruner(n_startup_trials=4) if kind == "median" else pruners.NopPruner()


class TrialSampler(optuna.samplers.BaseSampler):  # type: ignore[name-defined]
    """Draw each trial by a new sampler, seeded by the search's seed and the trial's place.

    A trial's place is the first that no earlier trial holds; killed trials hold none. So processes that draw at the same time draw
    different values, and a resumed search repeats the values of killed trials. Place 0 has the recipe's own values.
    """

    def __init__(self, study: Any, kind: str, seed: int, parameters: Sequence[Parameter], parallel: bool) -> None:
        self._study, self._kind, self._seed, self._parallel = study, kind, seed, parallel
        self._ranges = [parameter for parameter in parameters if isinstance(parameter, Range)]
        self._own: Any = None
        if kind == "cmaes":  # checked before any trial; imported only if used, since scipy.stats takes seconds
            require("cmaes", extra="tune")

    def before_trial(self, study: Any, trial: Any) -> None:
        storage, number = self._study._storage, trial._trial_id
        storage.record_heartbeat(number)  # by the database's clock, so that a trial of a lost machine becomes stale
        # before anything else, so that a kill from here on is recognised
        storage.set_trial_user_attr(number, PROCESS, this_process())
        place = free_place([one for one in self._study.get_trials(deepcopy=False) if one.number < trial.number])
        storage.set_trial_user_attr(number, PLACE, place)
        seed = int(np.random.SeedSequence([self._seed, place]).generate_state(1)[0])
        start = self._study.user_attrs.get(START)
        if place == 0 and start is not None:
            with _ignore_experimental_warnings():
                self._own = optuna.samplers.PartialFixedSampler(start, optuna.samplers.RandomSampler(seed=seed))
        elif self._kind == "random":
            self._own = optuna.samplers.RandomSampler(seed=seed)
        elif self._kind == "cmaes":
            self._own = CmaSampler(seed, self._ranges)
        else:
            with _ignore_experimental_warnings():
                self._own = optuna.samplers.TPESampler(seed=seed, constant_liar=self._parallel)

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        return self._own.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Mapping[str, Any]) -> Any:
        return self._own.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._own.sample_independent(study, trial, param_name, param_distribution)


def free_place(before: Sequence[Any]) -> int:
    """Return the first place that none of the trials ``before`` holds; killed ones hold none."""
    taken: set[int] = set()
    for one in before:
        if not was_killed(one):  # without a recorded place it is about to take the first free one
            taken.add(one.user_attrs.get(PLACE, _first_free(taken)))
    return _first_free(taken)


def _first_free(taken: set[int]) -> int:
    return next(place for place in itertools.count() if place not in taken)


class CmaSampler(optuna.samplers.BaseSampler):  # type: ignore[name-defined]
    """Sample ranges by CMA-ES (Hansen 2016, arXiv 1604.00772) and choices at random.

    Optuna's own sampler keeps a pickle in the database. This one replays all generations from the trials' values, which takes
    milliseconds for a thousand trials.
    """

    def __init__(self, seed: int, ranges: Sequence[Range]) -> None:
        self._seed, self._ranges = seed, list(ranges)
        self._independent = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {parameter.field: parameter.distribution() for parameter in self._ranges}

    def sample_relative(self, study: Any, trial: Any, search_space: Mapping[str, Any]) -> dict[str, Any]:
        if not self._ranges:
            return {}
        evolution = require("cmaes", extra="tune").CMA(
            mean=np.full(len(self._ranges), 0.5),
            sigma=SIGMA,
            bounds=np.tile([0.0, 1.0], (len(self._ranges), 1)),
            seed=self._seed,
        )
        ended = [one for one in study.get_trials(deepcopy=False) if one.state in (COMPLETE, PRUNED)]
        valued = [one for one in sorted(ended, key=lambda one: one.datetime_complete) if one.value is not None]
        sign = -1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0
        size = evolution.population_size
        for begin in range(0, len(valued) - size + 1, size):
            evolution.tell([(self._unit(one.params), sign * one.value) for one in valued[begin : begin + size]])
        drawn: NDArray[np.float64] = evolution.ask()
        return {parameter.field: _from_unit(parameter, float(share)) for parameter, share in zip(self._ranges, drawn)}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def _unit(self, values: Mapping[str, Any]) -> NDArray[np.float64]:
        return np.array([_to_unit(parameter, values[parameter.field]) for parameter in self._ranges])


def _to_unit(parameter: Range, value: float) -> float:
    low, high = parameter.low, parameter.high
    if parameter.log:
        low, high, value = float(np.log(low)), float(np.log(high)), float(np.log(value))
    return (value - low) / (high - low)


def _from_unit(parameter: Range, share: float) -> float | int:
    low, high = parameter.low, parameter.high
    if parameter.log:
        value = float(np.exp(np.log(low) + share * (np.log(high) - np.log(low))))
    else:
        value = low + share * (high - low)
    step = parameter.step or (1.0 if parameter.integer else None)
    if step is not None:
        value = min(low + round((value - low) / step) * step, parameter.last)
    value = min(max(value, low), high)
    return int(value) if parameter.integer else value


def this_process() -> list[str | int]:
    """Identify this process uniquely across machines: host, process id, start time."""
    return process_of(os.getpid())


def process_of(pid: int) -> list[str | int]:
    """Identify a living process of this machine uniquely across machines."""
    return [socket.gethostname(), pid, _started(pid)]


def _started(pid: int) -> str:
    """Return a process's start time in clock ticks since boot; empty on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def is_alive(process: Sequence[str | int]) -> bool:
    """Return False for a process of this machine that has ended, else True.

    On other machines heartbeats decide.
    """
    host, pid, started = process
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _started(int(pid)) == started


def _is_alive_here(process: Sequence[str | int] | None) -> bool:
    """Return True for a process of this machine that has not ended."""
    return process is not None and process[0] == socket.gethostname() and is_alive(process)


def fail_stale_trials(study: Any, own: Sequence[list[str | int]] = ()) -> int:
    """Mark trials as failed whose process died or is silent; return how many.

    own: processes whose trials the caller handles itself.
    """
    with _ignore_experimental_warnings():
        silent = study._storage._get_stale_trial_ids(study._study_id)
    running = study.get_trials(deepcopy=False, states=(RUNNING,))
    stale = [
        one
        for one in running
        if one.user_attrs.get(PROCESS) not in own and (one._trial_id in silent or _has_ended(one))
    ]
    for one in stale:
        before = [
            other
            for other in study.get_trials(deepcopy=False)
            if other.user_attrs.get(FATAL) == one.user_attrs.get(PLACE, "")
        ]
        if len(before) + 1 < DEATHS:
            fail(study, one, **{FATAL: one.user_attrs.get(PLACE)})
        else:  # out of memory, say: these values would kill every process that draws them again
            fail(
                study, one, error=f"its process was killed, as were those of {len(before)} trials with the same values"
            )
    return len(stale)


def _has_ended(trial: Any) -> bool:
    """Return True for a trial whose process has ended."""
    process = trial.user_attrs.get(PROCESS)
    if process is not None:
        return not is_alive(process)
    return bool((datetime.now() - trial.datetime_start).total_seconds() > GRACE_S)


def fail(study: Any, trial: Any, **noted: Any) -> None:
    """Mark a trial as failed and store attributes, unless another process has ended it."""
    try:
        for name, value in noted.items():
            study._storage.set_trial_user_attr(trial._trial_id, name, value)
        study.tell(trial.number, state=FAILED, skip_if_finished=True)
    except optuna.exceptions.UpdateFinishedTrialError:
        log.debug("trial %s was ended by another process", trial.number)


def was_killed(trial: Any) -> bool:
    """Return True for a failed trial without an error of its own: its process was killed."""
    return bool(trial.state == FAILED and "error" not in trial.user_attrs)


def finished(study: Any) -> list[Any]:
    """Return the trials that count: complete, pruned, or failed by their own error."""
    return [
        one
        for one in study.get_trials(deepcopy=False)
        if one.state in (COMPLETE, PRUNED, FAILED) and not was_killed(one)
    ]


def best(study: Any) -> Any:
    """Return the complete trial with the best value; None without one."""
    complete = study.get_trials(deepcopy=False, states=(COMPLETE,))
    sign = 1 if study.direction == optuna.study.StudyDirection.MINIMIZE else -1
    return min(complete, key=lambda one: (sign * one.value, one.number), default=None)
