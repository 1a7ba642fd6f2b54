"""Define the base of loggers that send to a service: lazy start, upload of checkpoints.

The loggers of Weights & Biases, MLflow, Comet and ClearML build on it. `CheckpointArtifacts` decides which checkpoints are sent and when;
a subclass says how. Keys of the description of a checkpoint (`describe`) are Lightning's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn
from arclight.trainer.loggers.logger import Logger, rank_zero_experiment

if TYPE_CHECKING:
    from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint

_SETTINGS = {
    **{name: name for name in ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")},
    "_every_n_train_steps": "every_n_train_steps",
}
"""Settings of a checkpoint's callback that services record: the name that readers of such records know, and the attribute."""


class HostedLogger(Logger):
    """Base class of loggers of hosted services.

    A subclass defines :meth:`start_experiment`, what it logs and :meth:`upload_checkpoint`.

    ``log_model``: ``"all"`` sends each checkpoint as it is saved, True those that are left when the run ends, False none.
    Raises ValueError for another ``log_model``.
    """

    def __init__(self, prefix: str | None, log_model: bool | str = False, experiment: Any = None) -> None:
        self.prefix, self._experiment = prefix, experiment
        self._artifacts = CheckpointArtifacts(log_model)

    def start_experiment(self) -> Any:
        """Start or resume the experiment, and return the client's object for it."""
        raise NotImplementedError(f"{type(self).__name__} has no start_experiment()")

    def upload_checkpoint(self, callback: Any, path: Any, score: Any) -> None:
        """Send one checkpoint, a file or a folder."""
        raise NotImplementedError(f"{type(self).__name__} has no upload_checkpoint(callback, path, score)")

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The client's object for the experiment, which is started when this is first used."""
        if self._experiment is None:
            self._experiment = self.start_experiment()
        return self._experiment

    def scalars(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Prefix the names of metrics, and read tensors of one element."""
        return {name: v.item() if hasattr(v, "item") else v for name, v in self._prefixed(metrics).items()}

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        if self._artifacts.saved(checkpoint_callback):
            self._upload_new(checkpoint_callback)

    def upload_remaining(self) -> None:
        """Send the checkpoints that are left at the end of a run."""
        for callback in self._artifacts.callbacks.values():
            self._upload_new(callback)

    def _upload_new(self, callback: Any) -> None:
        for path, score in self._artifacts.new(callback):
            self.upload_checkpoint(callback, path, score)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: the experiment itself stays here."""
        return {**self.__dict__, "_experiment": None}


class CheckpointArtifacts:
    """Remember which checkpoints a logger has sent.

    ``log_model`` as for :class:`HostedLogger`; with ``save_top_k=-1``, if none is ever removed, True sends each at once.
    """

    def __init__(self, log_model: bool | str) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(f"log_model={log_model!r}: choose True, False or 'all'")
        self.log_model = log_model
        self.sent: dict[Any, float] = {}
        self.callbacks: dict[int, Any] = {}

    def saved(self, callback: Any) -> bool:
        """Return True if the checkpoint that was just saved is to be sent now."""
        if self.log_model is True and callback.save_top_k != -1:
            self.callbacks[id(callback)] = callback
            return False
        return bool(self.log_model)

    def new(self, callback: Any) -> list[tuple[Any, Any]]:
        """List path and score of each checkpoint not sent yet, oldest first; mark it as sent."""
        found = scan_checkpoints(callback, self.sent)
        self.sent |= {path: time for time, path, _, _ in found}
        return [(path, score) for _, path, score, _ in found]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "callbacks": {}}


def scan_checkpoints(callback: Any, logged_model_time: dict[Any, float]) -> list[tuple[float, Any, Any, str]]:
    """List time, path, score and kind of checkpoints not logged yet, oldest first.

    Kinds: latest, best, best_k. One that was written again since it was logged is listed again.
    """
    checkpoints: dict[Any, tuple[Any, str]] = {}
    if hasattr(callback, "last_model_path") and hasattr(callback, "current_score"):
        checkpoints[callback.last_model_path] = (callback.current_score, "latest")
    if hasattr(callback, "best_model_path") and hasattr(callback, "best_model_score"):
        checkpoints[callback.best_model_path] = (callback.best_model_score, "best")
    for path, score in getattr(callback, "best_k_models", {}).items():
        checkpoints[path] = (score, "best_k")
    if any("://" in str(path) for path in checkpoints):
        rank_zero_warn("checkpoints at an address stay there: loggers send only those in local folders")
    found = [
        (Path(path).stat().st_mtime, path, score, tag)
        for path, (score, tag) in checkpoints.items()
        if path and Path(path).exists()
    ]
    new = [c for c in found if c[1] not in logged_model_time or logged_model_time[c[1]] < c[0]]
    return sorted(new, key=lambda c: (c[0], str(c[1])))


def describe(callback: Any, path: Any, score: Any, key: str) -> dict[str, Any]:
    """Describe a checkpoint for a service: score, file name, and its settings under ``key``."""
    return {
        "score": score.item() if hasattr(score, "item") else score,
        "original_filename": Path(path).name,
        key: {
            name: getattr(callback, attribute) for name, attribute in _SETTINGS.items() if hasattr(callback, attribute)
        },
    }


def aliases(callback: Any, path: Any) -> list[str]:
    """List the names that services know a checkpoint by."""
    return ["latest", "best"] if path == callback.best_model_path else ["latest"]


def joint_version(loggers: list[Any], separator: str = "_") -> int | str | None:
    """Join the versions of several loggers, each once, in order."""
    if len(loggers) == 1:
        version: int | str | None = loggers[0].version
        return version
    return separator.join(dict.fromkeys(str(logger.version) for logger in loggers))
