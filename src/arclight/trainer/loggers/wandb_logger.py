"""Log metrics, media and checkpoints to a Weights & Biases run.

Users pass it to a Trainer, or a recipe's ``[[loggers]]`` builds it (``loggers.settings``). Signature and names of artifacts are
Lightning's; only this file imports ``wandb``, when a logger is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn
from arclight.trainer.loggers.hosted_logger import HostedLogger, aliases, describe
from arclight.trainer.loggers.params import convert_json_serializable, convert_params, sanitize_callable_params

if TYPE_CHECKING:
    from torch import nn

Paths = str | os.PathLike[str]


class WandbLogger(HostedLogger):
    """Log to a Weights & Biases run, made when something is first logged.

    It belongs to ``project`` (else ``WANDB_PROJECT``); further arguments go to ``wandb.init``.

    ``version`` (or ``id``) goes on with a run that is there, ``offline`` keeps everything under ``save_dir`` (if
    that is None, ``dir``) to be sent later. ``log_model``: True sends the checkpoints that are left when training ends, ``"all"``
    each as it is saved, as versions of the artifact ``checkpoint_name``. The client's reports of its own errors are off
    unless ``WANDB_ERROR_REPORTING`` says otherwise. Needs the extra ``track``.
    Raises MisconfigurationError for ``log_model`` with ``offline``.
    """

    def __init__(
        self, name: str | None = None, save_dir: Paths = ".", version: str | None = None, offline: bool = False, dir: Paths | None = None,
        id: str | None = None, anonymous: bool | None = None, project: str | None = None, log_model: Literal["all"] | bool = False,
        experiment: Any = None, prefix: str = "", checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable", **kwargs: Any,
    ) -> None:  # fmt: skip
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        require("wandb", extra="track")
        if offline and log_model:
            raise MisconfigurationError(
                f"WandbLogger(offline=True, log_model={log_model!r}): checkpoints cannot be uploaded in offline mode; leave out one of them"
            )
        super().__init__(prefix, log_model, experiment)
        self._offline = offline
        self._checkpoint_name, self.add_file_policy = checkpoint_name, add_file_policy
        folder = save_dir if save_dir is not None else dir
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT", "lightning_logs"),
            "dir": os.fspath(folder) if folder is not None else None,
            "id": version or id,
            "resume": "allow",
            "anonymous": "allow" if anonymous else None,
            **kwargs,
        }
        self._project, self._save_dir = self._wandb_init["project"], self._wandb_init["dir"]
        self._name, self._id = self._wandb_init["name"], self._wandb_init["id"]
        self._attach_id: str | None = None

    def start_experiment(self) -> Any:
        """Start or continue the ``wandb.Run``."""
        wandb = require("wandb", extra="track")
        if self._offline:
            os.environ["WANDB_MODE"] = "dryrun"  # so that processes started from here are offline too
        if wandb.run is not None:
            rank_zero_warn(
                "There is a wandb run already in progress, and this WandbLogger continues it; call wandb.finish() before making "
                "the logger to begin a new one"
            )
            return wandb.run
        if self._attach_id is not None:
            return wandb._attach(self._attach_id)
        run = wandb.init(**_understood(wandb, self._wandb_init))
        if hasattr(run, "define_metric"):
            if self._wandb_init.get("sync_tensorboard"):
                run.define_metric("*", step_metric="global_step")
            else:
                run.define_metric("trainer/global_step")
                run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return run

    def __getstate__(self) -> dict[str, Any]:
        """Start the run and return the state, so that another process joins it by its id."""
        run = self.experiment
        return {
            **super().__getstate__(), "_id": getattr(run, "id", None), "_name": getattr(run, "name", None),
            "_attach_id": getattr(run, "_attach_id", None),
        }  # fmt: skip

    @property
    def save_dir(self) -> str | None:
        return self._save_dir  # type: ignore[no-any-return]

    @property
    def name(self) -> str | None:
        """The project; the run's own name is ``logger.experiment.name``."""
        return self._project  # type: ignore[no-any-return]

    @property
    def version(self) -> str | None:
        """The run's id; None before there is one."""
        return self._experiment.id if self._experiment is not None else self._id  # type: ignore[no-any-return]

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Record gradients (or ``parameters``, or ``all``) of ``model`` every ``log_freq`` steps."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        plain = convert_json_serializable(sanitize_callable_params(convert_params(params)))
        self.experiment.config.update(plain, allow_val_change=True)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        metrics = self._prefixed(metrics)
        if step is not None and not self._wandb_init.get("sync_tensorboard"):
            metrics["trainer/global_step"] = step
        self.experiment.log(metrics)

    @rank_zero_only
    def log_table(
        self, key: str, columns: list[str] | None = None, data: list[list[Any]] | None = None, dataframe: Any = None,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Log a table of anything, from ``columns`` and ``data`` or from ``dataframe``."""
        table = require("wandb", extra="track").Table(columns=columns, data=data, dataframe=dataframe)
        self.log_metrics({key: table}, step)

    log_text = log_table

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log images (tensors, arrays, PIL images or paths).

        Further arguments are lists with an item for each, such as ``caption``.
        """
        self._log_media(require("wandb", extra="track").Image, key, "images", images, step, kwargs)

    @rank_zero_only
    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log sounds (arrays or paths).

        Further arguments are lists with an item for each, such as ``sample_rate``.
        """
        self._log_media(require("wandb", extra="track").Audio, key, "audios", audios, step, kwargs)

    @rank_zero_only
    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Log videos (arrays or paths).

        Further arguments are lists with an item for each, such as ``fps``.
        """
        self._log_media(require("wandb", extra="track").Video, key, "videos", videos, step, kwargs)

    def _log_media(
        self, make: Callable[..., Any], key: str, what: str, items: list[Any], step: int | None, options: dict[str, list[Any]]
    ) -> None:  # fmt: skip
        if not isinstance(items, list):
            raise TypeError(f'Expected a list as "{what}", found {type(items)}')
        for name, values in options.items():
            if len(values) != len(items):
                raise ValueError(f"Expected {len(items)} items but only found {len(values)} for {name}")
        each = [{name: values[i] for name, values in options.items()} for i in range(len(items))]
        self.log_metrics({key: [make(item, **of_it) for item, of_it in zip(items, each, strict=True)]}, step)

    @staticmethod
    @rank_zero_only
    def download_artifact(
        artifact: str, save_dir: Paths | None = None, artifact_type: str | None = None, use_artifact: bool | None = True
    ) -> str:
        """Download ``artifact`` and return its folder.

        With ``use_artifact`` the run under way is recorded as its user.
        """
        wandb = require("wandb", extra="track")
        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return found.download(root=None if save_dir is None else os.fspath(save_dir))  # type: ignore[no-any-return]

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Return the artifact, noted as an input of this run."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if status == "success" and self._experiment is not None:
            self.upload_remaining()

    def upload_checkpoint(self, callback: Any, path: Any, score: Any) -> None:
        """Send a checkpoint as a version of the artifact ``checkpoint_name``."""
        name = self._checkpoint_name = self._checkpoint_name or f"model-{self.experiment.id}"
        about = describe(callback, path, score, type(callback).__name__)
        artifact = require("wandb", extra="track").Artifact(name=name, type="model", metadata=about)
        if Path(path).is_dir():
            artifact.add_dir(str(path), name="model", policy=self.add_file_policy)
        else:
            artifact.add_file(path, name="model.ckpt", policy=self.add_file_policy)
        self.experiment.log_artifact(artifact, aliases=aliases(callback, path))


def _understood(wandb: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop ``anonymous=None`` for clients that warn of any value of it."""
    major_minor = getattr(wandb, "__version__", "0.0").split(".")[:2]
    given_up = [int(part) for part in major_minor if part.isdigit()] >= [0, 22]
    return {
        name: value for name, value in arguments.items() if not (given_up and name == "anonymous" and value is None)
    }
