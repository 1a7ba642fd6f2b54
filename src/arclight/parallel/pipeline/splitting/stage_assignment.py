"""Assign calls, parameters and crossing values of a model to stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arclight.parallel.pipeline.call_graph import CallGraph, Value
from arclight.parallel.pipeline.splitting.placeholder_tensor import DataDependentError
from arclight.parallel.plan import PlanError

MultiUse = Literal["replicate", "transmit"] | Mapping[str, Literal["replicate", "transmit"]]
"""What is done with a parameter that several stages use: each has it, and gradients are summed (who runs the stages does that); or the
first of them has it, and sends its value with each micro-batch, so that gradients come back the same way."""
SENT = -1
"""The "call" of values that are parameters."""


@dataclass(frozen=True)
class StageAssignment:
    """Hold the cuts of a call graph, what crosses them, and the parameters of each stage."""

    graph: CallGraph
    begins: tuple[int, ...]
    """First call of each stage."""
    sent: tuple[str, ...] = ()
    """Parameters (first names) whose values are sent; parameter i is `Value(-1, i)`."""

    @classmethod
    def of(cls, graph: CallGraph, begins: Sequence[int], multi_use: MultiUse = "replicate") -> StageAssignment:
        """Raises PlanError for stages that are empty, or would change or draw apart what the model does once."""
        _refuse_apart(graph, begins)
        users = {name: stages for name, stages in graph.users(begins).items() if len(stages) > 1}
        sent = tuple(name for name in users if _settings(multi_use, graph, users)[name] == "transmit")
        return cls(graph, tuple(begins), sent)

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """For each parameter the stages that use it."""
        return self.graph.users(self.begins)

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """For each parameter that several stages have (it is not sent) these stages."""
        return {name: stages for name, stages in self.users.items() if len(stages) > 1 and name not in self.sent}

    def range(self, stage: int) -> tuple[int, int]:
        """Return the first call of ``stage``, and the one after its last."""
        return self.graph.ranges(self.begins)[stage]

    def crossing(self, stage: int) -> tuple[Value, ...]:
        """List what ``stage`` receives: parameters that are sent, then values of calls, in order."""
        if stage in (0, len(self.begins)):
            return ()
        users = self.users
        sent = [Value(SENT, i) for i, n in enumerate(self.sent) if users[n][0] < stage <= users[n][-1]]
        return (*sent, *self.graph.live(self.begins[stage]))

    def parameters(self, stage: int) -> set[str]:
        """Return the first names of the parameters that ``stage`` has."""
        users = self.users
        return {n for n, stages in users.items() if stage in stages and (n not in self.sent or stage == stages[0])}

    def received_parameters(self, stage: int) -> dict[str, Value]:
        """Return the parameters that ``stage`` uses as they are sent to it."""
        users = self.users
        return {n: Value(SENT, i) for i, n in enumerate(self.sent) if stage in users[n] and stage != users[n][0]}


def _settings(multi_use: MultiUse, graph: CallGraph, users: Mapping[str, Any]) -> dict[str, str]:
    """For each parameter that several stages use, what is done. Raises PlanError, naming it, for what cannot be."""
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


def _refuse_apart(graph: CallGraph, begins: Sequence[int]) -> None:
    """Raise DataDependentError for random numbers that two stages need, and for values that are changed before a cut and read after it."""
    ends = graph.ranges(begins)
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
            late = next((at for at in begins if at > index and value in graph.live(at)), None)
            if late is not None:
                raise DataDependentError(
                    f"{call.name} changes in place what {graph.calls[value.call].name} returned, and a later stage needs it: use the "
                    f"module without inplace, or do not cut before {graph.calls[late].name}"
                )
