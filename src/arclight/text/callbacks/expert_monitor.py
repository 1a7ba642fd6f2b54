"""Measure how layers choose their experts, and how alike experts and their routers' rows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from arclight.fabric.distributed.dtensor import is_sharded
from arclight.fabric.errors import MisconfigurationError
from arclight.text.model.balance import balance_group
from arclight.text.model.moe import MoE
from arclight.trainer.callbacks.monitoring.step_monitor import StepMonitor
from arclight.trainer.run.svg import standalone, text

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

CAPTION = "Share of the choices that each expert got, by layer, in the newest step that was measured."


class ExpertMonitor(StepMonitor):
    """Log ``experts/<layer>/max_share``, ``min_share``, ``router_similarity`` and ``expert_similarity`` of every n-th optimizer step.

    Shares are of all choices of a layer in the step, over all ranks; their histograms by layer are ``plots/experts.svg``, which the report
    shows. Similarities are mean absolute cosines over pairs of experts: of their rows in the router's weight, and of all their maps.
    Training keeps its bits. Raises MisconfigurationError before the first step for a model without layers of experts, and where weights are
    sharded or cut into stages.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps)
        self._values: dict[str, float] = {}
        self.shares: dict[str, list[float]] = {}
        """Shares of each layer's experts, in the newest step that was measured."""

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.strategy.in_stages or is_sharded(pl_module):
            raise MisconfigurationError(
                "experts are compared where each process has all of them, and here weights are sharded or cut into stages: leave it out"
            )
        if not layers_of_experts(pl_module):
            raise MisconfigurationError("the model has no layers of experts to measure: leave the monitor out")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None:
        if not self.is_due(trainer.global_step + 1):
            return
        group = balance_group(trainer.strategy)
        for name, layer in layers_of_experts(pl_module).items():
            counts_E = layer.router.counts.clone()  # which the module clears after this
            if group is not None:
                dist.all_reduce(counts_E, group=group)
            shares = (counts_E.double() / counts_E.sum().clamp(min=1)).tolist()
            self.shares[name] = shares
            stacks = [weight.detach().flatten(1) for weight in layer.experts.parameters()]
            self._values |= {
                f"experts/{name}/max_share": max(shares),
                f"experts/{name}/min_share": min(shares),
                f"experts/{name}/router_similarity": similarity(layer.router.weight.detach()),
                f"experts/{name}/expert_similarity": similarity(torch.cat(stacks, 1)),
            }

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._values:
            return
        self.publish(trainer, pl_module, self._values)
        self._values = {}
        if not trainer.fast_dev_run:
            run = trainer.run_folder  # on all ranks: its first access is a collective
            if trainer.is_global_zero:
                (run.plots / "experts.svg").write_text(histograms(self.shares, trainer.global_step), encoding="utf-8")
                run.caption_plot("experts.svg", CAPTION)


def layers_of_experts(module: torch.nn.Module) -> dict[str, MoE]:
    """Return the layers of experts by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MoE)}


def similarity(rows: Tensor) -> float:
    """Return the mean absolute cosine over pairs of ``rows`` (E, P); NaN for one row."""
    unit = torch.nn.functional.normalize(rows.float(), dim=1)
    cosines = (unit @ unit.T).abs().double()
    pairs = len(rows) * (len(rows) - 1)
    return float((cosines.sum() - cosines.diagonal().sum()) / pairs) if pairs else float("nan")


def histograms(shares: Mapping[str, Sequence[float]], step: int) -> str:
    """Draw a row of bars for each layer, an expert each, on one scale."""
    height, left, width = 36.0, 200.0, 520.0
    top = max(max(row) for row in shares.values()) or 1.0
    marks = []
    for number, (name, row) in enumerate(shares.items()):
        base = 76 + height * (number + 1)
        marks.append(text(22, base - 8, name[-26:], "muted"))
        for expert, share in enumerate(row):
            tall, wide = share / top * (height - 6), width / len(row)
            marks.append(
                f'<rect class="bar c0" x="{left + expert * wide:.1f}" y="{base - tall:.1f}" width="{wide * 0.8:.1f}" '
                f'height="{tall:.1f}"><title>expert {expert}: {share:.4f}</title></rect>'
            )
    subtitle = f"step {step:,}; the tallest bar is {top:.3f}"
    return standalone(left + width + 22, 96 + height * len(shares), "Chosen experts by layer", subtitle, marks)
