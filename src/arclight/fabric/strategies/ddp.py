"""Run distributed data parallel (DDP): a replica of the model and own batches per rank.

``strategy="ddp"`` and its variants make one (`strategy_registry`), ``"auto"`` does for several processes (`selection`), or users do.
Arguments are Lightning's and DistributedDataParallel's and stay. Checkpoints are those of one process.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from arclight._intervals import PositiveInt, check
from arclight.fabric.accelerators import Accelerator
from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.precision import Precision
from arclight.fabric.strategies.layer_sync import LayerSync
from arclight.fabric.strategies.parallel import DEFAULT_TIMEOUT, ParallelStrategy


class DDPStrategy(ParallelStrategy):
    """torch's DistributedDataParallel; gradients are averaged over ranks.

    ``ddp_comm_hook`` with ``ddp_comm_state`` changes how gradients are exchanged (``ddp_comm_wrapper`` wraps the hook); with a
    ``PostLocalSGDState`` parameters are averaged every ``model_averaging_period`` steps. Keyword arguments beyond those of
    :class:`ParallelStrategy` go to DistributedDataParallel: ``find_unused_parameters``, ``static_graph``, ``gradient_as_bucket_view``...
    """

    name = "ddp"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: datetime.timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        precision_plugin: Precision | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, precision_plugin=precision_plugin,
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method,
        )  # fmt: skip
        self.ddp_comm_state, self.ddp_comm_hook, self.ddp_comm_wrapper = ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper
        check("model_averaging_period", model_averaging_period, PositiveInt | None)
        self.model_averaging_period = model_averaging_period
        self._ddp_kwargs = ddp
        self.layer_sync: LayerSync | None = None
        """Synchronises layers over the global batch (:class:`TorchSyncBatchNorm`); None for none. `selection` sets it."""

    # -- model -------------------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap ``module`` in DistributedDataParallel, with this strategy's options and hooks."""
        if self.layer_sync is not None:
            module = self.layer_sync.apply(module)
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        wrapped = DistributedDataParallel(module=module, device_ids=device_ids, **self._ddp_kwargs)
        if self.ddp_comm_hook is not None:
            hook = self.ddp_comm_hook
            wrapped.register_comm_hook(
                state=self.ddp_comm_state, hook=self.ddp_comm_wrapper(hook) if self.ddp_comm_wrapper else hook
            )
        return wrapped

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self.wrap(module) if any(p.requires_grad for p in module.parameters()) else module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

        if isinstance(self.ddp_comm_state, PostLocalSGDState):
            self._average_parameters_after(optimizer, self.ddp_comm_state.start_localSGD_iter)
        return optimizer

    def _average_parameters_after(self, optimizer: Optimizer, first: int) -> None:
        """Average the parameters periodically, after steps of ``optimizer``."""
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

        if self.model_averaging_period is None:
            raise ValueError(
                "ddp_comm_state is a PostLocalSGDState, but model averaging period is not provided: pass "
                "DDPStrategy(model_averaging_period=...), in steps"
            )
        if isinstance(optimizer, (ZeroRedundancyOptimizer, PostLocalSGDOptimizer)):
            raise ValueError(
                f"model averaging cannot work with a distributed optimizer of type {type(optimizer).__name__}: give the optimizer that it wraps"
            )
        averager = PeriodicModelAverager(period=self.model_averaging_period, warmup_steps=first)

        def average(optimizer: Optimizer, *_: Any) -> None:
            parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            averager.average_parameters(iter(list(parameters)))

        optimizer.register_step_post_hook(average)

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, DistributedDataParallel) else module

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        return self.wrap(_StepModule(module, step))

    def copy_from_rank_zero(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def average_gradients(self, module: nn.Module) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for gradient, work in zip(gradients, works, strict=True):
            work.wait()
            gradient /= self.world_size

    def average_accumulated(self, module: nn.Module) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad]
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self.root_device)
        dist.all_reduce(present, dist.ReduceOp.MAX)
        for parameter, elsewhere in zip(parameters, present.tolist(), strict=True):
            if elsewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.average_gradients(module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


class _StepModule(nn.Module):
    """A module whose forward is another module's step, so that DDP's forward runs that step."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.step = step

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.step(*arguments, **options)
