"""Write the run's report when training ends, well or not.

Users pass it, and commands add it to the runs of recipes and of users' modules (``cli``). ``trainer.run.report`` writes the page from the
run folder; names of files stay.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class RunReport(Callback):
    """``report.html`` in the run folder, and ``environment.json`` when training starts.

    ``title`` defaults to the run's name and number. A report that cannot be written neither ends a run that is done nor hides why
    training failed: it is a warning.
    """

    runs_last = True

    def __init__(self, title: str | None = None) -> None:
        self.title = title
        self._fitting = False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting = not trainer.fast_dev_run
        if self._fitting:
            folder = trainer.run_folder  # made on every rank
            if trainer.is_global_zero:
                folder.write_environment(**({"measured": trainer.measured} if trainer.measured else {}))

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting:
            self._write(trainer, None)
        self._fitting = False

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if not self._fitting:
            return
        self._fitting = False
        try:
            self._write(trainer, f"{type(exception).__name__}: {exception}")
        except OSError as error:  # of a full disk, most likely what the exception is about
            log.warning("the report could not be written: %s", error)

    def _write(self, trainer: Trainer, failure: str | None) -> None:
        from arclight.trainer.run.report import write_report

        if trainer.is_global_zero:
            for logger in trainer.loggers:
                try:
                    logger.save()
                except OSError as error:  # the report has what was saved before
                    log.warning("%s could not save before the report: %s", type(logger).__name__, error)
            try:
                path = write_report(trainer.run_folder.path, self.title, failure=failure)
            except OSError as error:  # such as of a full disk: what is measured and trained is written already
                log.warning("the report of %s could not be written: %s", trainer.run_folder.path, error)
            else:
                log.info("report: %s", path)
