"""Assign the calls of a call graph and their parameters to stages; list crossing values.

`pipe.split` and `PipelinedSteps` make one `StageAssignment` on every process, from the same arguments; `sliced_module` and `traced_stage` build
stages from it. It must depend on nothing but its arguments, and the order of `values_into` is the order of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arclight.parallel.pipeline.call_graph import CallGraph, Value
from arclight.parallel.pipeline.splitting.placeholder_tensor import DataDependentError
from arclight.parallel.plan import PlanError

MultiUse = Literal["replicate", "transmit"] | Mapping[str, Literal["replicate", "transmit"]]
"""How stages share a parameter that several of them use. "replicate": each has a copy, and the runner sums their gradients;
"transmit": the first of them has it and sends its value with each micro-batch, and gradients return the same way."""
PARAMETER_CALL = -1
"""`Value.call` of a value that is a parameter, not the result of a call."""


@dataclass(frozen=True)
class StageAssignment:
    """A call graph that is cut into stages."""

    graph: CallGraph
    first_calls: tuple[int, ...]
    """First call of each stage."""
    transmitted: tuple[str, ...] = ()
    """Parameters that are transmitted, by first name; parameter i is ``Value(PARAMETER_CALL, i)``."""

    @classmethod
    def cut(cls, graph: CallGraph, first_calls: Sequence[int], multi_use: MultiUse = "replicate") -> StageAssignment:
        """Cut ``graph`` before each call of ``first_calls``.

        Raises PlanError for empty stages and for ``multi_use`` of unknown parameters, DataDependentError if two stages would both draw
        the same random number, or change the same buffer or value.
        """
        _check_side_effects(graph, first_calls)
        users = {name: stages for name, stages in graph.users(first_calls).items() if len(stages) > 1}
        transmitted = tuple(name for name in users if _settings(multi_use, graph, users)[name] == "transmit")
        return cls(graph, tuple(first_calls), transmitted)

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Map each parameter to the stages that use it."""
        return self.graph.users(self.first_calls)

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Map each parameter with copies in several stages to these stages."""
        return {name: stages for name, stages in self.users.items() if len(stages) > 1 and name not in self.transmitted}

    def range(self, stage: int) -> tuple[int, int]:
        """Return the first call of ``stage``, and the one after its last."""
        return self.graph.ranges(self.first_calls)[stage]

    def values_into(self, stage: int) -> tuple[Value, ...]:
        """List the values that ``stage`` receives from the stage before.

        Transmitted parameters come first, then results of calls.
        """
        if stage in (0, len(self.first_calls)):
            return ()
        users = self.users
        parameters = [
            Value(PARAMETER_CALL, i) for i, n in enumerate(self.transmitted) if users[n][0] < stage <= users[n][-1]
        ]
        return (*parameters, *self.graph.live(self.first_calls[stage]))

    def parameters(self, stage: int) -> set[str]:
        """Return the first names of the parameters that ``stage`` has."""
        users = self.users
        return {
            n for n, stages in users.items() if stage in stages and (n not in self.transmitted or stage == stages[0])
        }

    def received_parameters(self, stage: int) -> dict[str, Value]:
        """Map the parameters that ``stage`` receives to the values that carry them."""
        users = self.users
        return {
            n: Value(PARAMETER_CALL, i)
            for i, n in enumerate(self.transmitted)
            if stage in users[n] and stage != users[n][0]
        }


def _settings(multi_use: MultiUse, graph: CallGraph, users: Mapping[str, Any]) -> dict[str, str]:
    """Map each parameter that several stages use to "replicate" or "transmit".

    Raises PlanError, naming it, for anything else.
    """
    if isinstance(multi_use, str) and multi_use not in ("replicate", "transmit"):
        raise PlanError(
            f"multi_use is {multi_use!r}: say 'replicate' (each stage has a parameter) or 'transmit' (it is sent)"
        )
    if isinstance(multi_use, str):
        settings = dict.fromkeys(users, str(multi_use))
    elif isinstance(multi_use, Mapping):
        given = {graph.aliases.get(name, name): str(how) for name, how in multi_use.items()}
        unknown = [name for name in given if name not in users]
        if unknown:
            raise PlanError(
                f"multi_use names {unknown[0]}, which is used by one stage or none; by several are: {', '.join(users) or 'none'}"
            )
        settings = {name: given.get(name, "replicate") for name in users}
    else:
        raise PlanError(f"multi_use is {multi_use!r}: say 'replicate', 'transmit', or which for each parameter's name")
    for name, how in settings.items():
        if how not in ("replicate", "transmit"):
            raise PlanError(
                f"multi_use of {name} is {how!r}: say 'replicate' (each stage has it) or 'transmit' (it is sent)"
            )
    return settings


def _check_side_effects(graph: CallGraph, first_calls: Sequence[int]) -> None:
    """Raise DataDependentError for side effects that cross stages.

    Two stages may not need the same random numbers or change one buffer, and no value may be changed before a cut and
    used after it.
    """
    ends = graph.ranges(first_calls)
    stage_of = {call: stage for stage, (begin, end) in enumerate(ends) for call in range(begin, end)}
    drawn: dict[int, int] = {}
    users = [(i, call.draws, call.name) for i, call in enumerate(graph.calls)]
    for place, numbers, name in [*users, (len(graph.calls) - 1, graph.result_draws, "the result")]:
        for number in numbers:
            if drawn.setdefault(number, stage_of[place]) != stage_of[place]:
                raise DataDependentError(
                    f"random numbers that are drawn between the parts of the model are needed by stage {drawn[number]} and by stage "
                    f"{stage_of[place]} ({name}), which would draw different ones: draw them in a module (nn.Dropout), or cut elsewhere"
                )
    written: dict[str, int] = {}
    for index, call in enumerate(graph.calls):
        for name in call.buffers:
            if written.setdefault(name, stage_of[index]) != stage_of[index]:
                raise DataDependentError(
                    f"{name} is changed by stages {written[name]} and {stage_of[index]} ({call.name}), which would have different ones: do "
                    "not cut between calls of one module that gathers statistics"
                )
        for value in call.modifies:
            late = next((at for at in first_calls if at > index and value in graph.live(at)), None)
            if late is not None:
                raise DataDependentError(
                    f"{call.name} changes in place what {graph.calls[value.call].name} returned, and a later stage needs it: use the "
                    f"module without inplace, or do not cut before {graph.calls[late].name}"
                )
