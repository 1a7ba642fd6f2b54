"""Define the base of profilers, and wrappers that record functions and iterators.

Loops record their actions through `profiling`, which wraps by `profiled` and `profiled_items`; `simple`, `advanced`, `pytorch` and users'
own profilers build on `Profiler`. Names of classes, methods and actions are Lightning's, but for the wait for a batch
(`TrainerBehavior.fetch_labels`). Without a profiler nothing is wrapped.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

import fsspec

from arclight.fabric.errors import MisconfigurationError

_LOG = logging.getLogger("arclight")

Item = TypeVar("Item")


class Profiler:
    """Base class of profilers; override :meth:`start`, :meth:`stop` and :meth:`summary`.

    Actions may be nested.

    The report is logged on rank 0, or with ``filename`` appended to ``<dirpath>/<stage>-<filename>[-<rank>].txt``;
    without ``dirpath`` that is the folder of the run's logs.
    """

    is_over = False
    """True once the run's report is written; hooks that come later are not recorded."""

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = dirpath, filename
        self._stage: str | None = None
        self._local_rank: int | None = None
        self._output_file: TextIO | None = None
        self._lightning_module: Any = None

    def start(self, action_name: str) -> None:
        """Start an action."""
        raise NotImplementedError(f"{type(self).__name__} has no start(action_name)")

    def stop(self, action_name: str) -> None:
        """End an action, whether it returned or raised."""
        raise NotImplementedError(f"{type(self).__name__} has no stop(action_name)")

    def summary(self) -> str:
        """Return the report; empty if there is nothing to say."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Record the block as one action."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Start profiling a run of ``stage`` (fit, validate, test or predict).

        ``local_rank``: None if there is one process.
        """
        self._stage, self._local_rank = stage, local_rank
        self.dirpath = self.dirpath or log_dir

    def describe(self) -> None:
        """Write the report, and be ready for another run."""
        report = self.summary()
        if self.filename and self.dirpath:
            path = os.path.join(self.dirpath, self._prepare_filename())
            files, place = fsspec.core.url_to_fs(path)
            files.makedirs(os.path.dirname(place), exist_ok=True)
            with files.open(place, "a") as self._output_file:
                self._output_file.write(report)
        elif report and self.local_rank == 0:
            _LOG.warning("%s", report)  # at a level that is shown: somebody asked for it
        self.teardown(self._stage)

    def teardown(self, stage: str | None) -> None:
        """Release what a run needed."""
        self._output_file = None

    @property
    def local_rank(self) -> int:
        return self._local_rank or 0

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """Return the file name ``<stage>-<filename>-<rank>-<action>``, valid on any file system."""
        parts = [
            self._stage,
            self.filename or None,
            None if self._local_rank is None else str(self._local_rank),
            action_name,
        ]
        name = "-".join(part for part in parts if part is not None)
        return (re.sub(r'[\\/:*?"<>|\n\r\t_]+', "_", name).strip() or "profile") + extension

    def _titled(self, title: str, sections: Iterable[tuple[str, str]]) -> str:
        """Return a report with the stage in its title and a header for each section."""
        rank = "" if self._local_rank is None else f" rank: {self._local_rank}"
        lines = [self._title(title)]
        for action, text in sections:
            lines += [f"Profile stats for: {action}{rank}", text]
        return os.linesep.join(lines)

    def _title(self, title: str) -> str:
        return f"{self._stage.upper()} {title}" if self._stage is not None else title


class PassThroughProfiler(Profiler):
    """Profiler that records nothing, at no cost."""

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass


def resolve_profiler(choice: Profiler | str | None) -> Profiler:
    """Resolve ``Trainer(profiler=...)`` to a profiler.

    ``choice``: an object, ``"simple"``, ``"advanced"``, ``"pytorch"``, or None.

    Raises MisconfigurationError for another name.
    """
    from arclight.trainer import profilers

    known = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}
    if choice is None:
        return PassThroughProfiler()
    if not isinstance(choice, str):
        return choice
    if choice.lower() not in known:
        raise MisconfigurationError(
            f"When passing string value for the `profiler` parameter of `Trainer`, it can only be one of {', '.join(known)}; got {choice!r}"
        )
    chosen: Profiler = getattr(profilers, known[choice.lower()])()
    return chosen


def profiled(profiler: Profiler, action_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that ``profiler`` sees it as ``action_name``.

    Without profiling it is returned as it is.
    """
    if type(profiler) is PassThroughProfiler:
        return function
    start, stop = profiler.start, profiler.stop

    def run(*arguments: Any, **options: Any) -> Any:
        start(action_name)
        try:
            return function(*arguments, **options)
        finally:
            stop(action_name)

    return run


def profiled_items(profiler: Profiler, action_name: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yield ``items``, with the wait for each profiled as ``action_name``.

    Without profiling the iterator is returned as it is.
    """
    if type(profiler) is PassThroughProfiler:
        return items
    step = profiled(profiler, action_name, lambda: next(items, _END))
    return iter(step, _END)


_END: Any = object()
