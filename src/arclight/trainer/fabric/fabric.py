"""Define Fabric: devices, precision and processes for people who write their own loop.

`Fabric` is public; it chooses strategy, precision and launcher as the Trainer does. ``setup`` returns the objects of `wrappers`, ``save``
writes by `StateIO`. Method names and arguments are Lightning Fabric's and stay, as do the variables ``LT_*``, in which
``cli.commands.run`` passes its flags.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.data import ResumableLoader
from arclight.data.sampling import LoaderSeeds
from arclight.fabric.accelerators import Accelerator
from arclight.fabric.batches import as_scalars, as_tensors, map_tensors, move_batch
from arclight.fabric.rank_zero import rank_zero_deprecation, rank_zero_warn
from arclight.fabric.seeding import seed_everything
from arclight.fabric.selection import agree_on_precision
from arclight.fabric.strategies import SingleDeviceStrategy, Strategy
from arclight.trainer.fabric.checkpoint_io import StateIO
from arclight.trainer.fabric.strategies import select
from arclight.trainer.fabric.wrappers import (
    BackwardState,
    FabricDataLoader,
    FabricModule,
    FabricOptimizer,
    compiled_again,
    is_wrapped,
    uncompiled,
    unwrap,
)


@dataclass
class Choices:
    """Arguments of a Fabric before they are resolved."""

    accelerator: Any
    strategy: Any
    devices: Any
    num_nodes: Any
    precision: Any


_DEFAULTS = {"accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1, "precision": None}


def started_by_command_line() -> bool:
    """Return True if ``arclight run`` (or an equivalent launcher) started these processes."""
    return os.environ.get("LT_CLI_USED") == "1"


def from_command_line(accelerator: Any, strategy: Any, devices: Any, num_nodes: Any, precision: Any) -> Choices:
    """Take the command line's choice for each argument that the script left at its default.

    Raises ValueError if the script and the command line choose differently.
    """
    choices = Choices(accelerator, strategy, devices, num_nodes, precision)
    if not started_by_command_line():
        return choices
    for field in fields(Choices):
        text = os.environ.get(f"LT_{field.name.upper()}")
        given = getattr(choices, field.name)
        if text is None:
            continue
        if given != _DEFAULTS[field.name] and str(given) != text:
            raise ValueError(
                f"Your code has `Fabric({field.name}={given!r}, ...)` but it conflicts with the value "
                f"`--{field.name.replace('_', '-')}={text}` set through the CLI: remove one of them"
            )
        if given == _DEFAULTS[field.name]:
            setattr(
                choices,
                field.name,
                int(text) if field.name == "num_nodes" else _devices(text) if field.name == "devices" else text,
            )
    return choices


def _devices(text: str) -> Any:
    """Parse ``2``, ``auto``, or ``0,3`` (and ``3,``): a count, a word, or which."""
    if "," in text:
        return [int(part) for part in text.split(",") if part.strip()]
    return int(text) if text.lstrip("-").isdigit() else text


def _nothing(*_: Any) -> None:
    """Stand in for the function of a launch without one."""


def _run(fabric: Fabric, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric._join()
    return function(fabric, *args, **kwargs)


def _run_override(fabric: Fabric, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric._join()
    return cls.__dict__["run"].__wrapped__(fabric, *args, **kwargs)


def check_module(module: nn.Module, method: str) -> None:
    """Raise ValueError for a module that has been set up."""
    if isinstance(uncompiled(module)[0], FabricModule):
        raise ValueError(f"A model should be passed only once to the `{method}` method: this one has been set up")


def check_optimizers(optimizers: tuple[Optimizer, ...], method: str) -> None:
    """Check that optimizers are not set up yet and their parameters are initialised.

    Raises ValueError and RuntimeError.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, FabricOptimizer):
            raise ValueError(
                f"An optimizer should be passed only once to the `{method}` method: this one has been set up"
            )
        if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "The optimizer has references to the model's meta-device parameters, which get their values only in set-up. "
                "First `model = fabric.setup_module(model)`, then make the optimizer, then "
                "`optimizer = fabric.setup_optimizers(optimizer)`"
            )


def check_loaders(loaders: tuple[Any, ...]) -> None:
    """Check that there are loaders, and that none of them is set up yet or is plain data.

    Raises ValueError and TypeError.
    """
    if not loaders:
        raise ValueError("`setup_dataloaders` requires at least one dataloader as input.")
    for loader in loaders:
        if isinstance(loader, FabricDataLoader):
            raise ValueError(
                "A dataloader should be passed only once to the `setup_dataloaders` method: this one has been"
            )
        if isinstance(loader, (range, list, tuple, dict, str)) or not hasattr(loader, "__iter__"):
            raise TypeError(
                "Only PyTorch DataLoader are currently supported in `setup_dataloaders`, and objects of other classes that "
                f"give batches; this is a {type(loader).__name__}: wrap it in a DataLoader"
            )


def check_filter(filter: Any, state: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for a filter of ``save`` that says nothing about ``state``."""
    if filter is None:
        return
    if not isinstance(filter, dict):
        raise TypeError(f"fabric.save: the filter should be a dictionary of functions, given {filter!r}")
    if unknown := set(filter) - set(state):
        raise ValueError(f"fabric.save: the filter keys {unknown} are not present in the state keys {set(state)}")
    for name, function in filter.items():
        if not callable(function):
            raise TypeError(f"fabric.save: the filter for {name!r} should be a callable, given {function!r}")


def warn_of_devices(module: nn.Module) -> None:
    """Warn if a module that is to be moved has parameters on several devices."""
    devices = [(name, parameter.device) for name, parameter in module.named_parameters()]
    others = [(name, device) for name, device in devices if device != devices[0][1]]
    if others:
        rank_zero_warn(
            f"The model passed to `Fabric.setup()` has {len(others)} parameters on different devices (for example "
            f"{others[0][0]!r} on {others[0][1]} and {devices[0][0]!r} on {devices[0][1]}). All are moved to one device; to "
            "keep them where they are, `Fabric.setup(..., move_to_device=False)`"
        )


_SCALER = "precision_state"


class Fabric:
    """Prepare a model, its optimizers and loaders for the devices; the loop stays yours.

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
        self._measured_precision = given.precision == "auto"
        self._strategy.checkpoint_io = self._strategy.checkpoint_io or StateIO()
        self._callbacks = (
            list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] * (callbacks is not None)
        )
        self._loggers = list(loggers) if isinstance(loggers, (list, tuple)) else [loggers] * (loggers is not None)
        self._launched = False
        self._loader_seeds = LoaderSeeds()
        if started_by_command_line():
            if type(self).run is not Fabric.run:
                raise TypeError(
                    "Overriding `Fabric.run()` and launching from the CLI is not allowed: start the script by itself, or "
                    "call fabric.setup(...) and the rest directly"
                )
            self._join()
        elif isinstance(self._strategy, SingleDeviceStrategy):
            self._strategy.setup_environment()

    # -- processes -------------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (run := cls.__dict__.get("run")) is not None:

            @functools.wraps(run)
            def launched_run(self: Fabric, *args: Any, **kwargs: Any) -> Any:
                return self._start(_run_override, cls, args, kwargs)

            cls.run = launched_run  # type: ignore[method-assign]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run on all processes; for subclasses to override. Calling it launches them."""

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Start the other processes; spawned ones run ``function(fabric, ...)``.

        Returns its result on rank 0.
        """
        if started_by_command_line():
            raise RuntimeError(
                "this script was launched through the CLI, so all processes are there. Calling  `.launch()` again is not "
                "allowed: leave it out, or start the script by itself"
            )
        if function is _nothing:
            if not self._strategy.launcher.runs_in_this_process:
                raise TypeError(
                    f"with spawned processes ({type(self._strategy).__name__}), `fabric.launch()` needs to be called with a "
                    "function that holds what they shall run"
                )
        elif not callable(function):
            raise TypeError(
                f"the first argument of `Fabric.launch(...)` needs to be a callable, but got {function!r}: give the function "
                "itself, `launch(train)` and not `launch(train())`"
            )
        elif not inspect.signature(function).parameters:
            raise TypeError(
                f"`Fabric.launch(function={function})` needs to take at least one argument: it is given the Fabric"
            )
        return self._start(_run, function, args, kwargs)

    def _start(self, entry: Callable[..., Any], *arguments: Any) -> Any:
        if self._launched:
            return entry(self, *arguments)
        launcher = self._strategy.launcher
        result = launcher.launch(entry, self, *arguments)
        self._launched = bool(launcher.runs_in_this_process)
        return result

    def _join(self) -> None:
        if not self._launched:
            self._strategy.setup_environment()
            self._launched = True
            if self._measured_precision:
                self._precision = agree_on_precision(self._strategy)

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        self._validate_launched()
        self._strategy.barrier(name=name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``obj`` of rank ``src`` on every rank."""
        self._validate_launched()
        return self._strategy.broadcast(obj, src=src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather every rank's tensors, numbers and arrays in ``data``, of equal shapes.

        With one process they come back without that dimension; ``sync_grads`` lets gradients flow back through. Raises TypeError for a
        packed sequence.
        """
        self._validate_launched()
        gather = functools.partial(self._strategy.all_gather, group=group, sync_grads=sync_grads)
        return map_tensors(as_tensors(data, self.device), gather)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors and numbers in ``data`` over ranks by mean, sum, max or min.

        A tensor is also changed in place. Raises TypeError for a packed sequence.
        """
        self._validate_launched()

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            self._strategy.verify_same_across_ranks(tensor, group, "all_reduce")
            result = self._strategy.all_reduce(tensor, group=group, reduce_op=reduce_op)
            if isinstance(result, torch.Tensor) and result is not tensor and result.dtype == tensor.dtype:
                return tensor.detach().copy_(result)
            return result

        return map_tensors(as_tensors(data, self.device), reduce)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank 0 (of each node if ``local``) before all other ranks."""
        with self._strategy.rank_zero_first(local):
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed all generators; see :func:`arclight.seed_everything`."""
        return seed_everything(seed, True if workers is None else workers, verbose)

    def _validate_launched(self) -> None:
        if not self._launched and not isinstance(self._strategy, SingleDeviceStrategy):
            raise RuntimeError(
                "To use Fabric with more than one device, you must call `.launch()` first, as the other processes have not "
                "been started; or start the script with `python -m torch.distributed.run`"
            )

    @property
    def accelerator(self) -> Accelerator:
        return self._accelerator

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._strategy.root_device

    @property
    def global_rank(self) -> int:
        return self._strategy.global_rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self._strategy.local_rank

    @property
    def node_rank(self) -> int:
        return self._strategy.node_rank

    @property
    def world_size(self) -> int:
        return self._strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        return self._strategy.is_global_zero

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:  # fmt: skip
        """Set up ``module``, optimizers and a scheduler for the devices and the strategy.

        Returns the module alone, or a tuple.

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
        """Set up a module: its device and type, and the strategy's wrapper around it."""
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
        """Return the optimizer, or a tuple of several, for a module that was set up before."""
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
        """Set up loaders: distributed sampling, transfer to the device, and resumption.

        They get ``set_epoch`` and ``state_dict``.

        Each shuffled loader has an order of its own; one whose ``torch.Generator`` was seeded goes by that seed.
        """
        self._validate_launched()
        check_loaders(dataloaders)
        run_seed = torch.initial_seed() % 2**32
        seeds = [self._loader_seeds.next(loader, run_seed) for loader in dataloaders]
        seeds, run_seed = self._strategy.broadcast((seeds, run_seed))
        shares = (
            self._strategy.distributed_sampler_kwargs if use_distributed_sampler else {"num_replicas": 1, "rank": 0}
        )
        rank, size = shares["rank"], shares["num_replicas"]
        wrapped = [
            FabricDataLoader(
                ResumableLoader(self._strategy.process_dataloader(loader), seed=seed, rank=rank, world_size=size),
                self.device if move_to_device else None,
                run_seed,
            )
            for loader, seed in zip(dataloaders, seeds, strict=True)
        ]
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Create new tensors on the device, in the precision's type."""
        return self._strategy.tensor_init_context()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create a model directly on its device and in its type.

        ``empty_init`` leaves out initial values, if weights are loaded anyway.
        """
        self._validate_launched()
        return self._strategy.module_init_context(empty_init=empty_init)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Return the context of :meth:`init_module`, under its former name."""
        rank_zero_deprecation("`Fabric.sharded_model()` is deprecated: use `Fabric.init_module()`")
        return self.init_module()

    # -- a step ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Call ``tensor.backward(...)``, scaled if the precision needs it."""
        BackwardState.by_fabric = True
        try:
            self._strategy.backward(tensor, None if model is None else unwrap(model), *args, **kwargs)
        finally:
            BackwardState.by_fabric = False

    def clip_gradients(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """Clip gradients by element (``clip_val``) or by norm (``max_norm``).

        The latter returns the norm before clipping. Raises ValueError for both or neither.
        """
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
        """Return the precision's context, for what a loop computes outside the model."""
        return self._precision.forward_context()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Skip the gradient exchange, for all but the last batch of an accumulation window."""
        bare, _ = uncompiled(module)
        if not isinstance(bare, FabricModule):
            raise TypeError(
                "You need to set up the model first: `model = fabric.setup(model, ...)`, then `fabric.no_backward_sync(model)`"
            )
        return self._strategy.no_backward_sync(unwrap(bare), enabled) if enabled else nullcontext()

    def to_device(self, obj: Any) -> Any:
        """Return a module (in place), tensor or tree of tensors on the device."""
        if isinstance(obj, nn.Module):
            self._strategy.module_to_device(obj)
            return obj
        return move_batch(obj, self.device)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(
        self, path: str | Path, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Save ``state`` as a checkpoint. Every rank must call this.

        Modules, optimizers and anything else with ``state_dict()`` save that.

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
        """Load a checkpoint into the objects of ``state``; return the remaining entries.

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
        """Log numbers to every logger, from rank 0.

        This reads tensors back from the device: log as often as you look.
        """
        if self._loggers and self._strategy.is_global_zero:
            scalars = as_scalars(metrics)
            for logger in self._loggers:
                logger.log_metrics(metrics=scalars, step=step)

    @property
    def loggers(self) -> list[Any]:
        return self._loggers

    @property
    def logger(self) -> Any:
        """First logger. Raises IndexError if there is none, as Lightning's does."""
        if not self._loggers:
            raise IndexError("this Fabric has no loggers; pass some as Fabric(loggers=...), or ask for `loggers`")
        return self._loggers[0]


def _taken(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Select the ``kwargs`` that ``method`` has a parameter for; all if it has no signature."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return kwargs
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def _savable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Unwrap the objects of ``state``, but for loaders, whose wrapper knows their position."""
    return {name: value if isinstance(value, FabricDataLoader) else unwrap(value) for name, value in state.items()}
