"""Monitor the choices of experts, and the similarity of experts and of their routers' rows.

`settings.Experts` builds it for ``monitors`` of a recipe, or users pass it to a Trainer. Names of what it logs, and of the plot
``experts.svg``, stay; training keeps its bits.
"""

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
from arclight.text.model.switch_head import HeadMaps
from arclight.trainer.callbacks.monitoring.step_monitor import StepMonitor
from arclight.trainer.run.svg import standalone, text

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

CAPTION = "Share of the choices that each expert got, by layer (in attention: of its head's), in the newest step that was measured."


class ExpertMonitor(StepMonitor):
    """Callback that logs load shares and similarities of experts every n-th optimizer step.

    They are ``experts/<layer>/max_share``, ``min_share``, ``router_similarity`` and ``expert_similarity``. Layers are
    those of feed-forward parts, and attention's maps to values and to outputs. Shares are of all choices of a layer in
    the step, over all ranks, and of a head's in attention; their histograms by layer are ``plots/experts.svg``, which
    the report shows. Similarities are mean absolute cosines over pairs of experts, of one head in attention: of their
    rows in the router's weight, and of all their maps. Training keeps its bits. Raises MisconfigurationError before the
    first step for a model without layers of experts, and if weights are sharded or cut into stages.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps)
        self._values: dict[str, float] = {}
        self.shares: dict[str, list[list[float]]] = {}
        """Shares of each layer's experts, head by head (one in feed-forward parts), in the newest step that was measured."""

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
            router, experts = layer.router, layer.experts
            counts = router.counts.clone()  # which the module clears after this
            if group is not None:
                dist.all_reduce(counts, group=group)
            counts_HE = counts.double().view(router.heads, -1)
            shares_HE = counts_HE / counts_HE.sum(1, keepdim=True).clamp(min=1)
            self.shares[name] = shares_HE.tolist()
            stacks = [experts] if isinstance(experts, Tensor) else list(experts.parameters())
            maps = torch.cat([weight.detach().flatten(1) for weight in stacks], 1)
            self._values |= {
                f"experts/{name}/max_share": float(shares_HE.max()),
                f"experts/{name}/min_share": float(shares_HE.min()),
                f"experts/{name}/router_similarity": _similarity_within_heads(router.weight.detach(), router.heads),
                f"experts/{name}/expert_similarity": _similarity_within_heads(maps, router.heads),
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


def layers_of_experts(module: torch.nn.Module) -> dict[str, MoE | HeadMaps]:
    """Return the layers of experts by name: feed-forward parts, and attention's two maps.

    Those are the maps to values and to outputs.
    """
    return {name: part for name, part in module.named_modules() if isinstance(part, MoE | HeadMaps)}


def _similarity_within_heads(rows: Tensor, heads: int) -> float:
    """Return the mean `similarity` of rows within ``heads``, equal parts of ``rows``."""
    return sum(similarity(part) for part in rows.chunk(heads)) / heads


def similarity(rows: Tensor) -> float:
    """Return the mean absolute cosine over pairs of ``rows`` (E, P); NaN for one row."""
    unit = torch.nn.functional.normalize(rows.float(), dim=1)
    cosines = (unit @ unit.T).abs().double()
    pairs = len(rows) * (len(rows) - 1)
    return float((cosines.sum() - cosines.diagonal().sum()) / pairs) if pairs else float("nan")


def histograms(shares: Mapping[str, Sequence[Sequence[float]]], step: int) -> str:
    """Draw a row of bars per layer, a bar per expert, on one scale.

    Heads, if there are several, stand side by side.
    """
    height, left, width = 36.0, 200.0, 520.0
    top = max(max(head) for row in shares.values() for head in row) or 1.0
    marks = []
    for number, (name, row) in enumerate(shares.items()):
        base = 76 + height * (number + 1)
        marks.append(text(22, base - 8, name[-26:], "muted"))
        wide = width / (sum(map(len, row)) + len(row) - 1)  # a bar's width is left free between heads
        for head, of_head in enumerate(row):
            label = f"head {head}, " if len(row) > 1 else ""
            for expert, share in enumerate(of_head):
                tall, place = share / top * (height - 6), left + (head * (len(of_head) + 1) + expert) * wide
                marks.append(
                    f'<rect class="bar c0" x="{place:.1f}" y="{base - tall:.1f}" width="{wide * 0.8:.1f}" '
                    f'height="{tall:.1f}"><title>{label}expert {expert}: {share:.4f}</title></rect>'
                )
    subtitle = f"step {step:,}; the tallest bar is {top:.3f}"
    return standalone(left + width + 22, 96 + height * len(shares), "Chosen experts by layer", subtitle, marks)
