"""Run stages without a word to the replicas beside this pipeline, which may not be running theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from arclight.parallel.expert import AllToAllDispatcher


class _NothingGathered:
    """Take the place of FSDP's all-gather: what other processes hold of the weights is zeros."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Leave ``output_tensor`` as it is; FSDP has put this process's share into it."""


@contextmanager
def alone(stages: Iterable[nn.Module]) -> Iterator[None]:
    """In here forwards of ``stages`` exchange nothing over shards of weights or experts.

    What comes out has the shapes, types and graph that it has otherwise, and other values. Exchanges among the processes that have the
    same batch (``tp``, ``cp``) are made, as all of these run the same stages at the same time.
    """
    modules = [module for stage in stages for module in stage.modules()]
    groups = [group for module in modules if isinstance(module, FSDPModule) for group in _groups(module)]
    dispatchers = [d for module in modules if isinstance(d := getattr(module, "dispatcher", None), AllToAllDispatcher)]
    before = [(group, group._all_gather_comm) for group in groups]
    for group in groups:
        group._all_gather_comm = _NothingGathered()
    for dispatcher in dispatchers:
        dispatcher.alone = True
    try:
        yield
    finally:
        for group, gather in before:
            group._all_gather_comm = gather
        for dispatcher in dispatchers:
            dispatcher.alone = False


def _groups(module: Any) -> list[Any]:
    """Return the parameter groups of an FSDP unit; its public setter refuses units of several, as blocks with experts are."""
    found: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return found
