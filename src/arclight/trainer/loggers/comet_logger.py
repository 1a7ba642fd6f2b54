"""Log metrics, parameters and the model's description to a Comet experiment.

Users pass it as a logger, or a recipe's ``[[loggers]]`` builds it (``loggers.settings``). Name and arguments are Lightning's. The package
is imported when a logger is made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_only
from arclight.trainer.loggers.hosted_logger import HostedLogger
from arclight.trainer.loggers.params import convert_params, is_tensor

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

FRAMEWORK_NAME = "pytorch-lightning"
"""What Comet's pages know runs of this vocabulary by."""
_OLD_NAMES = {"experiment_name": "name", "save_dir": "offline_directory"}


class CometLogger(HostedLogger):
    """An experiment of Comet, made at once on rank 0.

    Further arguments (``name``, ``offline_directory``, ``log_code``, ...) are those of ``comet_ml.ExperimentConfig``.
    ``online=False`` writes an archive to ``offline_directory``, to be uploaded later. ``mode``: ``"get"`` goes on with
    the experiment of ``experiment_key``, ``"create"`` makes a new one, ``"get_or_create"`` does what is possible.
    ``prefix`` stands before each metric's name, joined as Comet does it. The experiment stays open when training ends,
    so that more can be logged; ``logger.experiment.end()`` closes it. Needs the extra ``track``.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        for old, new in _OLD_NAMES.items():
            if old in kwargs:
                log.warning("CometLogger: %s is now called %s", old, new)
                value = kwargs.pop(old)
                kwargs.setdefault(new, value)
        if "project_name" in kwargs:
            log.warning("CometLogger: project_name is now called project")
            project = kwargs.pop("project_name") if project is None else project
        if "offline" in kwargs:
            log.warning("CometLogger: offline=True is now online=False")
            offline = kwargs.pop("offline")
            online = not offline if online is None else online
        os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # comet_ml would patch torch, and says so where torch came first
        os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")  # the client's reports about itself
        comet = require("comet_ml", extra="track")
        self._api_key, self._workspace, self._mode, self._online = api_key, workspace, mode, online
        self._project_name, self._experiment_key = project, experiment_key
        super().__init__(prefix)
        self._kwargs = kwargs
        self._comet_config = comet.ExperimentConfig(**kwargs)
        _ = self.experiment

    def start_experiment(self) -> Any:
        """Start or continue the experiment of ``comet_ml``."""
        experiment = require("comet_ml", extra="track").start(
            api_key=self._api_key, workspace=self._workspace, project=self._project_name, experiment_key=self._experiment_key,
            mode=self._mode, online=self._online, experiment_config=self._comet_config,
        )  # fmt: skip
        if experiment is None:
            raise RuntimeError(
                f"Comet has made no experiment for project {self._project_name!r}; see its messages above, or pass online=False"
            )
        self._experiment_key, self._project_name = experiment.get_key(), experiment.project_name
        experiment.log_other("Created from", FRAMEWORK_NAME)
        return experiment

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.__internal_api__log_parameters__(
            parameters=convert_params(params), framework=FRAMEWORK_NAME, flatten_nested=True, source="manual"
        )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        plain = {name: value.detach().cpu() if is_tensor(value) else value for name, value in metrics.items()}
        epoch = plain.pop("epoch", None)
        self.experiment.__internal_api__log_metrics__(
            plain, step=step, epoch=epoch, prefix=self.prefix, framework=FRAMEWORK_NAME
        )

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the text of ``model``'s structure."""
        self.experiment.__internal_api__set_model_graph__(graph=model, framework=FRAMEWORK_NAME)

    @rank_zero_only
    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()

    @property
    def save_dir(self) -> str | None:
        return self._comet_config.offline_directory  # type: ignore[no-any-return]

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project_name

    @property
    def version(self) -> str | None:
        """The experiment's key."""
        return self._experiment.get_key() if self._experiment is not None else None
