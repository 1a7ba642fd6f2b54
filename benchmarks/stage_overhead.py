"""What our engine costs beside bare torch: the same stages, schedule and micro-batches, in the same processes, step by step in turns."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import pipeline
from benchmarks.results import Ratio, paired

RANKS, MICRO_BATCHES, WIDTH, SAMPLES = 4, 8, 64, 64


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * RANKS)))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, targets)


def _bare(device: torch.device) -> Any:
    """A step by torch alone: two layers on each process."""
    rank = dist.get_rank()
    part = model()[2 * rank : 2 * rank + 2]
    stage = PipelineStage(part, rank, RANKS, device)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == RANKS - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(total, RANKS - 1)  # as ours, which every process knows the loss after
        return total

    return step, part.parameters()


def _ours(device: torch.device) -> Any:
    pipe = pipeline.split(model(), (torch.zeros(SAMPLES // MICRO_BATCHES, WIDTH),), stages=RANKS)
    runner = pipe.on(schedule="1F1B", micro_batches=MICRO_BATCHES, loss=loss, reduction="micro_mean")
    return lambda x, y: runner.step(x, targets=y).loss, runner.parameters()


def _turns(steps: int) -> dict[str, Any]:
    """In one process of the pipeline: seconds (of the clock, and of this process's CPU) of each step of both."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    sides = {"bare": _bare(device), "ours": _ours(device)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu = copy.deepcopy(seconds)
    losses = {}
    for number in range(steps + 5):
        for side in sorted(sides, reverse=number % 2 == 1):
            step, parameters = sides[side]
            dist.barrier()
            began, computed = time.perf_counter(), time.process_time()
            losses[side] = float(step(x, y))
            for parameter in parameters:
                parameter.grad = None
            if number >= 5:
                seconds[side].append(time.perf_counter() - began)
                cpu[side].append(time.process_time() - computed)
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


def overhead(steps: int = 200) -> dict[str, Ratio]:
    """Compare our steps with bare torch's, step by step: ``wall``, time by the clock, and ``cpu``, of processors; of all processes together."""

    def here(fabric: al.Fabric) -> list[dict[str, Any]]:
        return fabric.strategy.all_gather_object(_turns(steps))

    fabric = al.Fabric(accelerator="cpu", devices=RANKS, strategy=DDPStrategy(start_method="fork"))
    found = fabric.launch(here)
    bare, ours = found[0]["losses"]["bare"], found[0]["losses"]["ours"]
    if abs(bare - ours) > 1e-6:
        raise RuntimeError(f"the two sides do not compute the same: losses {bare} and {ours}")

    def summed(clock: str, side: str) -> list[float]:
        return [sum(one[clock][side][step] for one in found) for step in range(steps)]

    return {
        "wall": paired(summed("seconds", "ours"), summed("seconds", "bare")),
        "cpu": paired(summed("cpu", "ours"), summed("cpu", "bare")),
    }
