"""The model class: an nn.Module whose steps have names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.data_hooks import DataHooks
from arclight.trainer.exporting import ExportMixin
from arclight.trainer.fabric.link import FabricLink, TrainerOfFabric
from arclight.trainer.hparams import HyperparametersMixin
from arclight.trainer.optimizing import Optimizing

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.trainer.callback import Callback
    from arclight.trainer.logging.results import ResultMetric
    from arclight.trainer.trainer import Trainer


class Module(Optimizing, DataHooks, HyperparametersMixin, ExportMixin, FabricLink, nn.Module):
    """Subclass this; write ``training_step`` and ``configure_optimizers``, and any other hook you need.

    It stays an ordinary ``nn.Module``: outside a trainer nothing here is in the way.
    """

    automatic_optimization: bool = True
    """Whether the trainer runs backward and the optimizer; False hands both to ``training_step``."""
    example_input_array: Any = None
    _compiler_ctx: dict[str, Any] | None = None  # what compiled its steps, see arclight.trainer.loop.verification
    _trainer: Trainer | None
    _entries: dict[str, ResultMetric] | None

    def __init__(self) -> None:
        super().__init__()
        # Plain attributes, kept out of nn.Module's bookkeeping: they are read in every step.
        self.__dict__["_trainer"] = None
        self.__dict__["_entries"] = None

    @property
    def strict_loading(self) -> bool:
        """Whether a checkpoint must have this module's parameters, no fewer and no others; True unless it is set."""
        return self.__dict__.get("_strict_loading") is not False

    @strict_loading.setter
    def strict_loading(self, strict: bool | None) -> None:
        self.__dict__["_strict_loading"] = strict

    # -- what a user writes ----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of one batch: a tensor, a dict with ``loss``, or None to skip the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step(batch, batch_idx); fit needs one")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch; log what should be averaged over the data."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of the test data."""

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The output for one batch; by default ``self(batch)``."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """An optimizer, ``(optimizers, schedulers)``, or a dict with ``optimizer`` and ``lr_scheduler``."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers(); fit needs one")

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Callbacks this module brings along; they replace the trainer's of the same type."""
        return []

    def configure_model(self) -> None:
        """Create layers on their device, just before they are needed."""

    def batch_weight(self, batch: Any) -> float | torch.Tensor:
        """How much the loss of ``batch`` counts: of how many valid tokens, boxes, ... it is the mean.

        Override it where batches have unequal numbers of what the loss is a mean of. An update then follows the gradient of the
        mean over all of them, in whatever batches of the window and processes they are; a step that looks at a part of the
        batch only (processes that share its sequences) returns a loss whose mean over those processes is the batch's.
        By default a batch of an accumulation window counts with its samples, and every process counts alike.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch_weight(batch)")

    batch_weight.is_default = True  # type: ignore[attr-defined]  # what rooms below know it by

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Return -1 to skip the rest of this epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_validation_start(self) -> None: ...

    def on_validation_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Called after validation, when every submodule is back in the mode that it was in."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation during training, unless an accumulation window needs them."""
        self.zero_grad()

    def on_test_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Called after testing, when every submodule is back in the mode that it was in."""

    def on_predict_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()

    def on_test_start(self) -> None: ...

    def on_test_end(self) -> None: ...

    def on_test_epoch_start(self) -> None: ...

    def on_test_epoch_end(self) -> None: ...

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_start(self) -> None: ...

    def on_predict_end(self) -> None: ...

    def on_predict_epoch_start(self) -> None: ...

    def on_predict_epoch_end(self) -> None: ...

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...

    def on_before_backward(self, loss: torch.Tensor) -> None: ...

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def freeze(self) -> Self:
        """Stop training every parameter and go into evaluation mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        return self.requires_grad_(True).train()

    # -- logging ---------------------------------------------------------------------------------------------------

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None, on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False, sync_dist: bool = False, sync_dist_group: Any = None,
        add_dataloader_idx: bool = True, batch_size: int | None = None, metric_attribute: str | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Record a number, a one-element tensor, or a metric (an object with ``compute()`` and ``reset()``) under ``name``.

        Costs no device synchronisation: values are read when they are shown.

        * ``on_step`` shows each value, ``on_epoch`` the epoch's reduction; with both, ``_step`` and ``_epoch`` are appended.
          Training steps show each value by default, evaluation and the hooks of an epoch the epoch's.
        * ``reduce_fx`` is ``mean`` (weighted by ``batch_size``, or by the batch's own), ``sum``, ``min`` or ``max``. Epoch values
          are reduced over the samples of all processes (of ``sync_dist_group``) in one exchange, with or without ``sync_dist``,
          unless ``rank_zero_only``. With ``sync_dist``, a step's value too is put together whenever a row is written.
        * ``prog_bar`` and ``logger`` say where it is shown; ``trainer.callback_metrics`` has it in any case.
        * With several evaluation loaders, ``/dataloader_idx_<n>`` is appended, unless ``add_dataloader_idx`` is False.
        * ``enable_graph`` keeps the value's graph. ``metric_attribute`` names the attribute that holds a metric.

        Raises ValueError for a value that is not a single number, MisconfigurationError for hooks that cannot log, and for a
        name that is logged twice in a hook with different arguments.
        """
        entries = self._entries
        if entries is None:
            self._log_outside(name, value, logger)
            return
        given = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group, add_dataloader_idx, metric_attribute,
            rank_zero_only,
        )  # fmt: skip
        entry = entries.get(name)
        if entry is None or entry.given != given:
            entry = self.trainer.logged.entry(entries, self, name, value, given)
        entry.add(value, batch_size)

    def log_dict(
        self, dictionary: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None, on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False, sync_dist: bool = False, sync_dist_group: Any = None,
        add_dataloader_idx: bool = True, batch_size: int | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """:meth:`log` for each item of a mapping, or for each metric of a collection of torchmetrics."""
        from arclight.trainer.logging.rules import metric_items

        if self._fabric is not None:
            self._log_through_fabric(dictionary, logger)
            return
        items = metric_items(dictionary) if hasattr(dictionary, "compute") else dictionary.items()
        for name, value in items:
            self.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group, add_dataloader_idx,
                batch_size, None, rank_zero_only,
            )  # fmt: skip

    def _log_outside(self, name: str, value: Any, logger: bool | None) -> None:
        """``log`` outside of a trainer's run: to a Fabric's loggers, or nowhere for a step that somebody calls by hand."""
        if self._fabric is not None:
            self._log_through_fabric({name: value}, logger)
            return
        if self._trainer is not None and self._trainer.barebones:
            rank_zero_warn(
                f"You are trying to `self.log({name!r}, ...)` but `Trainer(barebones=True)` is configured, which logs nothing"
            )
            return
        if self._trainer is not None:
            raise MisconfigurationError(
                f"You are trying to `self.log({name!r}, ...)` but it is not managed by the `Trainer` control flow: log in the hooks "
                "that fit, validate and test call"
            )
        rank_zero_warn(
            f"You are trying to `self.log({name!r}, ...)` but the `self.trainer` reference is not registered on the model yet: "
            f"nothing is logged, because {type(self).__name__} is not being run by a Trainer"
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above a progress bar that is being drawn."""
        bar = None if self._trainer is None else self._trainer.progress_bar_callback
        if bar is not None and bar.is_enabled:
            bar.print(*args, **kwargs)
        elif self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Every rank's tensors, numbers and arrays in ``data`` (of equal shapes), stacked along a new first dimension.

        With one process they come back without that dimension; ``sync_grads`` lets gradients flow back through.
        """
        from arclight.fabric.batches import as_tensors, map_tensors

        gather = partial(self.trainer.strategy.all_gather, group=group, sync_grads=sync_grads)
        return map_tensors(as_tensors(data, self.device), gather)

    # -- where am I ------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            if self._fabric is not None:
                return TrainerOfFabric(self._fabric)  # type: ignore[return-value]
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a `Trainer`; pass it to trainer.fit (or validate, test, predict) first"
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        """Of the modules inside as well."""
        for part in self.modules():
            if isinstance(part, Module):
                part.__dict__["_trainer"] = trainer

    @property
    def current_epoch(self) -> int:
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        owner = self._trainer or self._fabric
        return owner.global_rank if owner is not None else 0

    @property
    def local_rank(self) -> int:
        owner = self._trainer or self._fabric
        return owner.local_rank if owner is not None else 0

    @property
    def logger(self) -> Any:
        owner = self._trainer or self._fabric
        return owner.logger if owner is not None else None

    @property
    def loggers(self) -> Any:
        """All loggers, a list."""
        owner = self._trainer or self._fabric
        return owner.loggers if owner is not None else []

    @property
    def device(self) -> torch.device:
        tensor = next(self.parameters(), next(self.buffers(), None))
        return tensor.device if tensor is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def device_mesh(self) -> Any:
        """The processes as ``configure_model`` may spread the module over them; None where the strategy has no mesh."""
        return getattr(self._trainer.strategy, "device_mesh", None) if self._trainer is not None else None

    # -- checkpoints ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None, "_entries": None}
