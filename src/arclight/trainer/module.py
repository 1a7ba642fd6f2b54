"""Define Module, like LightningModule: an nn.Module with training_step and its like.

Users subclass `Module`, and so do all tasks of this package. ``loop.step`` and ``loop.evaluation`` call its steps; the loops call the
hooks that are overridden (``loop.hooks``). Names, arguments and defaults of methods are Lightning 2.x's and stay; ``batch_weight`` is
ours. A new hook in which values may be logged is also listed in ``logging.rules``.
"""

from __future__ import annotations

import inspect
import numbers
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import require
from arclight.fabric.modules import keeping_modes
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.checkpoint.loading import ReplacesLayers, load_weights
from arclight.trainer.datamodule import DataHooks
from arclight.trainer.hparams import HyperparametersMixin

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback
    from arclight.trainer.logging.results import ResultMetric
    from arclight.trainer.loop.optimizers import ManagedOptimizer
    from arclight.trainer.trainer import Trainer


class Module(DataHooks, HyperparametersMixin, nn.Module):
    """Base class of models: an ``nn.Module`` with training steps and hooks.

    Subclass it and write ``training_step`` and ``configure_optimizers``, and any other hook you need.

    It stays an ordinary ``nn.Module``: outside a trainer nothing here is in the way.
    """

    automatic_optimization: bool = True
    """Whether the trainer runs backward and the optimizer; False hands both to ``training_step``."""
    example_input_array: Any = None
    _compiler_ctx: dict[str, Any] | None = None  # what compiled its steps, see arclight.trainer.loop.verification
    _trainer: Trainer | None
    _entries: dict[str, ResultMetric] | None
    _fabric: Any = None
    _fabric_optimizers: list[Any] = []

    def __init__(self) -> None:
        super().__init__()
        # Plain attributes, kept out of nn.Module's bookkeeping: they are read in every step.
        self.__dict__["_trainer"] = None
        self.__dict__["_entries"] = None

    @property
    def strict_loading(self) -> bool:
        """Require a checkpoint to have exactly this module's parameters; True by default."""
        return self.__dict__.get("_strict_loading") is not False

    @strict_loading.setter
    def strict_loading(self, strict: bool | None) -> None:
        self.__dict__["_strict_loading"] = strict

    # -- what a user writes ----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one batch: a tensor, a dict with ``loss``, or None to skip the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step(batch, batch_idx); fit needs one")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch; log what should be averaged over the data."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of the test data."""

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output for one batch; by default ``self(batch)``."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers.

        That is an optimizer, ``(optimizers, schedulers)``, or a dict with ``optimizer`` and ``lr_scheduler``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers(); fit needs one")

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return callbacks of this module; they replace the trainer's of the same type."""
        return []

    def configure_model(self) -> None:
        """Create layers on their device, just before they are needed."""

    def batch_weight(self, batch: Any) -> float | torch.Tensor:
        """Return what the loss of ``batch`` is a mean over: the number of valid tokens, boxes, ...

        Override it if the loss is a mean over items, such as tokens, whose number differs between batches. An update then follows the gradient of the
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
        """Set the model to evaluation mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Run after validation, when every submodule is back in its own mode."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before a validation, unless an accumulation window needs them."""
        self.zero_grad()

    def on_test_model_eval(self) -> None:
        """Set the model to evaluation mode."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Run after testing, when every submodule is back in its own mode."""

    def on_predict_model_eval(self) -> None:
        """Set the model to evaluation mode."""
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

    # -- optimization -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization; scale the loss if precision asks for it.

        Raises MisconfigurationError in automatic optimization.
        """
        if self.automatic_optimization:
            raise MisconfigurationError(
                "To use manual optimization, please set `self.automatic_optimization = False`: `manual_backward` was called, but the "
                "trainer runs backward and the optimizer of this module"
            )
        self.trainer.backward(loss, *args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | ManagedOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Run the optimizer with the closure, which runs forward and backward.

        Every override must pass it on or call it.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip gradients of ``optimizer``'s parameters by global ``norm`` or element ``value``.

        In manual optimization call it between backward and step. Raises MisconfigurationError if the trainer was told to
        clip in another way.
        """
        if self._fabric is not None:
            by_value = (gradient_clip_algorithm or "norm") == "value"
            limits = {
                "clip_val": gradient_clip_val if by_value else None,
                "max_norm": None if by_value else gradient_clip_val,
            }
            self._fabric.clip_gradients(self, optimizer, **limits)
            return
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them.

        Their ``step`` runs hooks, removes the loss scale of 16-bit gradients and is counted.

        With ``use_pl_optimizer=False`` they are as ``configure_optimizers`` returned them.
        """
        optimizers: list[Any]
        if self._fabric is not None:
            optimizers = self._fabric_optimizers
        else:
            optimizers = list(self.trainer.managed_optimizers if use_pl_optimizer else self.trainer.optimizers)
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only ``optimizer``'s parameters require gradients, until :meth:`untoggle_optimizer`."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [
            p for o in self.trainer.optimizers for group in o.param_groups for p in group["params"] if id(p) not in own
        ]
        self.__dict__.setdefault("_toggled", []).extend((p, p.requires_grad) for p in others)
        for parameter in others:
            parameter.requires_grad = False

    def untoggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        for parameter, required in reversed(self.__dict__.pop("_toggled", [])):
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    # -- logging ---------------------------------------------------------------------------------------------------

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None, on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False, sync_dist: bool = False, sync_dist_group: Any = None,
        add_dataloader_idx: bool = True, batch_size: int | None = None, metric_attribute: str | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Log a number, one-element tensor or metric under ``name``.

        A metric is an object with ``compute()`` and ``reset()``.

        Costs no device synchronisation: values are read when they are shown.

        * ``on_step`` shows each value, ``on_epoch`` the epoch's reduction; with both, ``_step`` and ``_epoch`` are appended.
          Training steps show each value by default, evaluation and the hooks of an epoch the epoch's.
        * ``reduce_fx`` is ``mean`` (weighted by ``batch_size``, or by the batch's own), ``sum``, ``min`` or ``max``. Epoch values
          are reduced over the samples of all processes (of ``sync_dist_group``) in one exchange, with or without ``sync_dist``,
          unless ``rank_zero_only``. With ``sync_dist``, a step's value too is merged whenever a row is written: a
          mean is that of the ranks' values, which count alike, as in Lightning.
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
            is_new, entry = entry is None, self.trainer.logged.entry(entries, self, name, value, given)
            if is_new and logger and self.trainer.logger is None:
                rank_zero_warn(
                    f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured: Trainer(logger=...) takes one",
                    stacklevel=3,
                )
        entry.add(value, batch_size)

    def log_dict(
        self, dictionary: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None, on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False, sync_dist: bool = False, sync_dist_group: Any = None,
        add_dataloader_idx: bool = True, batch_size: int | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Call :meth:`log` for each item of a mapping, or each metric of a collection."""
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
        """Log outside of a trainer's run: to a Fabric's loggers, or nowhere with a warning."""
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

    def _log_through_fabric(self, values: Mapping[str, Any], logger: bool | None) -> None:
        """Send numbers to the Fabric's loggers. Raises ValueError for a value that is not a number."""
        from arclight.trainer.logging.rules import refuse_value

        for name, value in values.items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"`self.log_dict({dict(values)})` was called, but nested dictionaries cannot be logged"
                )
            if not isinstance(value, (torch.Tensor, numbers.Number)):
                raise refuse_value(name, value)
        if logger is not False:
            self._fabric.log_dict(metrics=values)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above a progress bar that is being drawn."""
        bar = None if self._trainer is None else self._trainer.progress_bar_callback
        if bar is not None and bar.is_enabled:
            bar.print(*args, **kwargs)
        elif self._trainer is None or self._trainer.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather every rank's tensors, numbers and arrays in ``data``, of equal shapes.

        With one process they come back without that dimension; ``sync_grads`` lets gradients flow back through. Raises TypeError for a
        packed sequence.
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
        """Set the trainer, of the modules inside as well."""
        for part in self.modules():
            if isinstance(part, Module):
                part.__dict__["_trainer"] = trainer

    @property
    def fabric(self) -> Any:
        """The Fabric that set this module up, None without one."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        """Set the Fabric, of the modules inside as well. They do not keep it alive."""
        if fabric is not None and not isinstance(fabric, weakref.ProxyTypes):
            fabric = weakref.proxy(fabric)
        for part in self.modules():
            if isinstance(part, Module):
                part.__dict__["_fabric"] = fabric

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
        """Device mesh for sharding in ``configure_model``; None if the strategy has none."""
        return getattr(self._trainer.strategy, "device_mesh", None) if self._trainer is not None else None

    # -- files ------------------------------------------------------------------------------------------------------

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **options: Any) -> Any:
        """Export the module as ONNX and return the ``torch.onnx.ONNXProgram``.

        ``file_path``: a path or binary file; None to write nothing.

        ``input_sample``: what ``forward`` takes, a tuple or dict of several (default ``example_input_array``);
        ``options`` go to ``torch.onnx.export``. Raises ValueError without a sample, MissingExtraError without onnx.
        """
        return _export(self, file_path, input_sample, options)

    def to_torchscript(self, *args: Any, **options: Any) -> Any:
        """Raise NotImplementedError: torch itself has left TorchScript for ``torch.export``."""
        raise NotImplementedError(
            "`to_torchscript` is not offered: TorchScript is no longer developed. Use to_onnx(), torch.export.export() or "
            "arclight.deploy.export(), which torch 2 runs everywhere that TorchScript did"
        )

    def _load_from(
        self, checkpoint: dict[str, Any], source: object, strict: bool | None, replaced_by: Sequence[ReplacesLayers]
    ) -> Self:  # fmt: skip
        strict = self._strictness(strict)
        self.configure_model()
        for callback in replaced_by:
            callback.replace_layers(self)
        self.on_load_checkpoint(checkpoint)
        weights = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}
        load_weights(self, weights, strict)
        if not weights:
            rank_zero_warn(f"The state dict in {str(source)!r} contains no parameters.")
            return self
        device = next((value.device for value in weights.values() if isinstance(value, torch.Tensor)), None)
        return self.to(device) if device is not None else self

    def _strictness(self, argument: bool | None) -> bool:
        overriding = inspect.getattr_static(type(self), "strict_loading") is not vars(Module)["strict_loading"]
        own = self.strict_loading if overriding else vars(self).get("_strict_loading")
        if own is not None and argument is not None and own != argument:
            raise ValueError(
                f"You set `.load_from_checkpoint(..., strict={argument!r})` which is in conflict with"
                f" `{type(self).__name__}.strict_loading={own!r}`. Please set the same value for both of them."
            )
        return self.strict_loading if argument is None else argument

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None, "_entries": None}


class TrainerOfFabric:
    """Stand-in for ``self.trainer`` in a Fabric's loop, with the names that both have."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._fabric, name)
        except AttributeError:
            raise AttributeError(
                f"Your LightningModule code tried to access `self.trainer.{name}`, which a Fabric does not have: in a loop of your own, "
                "keep it yourself, or ask `self.fabric`"
            ) from None


def _export(module: Module, target: str | Path | IO[bytes] | None, input_sample: Any, options: dict[str, Any]) -> Any:
    require("onnx", extra="deploy")
    if options.get("dynamo", True):
        require("onnxscript", extra="deploy")
    if input_sample is None:
        input_sample = module.example_input_array
    if input_sample is None:
        raise ValueError(
            "Could not export to ONNX since neither `input_sample` nor `model.example_input_array` attribute is set."
        )
    sample = module.transfer_batch_to_device(module.on_before_batch_transfer(input_sample, 0), module.device, 0)
    sample = module.on_after_batch_transfer(sample, 0)
    positional, named = _arguments(sample)
    with keeping_modes(module), torch.no_grad():
        if target is None or isinstance(target, (str, Path)):
            path = str(target) if target is not None else None
            return torch.onnx.export(module, positional, path, kwargs=named, **options)
        program = torch.onnx.export(module, positional, None, kwargs=named, **options | {"dynamo": True})
        target.write(program.model_proto.SerializeToString())  # type: ignore[union-attr]
        return program


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """Return ``forward``'s positional and named arguments for a sample."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple) else (sample,)), None
