"""Describe one forward as a graph of module calls, with the values and weights they use.

`splitting.capture` makes a `CallGraph` of a model's modules, `traced.graph_calls` one of a traced graph; ``cost`` measures its calls, and
`StageAssignment` cuts it into stages. All ranks must have the same graph: stages and messages are known by the numbers of its calls.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from arclight.parallel.plan import PlanError


@dataclass(frozen=True, order=True)
class Value:
    """Tensor that a call returned: a leaf of its output, in `torch.utils._pytree`'s order."""

    call: int
    leaf: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward.

    Glue between calls (masks, positions, reshaping) belongs to none.
    """

    name: str
    """Name of the module in the model. A module that is called more than once has several calls."""
    parameters: tuple[str, ...] = ()
    """First names of the parameters that the module, or the code since the call before, uses."""
    reads: frozenset[Value] = frozenset()
    """Values of earlier calls that it depends on directly, or through code between calls."""
    outputs: tuple[int, ...] = ()
    """Bytes of each leaf that it returned for the example (0 for what is no tensor)."""
    draws: frozenset[int] = frozenset()
    """Numbers of the random draws between calls that it depends on."""
    modifies: frozenset[Value] = frozenset()
    """Values of earlier calls that it changes in place."""
    buffers: tuple[str, ...] = ()
    """Buffers, by first names, that it changes in training."""


@dataclass(frozen=True)
class CallGraph:
    """Calls of a model's forward, in order.

    A stage is a range of them; it receives what it reads of earlier ones.
    """

    calls: tuple[Call, ...]
    result: frozenset[Value]
    """What the result of the forward depends on."""
    result_parameters: tuple[str, ...] = ()
    """Parameters that are used after the last call."""
    aliases: dict[str, str] = field(default_factory=dict)
    """First name of a parameter by each further name (tied weights)."""
    result_draws: frozenset[int] = frozenset()
    """Numbers of the random draws between calls that the result depends on."""
    rewritten: frozenset[Value] = frozenset()
    """Values of calls that code between calls changes in place before later calls read them."""
    writes_arguments: bool = False
    """Whether glue changes arguments of the model in place."""
    buffers: frozenset[str] = frozenset()
    """Buffers outside of the called modules (by first names) that code between calls changes in place."""
    repeated: frozenset[str] = frozenset()
    """Those of ``buffers`` that are changed before the last call: a process would change them once for each of its stages."""

    @property
    def used(self) -> set[str]:
        """First names of the parameters that calls or the result use."""
        return {name for call in self.calls for name in call.parameters}.union(self.result_parameters)

    def keeping(self, names: Iterable[str]) -> CallGraph:
        """Return the graph with unused ``names`` held by the last stage, for other steps and saving.

        Saving is that of checkpoints.
        """
        used = self.used
        return replace(self, result_parameters=(*self.result_parameters, *(name for name in names if name not in used)))

    def live(self, at: int) -> tuple[Value, ...]:
        """List what crosses a cut before call ``at``: values that later calls or the result read.

        A value that is used later than in the next stage is carried through the stages between.
        """
        wanted = self.result.union(*(call.reads for call in self.calls[at:]))
        return tuple(sorted(value for value in wanted if value.call < at))

    def crossing(self, at: int) -> int:
        """Return the bytes that cross a cut before call ``at``, for the example."""
        return sum(self.calls[value.call].outputs[value.leaf] for value in self.live(at))

    def users(self, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Map each parameter to the stages that use it; stage n begins with call ``cuts[n]``."""
        found: dict[str, set[int]] = {}
        for number, (begin, end) in enumerate(self.ranges(cuts)):
            for call in self.calls[begin:end]:
                for name in call.parameters:
                    found.setdefault(name, set()).add(number)
        for name in self.result_parameters:
            found.setdefault(name, set()).add(len(cuts) - 1)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def ranges(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first call of each stage, and the one after its last.

        Raises PlanError for cuts that leave a stage empty.
        """
        ends = [*cuts[1:], len(self.calls)]
        if not cuts or cuts[0] != 0 or any(begin >= end for begin, end in zip(cuts, ends, strict=True)):
            raise PlanError(
                f"stages begin with calls {list(cuts)} of {len(self.calls)}: begin with 0, and leave none empty"
            )
        return list(zip(cuts, ends, strict=True))


def bind_function(
    function: str | Callable[..., Any] | None, root: nn.Module
) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return a function that gives ``function`` bound to a copy of ``root``.

    function: None for the call of ``root``, a method's name, a method bound to ``root``, or any callable that takes the root first.
    """
    if function is None:
        return lambda copy: copy
    if isinstance(function, str):
        name = function
        return lambda copy: getattr(copy, name)
    if isinstance(function, types.MethodType) and function.__self__ is root:
        plain = function.__func__
        return lambda copy: types.MethodType(plain, copy)
    free = function
    return lambda copy: lambda *args, **kwargs: free(copy, *args, **kwargs)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(example: Any) -> Arguments:
    """Return ``example`` as ``(args, kwargs)``.

    It may be that already, a tuple of arguments, or a dict of keyword arguments. Raises PlanError for anything else.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], dict):
            return example[0], example[1]
        return example, {}
    raise PlanError(
        f"example_inputs is a {type(example).__name__}: give a tuple of arguments, a dict of keyword arguments, or (args, kwargs)"
    )


Function = str | Callable[..., Any] | None
"""Function of a model that is measured: see `bind_function`."""


def samples_of(example: Any) -> int:
    """Count the samples of an example: the first dimension of its first tensor."""
    return next((x.shape[0] for x in tree_leaves(example) if isinstance(x, Tensor) and x.ndim), 1)
