"""Checkpoints as artifacts of a logging service: which of them are new, and what is said of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arclight.fabric.rank_zero import rank_zero_warn

_SETTINGS = {
    **{name: name for name in ("monitor", "mode", "save_last", "save_top_k", "save_weights_only")},
    "_every_n_train_steps": "every_n_train_steps",
}
"""What services are told of a checkpoint's callback: the name that readers of such records know, and the attribute."""


class CheckpointArtifacts:
    """Remembers which checkpoints a logger has sent.

    ``log_model``: ``"all"`` sends each checkpoint as it is saved, True those that are left when the run ends (with
    ``save_top_k=-1``, where none is ever removed, each at once), False none.
    """

    def __init__(self, log_model: bool | str) -> None:
        if log_model not in (True, False, "all"):
            raise ValueError(f"log_model={log_model!r}: choose True, False or 'all'")
        self.log_model = log_model
        self.sent: dict[Any, float] = {}
        self.callbacks: dict[int, Any] = {}

    def saved(self, callback: Any) -> bool:
        """A checkpoint was saved; whether to send it now."""
        if self.log_model is True and callback.save_top_k != -1:
            self.callbacks[id(callback)] = callback
            return False
        return bool(self.log_model)

    def new(self, callback: Any) -> list[tuple[Any, Any, str]]:
        """Path, score and kind (latest, best or best_k) of each checkpoint that was not sent yet, oldest first."""
        found = scan_checkpoints(callback, self.sent)
        self.sent |= {path: time for time, path, _, _ in found}
        return [(path, score, tag) for _, path, score, tag in found]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "callbacks": {}}


def scan_checkpoints(callback: Any, logged_model_time: dict[Any, float]) -> list[tuple[float, Any, Any, str]]:
    """Time, path, score and kind of each checkpoint that is there and was not logged since it was written, oldest first."""
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
    """What is kept beside a checkpoint: its score, its file's name, and the settings it was saved under as ``key``."""
    return {
        "score": score.item() if hasattr(score, "item") else score,
        "original_filename": Path(path).name,
        key: {
            name: getattr(callback, attribute) for name, attribute in _SETTINGS.items() if hasattr(callback, attribute)
        },
    }


def aliases(callback: Any, path: Any) -> list[str]:
    return ["latest", "best"] if path == callback.best_model_path else ["latest"]


def joint_version(loggers: list[Any], separator: str = "_") -> int | str | None:
    """One version for several loggers: theirs, each once, in order."""
    if len(loggers) == 1:
        version: int | str | None = loggers[0].version
        return version
    return separator.join(dict.fromkeys(str(logger.version) for logger in loggers))
