"""Log metrics, parameters and checkpoints to MLflow, in a folder or on a server.

Users pass it as a logger, or a recipe's ``[[loggers]]`` builds it (``loggers.settings``). Name and arguments are Lightning's. The package
is imported when a logger is made.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import time
from typing import Any, Literal

from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn
from arclight.trainer.loggers.hosted_logger import HostedLogger, aliases, describe
from arclight.trainer.loggers.params import convert_params, flatten_dict, yaml_text

log = logging.getLogger(__name__)

LOCAL_FILE_URI_PREFIX = "file:"
_MAX_VALUE, _MAX_PARAMS, _MAX_METRICS = 250, 100, 1000
"""Limits of tracking servers: characters of a parameter's value, parameters and metrics of one request."""
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED", "aborted": "KILLED"}


class MLFlowLogger(HostedLogger):
    """A run of ``experiment_name`` in the MLflow store at ``tracking_uri``.

    ``tracking_uri`` is a server or ``file:<folder>``; if it is not given, ``MLFLOW_TRACKING_URI``, else the folder
    ``save_dir``. ``run_id`` goes on with a run that is there, ``run_name`` and ``tags`` describe a new one.
    ``log_model``: True sends the checkpoints that are left when training ends as artifacts, ``"all"`` each as it is
    saved. ``synchronous=False`` lets MLflow send in the background. Needs ``mlflow`` or ``mlflow-skinny`` (extra
    ``track``), whose own usage reports are turned off unless ``MLFLOW_DISABLE_TELEMETRY`` says otherwise.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: Literal[True, False, "all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        self._tracking_uri = (
            tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{LOCAL_FILE_URI_PREFIX}{save_dir}"
        )
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        if self.save_dir is not None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks whether one means it
        require("mlflow", extra="track")
        tracking = require("mlflow.tracking", extra="track")
        self._experiment_name, self._run_name, self._artifact_location = experiment_name, run_name, artifact_location
        self._experiment_id: str | None = None
        super().__init__(prefix, log_model)
        self._run_id, self.tags = run_id, tags
        self._log_batch_kwargs = {} if synchronous is None else {"synchronous": synchronous}
        self._mlflow_client: Any = tracking.MlflowClient(self._tracking_uri)

    def start_experiment(self) -> Any:
        """Start or continue the run, and return the ``mlflow.tracking.MlflowClient``."""
        require("mlflow", extra="track").set_tracking_uri(self._tracking_uri)
        client = self._mlflow_client
        if self._run_id is not None:
            self._experiment_id = client.get_run(self._run_id).info.experiment_id
            return client
        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None and found.lifecycle_stage != "deleted":
            self._experiment_id = found.experiment_id
        else:
            log.info("a new MLflow experiment: %s", self._experiment_name)
            self._experiment_id = client.create_experiment(
                name=self._experiment_name, artifact_location=self._artifact_location
            )
        if self._run_name is not None:
            self.tags = {**(self.tags or {}), "mlflow.runName": self._run_name}
        run = client.create_run(experiment_id=self._experiment_id, tags=_get_resolve_tags()(self.tags))
        self._run_id = run.info.run_id
        return client

    @property
    def run_id(self) -> str | None:
        """Id of the run, which is begun if need be."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the experiment, which is made if need be."""
        _ = self.experiment
        return self._experiment_id

    @property
    def name(self) -> str | None:
        return self.experiment_id

    @property
    def version(self) -> str | None:
        return self.run_id

    @property
    def save_dir(self) -> str | None:
        """The folder of a store that is one; None for a server."""
        uri = self._tracking_uri
        return uri.removeprefix(LOCAL_FILE_URI_PREFIX) if uri.startswith(LOCAL_FILE_URI_PREFIX) else None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        make = require("mlflow.entities", extra="track").Param
        flat = flatten_dict(convert_params(params))
        items = [make(key=name, value=str(value)[:_MAX_VALUE]) for name, value in flat.items()]
        for start in range(0, len(items), _MAX_PARAMS):
            part = items[start : start + _MAX_PARAMS]
            self.experiment.log_batch(run_id=self.run_id, params=part, **self._log_batch_kwargs)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        make, now = require("mlflow.entities", extra="track").Metric, int(time() * 1000)
        items = []
        for name, number in self.scalars(metrics).items():
            if isinstance(number, str):
                log.warning("MLflow keeps numbers only: %s=%r is left out", name, number)
                continue
            items.append(make(key=_allowed(name), value=number, timestamp=now, step=step or 0))
        for start in range(0, len(items), _MAX_METRICS):
            part = items[start : start + _MAX_METRICS]
            self.experiment.log_batch(run_id=self.run_id, metrics=part, **self._log_batch_kwargs)

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        if self._experiment is None:
            return
        self.upload_remaining()
        if self.experiment.get_run(self.run_id):
            self.experiment.set_terminated(self.run_id, _STATUS.get(status, status))

    def upload_checkpoint(self, callback: Any, path: Any, score: Any) -> None:
        """Upload a checkpoint as an artifact of its own name, with two files that describe it."""
        place, client = Path(path).stem, self.experiment
        if Path(path).is_dir():
            client.log_artifacts(self._run_id, str(path), f"{place}/{Path(path).name}")
        else:
            client.log_artifact(self._run_id, path, place)
        with tempfile.TemporaryDirectory() as folder:
            about = describe(callback, path, score, "Checkpoint")
            (Path(folder) / "metadata.yaml").write_text(yaml_text(about), encoding="utf-8")
            (Path(folder) / "aliases.txt").write_text(str(aliases(callback, path)), encoding="utf-8")
            client.log_artifacts(self._run_id, folder, place)


def _allowed(name: str) -> str:
    """Return ``name`` in the letters that MLflow accepts."""
    allowed = re.sub(r"[^a-zA-Z0-9_/. -]+", "", name)
    if allowed != name:
        rank_zero_warn(
            f"MLflow only allows '_', '/', '.', '-' and ' ' as special characters in metric names: {name} is logged as {allowed}",
            category=RuntimeWarning,
        )
    return allowed


def _get_resolve_tags() -> Callable[[Any], Any]:
    """Return MLflow's function that adds tags such as the user's name and the source file."""
    resolve: Callable[[Any], Any] = require("mlflow.tracking.context.registry", extra="track").resolve_tags
    return resolve
