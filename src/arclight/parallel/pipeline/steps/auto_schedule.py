"""Choose schedule, micro-batches and cut of a module's steps from predicted costs.

`parallelize_steps` calls `choose_pipeline` on rank 0 and broadcasts the result; `Pipeline` passes what a user left open as a
`PipelineRequest`. A schedule and a number of micro-batches that the user set are kept (one stage needs no schedule).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from arclight.parallel.pipeline.call_graph import CallGraph
from arclight.parallel.pipeline.cost.measure import closed_places, predict
from arclight.parallel.pipeline.cost.pipeline_search import choose
from arclight.parallel.pipeline.runtime.loss_reduction import ReductionKind
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.pipeline.unit_costs import ModelCosts
from arclight.parallel.plan import Plan, PlanError, bytes_of

Step = Callable[..., Any]
AUTOMATIC = ("1F1B", "ZB-H1", "ZBVZeroBubble", "V-Half")
"""Schedules that "auto" chooses from: those that hold no more than 1F1B, with at most two stages on a process."""
OVERHEAD = 1e-4
"""Seconds that an action takes besides computing: Python, and a message that is sent and received."""


@dataclass(frozen=True)
class PipelineRequest:
    """Settings of pipelined steps beside the plan: memory, evaluation, reduction, choices."""

    memory: str | float | None = None
    evaluation_micro_batches: int = 1
    reduction: ReductionKind = "token_mean"
    choose_schedule: bool = False
    choose_micro_batches: bool = False
    example: Any = None
    """A batch to decide by; None: the first of the data."""


@dataclass(frozen=True)
class PipelineChoice:
    """Chosen schedule, micro-batches and cut."""

    schedule: str
    micro_batches: int
    cuts: tuple[int, ...]
    """The first call of each stage."""


def choose_pipeline(
    module: nn.Module,
    step: Step,
    args: tuple[Any, ...],
    graph: CallGraph,
    samples: int,
    plan: Plan,
    request: PipelineRequest,
) -> PipelineChoice:
    """Choose what the plan and the request leave open, for the shortest step of ``samples``.

    args: of the step, for one micro-batch. Every process that has the same model finds the same. Raises PlanError if nothing keeps
    the memory, there are too few parts, or what they cost cannot be predicted.
    """
    number = plan.pieces
    if plan.pp == 1:
        return PipelineChoice("GPipe", number, (0,))
    schedules = _allowed(plan, request)
    least = plan.pp * min(schedule_kind(name).stages_per_process for name in schedules)
    if len(graph.calls) < least:
        fewer = max(1, len(graph.calls) * plan.pp // least)
        raise PlanError(
            f"{type(module).__name__}.{step.__name__} has {len(graph.calls)} parts that can be stages, and {least} stages are asked for: use "
            f"stages = {fewer} or fewer"
        )
    closed = closed_places(graph)
    if len(graph.calls) - len(closed) < least:
        drawn = graph.result_draws.union(*(call.draws for call in graph.calls))
        raise PlanError(
            f"{type(module).__name__}.{step.__name__} has {len(graph.calls)} parts, and stages can begin with {len(graph.calls) - len(closed)} of "
            "them only: "
            + (
                "random numbers that the step draws are needed by many, and stages would draw different ones. Draw them in a part "
                "(nn.Dropout) or with the data"
                if drawn
                else "parts change in place what others need. Use modules without inplace"
            )
        )
    costs = _costs(module, step, args, graph)
    # A batch of too few samples runs by a simpler order of the same stages: it is chosen for one that has enough.
    best = choose(
        costs, max(samples, number), plan.pp, stages=plan.pp, schedules=schedules, memory=request.memory,
        micro_batches="auto" if request.choose_micro_batches else number,
        recompute=plan.activation_checkpointing == "full", compiled=plan.compile != "none",
        overhead=OVERHEAD,
    ).best[0]  # fmt: skip
    return PipelineChoice(best.setting.schedule, best.setting.micro_batches, best.cuts)


def _allowed(plan: Plan, request: PipelineRequest) -> tuple[str, ...]:
    """Return the names of schedules that go together with the plan.

    Raises PlanError for a schedule that was asked for and does not.
    """
    names = AUTOMATIC if request.choose_schedule else (plan.schedule,)
    if plan.activation_checkpointing != "selective":
        return names
    whole = tuple(name for name in names if not schedule_kind(name).splits_backward)
    if not whole:
        raise PlanError(
            f'{plan.schedule} computes gradients of weights by themselves, which what "selective" recomputes can be used for once only: set '
            'activation_checkpointing = "full", or schedule = "1F1B"'
        )
    return whole


def _costs(module: nn.Module, step: Step, args: tuple[Any, ...], graph: CallGraph) -> ModelCosts:
    """Predict the costs of the whole step, or until its last part if the rest needs data."""
    last = graph.calls[-1].name
    turns = sum(call.name == last for call in graph.calls)
    failure: Exception | None = None
    for ends in (None, (last, turns)):
        try:
            return predict(_alone(module, step, ends), graph, args)
        except (RuntimeError, AttributeError) as error:
            failure = failure or error
    raise PlanError(
        f"what the parts of {type(module).__name__} cost cannot be predicted: {step.__name__} failed with tensors that have no data ({failure})"
    ) from failure


class _StepEnd(BaseException):
    """The last part has returned. No Exception: a step's own code must not catch it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def _alone(module: nn.Module, step: Step, ends: tuple[str, int] | None) -> nn.Module:
    """Make ``module`` callable as ``step``, sharing all members.

    A copy of it knows the same trainer.
    ends: the part after whose so-manyth call the step is over, and gives what that returned.
    """
    kind, function = type(module), step.__func__  # type: ignore[attr-defined]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "_in_step" in self.__dict__:  # the step calls the module itself
            return nn.Module.__call__(self, *args, **kwargs)
        self.__dict__["_in_step"] = True
        left = [ends[1] if ends is not None else 0]

        def over(_: nn.Module, __: Any, output: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise _StepEnd(output)

        handle = self.get_submodule(ends[0]).register_forward_hook(over) if ends is not None else None
        try:
            return function(self, *args, **kwargs)
        except _StepEnd as reached:
            return reached.output
        finally:
            del self.__dict__["_in_step"]
            if handle is not None:
                handle.remove()

    members = {
        "__call__": call,
        "__getstate__": lambda self: dict(self.__dict__),
        "_trainer": module.__dict__.get("_trainer"),
        "_entries": None,
        "log": _discard,
    }
    made: nn.Module = object.__new__(type(kind.__name__, (kind,), members))
    made.__dict__.update({k: v for k, v in module.__dict__.items() if k not in members})
    return made


def _discard(*_: Any, **__: Any) -> None:
    """Discard logged values: a cost estimate is no step of the run."""


def check_memory(memory: str | float | None) -> None:
    """Raise PlanError for an invalid memory size."""
    if isinstance(memory, str):
        bytes_of(memory)
    elif memory is not None and not memory > 0:
        raise PlanError(f"memory = {memory!r} is not a size: give bytes, or a number and a unit, as 22GiB")
