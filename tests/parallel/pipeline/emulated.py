"""Steps of real processes whose stages compute by sleeping: they take the same time on a busy machine.

`emulate` runs any schedule by the real engine and gives the steps as they were recorded; for tests, and for benchmarks of schedules, of cuts
and of the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.parallel.pipeline.naps import SlowInputs, SlowWeights
from torch import Tensor, nn

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel.pipeline.runtime.engine import Engine
from arclight.parallel.pipeline.runtime.recording import record
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology, StageProgram
from arclight.parallel.pipeline.schedule.step_trace import Trace
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.pipeline.unit_costs import UnitCost
from arclight.parallel.step_protocol import Split


class Sleeper(nn.Module):
    """A stage that takes what its cost says. What comes in has ``cost.output`` bytes, as what it gives."""

    def __init__(self, cost: UnitCost, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_seconds = cost.forward
        # The first stage's input needs no gradient: all of its backward is that of its weights.
        self.inputs, self.weights = (0.0, cost.backward) if first else (cost.inputs, cost.weights)

    def forward(self, x: Tensor) -> Tensor:
        return SlowInputs.apply(x, self.forward_seconds, self.inputs) * SlowWeights.apply(self.weight, self.weights)


def loss(output: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    return output.sum(), torch.tensor(output.numel())


def steps_here(schedule: str, costs: Sequence[UnitCost], micro_batches: int, steps: int, nbytes: int) -> list[Trace]:
    """In one process of a pipeline: ``steps`` steps, recorded. nbytes: size of a micro-batch of what crosses cuts."""
    torch.set_num_threads(1)
    stages, kind = len(costs), schedule_kind(schedule)
    line = PipelineTopology(dist.group.WORLD, stages, kind, torch.device("cpu"))
    parts = {
        number: StageProgram(
            Sleeper(costs[number], number == 0), loss if number == stages - 1 else None, first=number == 0
        )
        for number in line.own
    }
    engine = Engine(parts, line)
    pieces: list[Split] = [((torch.ones(1, max(1, nbytes // 4)),), {}, None) for _ in range(micro_batches)]
    with record(skip=1, steps=steps) as run:
        for _ in range(1 + steps):
            dist.barrier()
            engine.run(pieces, backward=True)
    return run.traces


def emulate(
    schedule: str, costs: Sequence[UnitCost], ranks: int, micro_batches: int, *, steps: int = 3, nbytes: int = 256
) -> list[Trace]:  # fmt: skip
    """``steps`` steps of ``schedule`` on ``ranks`` real processes, whose stages sleep as long as ``costs`` (one for each) say."""
    return emulate_all([(schedule, costs)], ranks, micro_batches, steps=steps, nbytes=nbytes)[0]


def emulate_all(
    runs: Sequence[tuple[str, Sequence[UnitCost]]], ranks: int, micro_batches: int, *, steps: int = 3, nbytes: int = 256
) -> list[list[Trace]]:  # fmt: skip
    """The same for several schedules one after another, in the same processes."""

    def here(fabric: al.Fabric) -> list[Any]:
        found = [steps_here(schedule, costs, micro_batches, steps, nbytes) for schedule, costs in runs]
        return fabric.strategy.all_gather_object(found)

    fabric = al.Fabric(accelerator="cpu", devices=ranks, strategy=DDPStrategy(start_method="fork"))
    return fabric.launch(here)[0]


def median_step(traces: Sequence[Trace]) -> Trace:
    """The step of median length."""
    return sorted(traces, key=lambda trace: trace.seconds)[(len(traces) - 1) // 2]
