"""Log metrics to TensorBoard event files.

Users pass it to a Trainer, or a recipe's ``[[loggers]]`` builds it (``loggers.settings``); under ``compat`` it is the default. Signature
and folders are Lightning's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn
from arclight.trainer.loggers.folder_logger import FolderLogger
from arclight.trainer.loggers.logger import rank_zero_experiment
from arclight.trainer.loggers.params import convert_params, plain_params, yaml_text

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard.writer import SummaryWriter

RETRY_S = 60.0
"""Seconds from a full disk to the next attempt, with a file of its own."""
LOST = f"what it is given is lost, until it tries again after {RETRY_S:g} s"
_NO_GRAPH = "Could not log computational graph to TensorBoard: "


class TensorBoardLogger(FolderLogger):
    """Log scalars, hyper-parameters and the model's graph for ``tensorboard --logdir``.

    The graph only with ``log_graph``.

    Without ``save_dir`` the files lie in ``tensorboard/`` of the run folder; with it, in
    ``save_dir/name/version_<version>[/sub_dir]``. ``default_hp_metric`` gives hyper-parameters the metric
    ``hp_metric`` = -1 if none is passed, as TensorBoard's HPARAMS page needs one. Further arguments go to the
    SummaryWriter. Needs the extra ``track``.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    inside_run = "tensorboard"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        require("tensorboard", extra="track")
        super().__init__(save_dir, name, version, prefix, os.fspath(sub_dir) if sub_dir is not None else None)
        self._log_graph, self._default_hp_metric, self._kwargs = log_graph, default_hp_metric, kwargs
        self._experiment: SummaryWriter | None = None
        self.hparams: dict[Any, Any] = {}
        self._hparams_changed = False

    def use_folder(self, folder: Path) -> None:
        if self._folder != Path(folder):
            self._close()
            super().use_folder(folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The ``torch.utils.tensorboard.SummaryWriter``, made when first used."""
        if self._experiment is None:
            self._experiment = self._writer()
        return self._experiment

    def _writer(self, **arguments: Any) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=self.log_dir, **arguments, **self._kwargs)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if time.monotonic() >= self._again_at:
            with self._sparing_training(LOST):
                self._log_metrics(metrics, step)

    def _log_metrics(self, metrics: Mapping[str, Any], step: int | None) -> None:
        for name, value in self._prefixed(metrics).items():
            if isinstance(value, Mapping):
                self.experiment.add_scalars(name, value, step)
                continue
            try:
                self.experiment.add_scalar(name, value.item() if hasattr(value, "item") else value, step)
            except (AssertionError, NotImplementedError, TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"you tried to log {name} = {value!r}, which is currently not supported: try a dict or a scalar/tensor"
                ) from error

    @rank_zero_only
    def log_hyperparams(
        self,
        params: Any,
        metrics: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log ``params`` with the initial values of the ``metrics`` that compare them.

        ``metrics``: a mapping, or one number.
        """
        from torch.utils.tensorboard.summary import hparams

        self.hparams.update(convert_params(params))
        self._hparams_changed = True
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        if metrics:
            self.log_metrics(metrics, step)
        if self.hparams:
            for summary in hparams(plain_params(self.hparams), dict(metrics)):
                self.experiment._get_file_writer().add_summary(summary, step)

    @rank_zero_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Log the graph of ``model`` for ``input_array`` or its ``example_input_array``.

        Either is a tensor or a tuple of arguments.
        """
        if not self._log_graph:
            return
        import torch

        from arclight.trainer.fabric.wrappers import unwrap

        model = unwrap(model)
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if example is None:
            rank_zero_warn(
                _NO_GRAPH + "The `model.example_input_array` attribute is not set or `input_array` was not given."
            )
        elif not isinstance(example, (torch.Tensor, tuple)):
            rank_zero_warn(
                f"{_NO_GRAPH}The `input_array` or `model.example_input_array` has type {type(example)}, which can't be "
                "traced by TensorBoard; make it a tensor, or a tuple of the positional arguments of forward()"
            )
        else:
            example = _on_device(model, example)
            with _traceable(model):
                self.experiment.add_graph(model, example)

    @rank_zero_only
    def resume(self, step: int) -> None:
        """Let TensorBoard hide what a run that was killed wrote at steps later than ``step``."""
        self._close()
        self._wait_for_a_later_name()
        self._experiment = self._writer(purge_step=step + 1)

    def _wait_for_a_later_name(self) -> None:
        """Wait for another second if there is an event file of this one.

        TensorBoard reads files in the order of their names, which begin with the second.
        """
        files, folder = fsspec.core.url_to_fs(self.log_dir)
        second = f"events.out.tfevents.{int(time.time()):010d}."
        if files.isdir(folder) and any(second in name for name in files.ls(folder, detail=False)):
            time.sleep(1.0)

    @rank_zero_only
    def save(self) -> None:
        """Flush the events; write ``hparams.yaml`` if hyper-parameters were logged since."""
        if time.monotonic() >= self._again_at:
            with self._sparing_training(LOST):
                self._save()

    def _save(self) -> None:
        self.experiment.flush()
        files, folder = fsspec.core.url_to_fs(self.log_dir)
        path = os.path.join(folder, self.NAME_HPARAMS_FILE)
        if files.isdir(folder) and (self._hparams_changed or not files.exists(path)):
            files.pipe_file(path, yaml_text(self.hparams).encode())
            self._hparams_changed = False

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is None:
            return
        with self._sparing_training(LOST):
            if status == "success":
                self._save()
            self.experiment.flush()
            self.experiment.close()  # logging again opens a file of its own

    def _close(self) -> None:
        if self._experiment is not None:
            self._experiment.close()
            self._experiment = None

    def _on_full_disk(self) -> None:
        """Close the file, whose writer takes nothing after an error."""
        with suppress(OSError):
            self._close()
        self._experiment, self._again_at = None, time.monotonic() + RETRY_S


class _NoTrainer:
    """Stand-in for a missing trainer, whose attributes are all empty."""

    def __getattr__(self, name: str) -> tuple[()]:
        return ()


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    """Hide the properties of modules that only work within a trainer from the tracer."""
    from arclight.trainer.module import Module

    ours = [part for part in model.modules() if isinstance(part, Module)]
    hidden = [name for base in Module.__mro__ for name, value in vars(base).items() if isinstance(value, property)]
    trainers = [part.__dict__["_trainer"] for part in ours]
    for part in ours:
        part.__dict__["__jit_ignored_attributes__"] = hidden
        if part.__dict__["_trainer"] is None:
            part.__dict__["_trainer"] = _NoTrainer()
    try:
        yield
    finally:
        for part, trainer in zip(ours, trainers, strict=True):
            part.__dict__["_trainer"] = trainer
            del part.__dict__["__jit_ignored_attributes__"]


def _on_device(model: nn.Module, example: Any) -> Any:
    """Return ``example`` on the model's device, through a trainer's hooks if it has one."""
    from arclight.fabric.batches import move_batch
    from arclight.trainer.module import Module

    trainer = model.__dict__.get("_trainer") if isinstance(model, Module) else None
    if trainer is not None:
        move = trainer.data.transfer(model)
        return example if move is None else move(example)
    parameter = next(model.parameters(), None)
    return example if parameter is None else move_batch(example, parameter.device)
