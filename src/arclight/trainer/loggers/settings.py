"""Define settings of loggers, each of which builds its logger.

They are a recipe's ``[[loggers]]`` (``cli.schema``), built by ``cli.run_setup``: names of fields stay, and docstrings are texts of
``--help``. No torch is imported here: a recipe is read without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arclight._intervals import Checked

if TYPE_CHECKING:
    from arclight.trainer.loggers.logger import Logger

LogModel = bool | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class LoggerSettings(Checked):
    """Base of the settings of loggers."""

    def build(self, run_name: str, root: Path) -> Logger:
        """Make the logger of a run called ``run_name``, whose folder is below ``root``."""
        raise NotImplementedError(f"{type(self).__name__} has no build(run_name, root)")


@dataclass(frozen=True, kw_only=True)
class CSV(LoggerSettings):
    """A further metrics.csv; the run folder has one in any case."""

    folder: str
    """Folder or address, such as s3://bucket/name; each run counts a version up in it."""

    def build(self, run_name: str, root: Path) -> Logger:
        from arclight.trainer.loggers.csv_logger import CSVLogger

        return CSVLogger(self.folder, name=run_name)


@dataclass(frozen=True, kw_only=True)
class TensorBoard(LoggerSettings):
    """Event files of TensorBoard."""

    folder: str | None = None
    """Folder or address of many runs; none: the run folder."""
    log_graph: bool = False
    """Also log the graph of a module that has an example_input_array."""

    def build(self, run_name: str, root: Path) -> Logger:
        from arclight.trainer.loggers.tensorboard_logger import TensorBoardLogger

        return TensorBoardLogger(self.folder, name=run_name, log_graph=self.log_graph, default_hp_metric=False)


@dataclass(frozen=True, kw_only=True)
class Wandb(LoggerSettings):
    """A run of Weights & Biases."""

    project: str | None = None
    """Project; none: the name of the run."""
    run_name: str | None = None
    """Name of the run there; none: W&B draws one."""
    run_id: str | None = None
    """Id of a run there that is continued, as after --resume; none begins one."""
    offline: bool = False
    """Keep everything below the folder of all runs, for wandb sync."""
    log_model: LogModel = False
    """Upload checkpoints: true those left at the end, all each one as it is saved."""

    def build(self, run_name: str, root: Path) -> Logger:
        from arclight.trainer.loggers.wandb_logger import WandbLogger

        return WandbLogger(
            project=self.project or run_name, name=self.run_name, version=self.run_id, offline=self.offline,
            log_model=self.log_model, save_dir=root,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MLflow(LoggerSettings):
    """A run of MLflow, in a folder or on a server."""

    experiment: str | None = None
    """Experiment; none: the name of the run."""
    run_name: str | None = None
    """Name of the run there; none: MLflow draws one."""
    run_id: str | None = None
    """Id of a run there that is continued, as after --resume; none begins one."""
    tracking_uri: str | None = None
    """Server, or file:FOLDER; none: MLFLOW_TRACKING_URI, else mlruns in the folder of all runs."""
    log_model: LogModel = False
    """Upload checkpoints: true those left at the end, all each one as it is saved."""

    def build(self, run_name: str, root: Path) -> Logger:
        from arclight.trainer.loggers.mlflow_logger import MLFlowLogger

        return MLFlowLogger(
            experiment_name=self.experiment or run_name, run_name=self.run_name, run_id=self.run_id, log_model=self.log_model,
            tracking_uri=self.tracking_uri, save_dir=root.resolve() / "mlruns",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Comet(LoggerSettings):
    """An experiment of Comet; the key is COMET_API_KEY."""

    project: str | None = None
    """Project; none: the name of the run."""
    workspace: str | None = None
    """Workspace; none: the account's own."""
    experiment_key: str | None = None
    """Key of an experiment that is continued, as after --resume; none begins one."""
    offline: bool = False
    """Keep an archive on this machine instead of sending."""

    def build(self, run_name: str, root: Path) -> Logger:
        from arclight.trainer.loggers.comet_logger import CometLogger

        return CometLogger(
            project=self.project or run_name, workspace=self.workspace, experiment_key=self.experiment_key, online=not self.offline
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClearML(LoggerSettings):
    """A task of ClearML."""

    project: str | None = None
    """Project; none: the name of the run."""
    task_name: str = "run"
    """Name of the task."""
    offline: bool = False
    """Keep a session on this machine instead of sending."""
    log_model: LogModel = False
    """Upload checkpoints: true those left at the end, all each one as it is saved."""

    def build(self, run_name: str, root: Path) -> Logger:
        from arclight.trainer.loggers.clearml_logger import ClearMLLogger

        return ClearMLLogger(
            project_name=self.project or run_name,
            task_name=self.task_name,
            offline=self.offline,
            log_model=self.log_model,
        )
