"""Fabric: devices, precision and processes for people who write their own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight import checkpoint as checkpoints
from arclight.data import ResumableLoader
from arclight.fabric.accelerators import resolve_accelerator
from arclight.fabric.batches import map_tensors, move_batch
from arclight.fabric.environments import detect_environment
from arclight.fabric.precision import Precision, ScaledOptimizer, resolve_precision
from arclight.fabric.seeding import seed_everything
from arclight.fabric.strategies import resolve_strategy
from arclight.optim import restore_optimizer


class Fabric:
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
    """

    def __init__(
        self, *, accelerator: Any = "auto", strategy: Any = "auto", devices: Any = "auto", num_nodes: int = 1, precision: Any = None,
        callbacks: Any = None, loggers: Any = None,
    ) -> None:  # fmt: skip
        self.accelerator = resolve_accelerator(accelerator)
        self.strategy = resolve_strategy(strategy, self.accelerator, devices, num_nodes, detect_environment())
        self.precision = resolve_precision(precision, self.accelerator.name)
        self._callbacks = _as_list(callbacks)
        self._loggers = _as_list(loggers)
        self._launched = False
        if (
            self.strategy.num_devices * self.strategy.num_nodes == 1
            or self.strategy.environment.creates_processes_externally
        ):
            self.strategy.setup_environment()
            self._launched = True

    # -- processes -------------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the other processes. ``function(fabric, ...)`` runs in all of them where processes are spawned; its result on rank 0 comes back."""
        if self._launched:
            return function(self, *args, **kwargs) if function is not None else None
        launcher = self.strategy.launcher()
        if function is None and not launcher.runs_in_this_process:
            raise TypeError(f"strategy {self.strategy.name!r} with spawned processes needs fabric.launch(function)")
        return launcher.launch(_run, self, function, args, kwargs)

    def barrier(self, name: str = "") -> None:
        self.strategy.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src`` on every rank."""
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked along a new first dimension."""
        return self.strategy.all_gather(data)

    def all_reduce(self, data: torch.Tensor, reduce_op: str = "mean") -> torch.Tensor:
        """The tensor reduced over ranks by mean, sum, max or min."""
        return self.strategy.all_reduce(data, reduce_op)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 (of each node where ``local``) runs the block before all others do."""
        rank = self.local_rank if local else self.global_rank
        if rank > 0:
            self.barrier("rank zero first")
        yield
        if rank == 0:
            self.barrier("rank zero first")

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """``module`` (and ``optimizers``, and a scheduler) ready for the devices: the module alone, or a tuple."""
        prepared = self.setup_module(module, move_to_device)
        extra = () if scheduler is None else (scheduler,)
        return (prepared, *map(self._scaled, optimizers), *extra) if optimizers or extra else prepared

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """The module with its parameters' type and device set, wrapped where processes must agree on gradients."""
        self._check_launched()
        prepared = self.strategy.setup_module(self.precision.convert_module(module), move_to_device)
        return FabricModule(prepared, module, self)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """The optimizers; with 16-bit gradients, ones whose ``step`` takes their scale out."""
        prepared = tuple(map(self._scaled, optimizers))
        return prepared[0] if len(prepared) == 1 else prepared

    def _scaled(self, optimizer: Any) -> Any:
        return optimizer if self.precision.scaler is None else ScaledOptimizer(optimizer, self.precision.scaler)

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Loaders that share the data between ranks, move batches to the device, and can resume (``set_epoch``, ``state_dict``)."""
        self._check_launched()
        seed = self.broadcast(torch.initial_seed() % 2**32)
        rank, size = (self.global_rank, self.world_size) if use_distributed_sampler else (0, 1)
        wrapped = [
            FabricLoader(
                ResumableLoader(loader, seed=seed, rank=rank, world_size=size), self.device if move_to_device else None
            )
            for loader in dataloaders
        ]
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create a model directly on its device and in its type; ``empty_init`` leaves out the initialisation of weights."""
        return _init_context(self, bool(empty_init))

    # -- a step ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        scaler = self.precision.scaler
        (tensor if scaler is None else scaler.scale(tensor)).backward(*args, **kwargs)

    def clip_gradients(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | None = None, max_norm: float | None = None, norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """Clip by element (``clip_val``) or by norm (``max_norm``, which gives back the norm before). Raises ValueError for both or neither."""
        if (clip_val is None) == (max_norm is None):
            raise ValueError("clip_gradients: give clip_val or max_norm, one of them")
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_(optimizer.optimizer if isinstance(optimizer, ScaledOptimizer) else optimizer)
        if clip_val is not None:
            nn.utils.clip_grad_value_(module.parameters(), clip_val)
            return None
        assert max_norm is not None
        return nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type, error_if_nonfinite)

    def autocast(self) -> AbstractContextManager[Any]:
        return self.precision.forward_context()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Backward without exchanging gradients: for all but the last batch of an accumulation window."""
        inner = module.wrapped if isinstance(module, FabricModule) else module
        return self.strategy.no_backward_sync(inner, enabled) if enabled else nullcontext()

    def to_device(self, obj: Any) -> Any:
        return obj.to(self.device) if isinstance(obj, nn.Module) else move_batch(obj, self.device)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(
        self, path: str | Path, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Write ``state`` as a checkpoint; modules, optimizers and anything with ``state_dict()`` save that. Every rank must call this."""
        tree: dict[str, Any] = {
            name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()
        }
        for name, keep in (filter or {}).items():
            tree[name] = {key: value for key, value in tree[name].items() if keep(key, value)}
        if self.is_global_zero:
            checkpoints.save(path, tree)
        self.barrier("checkpoint saved")

    def load(self, path: str | Path, state: dict[str, Any] | None = None, strict: bool = True) -> dict[str, Any]:
        """Read a checkpoint into the objects of ``state``; what ``state`` has no object for comes back."""
        tree = checkpoints.load(path)
        if state is None:
            return tree
        missing = [name for name in state if name not in tree]
        if strict and missing:
            raise KeyError(f"{path} has no entry {missing[0]!r}; it has {', '.join(tree)}")
        for name in [name for name in state if name in tree]:
            value = tree.pop(name)
            if isinstance(state[name], Optimizer):
                restore_optimizer(state[name], value)
            elif hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value, strict=strict) if isinstance(state[name], nn.Module) else state[
                    name
                ].load_state_dict(value)
            else:
                state[name] = value
        return tree

    def load_raw(self, path: str | Path, obj: Any, strict: bool = True) -> None:
        """Read a file of plain weights into a module."""
        obj.load_state_dict(checkpoints.load_weights(path), strict=strict)

    # -- the rest --------------------------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Run ``hook_name`` of every callback that has it."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                method(*args, **kwargs)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Send numbers to every logger (this reads tensors back: log as often as you look)."""
        values = {name: float(value) for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(values, step)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = False) -> int:
        return seed_everything(seed, bool(workers), verbose)

    def _check_launched(self) -> None:
        if not self._launched:
            raise RuntimeError(
                "call fabric.launch() before setting up modules and loaders: the other processes have not been started"
            )

    @property
    def device(self) -> torch.device:
        return self.strategy.device

    @property
    def global_rank(self) -> int:
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        return self.strategy.node_rank

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def loggers(self) -> list[Any]:
        return self._loggers

    @property
    def logger(self) -> Any:
        return self._loggers[0] if self._loggers else None


class FabricModule(nn.Module):
    """A module whose forward runs in the chosen precision and, with several processes, through their wrapper."""

    def __init__(self, wrapped: nn.Module, module: nn.Module, fabric: Fabric) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.__dict__["module"] = module
        run = fabric.precision.wrap(wrapped.__call__)
        self.__dict__["forward"] = run if type(fabric.precision) is Precision else _converting(run, fabric.precision)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The bare module's weights, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)


def _converting(run: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """``run`` with inputs in the type that it computes in and outputs in the default type, so that losses are exact."""

    def forward(*arguments: Any, **options: Any) -> Any:
        arguments, options = precision.convert_input((arguments, options))
        dtype = torch.get_default_dtype()
        return map_tensors(run(*arguments, **options), lambda t: t.to(dtype) if t.is_floating_point() else t)

    return forward


class FabricLoader:
    """A resumable loader as an iterable: each pass is the next epoch, each batch arrives on the device."""

    def __init__(self, loader: ResumableLoader, device: torch.device | None) -> None:
        self.loader, self.device = loader, device
        self.epoch = self.batch = 0
        self._resumed = False

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.batch = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        if self.batch and not self._resumed:
            self.set_epoch(self.epoch + 1)  # the pass before was left early
        self._resumed = False
        move = self.device is not None and self.device.type != "cpu"
        for batch in self.loader.batches(self.epoch, self.batch):
            self.batch += 1
            yield move_batch(batch, self.device) if move and self.device is not None else batch
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch, "loader": self.loader.state_dict(self.batch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batch, self._resumed = state["epoch"], state["batch"], True
        self.loader.load_state_dict(state["loader"])


def _run(fabric: Fabric, function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric.strategy.setup_environment()
    fabric._launched = True
    return function(fabric, *args, **kwargs) if function is not None else None


@contextmanager
def _init_context(fabric: Fabric, empty: bool) -> Iterator[None]:
    with fabric.precision.init_context(), fabric.device, _NoInit() if empty else nullcontext():
        yield


class _NoInit(torch.overrides.TorchFunctionMode):
    """Leaves out the functions of ``torch.nn.init``: weights stay as allocated, to be loaded right after."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
