"""Decide where a run writes: its run folder, its loggers, its checkpoints.

The Trainer owns one `RunPaths`; each entry point calls ``agree()`` by way of `CheckpointSelector`. Folder names on disk are public: runs
of older versions are found and resumed by them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.checkpoint.remote import is_remote, to_path
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.run.folder import RunFolder

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


class RunPaths:
    """Own the folders and loggers of a trainer.

    A single process makes folders and loggers when they are first used; several processes agree on them when a run starts (`agree`),
    because only a collective can.

    ``logger``: the Trainer's argument; ``run_folders``: files go to ``<root>/<name>/<n>/``, else to where loggers and callbacks put
    them; ``default_logger``: makes a logger where none was given, from ``root``; ``dry``: a ``fast_dev_run``, whose loggers write nothing.
    """

    def __init__(
        self, strategy: Strategy, *, root: str, name: str | None, folder: RunFolder | None, logger: Any, run_folders: bool,
        default_logger: Callable[[str], Any] | None, dry: bool
    ) -> None:  # fmt: skip
        self.strategy, self.root, self.name, self.run_folders = strategy, root, name, run_folders
        self._dry, self._logger_choice, self._default_logger = dry, logger, default_logger
        self.opened: RunFolder | None = folder
        """The run folder, if it was given, made or resumed."""
        self._loggers: list[Any] | None = None
        self._module_name: str | None = None
        self._folder_made_early = False
        self._agreed: dict[str, str | None] = {}

    def name_after(self, module: object) -> None:
        """Name run folders after the class of ``module``, if the user gave no name."""
        self._module_name = type(module).__name__.lower()

    @property
    def folder_name(self) -> str:
        """Return the name of the folder that holds the numbered run folders."""
        if self.opened is not None:
            return self.opened.name
        return self.name or self._module_name or "run"

    def newest_run(self) -> RunFolder | None:
        """Return the folder of this run, or the newest of its name; None if there is none yet."""
        return self.opened or RunFolder.newest(self.root, self.folder_name)

    def agree(self) -> None:
        """Agree across ranks on the folders of this run. A collective."""
        self._agreed = {}
        if self.strategy.world_size == 1:
            return
        if not self.run_folders:
            self._agreed = {"log_dir": self.log_dir, "checkpoints": self.checkpoint_folder}
            return
        if self._folder_made_early and self.strategy.broadcast(not os.path.isdir(self.run_folder)):
            self.opened = None  # an earlier run removed it, as it had written nothing
        if self.opened is None:
            folder, self._folder_made_early = self.run_folder.path, True
            for logger in self._loggers or []:
                if getattr(logger, "needs_folder", False) is True:
                    logger.use_folder(folder)

    def drop_empty_folder(self) -> None:
        """Remove the folder that `agree` made if nothing was written into it."""
        if self._folder_made_early and self.strategy.is_global_zero:
            with suppress(OSError):  # it holds something, or other runs are beside it
                self.run_folder.path.rmdir()
                self.run_folder.path.parent.rmdir()

    @property
    def run_folder(self) -> RunFolder:
        """Folder of this run, the same on every rank, made at the first use.

        That use is a collective.
        """
        if self.opened is None:
            made = str(RunFolder(self.root, self.folder_name).path) if self.strategy.is_global_zero else ""
            self.opened = RunFolder.open(self.strategy.broadcast(made))
        return self.opened

    @run_folder.setter
    def run_folder(self, folder: RunFolder) -> None:
        self.opened, self._folder_made_early = folder, False

    def open_run_folder(self, path: str | Path) -> None:
        """Continue to write into the run folder at ``path``."""
        self.run_folder = RunFolder.open(path)

    @property
    def loggers(self) -> list[Any]:
        if self._loggers is None:
            self.loggers = self._make_loggers()
        return self._loggers or []

    @loggers.setter
    def loggers(self, loggers: Iterable[Any] | None) -> None:
        self._loggers = list(loggers or [])
        self._agreed = {}
        for logger in self._loggers:
            if getattr(logger, "needs_folder", False) is True:
                logger.use_folder(self.run_folder.path)
        if len(self._loggers) > 1:
            from arclight.trainer.loggers.csv_logger import check_apart

            check_apart(self._loggers)

    @property
    def made_loggers(self) -> list[Any]:
        """Return the loggers that exist already; makes none."""
        return self._loggers or []

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Replace the loggers by none, or by one that writes nothing, inside the block."""
        from arclight.trainer.loggers.logger import DummyLogger

        before = self._loggers, self._agreed
        self._loggers = [] if self._loggers == [] or self._logger_choice is False else [DummyLogger()]
        try:
            yield
        finally:
            self._loggers, self._agreed = before

    def own_loggers(self) -> list[Any]:
        """Return the given loggers that choose their own place to write to; makes no run folder."""
        given = self._loggers if self._loggers is not None else _listed(self._logger_choice)
        if self._loggers is None and not self.run_folders:
            given = self.loggers
        return [logger for logger in given if getattr(logger, "needs_folder", False) is not True]

    def _make_loggers(self) -> list[Any]:
        """Make loggers from the ``logger`` argument; under ``fast_dev_run`` one that writes nothing."""
        from arclight.trainer.loggers.csv_logger import CSVLogger
        from arclight.trainer.loggers.logger import DummyLogger

        choice = True if self._logger_choice is None else self._logger_choice
        if choice is not True:
            given = _listed(choice)
            return [DummyLogger()] if given and self._dry else given
        if self._dry:
            return [DummyLogger()]
        return [CSVLogger() if self._default_logger is None else self._default_logger(self.root)]

    @property
    def log_dir(self) -> str | None:
        """Folder of the run, or of the first logger if there are no run folders.

        Without loggers it is ``default_root_dir``.
        """
        if self.run_folders:
            return str(self.run_folder.path)
        if "log_dir" in self._agreed:
            return self._agreed["log_dir"]
        folder = self.loggers[0].log_dir if self.loggers else self.root
        return self.strategy.broadcast(folder)  # type: ignore[no-any-return]

    @property
    def checkpoint_folder(self) -> str:
        """Return the folder of checkpoints that were given no path, the same on every rank."""
        if self.run_folders:
            return os.path.realpath(self.run_folder.checkpoints)
        if "checkpoints" in self._agreed:
            return str(self._agreed["checkpoints"])
        folder = self.root
        if self.loggers:
            logger = self.loggers[0]
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            folder = os.path.join(logger.save_dir or folder, str(logger.name), version)
        return str(self.strategy.broadcast(os.path.join(folder, "checkpoints")))


def local_root(folder: str | Path) -> str:
    """Return ``folder`` as a local path.

    Raises MisconfigurationError for an address, which can hold checkpoints only.
    """
    if is_remote(found := to_path(folder)):
        raise MisconfigurationError(
            f"Trainer(default_root_dir={str(folder)!r}): a run's log, metrics and report are written to local folders; keep "
            f"checkpoints at the address with ModelCheckpoint(dirpath={str(folder)!r}), in a recipe [checkpoint] folder"
        )
    return os.path.expanduser(found)


def _listed(choice: Any) -> list[Any]:
    """List the loggers in a ``logger`` argument."""
    if choice is None or isinstance(choice, bool):
        return []
    return list(choice) if isinstance(choice, Iterable) else [choice]
