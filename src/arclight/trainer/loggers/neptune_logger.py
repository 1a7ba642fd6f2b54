"""Metrics, parameters and checkpoints in a run of Neptune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_only
from arclight.trainer.loggers.artifacts import scan_checkpoints
from arclight.trainer.loggers.logger import Logger, rank_zero_experiment
from arclight.trainer.loggers.params import convert_params, flatten_dict, sanitize_params

if TYPE_CHECKING:
    from torch import nn

    from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint


class NeptuneLogger(Logger):
    """A run of Neptune, made when something is first logged; further arguments go to ``neptune.init_run``.

    ``run`` is one that was begun elsewhere; ``prefix`` is the namespace of everything logged. neptune.ai has closed its
    public service: this is for servers of one's own and for ``mode="offline"``, which writes to the folder ``.neptune``.
    Needs the extra ``track``.
    """

    LOGGER_JOIN_CHAR = "/"
    PARAMETERS_KEY = "hyperparams"

    def __init__(
        self,
        *,
        api_key: str | None = None,
        project: str | None = None,
        name: str | None = None,
        run: Any = None,
        log_model_checkpoints: bool = True,
        prefix: str = "training",
        **kwargs: Any,
    ) -> None:
        require("neptune", extra="track")
        self._run_init: dict[str, Any] = {"api_token": api_key, "project": project, "name": name, **kwargs}
        self._project, self._run_name, self.prefix = project, name, prefix
        self._experiment = run
        self._log_model_checkpoints = log_model_checkpoints
        self._sent: dict[Any, float] = {}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``neptune.Run``."""
        if self._experiment is None:
            given = {name: value for name, value in self._run_init.items() if value is not None}
            self._experiment = require("neptune", extra="track").init_run(**given)
        return self._experiment

    run = experiment

    @property
    def name(self) -> str | None:
        return self._run_name

    @property
    def version(self) -> str | None:
        """The run's id; None before there is one."""
        if self._experiment is None:
            return None
        return str(self._experiment["sys/id"].fetch() if not self._offline else self._experiment._id)

    @property
    def _offline(self) -> bool:
        return self._run_init.get("mode") in ("offline", "debug")

    @property
    def save_dir(self) -> str:
        return str(Path.cwd() / ".neptune")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in self._prefixed(metrics).items():
            self.experiment[name].append(value.item() if hasattr(value, "item") else value, step=step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        plain = sanitize_params(flatten_dict(convert_params(params)))
        self.experiment[self._key(self.PARAMETERS_KEY)] = plain

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the text of ``model``'s structure."""
        self.experiment[self._key("model/summary")] = str(model)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Upload the checkpoints that are new, and say which is best."""
        if not self._log_model_checkpoints:
            return
        for time, path, score, tag in scan_checkpoints(checkpoint_callback, self._sent):
            place = self._key(f"model/checkpoints/{Path(path).stem}")
            handle = self.experiment[place]
            handle.upload_files(f"{path}/*") if Path(path).is_dir() else handle.upload(str(path))
            self._sent[path] = time
            if tag == "best":
                self.experiment[self._key("model/best_model_path")] = str(path)
                if score is not None:
                    self.experiment[self._key("model/best_model_score")] = float(score)

    @rank_zero_only
    def save(self) -> None:
        if self._experiment is not None and not self._offline:
            self._experiment.sync(wait=False)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment[self._key("status")] = status
            self.save()

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def __getstate__(self) -> dict[str, Any]:
        """Another process goes on with the same run, by its id."""
        state = {**self.__dict__, "_experiment": None}
        if self._experiment is not None and not self._offline:
            state["_run_init"] = {**self._run_init, "with_id": self.version}
        return state
