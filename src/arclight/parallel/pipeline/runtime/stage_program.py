"""Define a stage's program per micro-batch (model part, loss), and the topology.

`install`, `PipeRunner` and ``steps`` (`StagePart`) make a `StageProgram` for each stage of this process, which `engine` runs;
`PipelineTopology` says which process has which stage, by `orders.stages_of`. ``loss_scale`` multiplies losses before their backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.table import ScheduleKind
from arclight.parallel.step_protocol import Split

Loss = Callable[[Any, Any], tuple[Tensor, Tensor]]
"""Function of the last stage's output and targets of a micro-batch: the sum of its losses, and the number of terms."""


class StageProgram(nn.Module):
    """Run one stage's part of the model for a micro-batch and, on the last stage, the loss."""

    def __init__(self, model: nn.Module, loss: Loss | None, sliced: bool = False, first: bool = False) -> None:
        """Initialise the program.

        sliced: pass ``model`` all inputs besides the received tensors. Else only the first stage gets the inputs;
        keyword arguments go to every stage.
        """
        super().__init__()
        self.model = model
        self.loss = loss
        self.sliced, self.first = sliced, first
        self.loss_scale: Tensor | float = 1.0
        """Factor of losses before their backward."""
        self.totals: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.outputs: list[Any] | None = None
        """Outputs of the last stage, if they are wanted."""
        self.autocast: Any = nullcontext()
        """Context of forwards alone: the schedule runs backwards too, outside of it."""

    def forward(self, *arrived: Tensor, micro_batch: Split) -> Any:
        with self.autocast:
            return self._forward(arrived, micro_batch)

    def _forward(self, arrived: tuple[Tensor, ...], micro_batch: Split) -> Any:
        args, kwargs, targets = micro_batch
        if self.sliced:
            output = self.model(*arrived, args=args, kwargs=kwargs)
        else:
            output = self.model(*(args if self.first else arrived), **kwargs)
        if self.loss is None:
            return tuple(x.contiguous() for x in (output if isinstance(output, tuple) else (output,)))
        if self.outputs is not None:
            self.outputs.append(output)
        total, count = self.loss(output, targets)
        self.totals.append(total.detach().double())
        self.counts.append(torch.as_tensor(count))
        return total * self.loss_scale


@dataclass(frozen=True)
class PipelineTopology:
    """Describe the pipeline's processes and stages, and this process's place among them."""

    group: dist.ProcessGroup | None
    """None for one process that has all stages."""
    stages: int
    kind: ScheduleKind
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group) if self.group is not None else 1

    @property
    def own(self) -> list[int]:
        """Numbers of the stages that this process has."""
        return self.stages_of(self.rank)

    def stages_of(self, rank: int) -> list[int]:
        """Return the numbers of the stages that a process has."""
        if self.ranks == 1:
            return list(range(self.stages))
        return stages_of(rank, self.ranks, self.stages, self.kind.v_shaped)

    def place(self, stage: int) -> int:
        """Return the process of the pipeline that has a stage."""
        return next(rank for rank in range(self.ranks) if stage in self.stages_of(rank))

    def owner(self, stage: int) -> int:
        """Return the same, as all processes are numbered."""
        return dist.get_global_rank(self.group, self.place(stage)) if self.group is not None else 0
