"""Pipeline a user's training_step and its like: capture, assign calls, run a schedule.

`parallelize_steps` makes one `PipelinedSteps` for a module whose steps were not written for pipelines, and `PlanStrategy` runs steps by it.
In: a user's step and batch; out: what the step returned, on all ranks. All ranks of a pipeline must be given the same batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arclight.fabric.distributed.dtensor import local_tensor
from arclight.fabric.seeding import seed_device
from arclight.parallel.blocks import repeated_blocks
from arclight.parallel.pipeline.call_graph import CallGraph, Value
from arclight.parallel.pipeline.runtime.loss_reduction import ReductionKind
from arclight.parallel.pipeline.runtime.runner import StepRunner, StepWeights
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology, StageProgram
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.splitting.placeholder_tensor import placeholders_in
from arclight.parallel.pipeline.splitting.sliced_module import SlicedModule
from arclight.parallel.pipeline.splitting.stage_assignment import StageAssignment
from arclight.parallel.pipeline.steps.micro_batch import MicroBatch, split_step
from arclight.parallel.pipeline.steps.module_state import AttributeSync, FullModuleView, isolate_attributes
from arclight.parallel.pipeline.steps.step_outputs import LogRecorder, OutputBroadcaster, StepOutput, merge_step_outputs
from arclight.parallel.plan import PlanError

_SEEDS = 1 << 48
"""A step's seed is below this number, so that a float64 holds it exactly; seeds of neighbouring stages are this far apart."""

Step = Callable[..., Any]
"""A method bound to the module that is cut."""


@dataclass(frozen=True)
class StepOptions:
    """Numbers of micro-batches, and the reduction of losses."""

    micro_batches: int
    evaluation_micro_batches: int = 1
    """Parts of a batch that validation, test and prediction take; with 1 they see whole batches, as in one process."""
    reduction: ReductionKind = "token_mean"


class StagePart(StageProgram):
    """Run one stage of the current step; for FSDP it is a module with the stage's tensors."""

    def __init__(self, steps: PipelinedSteps, number: int, names: frozenset[str] | None) -> None:
        """Initialise the part of stage ``number``.

        names: of the parameters and buffers of the module that are the stage's; None: all that the module has.
        """
        last = number == steps.topology.stages - 1
        super().__init__(_Stage(steps, number), steps.loss if last else None, sliced=True, first=number == 0)
        self.inner, self.names = steps.module, names

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if self._has(prefix, name):
                yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            if self._has(prefix, name):
                yield name, buffer

    def _has(self, prefix: str, name: str) -> bool:
        below = name.removeprefix(f"{prefix}." if prefix else "").removeprefix("inner.")
        return self.names is None or below in self.names


class _Stage(nn.Module):
    """One stage of the current step."""

    def __init__(self, steps: PipelinedSteps, number: int) -> None:
        super().__init__()
        self.__dict__["steps"], self.number = steps, number

    def forward(self, *received: Tensor, args: tuple[MicroBatch, str], kwargs: dict[str, Any]) -> Any:
        return self.__dict__["steps"].forward(self.number, received, args[0])


class PipelinedSteps:
    """The steps of ``module``, whose parts lie on the processes of ``topology``.

    The first step that is captured and cut assigns the calls to stages; others follow it, so that each parameter stays
    where it is. They may call parts in another order only if no stage would run again after a later one.
    """

    topology: PipelineTopology
    options: StepOptions
    broadcaster: OutputBroadcaster
    last: bool
    """Whether this process has the last stage."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.recorder, self.attributes = LogRecorder(module), AttributeSync(module)
        self.runner: StepRunner | None = None
        self.skeleton = FullModuleView(module)
        self.shared: dict[str, tuple[int, ...]] = {}
        """Parameters that several stages have, by their first names."""
        self.stages_of: dict[str, tuple[int, ...]] = {}
        """Stages of each parameter, by its first name."""
        self.everybodys: frozenset[str] = frozenset()
        """Buffers that belong to no part."""
        self._calls: dict[str, list[int]] = {}
        self._graphs: dict[str, CallGraph] = {}
        self._sliced: dict[str, SlicedModule] = {}
        self._outputs: dict[int, Any] = {}

    # -- cutting ---------------------------------------------------------------------------------------------------

    def capture(self, step: Step, args: tuple[Any, ...]) -> CallGraph:
        """Capture what ``step`` does with one micro-batch of its arguments.

        Raises PlanError if that cannot be cut.
        """
        graph = self._observe(step, args, {})
        self._refuse_unused(graph, step.__name__)
        return graph.keeping(name for name, _ in self.module.named_parameters())

    def cut(
        self, step: Step, graph: CallGraph, begins: Sequence[int], topology: PipelineTopology, options: StepOptions
    ) -> None:
        """Assign the calls of ``graph`` to stages; the module keeps this process's parts.

        Stage n begins with call ``begins[n]``.
        """
        self.topology, self.options = topology, options
        self.broadcaster = OutputBroadcaster(topology.group, topology.owner(topology.stages - 1), topology.device)
        self.last = topology.stages - 1 in topology.own
        assignment = StageAssignment.cut(graph, tuple(begins))
        if graph.repeated and len(topology.own) > 1:
            raise PlanError(
                f"{min(graph.repeated)} is changed between parts of the model, by each of the {len(topology.own)} stages of a process once: change it "
                "after the last part was called, or choose a schedule with one stage for each process (1F1B)"
            )
        for number in range(self.topology.stages):
            for call in graph.calls[slice(*assignment.range(number))]:
                self._calls.setdefault(call.name, []).append(number)
        self.stages_of, self.shared = assignment.users, assignment.shared
        parts = tuple(f"{call.name}." for call in graph.calls)
        self.everybodys = frozenset(name for name, _ in self.module.named_buffers() if not name.startswith(parts))
        with self._undisturbed():
            sliced = self._sliced[step.__name__] = self._cut(step, assignment)
        if self.last:  # saves what belongs to no part, as it is the one that has seen whole steps
            for path, _, name in (whole.rpartition(".") for whole in sliced.borrowed):
                self.module.get_submodule(path)._non_persistent_buffers_set.discard(name)
        self.skeleton.release()

    def _observe(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallGraph:
        if getattr(step, "__self__", None) is not self.module:
            raise PlanError(
                f"{getattr(step, '__name__', step)} is not a plain method of {type(self.module).__name__} (it was compiled, or put in its place), "
                "so it cannot be cut into stages: leave it as it is, and set compile in the plan"
            )
        with self._undisturbed(), self.recorder.recording():
            graph = capture_call_graph(self.module, step, args, kwargs, open_end=True)
            logged = [
                source
                for placeholder in placeholders_in(self.recorder.values())
                for source in placeholder.origin.sources
            ]
        values = frozenset(source for source in logged if isinstance(source, Value))
        names = tuple(dict.fromkeys(source for source in logged if isinstance(source, str)))
        return replace(graph, result=graph.result | values, result_parameters=(*graph.result_parameters, *names))

    def _refuse_unused(self, graph: CallGraph, step: str) -> None:
        used = graph.used
        unused = [name for name, p in self.module.named_parameters() if p.requires_grad and name not in used]
        if unused:
            raise PlanError(
                f"no stage of the pipeline uses {', '.join(unused[:3])}{' ...' if len(unused) > 3 else ''}, which {step} does not call: call "
                "requires_grad_(False) on what shall not train, or remove it"
            )

    def _following_cuts(self, step: str, graph: CallGraph) -> tuple[int, ...]:
        """Return the cuts of another step that leave each call where the first one has it."""
        seen: dict[str, int] = {}
        cuts, now = [0], 0
        for number, call in enumerate(graph.calls):
            known = self._calls.get(call.name)
            turn = seen[call.name] = seen.get(call.name, -1) + 1
            if known is not None:
                stage = known[min(turn, len(known) - 1)]
            else:
                stage = max(
                    (self.stages_of[name][-1] for name in call.parameters if name in self.stages_of), default=now
                )
            if stage < now:
                raise PlanError(
                    f"{step} calls {call.name} (stage {stage}) after parts of stage {now}: a batch goes through the stages of a pipeline "
                    "once; call parts in the order of training_step"
                )
            cuts += [number] * (stage - now)
            now = stage
        missing = self.topology.stages - len(cuts)
        if missing or any(a == b for a, b in pairwise(cuts)):
            raise PlanError(
                f"{step} leaves out all parts of a stage: a batch goes through all stages of a pipeline; use fewer stages"
            )
        return tuple(cuts)

    def _slice(self, step: Step, micro_batch: MicroBatch) -> None:
        name = step.__name__
        with self.skeleton.whole():
            graph = self._observe(step, micro_batch.args, micro_batch.kwargs)
            graph = graph.keeping(name for name, _ in self.module.named_parameters())
            assignment = StageAssignment.cut(graph, self._following_cuts(name, graph))
            self._sliced[name] = self._cut(step, assignment)

    def _cut(self, step: Step, assignment: StageAssignment) -> SlicedModule:
        return SlicedModule(self.module, step, assignment, self.topology.own, self.module, self.device)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Undo the side effects of steps that are run in the block for observation."""
        with ExitStack() as stack:
            stack.enter_context(self._own_randomness())
            stack.enter_context(self.skeleton.whole())
            stack.enter_context(isolate_attributes(self.module))
            yield

    def _own_randomness(self) -> Any:
        devices = [self.device] if self.device.type == "cuda" else []
        return torch.random.fork_rng(devices, device_type=self.device.type if devices else None)

    # -- parts of the module on this process -----------------------------------------------------------------------

    @property
    def _decided(self) -> SlicedModule:
        """The step that decided who has what."""
        return next(iter(self._sliced.values()))

    def names_of(self) -> dict[str, tuple[int, ...]]:
        """Return this process's stages of each parameter and buffer, by each of its names.

        Buffers of no part are the last stage's, or everybody's.
        """
        sliced = self._decided
        own = set(self.topology.own)
        found = {
            name: tuple(own.intersection(self.stages_of[sliced.names[name]]))
            for name, _ in self.module.named_parameters(remove_duplicate=False)
        }
        for name, _ in self.module.named_buffers(remove_duplicate=False):
            stages = {n for call, numbers in self._calls.items() if name.startswith(f"{call}.") for n in numbers}
            found[name] = tuple(own.intersection(stages) or {max(own)})
        return found

    def parts_here(self) -> list[nn.Module]:
        """Return the modules that this process calls, each once."""
        return list(dict.fromkeys(self._decided.parts.values()))

    def blocks_here(self) -> list[nn.Module]:
        """List the repeated blocks among the parts here, and those in them."""
        with self.skeleton.whole():
            repeated = {part for _, block in repeated_blocks(self.module) for part in block.modules()}
        return [part for part in self.parts_here() if part in repeated and next(part.parameters(), None) is not None]

    @property
    def counted_by_others(self) -> set[nn.Parameter]:
        """Parameters that an earlier stage on another process has too: they count there."""
        shared = self.runner.shared if self.runner is not None else None
        return shared.counted_by_others if shared is not None else set()

    @torch.no_grad()
    def send_shared(self) -> None:
        """Send tied parameters from their first stage to the others, so that all start equal."""
        if self.topology.group is None:
            return
        own = {self._decided.names[name]: p for name, p in self.module.named_parameters()}
        for name, stages in self.shared.items():
            if name not in own:
                continue
            part, first = local_tensor(own[name]), self.topology.place(stages[0])
            if self.topology.rank != first:
                room = torch.empty_like(part)
                dist.recv(room, self.topology.owner(stages[0]), group=self.topology.group)
                part.copy_(room)
                continue
            users = {self.topology.place(stage): self.topology.owner(stage) for stage in stages}
            for place in sorted(users.keys() - {first}):
                dist.send(part.contiguous(), users[place], group=self.topology.group)

    # -- running ---------------------------------------------------------------------------------------------------

    def bound(self, step: Step) -> Step:
        """Wrap ``step`` (a method of the module) for every process of the pipeline to call instead."""
        return functools.wraps(step)(functools.partial(self._run, step))

    def _run(self, step: Step, *args: Any, **kwargs: Any) -> Any:
        name, trains = step.__name__, torch.is_grad_enabled()
        self.attributes.begin()
        seed = int(torch.randint(_SEEDS, ()))
        number = self.options.micro_batches if trains else self.options.evaluation_micro_batches
        reduction = self.options.reduction if trains else "token_mean"
        micro_batches, counted = split_step(self.module, name, args, kwargs, number, reduction, seed, trains)
        if name not in self._sliced:
            self._slice(step, micro_batches[0])
        self._outputs = {}
        assert self.runner is not None
        weights = StepWeights.of(self.module, args[0]) if trains and counted else StepWeights()
        with self._own_randomness(), self.recorder.recording():
            total, _ = self.runner.run(
                [((micro_batch, repr(micro_batch)), {}, micro_batch) for micro_batch in micro_batches], weights
            )
        self.runner.engine.wait()
        outcome = self.broadcaster.broadcast(self._outcome(name, micro_batches, trains) if self.last else None, seed)
        if outcome.values is not None:
            self.recorder.replay(outcome.names, outcome.values)
        if not trains:
            return outcome.output
        weight = sum(micro_batch.weight for micro_batch in micro_batches)
        loss = total / weight if counted and reduction == "token_mean" and weight else total
        return loss if outcome.output is None else {"loss": loss, **outcome.output}

    def forward(self, number: int, received: tuple[Tensor, ...], micro_batch: MicroBatch) -> Any:
        """Run one stage on one micro-batch, with random numbers of its own.

        They depend on no other stage's or micro-batch's.
        """
        seed_device(micro_batch.seed + number * _SEEDS, self.device)
        self.recorder.micro_batch = micro_batch.number
        return self._sliced[micro_batch.step].run(number, received, micro_batch.args, micro_batch.kwargs)

    def loss(self, output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the weighted loss from the result of the last stage's step."""
        self._outputs[micro_batch.number] = output
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        if not torch.is_grad_enabled():
            return zero, zero
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PlanError(
                f"{micro_batch.step} of a pipeline must return a loss for each micro-batch (a tensor with one number, or a dict with 'loss'), got "
                f"{type(loss).__name__}: a batch cannot be skipped once its stages have run"
            )
        return loss.reshape(()) * micro_batch.weight, zero

    def _outcome(self, step: str, micro_batches: list[MicroBatch], trains: bool) -> StepOutput:
        names, values = self.recorder.combined({p.number: p.counts for p in micro_batches}, self.device)
        output = merge_step_outputs(
            [_besides(self._outputs[p.number], trains) for p in micro_batches],
            [p.samples for p in micro_batches], [p.counts for p in micro_batches], f"what {step} returned",
        )  # fmt: skip
        self._outputs = {}
        return StepOutput(names, torch.stack(values) if values else None, output)

    def sync_attributes(self) -> None:
        """Synchronise attributes over the pipeline, after an epoch's or evaluation's last step."""
        self.attributes.sync(self.topology.group, self.broadcaster.source, self.device)


def _besides(output: Any, trains: bool) -> Any:
    """Return a training step's output without the loss: None, or the rest of a dict.

    An evaluation's output stays as it is.
    """
    if not trains:
        return output
    rest = {name: value for name, value in output.items() if name != "loss"} if isinstance(output, dict) else None
    return rest or None
