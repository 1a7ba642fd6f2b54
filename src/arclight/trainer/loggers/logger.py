"""What every logger offers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from arclight.trainer.callbacks.model_checkpoint import ModelCheckpoint


class Logger:
    """Override what your destination understands; the trainer calls these on rank 0 only.

    A logger that was given no folder of its own (:attr:`needs_folder`) writes into the run folder: the trainer
    calls :meth:`use_folder` before anything is logged.
    """

    prefix: str = ""
    """Put before every metric's name, with :attr:`group_separator` between."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``, the number of optimizer updates completed."""
        raise NotImplementedError(f"{type(self).__name__} has no log_metrics(metrics, step)")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record hyper-parameters: a mapping or a namespace."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the model's graph."""

    def save(self) -> None:
        """Hand everything logged so far to the operating system or the service."""

    def finalize(self, status: str) -> None:
        """The run ended with ``status``: success, failed or aborted."""
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """A checkpoint is complete."""

    def resume(self, step: int) -> None:
        """Training goes on from ``step``: forget what a run that did not live to save it logged at later steps."""

    @property
    def needs_folder(self) -> bool:
        """Whether this logger was not told where to write, and wants the run folder."""
        return False

    def use_folder(self, folder: Path) -> None:
        """Write into ``folder``, the run folder."""

    @property
    def name(self) -> str | None:
        return None

    @property
    def version(self) -> int | str | None:
        return None

    @property
    def save_dir(self) -> str | None:
        """Parent of :attr:`root_dir`."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Parent of all versions."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """Where this version's files lie."""
        return self.root_dir

    @property
    def experiment(self) -> Any:
        """The object behind this logger, for what its interface does not cover."""
        return None

    @property
    def group_separator(self) -> str:
        return "/"

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{self.prefix}{self.group_separator}{name}" if self.prefix else name: value
            for name, value in metrics.items()
        }


class DummyLogger(Logger):
    """Records nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        pass


def next_version(folder: Path) -> int:
    """The number after the highest ``version_<n>`` in ``folder``."""
    taken = [
        int(e.name.removeprefix("version_"))
        for e in folder.glob("version_*")
        if e.name.removeprefix("version_").isdigit()
    ]
    return max(taken, default=-1) + 1


def plain_hyperparams(params: Any) -> dict[str, Any]:
    """``params`` as a flat dict of numbers, texts and booleans; nested names are joined by ``/``."""
    if params is None:
        return {}
    flat: dict[str, Any] = {}
    for name, value in (params if isinstance(params, Mapping) else vars(params)).items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{inner}": v for inner, v in plain_hyperparams(value).items()})
        else:
            flat[str(name)] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


def yaml_lines(values: Mapping[str, Any]) -> str:
    """A flat mapping as YAML that any reader takes the same way: JSON's quoting, and floats with a point in them."""
    return "".join(
        f"{json.dumps(name) if not name.isidentifier() else name}: {_yaml_scalar(value)}\n"
        for name, value in values.items()
    )


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        mantissa, e, exponent = repr(value).partition("e")
        return mantissa + (".0" if "." not in mantissa else "") + e + exponent
    return json.dumps(value)
