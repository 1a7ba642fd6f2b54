"""Measure the costs of a model's calls: timed on its device, or predicted with fake tensors.

`split`, `forecast`, `auto_schedule` and ``arclight plan`` call `measure` or `predict`. A model, its `CallGraph` and an example come in,
`ModelCosts` go out; model and random states are left as they were.

Both run the same passes. The model runs forward as it is; where a call of its `CallGraph` is over, what came since the
last one (the call, and the code before it) is timed, then differentiated up to the boundary values it reads: by those values alone (I), and
by those and its parameters (I + W). Then its outputs go on as new leaves, so that no more than one call's graph is alive.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from arclight.parallel.hardware import Hardware, hardware
from arclight.parallel.op_recorder import FusedAttentionMode, OpRecorder, size_of
from arclight.parallel.pipeline.call_graph import (
    Call,
    CallGraph,
    Function,
    Value,
    arguments_of,
    bind_function,
    samples_of,
)
from arclight.parallel.pipeline.cost.timed_pass import Clock, OnCall, Pass, PassResult, Roofline
from arclight.parallel.pipeline.unit_costs import Link, ModelCosts, Tie, UnitCost
from arclight.parallel.plan import PlanError

WARM = 2
"""Passes that are not counted: they fill caches and choose kernels."""


def measure(
    model: nn.Module, graph: CallGraph, example: Any, *, function: Function = None, repetitions: int = 5
) -> ModelCosts:  # fmt: skip
    """Measure the costs of the calls of ``graph`` for ``example``, on the model's device.

    ``example``: a tuple of arguments, a dict of keywords, or both. Medians of ``repetitions`` warm passes. function: of
    the model, that the graph was observed of (None: its forward). The model's mode stays; its buffers and the random
    state are put back.

    Raises PlanError if the model is on the meta device, or does not call what the graph says.
    """
    return _costs(
        model, graph, example, *_timed(model, bind_function(function, model)(model), graph, example, repetitions)
    )


def _timed(
    model: nn.Module, run: Callable[..., Any], graph: CallGraph, example: Any, repetitions: int, seen: OnCall | None = None
) -> tuple[PassResult, str]:  # fmt: skip
    """Return medians of warm passes, with held memory, and where they were timed.

    What one more pass holds is passed to ``seen``.
    """
    device, arguments = _device(model), arguments_of(example)
    if device.type == "meta":
        raise PlanError("a model on the meta device cannot be timed: use predict, or bring it into memory")
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {threads}"
    clock = Clock(device, time.perf_counter)
    with _undisturbed(model, device):
        counted = Pass(model, run, graph, Clock(device, lambda: 0.0), saving=True, seen=seen).run(arguments)
        passes = [Pass(model, run, graph, clock).run(arguments).phases for _ in range(WARM + repetitions)][WARM:]
    calls = (zip(*phases, strict=True) for phases in zip(*passes, strict=True))
    medians = [(median(forward), median(inputs), median(weights)) for forward, inputs, weights in calls]
    return replace(counted, phases=medians), f"measured on {kind}"


def predict(
    model: nn.Module, graph: CallGraph, example: Any, *, function: Function = None, device: Hardware | str | None = None
) -> ModelCosts:  # fmt: skip
    """Predict the costs of the calls of ``graph`` for ``example`` from their operations.

    Nothing is computed, and no memory is taken.
    Times are those of a roofline (`arclight.parallel.hardware`): what is computed or moved, whichever takes longer.
    device: its figures, or their name; None: those of a CPU for a model on one, else of an H100. The model may be on the meta device.
    The rest as for :func:`measure`.

    Raises PlanError if the model does not call what the graph says, and if what it does depends on numbers.
    """
    figures = _figures(model, device)
    done = _done(model, bind_function(function, model), graph, example, figures)
    return _costs(model, graph, example, done, f"predicted for {figures.name}")


def _done(
    model: nn.Module, function: Callable[[nn.Module], Callable[..., Any]], graph: CallGraph, example: Any, figures: Hardware
) -> PassResult:  # fmt: skip
    """Return a pass over a copy of the model that has shapes alone."""
    recorder, fake = OpRecorder(figures.seconds), FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(stand_in(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = stand_in(buffer)
    with warnings.catch_warnings():  # what torch's own graphs say when they are copied
        warnings.filterwarnings("ignore", message=".*(data pointer of FakeTensor|LeafSpec)")
        double = copy.deepcopy(model, memo)
    # Numbers of the arguments are real if they are known: glue code may read them.
    arguments = tree_map_only(Tensor, lambda x: stand_in(x) if x.is_meta else x.detach().cpu(), arguments_of(example))
    with ExitStack() as modes:
        modes.enter_context(torch.random.fork_rng([]))  # glue may draw numbers
        if any(x.is_meta for x in tree_leaves(example) if isinstance(x, Tensor)):
            modes.enter_context(fake)
        modes.enter_context(FusedAttentionMode(recorder, figures.kind == "cpu"))
        modes.enter_context(recorder)
        try:
            return Pass(double, function(double), graph, Roofline(recorder), saving=True).run(arguments)
        except (
            RuntimeError
        ) as error:  # of fake tensors: operations that they do not know, numbers that they do not have
            first = str(error).strip().partition("\n")[0]
            raise PlanError(
                f"what the model costs cannot be predicted without its numbers ({first}): measure it on a device"
            ) from error


class _StageSequence(nn.Module):
    def __init__(self, stages: Sequence[Any]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = ()
        for stage in self.stages:
            result = stage(*result, args=args, kwargs=kwargs)
        return result

    def graph(self, received: Sequence[int]) -> CallGraph:
        """Return a graph in which each stage is a call on the results of the one before."""
        calls = []
        for number, stage in enumerate(self.stages):
            own = tuple(f"stages.{number}.{name}" for name, _ in stage.named_parameters())
            reads = frozenset(Value(number - 1, leaf) for leaf in range(received[number]))
            calls.append(Call(f"stages.{number}", own, reads))
        return CallGraph(tuple(calls), frozenset())


def predict_stages(
    stages: Sequence[nn.Module], received: Sequence[int], model: nn.Module, graph: CallGraph, example: Any, *,
    device: Hardware | str | None = None,
) -> ModelCosts:  # fmt: skip
    """Predict the costs of stages, which need be no modules of ``model`` (a traced graph).

    Each has a call of ``graph``; the rest as :func:`predict`.
    received: how many tensors each stage receives from the one before.
    """
    figures, whole = _figures(model, device), _StageSequence(stages)
    done = _done(whole, lambda copied: copied, whole.graph(received), example, figures)
    return _costs(model, graph, example, done, f"predicted for {figures.name}")


def measure_stages(
    stages: Sequence[nn.Module], received: Sequence[int], example: Any, *, repetitions: int = 5, seen: OnCall | None = None
) -> list[UnitCost]:  # fmt: skip
    """Measure stages, all in this process, as :func:`measure` does calls.

    received: how many tensors each stage receives from the one before, and holds. seen: told of each stage's tensors in one more pass.
    Raises PlanError for stages on the meta device.
    """
    whole = _StageSequence(stages)
    graph = whole.graph(received)
    done, source = _timed(whole, whole, graph, example, repetitions, seen)
    calls = tuple(replace(call, outputs=sizes) for call, sizes in zip(graph.calls, done.outputs, strict=True))
    return _costs(whole, replace(graph, calls=calls), example, done, source).stages(range(len(calls)))


def _figures(model: nn.Module, device: Hardware | str | None) -> Hardware:
    if device is None:
        device = "cpu" if _device(model).type == "cpu" else "h100"
    return hardware(device) if isinstance(device, str) else device


def measure_link(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu", *, megabytes: float = 4.0
) -> Link:
    """Measure latency and bandwidth between the first two processes of ``group``.

    It is done by a ping-pong of small and of large tensors. All processes of the group call it and are given the same
    answer. Raises PlanError for a group of one.
    """
    if dist.get_world_size(group) < 2:
        raise PlanError("a link joins two processes, and the group has one")
    rank, sizes = dist.get_rank(group), (64, int(megabytes * 2**20))
    found = torch.zeros(2, dtype=torch.float64, device=device)
    if rank < 2:
        peer = dist.get_global_rank(group, 1 - rank) if group is not None else 1 - rank
        for index, size in enumerate(sizes):
            found[index] = _one_way(torch.zeros(size, dtype=torch.uint8, device=device), peer, rank == 0, group)
    dist.broadcast(found, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    small, large = found.tolist()
    # On a busy machine the small ones may take as long: then all of the large one's time counts for its bytes.
    return Link(small, sizes[1] / (large - small if large > small else large))


def _one_way(tensor: Tensor, peer: int, first: bool, group: dist.ProcessGroup | None, times: int = 11) -> float:
    """Return the median seconds of a message, half of a round trip."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        for turn in (first, not first):
            if turn:
                dist.send(tensor, peer, group=group)
            else:
                dist.recv(tensor, peer, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        found.append((time.perf_counter() - begin) / 2)
    return median(found[1:])


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random state and buffers after the block."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda, device_type=device.type if cuda else None):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is None:
        raise PlanError(f"{type(model).__name__} has no parameters, so nothing of it takes a stage")
    return first.device


def _costs(
    model: nn.Module, graph: CallGraph, example: Any, done: PassResult, source: str
) -> ModelCosts:  # fmt: skip
    sizes = {name: size_of(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    users: dict[str, list[int]] = {}
    for number, call in enumerate(graph.calls):
        for name in dict.fromkeys(call.parameters):
            users.setdefault(name, []).append(number)
    for name in graph.result_parameters:
        if len(graph.calls) - 1 not in users.setdefault(name, []):
            users[name].append(len(graph.calls) - 1)
    shared: dict[tuple[int, ...], int] = {}
    own = [0] * len(graph.calls)
    for name, numbers in users.items():
        for number in numbers:
            own[number] += sizes[name]
        if len(numbers) > 1:
            shared[tuple(numbers)] = shared.get(tuple(numbers), 0) + sizes[name]
    units = tuple(
        UnitCost(forward, inputs, weights, own[number], done.held[number], sum(graph.calls[number].outputs))
        for number, (forward, inputs, weights) in enumerate(done.phases)
    )
    crossing = tuple(graph.crossing(at) for at in range(len(graph.calls)))
    ties = tuple(Tie(numbers, size) for numbers, size in shared.items())
    return ModelCosts(units, crossing, ties, closed_places(graph), samples_of(example), source)


def closed_places(graph: CallGraph) -> tuple[int, ...]:
    """Return the calls before which there can be no cut.

    They are between a change in place and its readers, or between users of the same random numbers.
    """
    count = len(graph.calls)
    found: set[int] = set()
    for index, call in enumerate(graph.calls):
        if call.modifies:
            found |= {at for at in range(index + 1, count) if call.modifies.intersection(graph.live(at))}
    drawn: dict[int, int] = {}
    users = [*enumerate(call.draws for call in graph.calls), (count - 1, graph.result_draws)]
    for index, numbers in users:
        for number in numbers:
            found |= set(range(drawn.setdefault(number, index) + 1, index + 1))
    return tuple(sorted(found))
