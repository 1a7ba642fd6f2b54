"""Split any model into stages: capture one forward, choose the cuts, return a `Pipe`.

`split`, `Pipe` and `StageModule` are public. In: a model and an example; out: stages that keep the model's parameter names. `forecast`
simulates a `Pipe`, `PipeRunner` trains it; under a Trainer the strategies use ``steps`` or `runtime.install` instead.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.parallel.pipeline.call_graph import CallGraph, arguments_of
from arclight.parallel.pipeline.cost.measure import predict, predict_stages
from arclight.parallel.pipeline.cost.partition import partition
from arclight.parallel.pipeline.runtime.pipe_runner import PipeRunner, RunOptions, topology_of
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.splitting.placeholder_tensor import DataDependentError
from arclight.parallel.pipeline.splitting.proxy_modules import parameter_names
from arclight.parallel.pipeline.splitting.sliced_module import SlicedModule
from arclight.parallel.pipeline.splitting.stage_assignment import MultiUse, StageAssignment
from arclight.parallel.pipeline.splitting.stage_info import NamePreservingStage, StageInfo, stage_info_of
from arclight.parallel.pipeline.splitting.stage_tensors import meta_skeleton
from arclight.parallel.pipeline.splitting.traced.traced_stage import TracedStage, trace_model
from arclight.parallel.pipeline.unit_costs import ModelCosts, UnitCost
from arclight.parallel.pipeline.weights.initialize import initialize_stages
from arclight.parallel.pipeline.weights.load import LoadReport, load
from arclight.parallel.pipeline.weights.save import save
from arclight.parallel.plan import PlanError

Policy = Callable[[CallGraph, int], Sequence[int]]
"""Function of a graph and a number of stages that returns the first call of each stage."""


class StageModule(NamePreservingStage):
    """One stage of a model: its parameters under their original names, its part of the forward."""

    def __init__(
        self, root: nn.Module, assignment: StageAssignment, number: int, home: torch.device | None = None
    ) -> None:
        super().__init__(StageInfo(number, assignment.values_into(number), assignment.values_into(number + 1)))
        self._sliced = SlicedModule(root, None, assignment, [number], self, home)
        self.training = root.training

    def forward(self, *received: Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Compute this stage for the ``received`` tensors.

        received: the tensors of ``receives``. args, kwargs: what the whole model is called with. Returns the tensors of
        ``sends``; on the last stage what the model returns.
        """
        return self._sliced.run(self._stage_info.number, received, args, dict(kwargs or {}))

    def _parts(self) -> dict[str, nn.Module]:
        return self._sliced.parts

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as any module, with buffers that the first stage saves for all stages.

        They are loaded if ``state_dict`` has them.
        """
        own = OrderedDict(state_dict)
        for name in self._sliced.borrowed:
            value = own.pop(name, None)
            if value is not None:
                path, _, last = name.rpartition(".")
                buffers = self.get_submodule(path)._buffers
                buffer = buffers[last]
                if assign or buffer is None:
                    buffers[last] = value
                else:
                    with torch.no_grad():
                        buffer.copy_(value)
        if hasattr(state_dict, "_metadata"):
            own._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return super().load_state_dict(own, strict, assign)

    def _apply(self, fn: Any, recurse: bool = True) -> StageModule:
        tied = _tied(self)
        super()._apply(fn, recurse)
        for name, first in tied.items():
            path, _, leaf = name.rpartition(".")
            self.get_submodule(path)._parameters[leaf] = self.get_parameter(first)
        return self

    def extra_repr(self) -> str:
        known = self._stage_info
        return f"stage {known.number}, receives {len(known.receives)}, sends {len(known.sends)}"


def _tied(module: nn.Module) -> dict[str, str]:
    names, _ = parameter_names(module)
    return {name: first for name, first in names.items() if name != first}


class Pipe:
    """A model cut into stages, which run in this process one after another when it is called."""

    def __init__(
        self,
        assignment: StageAssignment,
        stages: Sequence[StageModule | TracedStage],
        names: Mapping[str, str],
        model: nn.Module,
    ) -> None:
        """Initialise the pipe with its stages.

        model: only its tree is kept, not what it holds.
        """
        self._model = meta_skeleton(model)
        self.graph, self.cuts, self.stages = assignment.graph, assignment.first_calls, list(stages)
        self.shared: dict[str, tuple[int, ...]] = assignment.shared
        """Stages of each parameter that several have, by its first name: their gradients must be summed."""
        self._names = dict(names)
        self._paths = {name.rsplit(".", n)[0] for name in names for n in range(1, name.count(".") + 1)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; return the model's result for these arguments."""
        result: Any = ()
        for stage in self.stages:
            result = stage(*result, args=args, kwargs=kwargs)
        return result

    def on(
        self, group: Any = None, *, schedule: str = "1F1B", micro_batches: int = 8,
        loss: Callable[[Any, Any], Any] | None = None, reduction: Literal["token_mean", "micro_mean", "sum"] = "token_mean",
        weight: Callable[[Any], Any] | None = None, chunks: Mapping[int | str, Any] | None = None, outputs: Any = 0,
        data: Any = None, device: Any = None,
    ) -> PipeRunner:  # fmt: skip
        """Return a runner of the stages on ``group``, all of whose processes call this alike.

        By default the group is all processes; one process runs all stages.
        micro_batches: how many a batch becomes, or fewer if it has fewer samples. loss: of the last stage's output and targets,
        ``(sum, count)`` or a number; without it the model's own result is that. reduction, weight: see `LossReduction`. chunks: how
        arguments are cut, by position or name (and "targets"): a dimension (0 by default), "replicate", or a tree of these. outputs:
        how results are merged: a dimension, "sum", "mean", a `Reducer`, or a tree of these. data: the group of processes that run
        other batches through the same stages; gradients become those of all batches.

        Raises PlanError if schedule, stages and processes do not fit.
        """
        options = RunOptions(schedule, micro_batches, loss, reduction, weight, chunks, outputs)
        return PipeRunner(self, group, options, data, device)

    def train(self, mode: bool = True) -> Pipe:
        """Set the mode of all stages."""
        for stage in self.stages:
            stage.train(mode)
        return self

    def eval(self) -> Pipe:
        """Set all stages to evaluation."""
        return self.train(False)

    def local_stage_indices(self, schedule: str = "1F1B", group: Any = None) -> list[int]:
        """List the stages that :meth:`on` gives this process, to load or initialise them before.

        See :meth:`load` and :meth:`initialize`.
        """
        return topology_of(self, schedule, group).own

    def load(
        self, path: str | Path, stages: Sequence[int] | None = None, *, device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None, prefix: str | None = None, rename: Callable[[str], str] | None = None, mapped: bool = True,
    ) -> LoadReport:  # fmt: skip
        """Load the stages of these numbers (None: all) from safetensors.

        See `arclight.parallel.pipeline.weights.load.load`.
        """
        chosen = self.stages if stages is None else [self.stages[number] for number in stages]
        return load(
            chosen, path, model=self._model, device=device, dtype=dtype, prefix=prefix, rename=rename, mapped=mapped
        )

    def initialize(
        self, stages: Sequence[int] | None = None, *, device: str | torch.device = "cpu", seed: int | None = None
    ) -> tuple[str, ...]:
        """Initialise the stages of these numbers (None: all), by ``seed`` and names.

        Values are the same for any number of stages. See
        `arclight.parallel.pipeline.weights.initialize.initialize_stages`.
        """
        chosen = self.stages if stages is None else [self.stages[number] for number in stages]
        return initialize_stages(chosen, model=self._model, device=device, seed=seed)

    def save(
        self, folder: str | Path, *, max_shard_size: int | str = "5GB", group: dist.ProcessGroup | None = None
    ) -> None:
        """Save all stages as one folder, which loads with any number of stages.

        It opens in transformers, too, if the model is from there. All processes of ``group`` call this, each of which
        has some of the stages: see `arclight.parallel.pipeline.weights.save.save`.
        """
        save(self.stages, folder, model=self._model, max_shard_size=max_shard_size, group=group)

    def remap_qualname(self, name: str) -> str:
        """Return the name in the model of a parameter or module of a stage.

        It is its own, or the first one of a tied parameter. What lies below a known module is named as it is. Raises
        KeyError for other names.
        """
        if name in self._names:
            return self._names[name]
        if name in self._paths:
            return name
        parts = name.split(".")
        for count in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:count]) in self._paths:
                return name
        raise KeyError(f"{name} is not a name in the model")


def split(
    model: nn.Module, example_inputs: Any, *, stages: int | None = None, at: Sequence[str] | None = None,
    policy: Policy | None = None, costs: ModelCosts | None = None, frontend: Literal["auto", "slice", "trace"] = "auto",
    multi_use: MultiUse = "replicate",
) -> Pipe:  # fmt: skip
    """Cut ``model`` into stages: ``stages`` of them, or where the modules named by ``at`` begin.

    example_inputs: a tuple of arguments, a dict of keyword arguments, or ``(args, kwargs)``; shapes may differ later. The model may be on
    the meta device (its stages then compute where the example lies: see `Pipe.load` and `Pipe.initialize`); it is not changed, and stages have
    its own modules, parameters and buffers. policy: chooses the first call of each stage; otherwise a step is made as short as
    can be by ``costs``, which may be measured (`arclight.parallel.pipeline.cost.measure`); None: predicted ones. multi_use: what is done with
    parameters that several stages use.

    frontend: "slice" runs the model's own code in each stage; "trace" cuts a graph of its operations, which is true for shapes, mode and
    precision of the example only (`arclight.parallel.pipeline.splitting.traced.traced_stage`), but may be cut where code computes with parameters
    between modules; "auto" slices, and traces with a warning if that cannot be.

    Raises PlanError for a model that cannot be cut so, and says what can be done.
    """
    args, kwargs = arguments_of(example_inputs)
    if (stages is None) == (at is None):
        raise PlanError(
            "say either into how many stages the model is cut (stages = 4), or where (at = [names of modules])"
        )
    if frontend not in ("auto", "slice", "trace"):
        raise PlanError(f"frontend is {frontend!r}: say 'auto', 'slice' or 'trace'")
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for name in at or ():
        if name not in paths:
            raise PlanError(f"{name} is not a module of {type(model).__name__}; did you mean {_nearest(name, paths)}?")
    names, parameters = parameter_names(model)

    def cut(graph: CallGraph, find: Callable[[], ModelCosts], begins: Sequence[int] | None = None) -> StageAssignment:
        graph = _with_unused(graph, parameters)
        if at is not None:
            return StageAssignment.cut(graph, cuts_at(graph, at), multi_use)
        assert stages is not None
        if policy is not None:
            return StageAssignment.cut(graph, policy(graph, stages), multi_use)
        known = costs or _predicted(find, graph, parameters)
        return StageAssignment.cut(graph, default_cuts(known, stages, begins=begins), multi_use)

    reason: PlanError | None = None
    if frontend != "trace":
        try:
            graph = capture_call_graph(model, None, args, kwargs, at or ())
            _refuse_few(graph, stages or 0)
            assignment = cut(graph, lambda: predict(model, graph, (args, kwargs)))
            home = _home(args, kwargs)
            parts = [StageModule(model, assignment, number, home) for number in range(len(assignment.first_calls))]
            return Pipe(assignment, parts, names, model)
        except DataDependentError as error:
            if frontend == "slice":
                raise
            reason = error
    return _traced(model, (args, kwargs, at or ()), cut, names, reason)


def _home(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Find the device where a model on the meta device will compute: that of its example."""
    given = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and not leaf.is_meta)
    return next((leaf.device for leaf in given), None)


def _traced(
    model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any], Sequence[str]], cut: Callable[..., StageAssignment],
    names: Mapping[str, str], reason: PlanError | None,
) -> Pipe:  # fmt: skip
    """Cut a traced graph into stages.

    arguments: args, kwargs, names of modules where stages begin. reason: why the model's own code cannot be cut.
    """
    try:
        args, kwargs, at = arguments
        traced = trace_model(model, args, kwargs)
        traced.refuse_inside(at)
        graph = traced.graph
        alone = StageAssignment(graph, tuple(range(len(graph.calls))))

        def find() -> ModelCosts:
            alike = traced.stages(alone)
            received = [len(stage_info_of(stage).receives) for stage in alike]
            return predict_stages(alike, received, model, graph, (args, kwargs))

        assignment = cut(graph, find, narrow(graph))
    except PlanError as error:
        if reason is None:
            raise
        raise PlanError(f"{reason}. Nor can the model be traced: {error}") from error
    if reason is not None:
        rank_zero_warn(f"the model is cut as a traced graph, for shapes and mode of the example only: {reason}")
    return Pipe(assignment, traced.stages(assignment), names, model)


def default_cuts(
    costs: ModelCosts, stages: int, micro_batches: int | None = None, begins: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the first call of each of ``stages`` for the shortest step.

    ``micro_batches``: of the step (None: twice the stages). Raises PlanError.
    begins: calls with which stages begin as long as these are enough (None: any); the first is 0.
    """
    count = len(costs.units)
    if stages > count:
        raise PlanError(
            f"{stages} stages are more than the {count} parts that the model has: use stages = {count} or fewer"
        )
    closed = set(costs.closed) | (set(range(count)).difference(begins) if begins is not None else set())
    for kept in (closed, set(costs.closed), set[int]()):  # a cut that cannot be made is named by whoever makes it
        if count - len(kept) >= stages:
            break
    number, crossing = micro_batches or 2 * stages, costs.crossing or None
    return partition(costs.units, stages, number, ties=costs.ties, crossing=crossing, closed=kept).cuts


def _predicted(find: Callable[[], ModelCosts], graph: CallGraph, parameters: Mapping[str, nn.Parameter]) -> ModelCosts:
    """Predict costs, or warn and count parameters if no prediction can be made."""
    try:
        return find()
    except PlanError as error:
        rank_zero_warn(f"stages are balanced by their parameters: {error}, and give them as costs")
        sizes = [sum(parameters[name].numel() for name in call.parameters) for call in graph.calls]
        return ModelCosts(tuple(UnitCost(float(size), float(size), float(size)) for size in sizes))


def narrow(graph: CallGraph) -> list[int]:
    """Return the first call, and calls before which a cut is locally narrowest.

    No more bytes cross there than before the calls next to them.
    """
    bytes_at = [graph.crossing(at) for at in range(1, len(graph.calls))]
    around = zip([*bytes_at[:1], *bytes_at], bytes_at, [*bytes_at[1:], *bytes_at[-1:]], strict=False)
    return [0, *(at for at, (before, here, after) in enumerate(around, 1) if here <= min(before, after))]


def _refuse_few(graph: CallGraph, stages: int) -> None:
    """Raise DataDependentError if parameters used between parts leave too few parts."""
    loose = [n for call in graph.calls for n in call.parameters if not n.startswith(f"{call.name}.")]
    loose = [name for name in (*loose, *graph.result_parameters) if name not in graph.aliases.values()]
    if stages > len(graph.calls) and loose:
        raise DataDependentError(
            f"{stages} stages are more than the {len(graph.calls)} parts that the model has, and it computes with {loose[0]} between them"
        )


def cuts_at(graph: CallGraph, at: Sequence[str]) -> tuple[int, ...]:
    """Return the first call of each stage; stages begin at the modules named in ``at``.

    A module may begin by calls of its submodules. Raises PlanError.
    """
    begins = [0]
    for name in at:
        inside = (i for i, call in enumerate(graph.calls) if call.name == name or call.name.startswith(name + "."))
        found = next(inside, None)
        if found is None:
            names = {call.name for call in graph.calls}
            raise PlanError(
                f"{name} is not called by the model, so no stage can begin with it; did you mean {_nearest(name, names)}?"
            )
        if found <= begins[-1]:
            before = "the model begins with it" if not found else f"it is called before {at[len(begins) - 2]}"
            raise PlanError(
                f"no stage can begin with {name}: {before}. Name modules in the order in which they are called"
            )
        begins.append(found)
    return tuple(begins)


def _with_unused(graph: CallGraph, parameters: Mapping[str, nn.Parameter]) -> CallGraph:
    """Return ``graph`` with unused frozen parameters kept by the last stage.

    Raises PlanError for unused parameters that would train.
    """
    used = graph.used
    training = [name for name, parameter in parameters.items() if parameter.requires_grad and name not in used]
    if training:
        shown = ", ".join(training[:5]) + (f" and {len(training) - 5} more" if len(training) > 5 else "")
        raise PlanError(
            f"the model does not use {shown} for these arguments, so no stage has them: call requires_grad_(False) on what shall not train "
            "(the last stage keeps it), leave it out of the model, or give example arguments that use it"
        )
    return graph.keeping(parameters)


def _nearest(name: str, known: set[str]) -> str:
    return next(iter(difflib.get_close_matches(name, sorted(known), 1, 0.0)), "another")
