"""Predict a pipeline step of a model: find costs, cut into stages, simulate the schedule.

`simulate` is public as ``pipeline.simulate``. It joins ``cost``, ``splitting`` and ``schedule`` and starts no process. A model, a `Pipe` or an
`EvaluatedPlan` comes in; a `Prediction` goes out, which ``pipeline.timeline`` draws. Argument names are public and stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from arclight.parallel.hardware import Hardware
from arclight.parallel.pipeline.call_graph import arguments_of, samples_of
from arclight.parallel.pipeline.cost.candidates import EvaluatedPlan, PlanCandidate, PlanEvaluator
from arclight.parallel.pipeline.cost.measure import measure, measure_stages, predict
from arclight.parallel.pipeline.cost.timed_pass import storage_key
from arclight.parallel.pipeline.pipe import Pipe
from arclight.parallel.pipeline.runtime.split_backward import backward_of_inputs
from arclight.parallel.pipeline.schedule.simulation import AT_ONCE, Prediction
from arclight.parallel.pipeline.schedule.simulation import simulate as simulate_order
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.splitting.stage_info import stage_info_of
from arclight.parallel.pipeline.unit_costs import Link, UnitCost
from arclight.parallel.plan import Plan, PlanError


def simulate(
    what: nn.Module | Pipe | EvaluatedPlan, example: Any = None, schedule: str | Plan = "1F1B", micro_batches: int = 8,
    processes: int | None = None, *, measured: bool | None = None, device: Hardware | str | None = None,
    link: Link | None = None, reduction: float = 0.0, optimizer: float = 0.0,
) -> Prediction:  # fmt: skip
    """Simulate a pipeline step: times of each process, and memory it holds.

    No process is started.

        step = pipeline.simulate(model, {"input_ids": tokens}, "ZBVZeroBubble", micro_batches=16, processes=4)
        step.seconds; print(step); pipeline.timeline(step)

    Args:
        what: a model, which is cut where the step is predicted to be shortest; a `Pipe`, which is cut already; or an `EvaluatedPlan`
            of `choose`, whose prediction is returned.
        example: arguments of the model for one micro-batch, as for `split`.
        schedule: a name or a file (see `schedule.table.order_of`), or a plan, which also gives micro_batches and processes.
        micro_batches: how many a step has.
        processes: of the pipeline; for a `Pipe` the default is the number of its stages, divided by those that a process has.
        measured: True to time the parts on their device (a `Pipe` always is), False to compute times from the operations (a model on
            the meta device always needs that). None: time them if possible.
        device: hardware for which times are computed: see `cost.measure.predict`.
        link: between neighbours; None: sending costs nothing. See `cost.measure.measure_link`.
        reduction: seconds for which processes exchange gradients after their last action.
        optimizer: seconds of the optimizer's step.

    Raises PlanError for a model that cannot be cut or traced, and for a schedule that cannot run it.
    """
    if isinstance(what, EvaluatedPlan):
        return what.prediction
    if example is None:
        raise PlanError("say what the model is called with for one micro-batch (example), so that its parts have sizes")
    if isinstance(schedule, Plan):
        processes = schedule.pp if processes is None else processes
        micro_batches, schedule = schedule.pieces, schedule.schedule
    kind = schedule_kind(schedule)
    if isinstance(what, Pipe):
        if processes is None:
            processes = max(1, len(what.stages) // kind.stages_per_process)
        parts, freed = _timed_stages(what, example, repetitions=5)
    else:
        if processes is None:
            raise PlanError("say over how many processes the model is cut (processes = 4)")
        parts = _parts(what, example, PlanCandidate(processes, schedule, micro_batches), measured, device, link)
        freed = [0.0] * len(parts)
    return simulate_order(
        schedule, parts, processes, micro_batches, link=link or AT_ONCE, freed_by_inputs=freed,
        reduction=reduction, optimizer=optimizer,
    )  # fmt: skip


def _parts(
    model: nn.Module, example: Any, setting: PlanCandidate, measured: bool | None, device: Hardware | str | None, link: Link | None
) -> list[UnitCost]:  # fmt: skip
    """Return the costs of the stages, cut where the step is shortest."""
    args, kwargs = arguments_of(example)
    graph = capture_call_graph(model, None, args, kwargs)
    if measured is None:
        measured = device is None and not any(x.is_meta for x in (*model.parameters(), *_tensors(example)))
    given = (args, kwargs)
    costs = measure(model, graph, given) if measured else predict(model, graph, given, device=device)
    evaluator = PlanEvaluator(costs, samples_of(example) * setting.micro_batches, link=link)
    refusal = evaluator.refusal(setting)
    if refusal is not None:
        raise PlanError(f"{setting.schedule} {refusal}")
    return evaluator.cut(setting).parts


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _timed_stages(pipe: Pipe, example: Any, repetitions: int) -> tuple[list[UnitCost], list[float]]:
    """Return the costs of stages, and the share of held memory that action I frees.

    It is negative if the action adds memory (see `simulation.simulate`).
    """
    kept: list[int] = []

    def seen(outputs: list[Tensor], inputs: list[Tensor], weights: list[nn.Parameter]) -> None:
        kept.append(_kept(outputs, inputs, weights))

    received = [len(stage_info_of(stage).receives) for stage in pipe.stages]
    costs = measure_stages(pipe.stages, received, example, repetitions=repetitions, seen=seen)
    return costs, [-size / max(1, cost.saved_activation_bytes) for size, cost in zip(kept, costs, strict=True)]


def _kept(outputs: list[Tensor], inputs: list[Tensor], weights: list[nn.Parameter]) -> int:
    """Count the bytes of gradients that a split backward keeps for its second half."""
    if not outputs or not inputs:
        return 0
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    _, rest = backward_of_inputs(outputs, [torch.ones_like(x) for x in outputs], inputs, weights)
    for weight, gradient in zip(weights, before, strict=True):
        weight.grad = gradient
    known = {storage_key(x) for x in (*outputs, *inputs, *weights)}
    new = {key: x for x in rest.kept if (key := storage_key(x)) not in known}
    return sum(x.untyped_storage().nbytes() for x in new.values())
