"""Where a run writes, and the loggers that say so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.checkpoint.remote import is_remote, to_path
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.run.folder import RunFolder

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.module import Module
    from arclight.trainer.settings import TrainerBehavior


class RunPlaces:
    """Loggers and folders of a trainer. One process makes nothing before it is asked for, several decide when a run begins."""

    conventions: TrainerBehavior
    strategy: Strategy
    default_root_dir: str
    run_name: str | None
    fast_dev_run: int | bool
    _run_folder: RunFolder | None
    _logger_choice: Any
    _loggers: list[Any] | None
    _module: Module | None
    _folder_made_early: bool
    _agreed: dict[str, str | None]

    @property
    def folder_name(self) -> str:
        """Name of the folder that the numbered folders of such runs lie in."""
        if self._run_folder is not None:
            return self._run_folder.name
        return self.run_name or (type(self._module).__name__.lower() if self._module is not None else "run")

    def agree_on_places(self) -> None:
        """Decide on all ranks where this run writes, so that a rank may ask for it alone. A collective."""
        self._agreed = {}
        if self.strategy.world_size == 1:
            return
        if not self.conventions.run_folders:
            self._agreed = {"log_dir": self.log_dir, "checkpoints": self.checkpoint_folder}
            return
        if self._folder_made_early and self.strategy.broadcast(not os.path.isdir(self.run_folder)):
            self._run_folder = None  # a run before left nothing in it
        if self._run_folder is None:
            folder, self._folder_made_early = self.run_folder.path, True
            for logger in self._loggers or []:
                if getattr(logger, "needs_folder", False) is True:
                    logger.use_folder(folder)

    def drop_empty_folder(self) -> None:
        """Remove the folder that several processes decided on if nobody has written into it."""
        if self._folder_made_early and self.strategy.is_global_zero:
            with suppress(OSError):  # it holds something, or other runs are beside it
                self.run_folder.path.rmdir()
                self.run_folder.path.parent.rmdir()

    @property
    def run_folder(self) -> RunFolder:
        """Where this run writes, the same on every rank; in one process made when first asked for."""
        if self._run_folder is None:
            made = str(RunFolder(self.default_root_dir, self.folder_name).path) if self.strategy.is_global_zero else ""
            self._run_folder = RunFolder.open(self.strategy.broadcast(made))
        return self._run_folder

    @run_folder.setter
    def run_folder(self, folder: RunFolder) -> None:
        self._run_folder, self._folder_made_early = folder, False

    @property
    def loggers(self) -> list[Any]:
        if self._loggers is None:
            self.loggers = self._made_loggers()
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
    def logger(self) -> Any:
        """The first logger, None where there is none; setting one makes it the only one."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    def own_loggers(self) -> list[Any]:
        """The loggers that were given and know where to write by themselves; no folder is made for asking."""
        given = self._loggers if self._loggers is not None else _listed(self._logger_choice)
        if self._loggers is None and not self.conventions.run_folders:
            given = self.loggers
        return [logger for logger in given if getattr(logger, "needs_folder", False) is not True]

    def _made_loggers(self) -> list[Any]:
        """Loggers from the ``logger`` argument; in a development run one that writes nothing."""
        from arclight.trainer.loggers import CSVLogger, DummyLogger

        choice = True if self._logger_choice is None else self._logger_choice
        if choice is not True:
            given = _listed(choice)
            return [DummyLogger()] if given and self.fast_dev_run else given
        if self.fast_dev_run:
            return [DummyLogger()]
        return [CSVLogger() if self.conventions.run_folders else _versioned_logger(self.default_root_dir)]

    @property
    def log_dir(self) -> str | None:
        """The run folder; where there is none the first logger's folder, or ``default_root_dir`` without loggers."""
        if self.conventions.run_folders:
            return str(self.run_folder.path)
        if "log_dir" in self._agreed:
            return self._agreed["log_dir"]
        folder = self.loggers[0].log_dir if self.loggers else self.default_root_dir
        return self.strategy.broadcast(folder)  # type: ignore[no-any-return]

    @property
    def checkpoint_folder(self) -> str:
        """Where checkpoints go that were given no place, the same on every rank."""
        if self.conventions.run_folders:
            return os.path.realpath(self.run_folder.checkpoints)
        if "checkpoints" in self._agreed:
            return str(self._agreed["checkpoints"])
        folder = self.default_root_dir
        if self.loggers:
            logger = self.loggers[0]
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            folder = os.path.join(logger.save_dir or folder, str(logger.name), version)
        return str(self.strategy.broadcast(os.path.join(folder, "checkpoints")))


def local_root(folder: str | Path) -> str:
    """``folder`` for logs, reports and records of runs. Raises MisconfigurationError for an address: only checkpoints can lie there."""
    if is_remote(found := to_path(folder)):
        raise MisconfigurationError(
            f"Trainer(default_root_dir={str(folder)!r}): a run's log, metrics and report are written to local folders; keep "
            f"checkpoints at the address with ModelCheckpoint(dirpath={str(folder)!r}), in a recipe [checkpoint] folder"
        )
    return os.path.expanduser(found)


def _listed(choice: Any) -> list[Any]:
    """Loggers in a ``logger`` argument."""
    if choice is None or isinstance(choice, bool):
        return []
    return list(choice) if isinstance(choice, Iterable) else [choice]


def _versioned_logger(folder: str | Path) -> Any:
    """TensorBoard where it is installed, else CSV, in ``folder/lightning_logs/version_<n>``; n is a SLURM job's number."""
    from importlib.util import find_spec

    from arclight.fabric.environments import SLURMEnvironment
    from arclight.trainer.loggers import CSVLogger, TensorBoardLogger

    if find_spec("tensorboard") is None:
        return CSVLogger(folder)
    return TensorBoardLogger(folder, version=SLURMEnvironment.job_id())
