"""The processes of a Fabric: starting them, who is who, and what they exchange."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.batches import map_tensors
from arclight.fabric.seeding import seed_everything
from arclight.fabric.strategies import SingleDeviceStrategy, Strategy
from arclight.trainer.fabric_environment import started_by_command_line
from arclight.trainer.fabric_values import as_tensors


def _nothing(*_: Any) -> None:
    """What a launch without a function runs."""


class FabricProcesses:
    """What of :class:`Fabric` is about processes."""

    _strategy: Strategy
    _accelerator: Accelerator
    _launched: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (run := cls.__dict__.get("run")) is not None:

            @functools.wraps(run)
            def launched_run(self: FabricProcesses, *args: Any, **kwargs: Any) -> Any:
                return self._start(_run_override, cls, args, kwargs)

            cls.run = launched_run  # type: ignore[method-assign]

    # -- processes -------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """For subclasses: what all processes do. It is launched by being called."""

    def launch(self, function: Callable[..., Any] = _nothing, *args: Any, **kwargs: Any) -> Any:
        """Start the other processes. ``function(fabric, ...)`` runs in all of them where processes are spawned; its result on rank 0 comes back."""
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

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        self._validate_launched()
        self._strategy.barrier(name=name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src`` on every rank."""
        self._validate_launched()
        return self._strategy.broadcast(obj, src=src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Every rank's tensors, numbers and arrays in ``data`` (of equal shapes), stacked along a new first dimension.

        With one process they come back without that dimension; ``sync_grads`` lets gradients flow back through.
        """
        self._validate_launched()
        gather = functools.partial(self._strategy.all_gather, group=group, sync_grads=sync_grads)
        return map_tensors(as_tensors(data, self.device), gather)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Tensors and numbers in ``data`` reduced over ranks by mean, sum, max or min; a tensor holds the result itself too."""
        self._validate_launched()

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            self._strategy.check_alike(tensor, group, "all_reduce")
            result = self._strategy.all_reduce(tensor, group=group, reduce_op=reduce_op)
            if isinstance(result, torch.Tensor) and result is not tensor and result.dtype == tensor.dtype:
                return tensor.detach().copy_(result)
            return result

        return map_tensors(as_tensors(data, self.device), reduce)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 (of each node where ``local``) runs the block before all others do, however long that takes."""
        with self._strategy.rank_zero_first(local):
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)  # noqa: T201

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """See :func:`arclight.seed_everything`."""
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


def _run(fabric: FabricProcesses, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric._join()
    return function(fabric, *args, **kwargs)


def _run_override(fabric: FabricProcesses, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric._join()
    return cls.__dict__["run"].__wrapped__(fabric, *args, **kwargs)
