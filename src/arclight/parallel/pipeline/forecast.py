"""Steps of models, simulated: what their parts cost is found out, the cut is made, and the schedule goes through it."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from arclight.parallel.hardware import Hardware
from arclight.parallel.pipeline.call_graph import arguments_of, samples_of
from arclight.parallel.pipeline.cost.candidates import EvaluatedPlan, PlanCandidate, PlanEvaluator
from arclight.parallel.pipeline.cost.measure import WARM, measure, predict
from arclight.parallel.pipeline.cost.timed_pass import Clock
from arclight.parallel.pipeline.pipe import Pipe
from arclight.parallel.pipeline.runtime.split_backward import backward_of_inputs
from arclight.parallel.pipeline.schedule.simulation import AT_ONCE, Prediction
from arclight.parallel.pipeline.schedule.simulation import simulate as simulate_order
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.unit_costs import Link, UnitCost
from arclight.parallel.plan import Plan, PlanError

PHASES = ("forward", "inputs", "weights")


def simulate(
    what: nn.Module | Pipe | EvaluatedPlan, example: Any = None, schedule: str | Plan = "1F1B", micro_batches: int = 8,
    processes: int | None = None, *, measured: bool | None = None, device: Hardware | str | None = None,
    link: Link | None = None, reduction: float = 0.0, optimizer: float = 0.0,
) -> Prediction:  # fmt: skip
    """A step of a pipeline as it would run: when which process does what, waits, and holds how much. No process is started.

        step = pipeline.simulate(model, {"input_ids": tokens}, "ZBVZeroBubble", micro_batches=16, processes=4)
        step.seconds; print(step); pipeline.timeline(step)

    Args:
        what: a model, which is cut where the step is predicted to be shortest; a `Pipe`, which is cut already; or a choice of
            `planner.choose`, which has its step.
        example: what the model is called with for one micro-batch: as for `split`.
        schedule: a name or a file (see `orders.order_of`), or a plan, from which micro_batches and processes come too.
        micro_batches: how many go through in a step.
        processes: of the pipeline; a `Pipe` knows them by its stages.
        measured: whether parts are timed on the device they are on (and a `Pipe` always is), or their times worked out from
            operations (which a model on the meta device always needs). None: timed where that can be.
        device: for which times are worked out: see `measuring.predict`.
        link: between neighbours; None: sending costs nothing. See `measuring.measure_link`.
        reduction: seconds for which processes exchange gradients after their last action.
        optimizer: seconds of its step.

    Raises PlanError for what cannot be cut or run so, and for a model that cannot be observed.
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
    """Costs of the stages of the cut whose step is shortest."""
    args, kwargs = arguments_of(example)
    graph = capture_call_graph(model, None, args, kwargs)
    if measured is None:
        measured = device is None and not any(x.is_meta for x in (*model.parameters(), *_tensors(example)))
    given = (args, kwargs)
    costs = measure(model, graph, given) if measured else predict(model, graph, given, device=device)
    forecast = PlanEvaluator(costs, samples_of(example) * setting.micro_batches, link=link)
    refusal = forecast.refusal(setting)
    if refusal is not None:
        raise PlanError(f"{setting.schedule} {refusal}")
    return forecast.cut(setting).parts


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def measure_stages(pipe: Pipe, example: Any, repetitions: int = 5) -> list[UnitCost]:
    """Time each stage of ``pipe`` for ``example`` (one micro-batch): medians of warm passes.

    All stages must be in this process. Buffers and the random state are put back. Raises PlanError for stages on the meta device.
    """
    return _timed_stages(pipe, example, repetitions)[0]


def _timed_stages(pipe: Pipe, example: Any, repetitions: int) -> tuple[list[UnitCost], list[float]]:
    """Costs of stages, and of what each holds the part that I frees (see `simulation.simulate`): less than nothing."""
    holder = nn.ModuleList(pipe.stages)
    device = next((p.device for p in holder.parameters()), torch.device("cpu"))
    if any(p.is_meta for p in holder.parameters()):
        raise PlanError("stages on the meta device cannot be timed: fill them first (load or begin), or give the model")
    before = {name: buffer.clone() for name, buffer in holder.named_buffers()}
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda, device_type=device.type if cuda else None), torch.enable_grad():
        try:
            passes = [_pass(pipe, example, device, saving=False) for _ in range(WARM + repetitions)][WARM:]
            counted = _pass(pipe, example, device, saving=True)
        finally:
            with torch.no_grad():
                for name, buffer in holder.named_buffers():
                    buffer.copy_(before[name])
    costs = []
    for number, (stage, (sizes, _)) in enumerate(zip(pipe.stages, counted, strict=True)):
        timed = [one[number][0] for one in passes]
        forward, inputs, weights = (median(getattr(one, name) for one in timed) for name in PHASES)
        parameters = sum(p.nbytes for p in stage.parameters())
        costs.append(UnitCost(forward, inputs, weights, parameters, sizes.held, sizes.output))
    return costs, [-kept / max(1, sizes.held) for sizes, kept in counted]


def _pass(pipe: Pipe, example: Any, device: torch.device, saving: bool) -> list[tuple[UnitCost, int]]:
    """One micro-batch through all stages, each differentiated when it is over, and the bytes kept between I and W.

    saving: count bytes, not time.
    """
    args, kwargs = arguments_of(example)
    clock, found = Clock(device, time.perf_counter), []
    received: tuple[Tensor, ...] = ()
    known = {_storage(x) for stage in pipe.stages for x in (*stage.parameters(), *stage.buffers())}
    known.update(map(_storage, _tensors(example)))
    for stage in pipe.stages:
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved.setdefault(_storage(tensor), tensor)
            return tensor

        with saved_tensors_hooks(keep if saving else _same, _same):
            clock.begin()
            output = stage(*received, args=args, kwargs=kwargs)
            forward = clock.seconds()
        saved |= {_storage(x): x for x in received}
        roots = [x for x in _tensors(output) if x.requires_grad]
        wanted = [x for x in received if x.requires_grad]
        weights = [p for p in stage.parameters() if p.requires_grad]
        sent = _tensors(output) if stage is not pipe.stages[-1] else []
        times, kept = (0.0, 0.0), 0
        if saving:
            kept = _kept(roots, wanted, weights, known.union(saved))
        else:
            inputs = _backward(clock, roots, wanted)
            times = inputs, max(0.0, _backward(clock, roots, [*wanted, *weights]) - inputs) if weights else 0.0
        held = sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in known)
        found.append((UnitCost(forward, *times, 0, held, sum(x.nbytes for x in sent)), kept))
        received = tuple(x.detach().requires_grad_(x.requires_grad) for x in sent)
    return found


def _kept(roots: list[Tensor], wanted: list[Tensor], weights: list[nn.Parameter], known: set[int]) -> int:
    """Bytes of gradients that a split backward keeps for its second half."""
    if not roots or not wanted:
        return 0
    before = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    _, rest = backward_of_inputs(roots, [torch.ones_like(x) for x in roots], wanted, weights)
    for weight, gradient in zip(weights, before, strict=True):
        weight.grad = gradient
    new = {_storage(x): x for x in rest.kept if _storage(x) not in known}
    return sum(x.untyped_storage().nbytes() for x in new.values())


def _backward(clock: Clock, roots: list[Tensor], wanted: list[Tensor]) -> float:
    if not roots or not wanted:
        return 0.0
    gradients = [torch.ones_like(x) for x in roots]
    clock.begin()
    torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    return clock.seconds()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
