"""Select a strategy, accelerator, devices, environment and precision from arguments.

Fabric and Trainer call `select` through ``trainer.fabric.strategies``, which adds the strategies of ``parallel``, and `agree_on_precision`
directly. In: the arguments as users gave them; out: one `Strategy` with its parts. Lightning's names and error types are accepted and
stay; a new name goes into the registry of its kind.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from typing import Any

from arclight.fabric.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    resolve_accelerator,
)
from arclight.fabric.environments import ClusterEnvironment, LightningEnvironment, detect_environment
from arclight.fabric.errors import MisconfigurationError, MissingDeviceError
from arclight.fabric.precision import BitsandbytesPrecision, Precision, resolve_precision
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.strategies.base import SingleDeviceStrategy, Strategy
from arclight.fabric.strategies.ddp import DDPStrategy
from arclight.fabric.strategies.layer_sync import LayerSync, TorchSyncBatchNorm
from arclight.fabric.strategies.parallel import ParallelStrategy
from arclight.fabric.strategies.strategy_registry import STRATEGY_REGISTRY
from arclight.fabric.warnings import PossibleUserWarning


@dataclass
class Plugins:
    """Plugins of a user by kind; None if there is none of it."""

    precision: Precision | None = None
    environment: ClusterEnvironment | None = None
    checkpoint_io: Any = None
    layer_sync: LayerSync | None = None


def select(
    *, accelerator: Any = "auto", strategy: Any = "auto", devices: Any = "auto", num_nodes: int = 1, precision: Any = None,
    plugins: Any = None, sync_batchnorm: bool = False, owner: str = "Trainer",
) -> Strategy:  # fmt: skip
    """Select the strategy for a user's arguments, with everything that it needs.

    No process is started, no device claimed. ``owner``: the class that the user called, for messages.

    * ``accelerator``: a name or an Accelerator. ``strategy``: a name or a Strategy, which may hold an accelerator, devices, a
      cluster environment, a checkpoint IO and a precision of its own. ``precision``: a name. ``plugins``: a Precision, a
      ClusterEnvironment, a checkpoint IO, a LayerSync, or a list of them.
    * ``"auto"``: the best kind of device there is; as many processes as the cluster has started, else one per CUDA device (in a notebook
      one) and one on other kinds; DDP for more than one process, in a notebook by forking.

    Raises ValueError, TypeError or MisconfigurationError (which is both) for choices that contradict one another.
    """
    if type(num_nodes) is not int or num_nodes < 1:
        raise ValueError(f"`num_nodes` must be a positive integer, but got {num_nodes}")
    plugin = sort_plugins(plugins)
    given = _named(strategy)
    accelerator, precision = _from_strategy(given, accelerator, precision, plugin)
    if devices in (0, "0") or devices == []:
        name = type(accelerator).__name__ if isinstance(accelerator, Accelerator) else accelerator
        raise MisconfigurationError(
            f"`{owner}(devices={devices!r})` value is not a valid input using {name} accelerator"
        )
    kind = resolve_accelerator(accelerator)
    environment = plugin.environment or getattr(given, "cluster_environment", None) or detect_environment()
    held = given.parallel_devices if given is not None else None
    local = held or _devices(kind, devices, num_nodes, environment)
    chosen = given if given is not None else _automatic(local, num_nodes)
    _check(chosen, kind, strategy, owner)
    chosen.attach(kind, local, num_nodes, environment)
    if not chosen.has_own_precision:
        chosen.precision = _precision(plugin.precision or precision, kind)
    if (
        owner == "Trainer"
        and accelerator == "cpu"
        and (CUDAAccelerator.is_available() or MPSAccelerator.is_available())
    ):
        rank_zero_warn("GPU available but not used: Trainer(accelerator='gpu') uses it", category=PossibleUserWarning)
    chosen.checkpoint_io = chosen.checkpoint_io or plugin.checkpoint_io
    if sync_batchnorm and plugin.layer_sync is not None and not isinstance(plugin.layer_sync, TorchSyncBatchNorm):
        raise MisconfigurationError(
            f"You set `{owner}(sync_batchnorm=True)` and provided a `{type(plugin.layer_sync).__name__}` plugin, but this is not allowed: "
            "choose one of them"
        )
    if isinstance(chosen, DDPStrategy):
        chosen.layer_sync = plugin.layer_sync or (TorchSyncBatchNorm() if sync_batchnorm else None)
    return chosen


def sort_plugins(plugins: Any) -> Plugins:
    """Sort plugins by kind.

    Raises MisconfigurationError for what is no plugin, and for two of a kind.
    """
    found = Plugins()
    twice: list[str] = []
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]:
        if isinstance(plugin, Precision):
            place, kind = "precision", "Precision"
        elif isinstance(plugin, ClusterEnvironment):
            place, kind = "environment", "ClusterEnvironment"
        elif isinstance(plugin, LayerSync):
            place, kind = "layer_sync", "LayerSync"
        elif hasattr(plugin, "save_checkpoint") and hasattr(plugin, "load_checkpoint"):
            place, kind = "checkpoint_io", "CheckpointIO"
        else:
            raise MisconfigurationError(
                f"Found invalid type for plugin {plugin!r}. Expected one of: Precision, CheckpointIO, ClusterEnvironment, LayerSync"
            )
        if getattr(found, place) is not None and kind not in twice:
            twice.append(kind)
        setattr(found, place, plugin)
    if twice:
        raise MisconfigurationError(
            f"Received multiple values for {', '.join(twice)} flags in `plugins`. Expected one value of each kind at most"
        )
    return found


def _named(strategy: Any) -> Strategy | None:
    """Return the strategy of a name or an object; None for ``auto``."""
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        strategy = strategy()
    if isinstance(strategy, Strategy):
        return strategy
    name = strategy.lower() if isinstance(strategy, str) else strategy
    if name == "auto":
        return None
    if not isinstance(name, str) or name not in STRATEGY_REGISTRY.available_strategies():
        names = ", ".join(["auto", *STRATEGY_REGISTRY.available_strategies()])
        close = difflib.get_close_matches(str(name), STRATEGY_REGISTRY.available_strategies(), 1)
        meant = "".join(f"; did you mean {one}?" for one in close) or "."
        raise ValueError(
            f"You selected an invalid strategy name: `strategy={strategy!r}`{meant} Names are {names}; or pass a Strategy"
        )
    made: Strategy = STRATEGY_REGISTRY.get(name)
    return made


def _from_strategy(strategy: Strategy | None, accelerator: Any, precision: Any, plugin: Plugins) -> tuple[Any, Any]:
    """Return accelerator and precision, taken from the strategy if it has its own."""
    if plugin.precision is not None and precision is not None:
        raise ValueError(f"Received both `precision={precision}` and `plugins={plugin.precision}`. Choose one")
    if strategy is None:
        return accelerator, precision
    held = {
        "accelerator": (strategy.accelerator, None if accelerator == "auto" else accelerator, "accelerator flag"),
        "precision": (strategy.precision if strategy.has_own_precision else None, plugin.precision, "plugins"),
        "checkpoint_io": (strategy.checkpoint_io, plugin.checkpoint_io, "plugins"),
        "cluster_environment": (strategy.cluster_environment, plugin.environment, "plugins"),
    }
    for name, (own, other, place) in held.items():
        same = own is other or (isinstance(own, Accelerator) and own.name() == {"gpu": "cuda"}.get(other, other))
        if own is not None and other is not None and not same:
            raise MisconfigurationError(f"{name} set through both strategy class and {place}, choose one")
    if strategy.accelerator is not None:
        accelerator = strategy.accelerator
    kind = strategy.parallel_devices[0].type if strategy.parallel_devices else ""
    named = {"cpu": ("cpu",), "cuda": ("cuda", "gpu")}.get(kind, ())
    if named and isinstance(accelerator, str):
        if accelerator not in ("auto", *named):
            raise MisconfigurationError(
                f"{named[-1].upper()} parallel_devices set through {type(strategy).__name__} class, but accelerator set to {accelerator}, "
                "please choose one device type"
            )
        accelerator = named[0]
    return accelerator, precision


def _devices(accelerator: Accelerator, devices: Any, num_nodes: int, environment: ClusterEnvironment) -> list[Any]:
    """Return the devices of this node's processes."""
    if devices == "auto":
        if environment.creates_processes_externally and not isinstance(environment, LightningEnvironment):
            devices = max(1, environment.world_size() // num_nodes)
        else:
            devices = accelerator.auto_device_count()
            if is_interactive() and isinstance(accelerator, CUDAAccelerator):
                devices = 1  # processes of a notebook are an experiment: they are for those who ask
    chosen = accelerator.get_parallel_devices(accelerator.parse_devices(devices))
    if not chosen:
        raise MisconfigurationError(f"devices={devices!r}: need at least one")
    return chosen


def _automatic(devices: list[Any], num_nodes: int) -> Strategy:
    if len(devices) * num_nodes == 1:
        return SingleDeviceStrategy(devices[0])
    return DDPStrategy(start_method="fork" if is_interactive() and num_nodes == 1 else "popen")


def _check(strategy: Strategy, accelerator: Accelerator, choice: Any, owner: str) -> None:
    if not isinstance(strategy, ParallelStrategy):
        return
    if isinstance(accelerator, MPSAccelerator):
        raise MisconfigurationError(
            f"You set `strategy={choice}` but strategies from the DDP family are not supported on the MPS accelerator: it is one "
            "device. Set accelerator='cpu' or another strategy"
        )
    if is_interactive() and strategy._start_method != "fork":
        raise MissingDeviceError(
            f"`{owner}(strategy={choice!r})` is not compatible with an interactive environment, whose main module other processes "
            f"cannot run. Run a script, or choose `{owner}(strategy='ddp_notebook')`"
        )


def _precision(choice: Any, accelerator: Accelerator) -> Precision:
    precision = resolve_precision(choice, accelerator.name() if not isinstance(accelerator, CPUAccelerator) else "cpu")
    if isinstance(precision, BitsandbytesPrecision) and not isinstance(accelerator, CUDAAccelerator):
        raise MissingDeviceError("Bitsandbytes is only supported on CUDA GPUs: set accelerator='cuda'")
    return precision


def agree_on_precision(strategy: Strategy, resumed: str | None = None) -> Precision:
    """Set the precision of all ranks to the ``resumed`` one, else to rank 0's. A collective.

    For ``precision="auto"``, which each process has measured by itself.
    """
    name = strategy.broadcast(resumed or strategy.precision.name)
    if name != strategy.precision.name:
        strategy.precision = resolve_precision(name, strategy.root_device.type)
    return strategy.precision


def is_interactive() -> bool:
    """Return True if Python runs at a prompt or in a notebook."""
    return hasattr(sys, "ps1")
