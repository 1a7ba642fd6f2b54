"""Define the interface of strategies, and the strategy of one process.

Trainer loops and Fabric call a `Strategy` for devices, collectives, backward, steps and saves; ``fabric.strategies`` and
``arclight.parallel`` implement it, and users may subclass it. A new method needs a default here that is right for one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.batches import move_batch
from arclight.fabric.distributed.optimizer_names import add_parameter_names, name_parameters, select_optimizer_state
from arclight.fabric.distributed.stop_signal import StopSignal
from arclight.fabric.distributed.store_gather import StoreGather
from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.launchers import Launcher
from arclight.fabric.modules import SkipInit, enter_all, materialize_meta
from arclight.fabric.precision import Precision


class Strategy:
    """One process and one device; subclasses add others.

    A loop asks a strategy for a step function (:meth:`wrap_step`) once, and calls that; one that must own the whole step
    returns its own. A Trainer or Fabric fills in what is None (:meth:`attach`); ``precision_plugin`` is another word for ``precision``.
    """

    name = "single"
    evaluates_in_inference_mode = True
    """False if a forward makes tensors that later training steps use again."""
    evaluates_together = False
    """Whether all processes must run equally many forwards, because they exchange weights or activations in them."""
    contributes_logs = True
    """Whether values logged on this rank are added to those of all; False if another rank logs the same ones."""

    FORMER: ClassVar[dict[str, str]] = {
        "bare": "unwrap", "settle": "sync_module_attributes", "check_alike": "verify_same_across_ranks",
        "over_replicas": "replicate_mesh",
    }  # fmt: skip
    """Former names of methods, which a subclass may still override for one release."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for former, name in Strategy.FORMER.items():
            if former in vars(cls) and name not in vars(cls):
                warnings.warn(f"{cls.__name__}.{former} is called {name} now: rename it", FutureWarning, stacklevel=2)
                setattr(cls, name, vars(cls)[former])

    def __init__(
        self, accelerator: Accelerator | None = None, checkpoint_io: Any = None, precision: Precision | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:  # fmt: skip
        self.accelerator: Accelerator = accelerator  # type: ignore[assignment]  # None until attach()
        self.checkpoint_io = checkpoint_io
        own = precision if precision is not None else precision_plugin
        self.precision = own if own is not None else Precision()
        self.has_own_precision = own is not None
        """Whether its precision was passed to the constructor; else a Trainer or Fabric sets it."""
        self.parallel_devices: list[torch.device] | None = None
        self.cluster_environment: ClusterEnvironment | None = None
        self.num_nodes = 1
        self.stop = StopSignal()

    example: Callable[..., tuple[Callable[..., Any], Any]] | None = None
    """Function that returns a step of the module and a batch for it (or the one it is given), without using the batch up; set by a
    Trainer before :meth:`place`."""
    lightning_module: nn.Module | None = None
    """The module to run; set by a Trainer at each entry point."""

    def connect(self, model: nn.Module) -> None:
        """Set ``model`` as the module to run."""
        self.lightning_module = model

    def attach(
        self, accelerator: Accelerator, parallel_devices: list[torch.device], num_nodes: int, environment: ClusterEnvironment
    ) -> None:  # fmt: skip
        """Set devices and environment that the constructor was not given; nothing is started yet."""
        self.accelerator = accelerator
        self.parallel_devices = self.parallel_devices or parallel_devices
        self.cluster_environment = self.cluster_environment or environment
        self.num_nodes = num_nodes

    @property
    def in_stages(self) -> bool:
        """True if each process has stages of a pipeline, and none the full model."""
        return False

    @property
    def precision_plugin(self) -> Precision:
        return self.precision

    @precision_plugin.setter
    def precision_plugin(self, precision: Precision) -> None:
        self.precision = precision

    @property
    def launcher(self) -> Launcher:
        """Launcher of the other processes, one for a program."""
        return Launcher()

    def setup_environment(self) -> None:
        """Join the other processes and claim this process's device."""
        self.accelerator.setup_device(self.root_device)

    def teardown(self) -> None:
        """Release what is no longer needed when a run has ended."""
        self.precision.teardown()
        for part in (self.accelerator, self.checkpoint_io, self.cluster_environment):
            if part is not None and hasattr(part, "teardown"):
                part.teardown()

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        raise NotImplementedError(
            f"{type(self).__name__} must say which device is this process's: give it a root_device"
        )

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.root_device

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or [None])

    num_devices = num_processes

    @property
    def device_ids(self) -> list[int]:
        """Numbers of this node's devices."""
        devices = self.parallel_devices or [self.root_device]
        return [i if getattr(device, "index", None) is None else device.index for i, device in enumerate(devices)]

    @property
    def world_size(self) -> int:
        return 1

    @property
    def global_rank(self) -> int:
        return 0

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def node_rank(self) -> int:
        return self.cluster_environment.node_rank() if self.cluster_environment is not None else 0

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    # -- stopping together -----------------------------------------------------------------------------------------

    def request_stop(self, reason: str = "") -> None:
        """Request all ranks to stop, from any rank, thread or signal handler.

        See :class:`StopSignal`.
        """
        self.stop.request(reason)

    def should_stop(self, position: int) -> bool:
        """Return True if all ranks stop before what follows ``position``; all ask at the same ones."""
        return self.stop.due(position)

    @property
    def replica_mesh(self) -> Any:
        """Mesh whose first dimension counts replicas that steps do not keep equal, or None."""
        return None

    def replicate_mesh(self, mesh: Any) -> Any:
        """Return the mesh of all replicas of a tensor that one replica shards over ``mesh``.

        Its first dimension is that of :attr:`replica_mesh`, its last ones are ``mesh``'s; with None for ``mesh`` each replica holds the
        full tensor.
        """
        return self.replica_mesh

    @property
    def step_group(self) -> Any:
        """Process group of the ranks whose batches make one update; None for all."""
        return None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of samplers that divide the data (``num_replicas``), and this one's ``rank``."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- model: for a loop that is the user's ----------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return ``module``, wrapped if forward and backward involve other processes."""
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Set up both, for optimizers that were made before the module was wrapped."""
        return self.setup_module(module), [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    lightning_restore_optimizer: bool = True
    """False for a strategy whose optimizers are not to be restored from a checkpoint of the Trainer."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers from the key ``optimizer_states`` of a Trainer's checkpoint.

        For strategies that override this; without an override the Trainer restores them itself and does not call it.
        """
        raise NotImplementedError(
            "the Trainer restores the optimizers of a strategy without a load_optimizer_state_dict of its own; an override "
            "restores them all and does not call the base class"
        )

    def process_dataloader(self, dataloader: Any) -> Any:
        return dataloader

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which new tensors are on the device, in the precision's type.

        With ``empty_init`` they are not initialised.
        """
        return enter_all(
            self.root_device, SkipInit() if empty_init else nullcontext(), self.precision.tensor_init_context()
        )

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which new modules are on the device, in the precision's type.

        With ``empty_init`` they are not initialised.
        """
        return enter_all(
            self.root_device, SkipInit() if empty_init else nullcontext(), self.precision.module_init_context()
        )

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward from ``tensor`` with the precision's hooks."""
        precision, kind = self.precision, type(self.precision)
        if kind.pre_backward is not Precision.pre_backward:  # a call that does nothing costs more than the question
            precision.pre_backward(tensor, module)
        precision.backward(tensor, module, *args, **kwargs)
        if kind.post_backward is not Precision.post_backward:
            precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Run ``optimizer.step(**kwargs)`` by the precision.

        It skips a step whose float16 gradients overflowed.
        """
        return self.precision.optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Clip the optimizer's gradients to a total norm of ``max_norm``; return the norm before."""
        self.precision.unscale_gradients(optimizer)
        return self.clip_norm(list(self.precision.main_params(optimizer)), max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Limit every element of the optimizer's gradients to ``[-clip_val, clip_val]``."""
        self.precision.unscale_gradients(optimizer)
        self.clip_value(list(self.precision.main_params(optimizer)), clip_val)

    def clip_norm(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip unscaled gradients by their total norm, which is returned."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: list[torch.Tensor], limit: float) -> None:
        """Clip unscaled gradients by element."""
        nn.utils.clip_grad_value_(parameters, limit)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward does not reduce gradients.

        For all but the last batch of a window.
        """
        return nullcontext()

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of all but the last batch of an accumulation window."""
        return self.no_backward_sync(module)

    # -- model: for the Trainer ------------------------------------------------------------------------------------

    def place(self, module: nn.Module, whole_step: bool = True) -> None:
        """Move ``module``, or this rank's shard of it, to its device, before optimizers are made.

        ``whole_step`` says that forward and backward passes lie in one step function each, which :meth:`wrap_step` may
        wrap; otherwise, in manual optimization, there is no such function.
        """
        materialize_meta(module, self.device)
        module.to(self.device)

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step``, a method of ``module`` that runs forward, to synchronise with other ranks."""
        return step

    def wrap_evaluation_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step that no backward follows."""
        return step

    def sync_module_attributes(self, module: nn.Module) -> None:
        """Synchronise the attributes that steps set in ``module``.

        Called at the end of an epoch or evaluation, before its hooks.
        """

    def copy_from_rank_zero(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's values into every rank's tensors."""

    def average_gradients(self, module: nn.Module) -> None:
        """Average gradients over ranks after a backward of manual optimization."""

    def average_accumulated(self, module: nn.Module) -> None:
        """Average the gradients of an accumulation window over ranks if no backward has.

        Its last batch has no loss, or was not known to be the last. Ranks may differ in which parameters have a gradient.
        """

    def move(self, batch: Any) -> Any:
        return move_batch(batch, self.device)

    # -- collectives: with one process each is the identity --------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Release what the strategy holds of a run that has failed."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[Any]:
        """Return a context that rank 0 leaves before the others enter, however long it takes.

        With ``local``, rank 0 of each node.
        """
        return nullcontext()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Broadcast ``value``, any picklable object, from rank ``src`` to every rank."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        return [value]

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        """Return ``tensor`` reduced over the ranks (of ``group``) by mean, sum, max or min.

        With one process it is returned as it is.
        """
        return tensor

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor by :meth:`all_reduce`; return anything else as it is."""
        return self.all_reduce(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather every rank's ``tensor``, stacked along a new first dimension.

        With one process the tensor is returned as it is. With ``sync_grads`` a gradient of the result flows back to the rank that each part
        came from. Raises ValueError on all ranks if shapes or types differ (see :meth:`verify_same_across_ranks`).
        """
        return tensor

    def verify_same_across_ranks(self, tensor: torch.Tensor, group: Any, operation: str) -> None:
        """Verify that ``operation`` gets tensors of one shape and type on all ranks.

        Raises ValueError on every rank otherwise.

        One exchange of a few bytes for tensors on CPUs. On other devices that would cost more than the operation: there ranks compare
        only if ``TORCH_DISTRIBUTED_DEBUG`` is INFO or DETAIL.
        """

    def exchange(self, name: str, timeout: float) -> StoreGather | None:
        """Return a channel for threads to send values to rank 0; None for one process."""
        return None

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks decided so; without ``all``, if any did."""
        return decision

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:  # fmt: skip
        """Save ``state``; of an object with a ``state_dict()`` that is saved.

        ``filter``: by entry, a function of key and value that returns True for the items to keep.
        """
        names = self.parameter_names(state.values())
        tree = {
            name: kept
            for name, value in state.items()
            if (kept := _filtered(self.state_of(value, names), (filter or {}).get(name))) is not None
        }
        self.write_checkpoint(self.checkpoint_io, tree, path, storage_options)

    def write_checkpoint(self, io: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Let ``io`` write a state tree; every rank calls this, and returns when its part is done."""
        checkpoint = self.portable(checkpoint)
        if self.is_global_zero:
            # by position: a CheckpointIO of the user's own may have other names for these two
            io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into the objects of ``state``, and return the remaining entries.

        ``state`` may also be one module or optimizer.

        Raises KeyError with ``strict`` for an object that the checkpoint has nothing for.
        """
        tree = self.read_checkpoint(self.checkpoint_io, path, weights_only=weights_only)
        if isinstance(state, (nn.Module, Optimizer)):
            self.restore(state, tree, strict)
            return {}
        missing = [name for name in state or {} if name not in tree]
        if missing and strict:
            raise KeyError(
                f"{path} contains no key {missing[0]!r}, which was asked for; it has {', '.join(map(str, tree))}. "
                "To disable strict loading, set `strict=False`"
            )
        names = self.parameter_names((state or {}).values())
        for name in [name for name in state or {} if name in tree]:
            value = tree.pop(name)
            if isinstance(state[name], Optimizer):
                value = select_optimizer_state(state[name], value, names)
            elif not isinstance(state[name], nn.Module):
                value = self.in_memory(value)
            if hasattr(state[name], "load_state_dict"):
                self.restore(state[name], value, strict)
            else:
                state[name] = value
        rest: dict[str, Any] = self.in_memory(tree)
        return rest

    def read_checkpoint(self, io: Any, path: Any, **options: Any) -> dict[str, Any]:
        """Read the checkpoint at ``path`` by ``io``; every rank calls this."""
        found: dict[str, Any] = io.load_checkpoint(path, **options)
        return found

    def in_memory(self, tree: Any) -> Any:
        """Return ``tree`` without tensors that are still in a file."""
        return tree

    def state_of(self, value: Any, names: Mapping[torch.Tensor, str] | None = None) -> Any:
        """Return the state of an object for a checkpoint; an optimizer's with parameter ``names``."""
        if isinstance(value, nn.Module):
            return self.get_module_state_dict(value)
        if isinstance(value, Optimizer):
            state = self.get_optimizer_state(value)
            return state if names is None else self.named_optimizer_state(value, state, names)
        return value.state_dict() if hasattr(value, "state_dict") else value

    def restore(self, target: Any, state: Any, strict: bool = True) -> None:
        """Invert :meth:`state_of`."""
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, state, strict)
        else:
            target.load_state_dict(state)

    def parameter_names(self, parts: Iterable[Any]) -> dict[torch.Tensor, str]:
        """Return the names that checkpoints have for the parameters of the modules among ``parts``."""
        return name_parameters(self.unwrap(part) for part in parts if isinstance(part, nn.Module))

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module in what :meth:`setup_module` returned."""
        return module

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights under their own names."""
        return self.unwrap(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load full weights into a module that may be sharded."""
        self.unwrap(module).load_state_dict(state_dict, strict=strict)

    def own_weights(self, module: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
        """Select the ``weights`` that this process's ``module`` has to take or to refuse."""
        return weights

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def named_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], names: Mapping[torch.Tensor, str]
    ) -> dict[str, Any]:
        """Return ``optimizer``'s state by names, so that it fits any sharding; on every rank."""
        return add_parameter_names(optimizer, state, names)

    def share_of(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the shard of a full tensor that this process keeps, sharded as ``like`` is."""
        return whole

    def portable(self, tree: Any) -> Any:
        """Return a state tree with full tensors, on rank 0.

        A collective if tensors are sharded over processes.
        """
        return tree


def _filtered(value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    """Return the items of a dict that a filter keeps, or None; anything else as it is."""
    if keep is None or not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if keep(key, item)} or None


class SingleDeviceStrategy(Strategy):
    """Strategy of one process, on ``device``."""

    def __init__(
        self, device: torch.device | str = "cpu", accelerator: Accelerator | None = None, checkpoint_io: Any = None,
        precision: Precision | None = None, precision_plugin: Precision | None = None,
    ) -> None:  # fmt: skip
        super().__init__(accelerator, checkpoint_io, precision, precision_plugin)
        self._root_device = torch.device(device)

    @property
    def root_device(self) -> torch.device:
        return self._root_device
