"""Log metrics, parameters and checkpoints to a ClearML task.

Users pass it as a logger, or a recipe's ``[[loggers]]`` builds it (``loggers.settings``). The package is imported when a logger is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_only
from arclight.trainer.loggers.hosted_logger import HostedLogger
from arclight.trainer.loggers.params import plain_params


class ClearMLLogger(HostedLogger):
    """Log to a ClearML task, made when something is first logged.

    Further arguments go to ``clearml.Task.init``.

    ``task`` is one that was begun elsewhere. ``offline`` keeps everything in a folder that ``clearml.Task.import_offline_session``
    sends later. ``log_model``: True sends the checkpoints that are left when training ends, ``"all"`` each as it is saved.
    A metric ``group/name`` is the series ``name`` of the plot ``group``. Nothing is captured that was not logged: the
    arguments of the command line, the output and other frameworks are left alone unless asked for. Needs the extra ``track``.
    """

    def __init__(
        self,
        project_name: str = "lightning_logs",
        task_name: str = "run",
        task: Any = None,
        offline: bool = False,
        log_model: Literal[True, False, "all"] = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        require("clearml", extra="track")
        super().__init__(prefix, log_model, task)
        self._project_name, self._offline = project_name, offline
        self._task_init: dict[str, Any] = {
            "project_name": project_name,
            "task_name": task_name,
            "reuse_last_task_id": False,
            "auto_connect_arg_parser": False,
            "auto_connect_frameworks": False,
            "auto_resource_monitoring": False,
            "auto_connect_streams": False,
            **kwargs,
        }

    def start_experiment(self) -> Any:
        """Start or continue the ``clearml.Task``."""
        tasks = require("clearml", extra="track").Task
        if self._offline:
            tasks.set_offline(offline_mode=True)
        return tasks.init(**self._task_init)

    @property
    def name(self) -> str:
        """The project."""
        return self._project_name

    @property
    def version(self) -> str | None:
        """The task's id; None before there is one."""
        return self._experiment.id if self._experiment is not None else None

    @property
    def save_dir(self) -> str | None:
        """The folder of an offline task."""
        if self._experiment is None or not self._offline:
            return None
        return str(self._experiment.get_offline_mode_folder())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        reporter = self.experiment.get_logger()
        for name, number in self.scalars(metrics).items():
            group, _, series = name.rpartition("/")
            reporter.report_scalar(title=group or name, series=series, value=number, iteration=step or 0)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.set_parameters_as_dict({"General": plain_params(params)})

    @rank_zero_only
    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush(wait_for_uploads=False)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what is left; the task stays open, so that a test after a fit belongs to it."""
        if self._experiment is None:
            return
        self.upload_remaining()
        if status != "success":
            self._experiment.mark_failed(status_message=status)
        self._experiment.flush(wait_for_uploads=True)

    def upload_checkpoint(self, callback: Any, path: Any, score: Any) -> None:
        self.experiment.upload_artifact(name=Path(path).name, artifact_object=str(path), wait_on_upload=True)

    def __getstate__(self) -> dict[str, Any]:
        """Let another process continue the same task, by its id."""
        state = super().__getstate__()
        if self.version is not None and not self._offline:
            state["_task_init"] = {**self._task_init, "reuse_last_task_id": self.version, "continue_last_task": 0}
        return state
