"""Define the strategy that pipelines any module: ``Trainer(strategy="pipeline")``.

Users name it, or pass a `Pipeline`; `trainer.fabric.strategies` registers the name. To `PlanStrategy` it adds the number of stages, the
schedule and the micro-batches that "auto" chooses (`auto_schedule`), and it cuts a module's own steps whenever the plan allows it.
Argument names are public and stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.parallel.pipeline.runtime.loss_reduction import REDUCTIONS, ReductionKind
from arclight.parallel.pipeline.steps.auto_schedule import PipelineRequest, check_memory
from arclight.parallel.pipeline.steps.parallelize_steps import only_stages
from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.strategy import PlanStrategy

Auto = Literal["auto"]


class Pipeline(PlanStrategy):
    """Strategy that runs the steps of an ordinary module in stages, on several processes.

    There are as many processes as there are stages times replicas. ``training_step`` is cut where the pipeline is
    predicted to be fastest, for the first batch (or for ``example``), and each batch goes through the stages in
    micro-batches; so do those of validation, test and prediction, whole. Every process sees the loss, the logged values
    and the outputs of whole batches, hooks are called once for a step, and checkpoints hold the whole module under its
    own names, whatever the number of stages. With one stage the same code runs in one process.

    * The loss is the mean over the samples of a batch, or over what the module's ``batch_weight`` counts ("token_mean"), the plain
      mean of the micro-batches' losses ("micro_mean"), or their sum ("sum"). What is logged is merged in the same way.
    * What mixes samples (batch normalization, contrastive losses) sees micro-batches, and code of a step outside of the parts of the
      model may run on several processes: what it gathers in attributes of the module is that of the last stage.
    * A batch's tensors have samples in dimension 0; else the module has ``part_of_batch(batch, start, stop)``.
    """

    name = "pipeline"

    def __init__(
        self, stages: int | Auto = "auto", *, schedule: str = "auto", micro_batches: int | Auto = "auto", memory: str | float | None = None,
        replicas: int = 1, shards: int = 1, reduction: ReductionKind = "token_mean", evaluation_micro_batches: int = 1, example: Any = None,
        plan: Plan | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Initialise the strategy. Raises PlanError for what cannot be run.

        stages: processes that a batch passes; "auto": the devices there are.
        schedule, micro_batches: "auto" is what is predicted to be fastest for the first batch
        (`arclight.parallel.pipeline.steps.auto_schedule`).
        memory: what a process may use, as "22GiB".
        replicas, shards: such pipelines beside each other, which read other samples and hold the same weights, or share
        them out (FSDP).
        evaluation_micro_batches: parts of a batch that does not train.
        example: a batch, if the data give none before they are read.
        plan: whatever else a `Plan` says.
        options: those of `PlanStrategy`.
        """
        if reduction not in REDUCTIONS:
            raise PlanError(f"reduction = {reduction!r} is not known; choose one of {', '.join(REDUCTIONS)}")
        if evaluation_micro_batches < 1:
            raise PlanError(f"evaluation_micro_batches must be 1 or more, got {evaluation_micro_batches!r}")
        check_memory(memory)
        self._stages = stages
        fields: dict[str, Any] = {
            "pp": 1 if stages == "auto" else stages,
            "schedule": "1F1B" if schedule == "auto" else schedule,
            "micro_batches": 0 if micro_batches == "auto" else micro_batches,
            "dp_replicate": replicas,
            "dp_shard": shards,
        }
        super().__init__(_joined(plan, fields), **options)
        self.request = PipelineRequest(
            memory, evaluation_micro_batches, reduction, schedule == "auto", micro_batches == "auto", example
        )

    @property
    def in_stages(self) -> bool:
        return True

    def _cuts_steps(self, module: nn.Module) -> bool:
        """Return True wherever steps can be cut, as `PipelineRequest` is about parts of a step."""
        if only_stages(self.plan) or super()._cuts_steps(module):
            return True
        self._refuse_unsupported(module)
        return False

    def _refuse_unsupported(self, module: nn.Module) -> None:
        """Raise PlanError for settings of cut steps if the model is pruned; warn of "auto"."""
        plan, request, usual = self.plan, self.request, PipelineRequest()
        sharded_by = next(f"{name} = {value}" for name in ("cp", "tp", "ep") if (value := getattr(plan, name)) > 1)
        for name in ("memory", "evaluation_micro_batches", "reduction", "example"):
            if getattr(request, name) is not getattr(usual, name) and getattr(request, name) != getattr(usual, name):
                raise PlanError(
                    f"Pipeline({name}=...) needs stages that are cut by what their parts cost, and {sharded_by} spreads "
                    f"{type(module).__name__} over more than stages: leave {name} out, or use stages, replicas and shards alone"
                )
        left = [name for name in ("schedule", "micro_batches") if getattr(request, f"choose_{name}")]
        if left:
            rank_zero_warn(
                f'{" and ".join(left)} = "auto" cannot be predicted with {sharded_by}: {plan.schedule} and {plan.pieces} micro-batches '
                "are used; name what shall be"
            )

    def attach(
        self, accelerator: Accelerator, parallel_devices: list[torch.device], num_nodes: int, environment: ClusterEnvironment
    ) -> None:  # fmt: skip
        if self._stages == "auto":
            there = max(len(parallel_devices) * num_nodes, environment.world_size())
            stages, rest = divmod(there, self.plan.data_parallel)
            if rest or not stages:
                raise PlanError(
                    f"{there} devices cannot be shared by {self.plan.data_parallel} pipelines: set stages, or other replicas and shards"
                )
            self.plan = _joined(self.plan, {"pp": stages})
            self._stages = stages
        super().attach(accelerator, parallel_devices, num_nodes, environment)


def _joined(plan: Plan | None, fields: dict[str, Any]) -> Plan:
    if plan is None:
        return Plan(**fields)
    default = Plan()
    own = {name: value for name, value in fields.items() if value != getattr(default, name)}
    return replace(plan, **own)
