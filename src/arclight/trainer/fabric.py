"""Fabric: devices, precision and processes for people who write their own loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.data import ResumableLoader
from arclight.data.sampling import LoaderSeeds
from arclight.fabric.batches import move_batch
from arclight.fabric.rank_zero import rank_zero_deprecation, rank_zero_warn
from arclight.fabric.strategies import SingleDeviceStrategy, Strategy
from arclight.trainer.fabric_checkpoint import StateIO
from arclight.trainer.fabric_checks import check_filter, check_loaders, check_module, check_optimizers, warn_of_devices
from arclight.trainer.fabric_environment import from_command_line, started_by_command_line
from arclight.trainer.fabric_modules import (
    BackwardState,
    FabricDataLoader,
    FabricModule,
    FabricOptimizer,
    compiled_again,
    is_wrapped,
    uncompiled,
    unwrap,
)
from arclight.trainer.fabric_processes import FabricProcesses
from arclight.trainer.fabric_values import as_scalars
from arclight.trainer.strategies import select

_SCALER = "precision_state"


class Fabric(FabricProcesses):
    """Prepares a model, its optimizers and loaders for the devices at hand; the loop stays yours.

    >>> fabric = Fabric(devices=2, strategy="ddp")
    >>> fabric.launch()
    >>> model, optimizer = fabric.setup(model, optimizer)
    >>> loader = fabric.setup_dataloaders(loader)
    >>> for batch in loader:
    ...     loss = model(batch)
    ...     fabric.backward(loss)
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    ``plugins`` are a Precision, a ClusterEnvironment or a checkpoint IO, or a list of them. A subclass may override
    :meth:`run`, which then runs in every process.
    """

    def __init__(
        self, *, accelerator: Any = "auto", strategy: Any = "auto", devices: Any = "auto", num_nodes: int = 1,
        precision: Any = None, plugins: Any = None, callbacks: Any = None, loggers: Any = None,
    ) -> None:  # fmt: skip
        given = from_command_line(accelerator, strategy, devices, num_nodes, precision)
        self._strategy: Strategy = select(**vars(given), plugins=plugins, owner="Fabric")
        self._accelerator, self._precision = self._strategy.accelerator, self._strategy.precision
        self._strategy.checkpoint_io = self._strategy.checkpoint_io or StateIO()
        self._callbacks = (
            list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] * (callbacks is not None)
        )
        self._loggers = list(loggers) if isinstance(loggers, (list, tuple)) else [loggers] * (loggers is not None)
        self._launched = False
        self._loader_seeds = LoaderSeeds()
        if started_by_command_line():
            if type(self).run is not FabricProcesses.run:
                raise TypeError(
                    "Overriding `Fabric.run()` and launching from the CLI is not allowed: start the script by itself, or "
                    "call fabric.setup(...) and the rest directly"
                )
            self._join()
        elif isinstance(self._strategy, SingleDeviceStrategy):
            self._strategy.setup_environment()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:  # fmt: skip
        """``module`` (and ``optimizers``, and a scheduler) ready for the devices: the module alone, or a tuple.

        A compiled module is compiled again around what the strategy adds. Raises ValueError for what was set up before.
        """
        self._validate_launched()
        check_module(module, "setup")
        check_optimizers(optimizers, "setup")
        bare, how = uncompiled(module) if _reapply_compile else (module, None)
        prepared = self._prepare(bare, move_to_device)
        given = list(optimizers)
        if given:
            prepared, given, scheduler = self._strategy.setup_module_and_optimizers(prepared, given, scheduler)
        else:
            prepared = self._strategy.setup_module(prepared)
        wrapped = self._wrap_module(prepared, bare, how)
        wrapped_optimizers = [FabricOptimizer(optimizer, self._strategy, self._callbacks) for optimizer in given]
        if hasattr(bare, "_fabric"):
            bare._fabric_optimizers = wrapped_optimizers
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not optimizers:
            return wrapped
        return (wrapped, *wrapped_optimizers, *(() if scheduler is None else (scheduler,)))

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> FabricModule:
        """The module with its parameters' type and device set, wrapped where processes must agree on gradients."""
        self._validate_launched()
        check_module(module, "setup_module")
        bare, how = uncompiled(module) if _reapply_compile else (module, None)
        return self._wrap_module(self._strategy.setup_module(self._prepare(bare, move_to_device)), bare, how)

    def _prepare(self, module: nn.Module, move: bool) -> nn.Module:
        module = self._precision.convert_module(module)
        if move:
            warn_of_devices(module)
            self._strategy.module_to_device(module)
        return module

    def _wrap_module(self, prepared: nn.Module, bare: nn.Module, how: Any) -> FabricModule:
        if how is not None:
            prepared = compiled_again(prepared, how)
        if hasattr(bare, "_fabric"):  # an arclight.Module: what it logs or gathers goes through this object
            bare._fabric = self  # type: ignore[assignment]
            if bare not in self._callbacks:
                self._callbacks.append(bare)
        return FabricModule(prepared, self._strategy, original_module=bare)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """The optimizer, or a tuple of several, for a module that was set up before."""
        self._validate_launched()
        if not optimizers:
            raise ValueError("`setup_optimizers` requires at least one optimizer as input.")
        check_optimizers(optimizers, "setup_optimizers")
        prepared = [
            FabricOptimizer(self._strategy.setup_optimizer(o), self._strategy, self._callbacks) for o in optimizers
        ]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Share the data of loaders between ranks, move batches to the device, and let them resume (``set_epoch``, ``state_dict``).

        Each shuffled loader has an order of its own; one whose ``torch.Generator`` was seeded goes by that seed.
        """
        self._validate_launched()
        check_loaders(dataloaders)
        run_seed = torch.initial_seed() % 2**32
        seeds = self._strategy.broadcast([self._loader_seeds.next(loader, run_seed) for loader in dataloaders])
        shares = (
            self._strategy.distributed_sampler_kwargs if use_distributed_sampler else {"num_replicas": 1, "rank": 0}
        )
        rank, size = shares["rank"], shares["num_replicas"]
        wrapped = [
            FabricDataLoader(
                ResumableLoader(self._strategy.process_dataloader(loader), seed=seed, rank=rank, world_size=size),
                self.device if move_to_device else None,
            )
            for loader, seed in zip(dataloaders, seeds, strict=True)
        ]
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def init_tensor(self) -> AbstractContextManager[Any]:
        """New tensors come into being on the device, in the precision's type."""
        return self._strategy.tensor_init_context()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create a model directly on its device and in its type; ``empty_init`` leaves out first values, to be loaded."""
        self._validate_launched()
        return self._strategy.module_init_context(empty_init=empty_init)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """The former name of :meth:`init_module`."""
        rank_zero_deprecation("`Fabric.sharded_model()` is deprecated: use `Fabric.init_module()`")
        return self.init_module()

    # -- a step ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """``tensor.backward(...)``, scaled where the precision needs it."""
        BackwardState.by_fabric = True
        try:
            self._strategy.backward(tensor, None if model is None else unwrap(model), *args, **kwargs)
        finally:
            BackwardState.by_fabric = False

    def clip_gradients(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """Clip by element (``clip_val``) or by norm (``max_norm``, which gives back the norm before). Raises ValueError for both or neither."""
        if clip_val is not None and max_norm is not None:
            raise ValueError(
                "clip_gradients: Only one of `clip_val` or `max_norm` can be set: each is another algorithm"
            )
        bare = unwrap(module), unwrap(optimizer)
        if clip_val is not None:
            self._strategy.clip_gradients_value(*bare, clip_val=clip_val)
            return None
        if max_norm is None:
            raise ValueError("clip_gradients: You have to specify either `clip_val` or `max_norm`")
        return self._strategy.clip_gradients_norm(
            *bare, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's context, for what a loop computes outside the model."""
        return self._precision.forward_context()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Forward and backward without exchanging gradients: for all but the last batch of an accumulation window."""
        bare, _ = uncompiled(module)
        if not isinstance(bare, FabricModule):
            raise TypeError(
                "You need to set up the model first: `model = fabric.setup(model, ...)`, then `fabric.no_backward_sync(model)`"
            )
        return self._strategy.no_backward_sync(unwrap(bare), enabled) if enabled else nullcontext()

    def to_device(self, obj: Any) -> Any:
        """A module (in place), tensor or tree of tensors on the device."""
        if isinstance(obj, nn.Module):
            self._strategy.module_to_device(obj)
            return obj
        return move_batch(obj, self.device)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(
        self, path: str | Path, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Write ``state`` as a checkpoint; modules, optimizers and anything with ``state_dict()`` save that. Every rank must call this.

        ``filter`` maps an entry to a function of name and value that says what of it to keep. The scale of 16-bit
        gradients is saved too.
        """
        check_filter(filter, state)
        content = _savable(state)
        if _SCALER not in content and (scaler := self._precision.state_dict()):
            content[_SCALER] = scaler
        self._strategy.save_checkpoint(path=path, state=content, filter=filter)
        self.barrier("checkpoint saved")

    def load(
        self,
        path: str | Path,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into the objects of ``state``; what ``state`` has no object for comes back.

        Nothing is ever unpickled: ``weights_only`` is accepted for the habit's sake.
        """
        targets = _savable(state or {})
        rest = self._strategy.load_checkpoint(
            path=path, state=None if state is None else targets, strict=strict, weights_only=weights_only
        )
        if state is not None:
            state.update({name: value for name, value in targets.items() if not is_wrapped(state[name])})
            if (scaler := rest.pop(_SCALER, None)) is not None:
                self._precision.load_state_dict(scaler)
        self.barrier("checkpoint loaded")
        return rest

    def load_raw(self, path: str | Path, obj: Any, strict: bool = True, *, weights_only: bool | None = None) -> None:
        """Read a file of plain weights, or of an optimizer's state, into that one object."""
        self._strategy.load_checkpoint(path=path, state=unwrap(obj), strict=strict, weights_only=weights_only)

    # -- the rest --------------------------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Run ``hook_name`` of every callback that has it, with those of ``kwargs`` that it takes."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **_taken(method, kwargs))
            elif method is not None:
                rank_zero_warn(f"Skipping the callback `{type(callback).__name__}.{hook_name}`: it is not callable")

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send one number to every logger."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send numbers to every logger, from rank 0 (this reads tensors back: log as often as you look)."""
        if self._loggers and self._strategy.is_global_zero:
            scalars = as_scalars(metrics)
            for logger in self._loggers:
                logger.log_metrics(metrics=scalars, step=step)

    @property
    def loggers(self) -> list[Any]:
        return self._loggers

    @property
    def logger(self) -> Any:
        """Return the first logger. Raises IndexError if there is none, as Lightning's does; ``loggers`` may be empty."""
        if not self._loggers:
            raise IndexError("this Fabric has no loggers; pass some as Fabric(loggers=...), or ask for `loggers`")
        return self._loggers[0]


def _taken(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of ``kwargs`` that ``method`` has a parameter for; all where that cannot be told."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return kwargs
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def _savable(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` without Fabric's wrappers, but for loaders: it is the wrapper that knows their position."""
    return {name: value if isinstance(value, FabricDataLoader) else unwrap(value) for name, value in state.items()}
