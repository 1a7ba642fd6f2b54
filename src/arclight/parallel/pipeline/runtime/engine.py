"""Run micro-batches through this rank's stages by a schedule.

`StepRunner` and `PipeRunner` hand it micro-batches; it makes `Stage` objects, with the boundaries that it learns when a shape of micro-batches
first comes, and drives torch's schedules over them. In: micro-batches (arguments and targets), the same for every stage; out: losses and
outputs, in the last stage's `StageProgram`. All ranks must take the same branches here, or their messages do not match.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.strategies.root_module import reshard
from arclight.parallel.layers.expert_parallel import AllToAllDispatcher, TokenGroups, token_readers
from arclight.parallel.pipeline.runtime.boundary import Boundary, TensorSpec
from arclight.parallel.pipeline.runtime.consistency_check import (
    DisagreementError,
    PipelineFingerprint,
    digest,
    verify_fingerprints,
)
from arclight.parallel.pipeline.runtime.failure_store import (
    DeviceSteps,
    FailureStore,
    abort_peers,
    failure_to_raise,
    timeout_of,
)
from arclight.parallel.pipeline.runtime.split_backward import inputs_reached
from arclight.parallel.pipeline.runtime.stage import Stage
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology, StageProgram
from arclight.parallel.pipeline.runtime.torch_pipelining import Schedule
from arclight.parallel.pipeline.schedule.table import that_fits
from arclight.parallel.plan import PlanError
from arclight.parallel.step_protocol import Split

T = TypeVar("T")
SHAPES = 64
"""Shapes of batches, and of micro-batches, that are remembered. All processes of a pipeline forget the same ones."""


class LruCache(Generic[T]):
    """The most recently used values, by key."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: dict[Any, T] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value of ``key``, made if missing; the least recently used is dropped."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > self.size:
            del self._values[next(iter(self._values))]
        return value


_Passed = dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
"""Inputs and outputs of each stage, for one micro-batch."""


_Shape = tuple[bool, tuple[bool, ...], Any]
"""Key of a micro-batch's boundaries: if it has a backward, which parameters train, and its `signature`."""


class Engine:
    """Run the stages of this process, in step with the other processes of the pipeline.

    Before the first step they compare what they were given (``statement``). An error on one of them ends the others too, and says which
    stage was at which action; the engine cannot be used after it.
    """

    def __init__(
        self, parts: dict[int, StageProgram], topology: PipelineTopology, statement: Callable[[], PipelineFingerprint] | None = None,
        shared: dict[str, tuple[int, ...]] | None = None, expected: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        """Check the stages of this process; raises PlanError for one inside DDP.

        statement, shared, expected: see `consistency_check.verify_fingerprints`.
        """
        self.parts, self.topology = parts, topology
        self._statement, self._shared, self._expected = statement, shared or {}, expected
        self._boundaries: LruCache[dict[int, Boundary]] = LruCache(SHAPES)
        self._schedules: LruCache[Schedule] = LruCache(SHAPES)
        self.parameters = list(dict.fromkeys(p for part in parts.values() for p in part.parameters()))
        """Parameters of this process's stages, each once."""
        self._board = FailureStore(topology.group, topology.rank) if topology.group is not None else None
        self._device: DeviceSteps | None = None
        if self._board is not None and topology.group is not None and topology.device.type == "cuda":
            record = functools.partial(torch.cuda.current_stream(topology.device).record_event)
            self._device = DeviceSteps(self._board, timeout_of(topology.group, topology.device), record)
        self._verified = topology.group is None
        self._warned = False
        self._failure: str | None = None
        for part in parts.values():
            if any(isinstance(module, DistributedDataParallel) for module in part.modules()):
                raise PlanError(
                    "a stage is in a DistributedDataParallel, which sums gradients in each backward and not after the last, and misses "
                    "those of split backwards: give the pipeline the bare model and data=<the group of replicas>"
                )

    @property
    def last(self) -> StageProgram | None:
        """The part of the last stage, if that is here."""
        return self.parts.get(self.topology.stages - 1)

    def run(self, micro_batches: list[Split], backward: bool) -> None:
        """Run ``micro_batches`` through all stages; losses and outputs are left in :attr:`last`."""
        if self._failure is not None:
            raise RuntimeError(f"this pipeline has failed before and cannot continue: {self._failure}")
        self.wait(DeviceSteps.AHEAD - 1)
        device = self.topology.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        for part in self.parts.values():
            part.autocast = torch.autocast(device, dtype) if enabled else nullcontext()
            part.totals.clear()
            part.counts.clear()
        with torch.autocast(device, enabled=False):
            schedule = self._schedule(micro_batches, backward)
            try:
                schedule.run([{"micro_batch": micro_batch} for micro_batch in micro_batches])
            except BaseException as error:
                raise self._fail(error, *self._place(schedule)) from error.__cause__
        if not backward:
            self._reshard()
        if self._device is not None:
            self._device.add()

    def totals(self) -> tuple[Tensor, Tensor]:
        """Sum losses and counts over the micro-batches of the last run.

        They are float64, on every process of the pipeline.
        """
        both, last = torch.zeros(2, dtype=torch.float64, device=self.topology.device), self.last
        if last is not None:
            both[0], both[1] = torch.stack(last.totals).sum(), torch.stack(last.counts).sum()
        if self.topology.group is not None:
            dist.broadcast(both, self.topology.owner(self.topology.stages - 1), group=self.topology.group)
        return both[0], both[1]

    def wait(self, left: int = 0) -> None:
        """Wait until the device is at one of the last ``left`` steps, before their numbers are read.

        Names the rank that is waited for.
        """
        if self._device is None:
            return
        try:
            self._device.wait(left)
        except BaseException as error:
            raise self._fail(error, f"process {self.topology.rank} failed on its device", True) from error.__cause__

    def _fail(self, error: BaseException, where: str, waiting: bool) -> BaseException:
        found = failure_to_raise(self._board, error, where, waiting)
        self._failure = where
        if self.topology.group is not None:
            abort_peers(self.topology.group, self.topology.device)
        return found

    def _place(self, schedule: Schedule) -> tuple[str, bool]:
        """Describe what this process is at; then True if it waits for another."""
        action, computing = schedule.at()
        if action is None:
            return f"process {self.topology.rank} waited for what it had sent to be received", True
        who = f"process {self.topology.rank} (stage {action.stage})"
        if computing:
            return f"{who} failed in {action}", False
        source = action.stage - 1 if action.kind == "F" else action.stage + 1
        if not 0 <= source < self.topology.stages:
            return f"{who} waited before {action}", True
        return f"{who} waited for {action} from stage {source} on process {self.topology.place(source)}", True

    def _reshard(self) -> None:
        """Reshard weights that FSDP gathered for forwards without a backward.

        They would stay, and be used after the next update.
        """
        for part in self.parts.values():
            reshard(part)

    # -- schedules and what crosses the cuts -----------------------------------------------------------------------

    def _schedule(self, micro_batches: list[Split], backward: bool) -> Schedule:
        """Return the schedule for micro-batches of these shapes, built when they first come."""
        signatures = tuple(signature(*tree_flatten(micro_batch)) for micro_batch in micro_batches)
        trains = tuple(p.requires_grad for p in self.parameters) if backward else ()
        shapes = [(backward, trains, one) for one in signatures]
        return self._schedules.get((backward, signatures, trains), lambda: self._make(micro_batches, shapes))

    def _make(self, micro_batches: list[Split], shapes: list[_Shape]) -> Schedule:
        topology, count, backward = self.topology, len(micro_batches), shapes[0][0]
        found = self._crossings(micro_batches, shapes)
        kind = that_fits(topology.kind, count, topology.ranks, backward)
        if backward and kind.name != topology.kind.name and topology.group is not None and not self._warned:
            self._warned = True
            rank_zero_warn(f"a batch of {count} micro-batches does not fit the schedule: it runs by a simpler one")
        stages = [
            Stage(
                part, number, topology.stages, topology.device, topology.group,
                [crossing.get(number - 1, ()) for crossing in found], [crossing.get(number, ()) for crossing in found],
            )
            for number, part in self.parts.items()
        ]  # fmt: skip
        return Schedule(kind, stages, count, backward)

    def _crossings(self, micro_batches: list[Split], shapes: list[_Shape]) -> list[dict[int, Boundary]]:
        """Find what crosses the cuts, of each micro-batch."""
        stages = " and ".join(map(str, self.parts))
        where = f"process {self.topology.rank} (stage {stages}) failed in the first micro-batch of its shape"
        try:
            self._agree(shapes)
            return [
                self._boundaries.get(shape, functools.partial(self._cross, micro_batch, shape[0]))
                for micro_batch, shape in zip(micro_batches, shapes, strict=True)
            ]
        except DisagreementError:  # which all processes have
            raise
        except BaseException as error:
            raise self._fail(error, where, True) from error.__cause__

    def _agree(self, shapes: list[_Shape]) -> None:
        """Check that all processes of the pipeline have the same batch and plan.

        Else they would wait for each other.
        """
        if self._board is None or self.topology.group is None:
            return
        timeout = timeout_of(self.topology.group, self.topology.device)
        if not self._verified and self._statement is not None:
            own = self._statement()
            fingerprints = self._board.exchange([own.plan, own.parameters], timeout)
            verify_fingerprints([PipelineFingerprint(*one) for one in fingerprints], self._shared, self._expected)
        self._verified = True
        shown = ", ".join(f"{x[0]} {x[1]}" if isinstance(x, tuple) else str(x) for x in shapes[0][2][1])
        others = self._board.exchange([shown, len(shapes), digest([shape[2] for shape in shapes])], timeout)
        for rank, other in enumerate(others):
            if other != others[0]:
                raise DisagreementError(
                    f"processes of one pipeline were given batches of different shapes: process 0 {others[0][1]} micro-batches, "
                    f"the first of {others[0][0]}; process {rank} {other[1]}, the first of {other[0]}; let all of them read the same samples (those of "
                    "the data-parallel rank)"
                )

    def _cross(self, micro_batch: Split, backward: bool) -> dict[int, Boundary]:
        """Return the boundaries of this process's stages, by the number of the stage before each.

        One micro-batch runs through the real stages but the last, one after another; what they count and draw on the way is put
        back. Replicas beside this pipeline may have no new shape, and are not notified.
        """
        topology, crossing, passed = self.topology, dict[int, Boundary](), _Passed()
        devices = [topology.device] if topology.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices, device_type=topology.device.type if devices else None),
            torch.set_grad_enabled(backward),
            _alone(self.parts.values()),
        ):
            for number, part in self.parts.items():
                arrived: tuple[Tensor, ...] = ()
                if number > 0 and number - 1 not in self.parts:
                    crossing[number - 1], arrived = self._receive(number - 1)
                elif number > 0:
                    arrived = tuple(x.detach() for x in passed[number - 1][1])
                for tensor, shape in zip(arrived, crossing.get(number - 1, ()), strict=True):
                    tensor.requires_grad_(shape.requires_grad)
                if number == topology.stages - 1:
                    continue
                before = {name: buffer.clone() for name, buffer in part.named_buffers()}
                output = part(*arrived, micro_batch=micro_batch)
                with torch.no_grad():
                    for name, buffer in part.named_buffers():
                        buffer.copy_(before[name])
                passed[number] = arrived, output
                crossing[number] = tuple(map(TensorSpec.of, output))
                if number + 1 not in self.parts:
                    self._send(number + 1, crossing[number], output)
        if backward:
            self._cross_back(passed, crossing)
        self._reshard()
        return crossing

    def _cross_back(self, passed: _Passed, crossing: dict[int, Boundary]) -> None:
        """Mark values in ``crossing`` that the loss does not depend on; no gradient comes back."""
        for number in sorted(passed, reverse=True):
            arrived, given = passed.pop(number)
            if number < self.topology.stages - 2:  # the last stage has not run: all that it is given may come back
                if number + 1 not in self.parts:
                    crossing[number] = _returning(crossing[number], self._receive_plain(number + 1))
                given = tuple(x for x, shape in zip(given, crossing[number], strict=True) if shape.returns)
            if number > 0:
                flags = inputs_reached(given, arrived)
                crossing[number - 1] = _returning(crossing[number - 1], flags)
                if number - 1 not in self.parts:
                    self._send_plain(number - 1, flags)

    # -- messages while shapes are found out -----------------------------------------------------------------------

    def _send_plain(self, stage: int, message: Any) -> None:
        """Send plain data to the process of a stage: its length, then its JSON."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            dist.send(tensor.to(self.topology.device), self.topology.owner(stage), group=self.topology.group)

    def _receive_plain(self, stage: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device=self.topology.device)
        dist.recv(length, self.topology.owner(stage), group=self.topology.group)
        data = torch.zeros(int(length), dtype=torch.uint8, device=self.topology.device)
        dist.recv(data, self.topology.owner(stage), group=self.topology.group)
        return json.loads(bytes(data.tolist()))

    def _send(self, stage: int, boundary: Boundary, tensors: tuple[Tensor, ...]) -> None:
        self._send_plain(stage, [shape.plain() for shape in boundary])
        for tensor in tensors:
            dist.send(tensor.detach(), self.topology.owner(stage), group=self.topology.group)

    def _receive(self, stage: int) -> tuple[Boundary, tuple[Tensor, ...]]:
        boundary = tuple(map(TensorSpec.of_plain, self._receive_plain(stage)))
        tensors = tuple(shape.empty(self.topology.device) for shape in boundary)
        for tensor in tensors:
            dist.recv(tensor, self.topology.owner(stage), group=self.topology.group)
        return boundary, tensors


def _returning(boundary: Boundary, flags: list[bool]) -> Boundary:
    return tuple(replace(shape, returns=flag) for shape, flag in zip(boundary, flags, strict=True))


def signature(leaves: list[Any], structure: Any) -> Hashable:
    """Give a key of what shapes inside the model depend on, of a flattened tree."""
    return structure, tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor)
        else x if isinstance(x, (int, float, str, bool, type(None))) else type(x).__qualname__
        for x in leaves
    )  # fmt: skip


# -- a pass that replicas do not run -------------------------------------------------------------------------------


class _ZeroAllGather:
    """Take the place of FSDP's all-gather: what other processes hold of the weights is zeros."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Leave ``output_tensor`` as it is; FSDP has put this process's share into it."""


@contextmanager
def _alone(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Run forwards of ``stages`` that exchange nothing over shards of weights or experts.

    What comes out has the shapes, types and graph that it has otherwise, and other values. Exchanges among the processes that have the
    same batch (``tp``, ``cp``) are made, as all of these run the same stages at the same time.
    """
    modules = [module for stage in stages for module in stage.modules()]
    groups = [group for module in modules if isinstance(module, FSDPModule) for group in _groups(module)]
    dispatchers = [d for module in modules if isinstance(d := getattr(module, "dispatcher", None), AllToAllDispatcher)]
    readers = [(reader, reader.groups) for stage in stages for reader in token_readers(stage)]
    before = [(group, group._all_gather_comm) for group in groups]
    for group in groups:
        group._all_gather_comm = _ZeroAllGather()
    for dispatcher in dispatchers:
        dispatcher.alone = True
    for reader, known in readers:
        reader.groups = TokenGroups(same=known.same)
    try:
        yield
    finally:
        for group, gather in before:
            group._all_gather_comm = gather
        for dispatcher in dispatchers:
            dispatcher.alone = False
        for reader, known in readers:
            reader.groups = known


def _groups(module: Any) -> list[Any]:
    """Return the parameter groups of an FSDP unit.

    Its public setter refuses units of several groups, as blocks with experts are.
    """
    found: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return found
