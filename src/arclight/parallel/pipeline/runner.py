"""The runner of a pipeline: a batch becomes micro-batches, which a schedule takes through the stages, there and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.spread import own_parts
from arclight.parallel.context import over_sequences, shard_arguments
from arclight.parallel.pipeline.partition import stages_of
from arclight.parallel.pipeline.upstream import Boundary, Schedule, ScheduleKind, Stage, TensorShape, that_fits
from arclight.parallel.plan import PlanError
from arclight.parallel.running import Runnable, Split, with_positions


class Part(nn.Module):
    """What one stage calls: its part of the model and, on the last stage, the module's loss after it."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], tuple[Tensor, Tensor]] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.share: Tensor | float = 1.0
        """What losses are multiplied by before their backward."""
        self.totals: list[Tensor] = []
        self.counts: list[Tensor] = []
        self.autocast: Any = nullcontext()
        """What forwards run in. Backwards must not, and lie in the same schedule."""

    def forward(self, *args: Any, targets: Any = None, **kwargs: Any) -> Any:
        with self.autocast:
            return self._forward(*args, targets=targets, **kwargs)

    def _forward(self, *args: Any, targets: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.loss is None:
            return output.contiguous() if isinstance(output, Tensor) else tuple(x.contiguous() for x in output)
        total, count = self.loss(output, targets)
        self.totals.append(total.detach().double())
        self.counts.append(torch.as_tensor(count))
        return total * self.share


@dataclass(frozen=True)
class Line:
    """Where this process stands among those of its pipeline."""

    group: dist.ProcessGroup
    stages: int
    kind: ScheduleKind
    device: torch.device

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def own(self) -> list[int]:
        """Numbers of the stages that this process has."""
        return stages_of(dist.get_rank(self.group), self.ranks, self.stages, self.kind.v_shaped)

    def owner(self, stage: int) -> int:
        """The process (as all of them are numbered) that has a stage."""
        places = range(self.ranks)
        place = next(r for r in places if stage in stages_of(r, self.ranks, self.stages, self.kind.v_shaped))
        return dist.get_global_rank(self.group, place)


class PipelineRunner:
    """Runs the steps of a module whose model is cut into stages; see `arclight.parallel.running`.

    A batch is cut along its samples into ``micro_batches`` parts, or fewer where it has fewer samples; parts may differ in size.
    With gradients switched off it is evaluated, by forwards only. The loss and its count are the same on all processes of the
    pipeline. cp: the mesh over which sequences are cut. data: the group of processes that see other tokens with the same layers, over
    which FSDP averages gradients within the schedule; None where there are none.
    """

    def __init__(
        self, parts: dict[int, Part], line: Line, micro_batches: int, cp: Any = None, data: dist.ProcessGroup | None = None
    ) -> None:  # fmt: skip
        self.parts, self.line, self.micro_batches, self.cp, self.data = parts, line, micro_batches, cp, data
        self._boundaries: dict[Any, dict[int, Boundary]] = {}
        self._schedules: dict[Any, Schedule] = {}
        self._kept: tuple[Tensor, ...] = ()
        self._parameters = [p for part in parts.values() for p in part.parameters() if p.requires_grad]
        self._trains = {n: any(p.requires_grad for p in part.parameters()) for n, part in parts.items()}

    def __call__(self, module: Runnable, batch: Any) -> tuple[Tensor, Tensor]:
        pieces = self._pieces(module, batch)
        if not torch.is_grad_enabled():
            return self._shared(*self._run(pieces, backward=False))
        share = self._share(module, batch)
        for part in self.parts.values():
            part.share = share
        if hasattr(module, "scale_losses"):
            module.scale_losses(share)
        held = _Gradients(self._parameters)
        totals = self._run(pieces, backward=True)
        gradients = held.taken()
        total, count = self._shared(*totals)
        factor = (self.cp.size() if self.cp is not None else 1) / share
        start = torch.zeros((), device=self.line.device, requires_grad=True)
        return _Computed.apply(start, total, gradients, factor, self.data), count

    def _pieces(self, module: Any, batch: Any) -> list[Split]:
        """The micro-batches: as the module cuts them, where it does so itself (``micro_batches(batch, number)``)."""
        if hasattr(module, "micro_batches"):
            own: list[Split] = module.micro_batches(batch, self.micro_batches)
            return own
        split = with_positions(module.split_batch(batch))
        if self.cp is not None:
            split = shard_arguments(split, self.cp)
        return micro_batches(split, self.micro_batches)

    def _share(self, module: Any, batch: Any) -> Tensor:
        """1 / the mean over processes of what their batches count, if the module says that: gradients then have their final size from the
        start, which is kind to half types. Alike on all processes that have the same layers.
        """
        weight = torch.ones((), dtype=torch.float64, device=self.line.device)
        with suppress(AttributeError, NotImplementedError):  # of a module that does not say
            weight = torch.as_tensor(module.batch_weight(batch), device=self.line.device).double()
        if self.data is not None:
            dist.all_reduce(weight, group=self.data)
            weight /= dist.get_world_size(self.data)
        return torch.where(weight > 0, weight, 1.0).reciprocal()

    def _run(self, pieces: list[Split], backward: bool) -> tuple[Tensor, Tensor]:
        """Sums of loss and count over all micro-batches where the last stage is; zeros elsewhere."""
        device = self.line.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        for part in self.parts.values():
            part.autocast = torch.autocast(device, dtype) if enabled else nullcontext()
        with torch.autocast(device, enabled=False):
            return self._run_pieces(pieces, backward)

    def _run_pieces(self, pieces: list[Split], backward: bool) -> tuple[Tensor, Tensor]:
        schedule = self._schedule(pieces, backward)
        for part in self.parts.values():
            part.totals.clear()
            part.counts.clear()
        last = self.parts.get(self.line.stages - 1)
        keywords = [{**kwargs, "targets": targets} if last is not None else kwargs for _, kwargs, targets in pieces]
        schedule.run([args for args, _, _ in pieces], keywords)
        if not backward:
            self._let_go()
        zero = torch.zeros((), device=self.line.device)
        if last is None:
            return zero, zero
        return torch.stack(last.totals).sum(), torch.stack(last.counts).sum().to(self.line.device)

    def _shared(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and count of the whole batch, on every process of the pipeline."""
        both = torch.stack((total.double(), count.double()))
        dist.broadcast(both, self.line.owner(self.line.stages - 1), group=self.line.group)
        total, count = both[0], both[1].long()
        if self.cp is None:
            return total, count
        return over_sequences(total, count, self.cp)

    # -- schedules and what crosses the cuts -----------------------------------------------------------------------

    def _schedule(self, pieces: list[Split], backward: bool) -> Schedule:
        """For micro-batches of these shapes, made when they first come."""
        line, shapes = self.line, [_signature(piece) for piece in pieces]
        key = (backward, *shapes)
        if key not in self._schedules:
            for piece, shape in zip(pieces, shapes, strict=True):
                if shape not in self._boundaries:
                    self._agree(shape)
                    self._boundaries[shape] = self._cross(piece)
            kind = that_fits(line.kind, len(pieces), line.ranks, backward)
            if backward and kind is not line.kind:
                rank_zero_warn(
                    f"a batch of {len(pieces)} micro-batches does not fit the schedule: it runs by a simpler one"
                )
            found = [self._boundaries[shape] for shape in shapes]
            stages = [
                Stage(
                    part, number, line.stages, line.device, line.group,
                    [crossing.get(number - 1, ()) for crossing in found], [crossing.get(number, ()) for crossing in found],
                )
                for number, part in self.parts.items()
            ]  # fmt: skip
            self._schedules[key] = Schedule(kind, stages, len(pieces), backward)
        return self._schedules[key]

    def _agree(self, shape: Any) -> None:
        """All processes of a pipeline must have been given a batch of the same shape, or they would wait for each other."""
        shapes: list[Any] = [None] * self.line.ranks
        dist.all_gather_object(shapes, shape, group=self.line.group)
        if any(other != shape for other in shapes):
            raise ValueError(
                f"processes of one pipeline were given batches of different shapes: {shapes}; let all of them read the same samples "
                "(those of the data-parallel rank)"
            )

    @torch.no_grad()
    def _cross(self, piece: Split) -> dict[int, Boundary]:
        """By the number of the stage before it: what crosses each cut that this process has to do with.

        One micro-batch runs through the real stages but the last, one after another; what they count and draw on the way is put
        back.
        """
        args, kwargs, _ = piece
        line, crossing = self.line, dict[int, Boundary]()
        devices = [line.device] if line.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, device_type=line.device.type if devices else None):
            arrived: tuple[Tensor, ...] = ()
            for number, part in self.parts.items():
                if number > 0 and number - 1 not in self.parts:
                    crossing[number - 1], arrived = self._receive(number - 1)
                elif number > 0:
                    arrived = self._kept
                if number == line.stages - 1:
                    continue
                before = {name: buffer.clone() for name, buffer in part.named_buffers()}
                output = part(*(args if number == 0 else arrived), **kwargs)
                for name, buffer in part.named_buffers():
                    buffer.copy_(before[name])
                self._kept = output if isinstance(output, tuple) else (output,)
                trains = self._trains[number] or any(shape.requires_grad for shape in crossing.get(number - 1, ()))
                crossing[number] = tuple(TensorShape.of(x, trains) for x in self._kept)
                if number + 1 not in self.parts:
                    self._send(number + 1, crossing[number], self._kept)
        self._kept = ()
        self._let_go()
        return crossing

    def _send(self, stage: int, boundary: Boundary, tensors: tuple[Tensor, ...]) -> None:
        owner, group = self.line.owner(stage), self.line.group
        dist.send_object_list([boundary], owner, group=group, device=self.line.device)
        for tensor in tensors:
            dist.send(tensor, owner, group=group)

    def _receive(self, stage: int) -> tuple[Boundary, tuple[Tensor, ...]]:
        owner, box = self.line.owner(stage), [None]
        dist.recv_object_list(box, owner, group=self.line.group, device=self.line.device)
        boundary: Boundary = box[0]  # type: ignore[assignment]
        tensors = tuple(shape.empty(self.line.device) for shape in boundary)
        for tensor in tensors:
            dist.recv(tensor, owner, group=self.line.group)
        return boundary, tensors

    def _let_go(self) -> None:
        """After forwards that no backward follows: weights that FSDP gathered would stay, and be used after the next update."""
        from torch.distributed.fsdp import FSDPModule

        for part in self.parts.values():
            for unit in part.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()


class _Gradients:
    """The gradients of one step, apart from those that parameters have from steps before."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.new: list[Tensor | None] = []

    def taken(self) -> _Gradients:
        """Take the step's gradients off the parameters, which have those from before again."""
        self.new = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self.before, strict=True):
            parameter.grad = gradient
        self.before = []
        return self

    def put(self, scale: Tensor) -> None:
        """Add them to the parameters', multiplied by ``scale``."""
        pairs = [(p, new) for p, new in zip(self.parameters, self.new, strict=True) if new is not None]
        self.new = []
        if not pairs:
            return
        torch._foreach_mul_(own_parts([new for _, new in pairs]), scale)
        sums = [(p.grad, new) for p, new in pairs if p.grad is not None]
        if sums:
            torch._foreach_add_(own_parts([old for old, _ in sums]), own_parts([new for _, new in sums]))
        for parameter, new in pairs:
            if parameter.grad is None:
                parameter.grad = new


class _Computed(torch.autograd.Function):
    """A loss whose gradients are there before its backward, which scales them."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, total: Tensor, gradients: _Gradients, factor: Tensor, data: dist.ProcessGroup | None
    ) -> Tensor:  # fmt: skip
        ctx.gradients, ctx.factor, ctx.data = gradients, factor, data
        return total.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, ...]:
        if ctx.data is not None:  # FSDP has averaged over processes already: that is right if all of them scale alike
            both = torch.stack((scale, -scale))
            dist.all_reduce(both, dist.ReduceOp.MAX, group=ctx.data)
            largest, least = both[0], -both[1]
            torch._assert_async(
                largest - least <= 1e-4 * torch.maximum(largest.abs(), least.abs()),
                "data-parallel processes scale the gradients of their pipelines differently: give the module a batch_weight, so "
                "that losses count by what they are the mean of",
            )
            scale = largest
        ctx.gradients.put(scale * ctx.factor)
        return None, None, None, None, None


def micro_batches(split: Split, number: int) -> list[Split]:
    """``split`` cut along dimension 0 of its tensors into ``number`` parts, or as many as there are samples.

    Tensors without dimensions and all that is no tensor go into every part. Raises PlanError where tensors have different
    numbers of samples.
    """
    sizes = {tuple(leaf.shape)[0] for leaf in tree_flatten(split)[0] if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise PlanError(
            f"split_batch gave tensors with {' and '.join(map(str, sorted(sizes))) or 'no'} samples in dimension 0: "
            "micro-batches need the same number in all of them"
        )
    count = min(number, sizes.pop())

    def part(index: int) -> Split:
        cut: Split = tree_map_only(Tensor, lambda x: x.tensor_split(count)[index] if x.ndim else x, split)
        return cut

    return [part(index) for index in range(count)]


def _signature(piece: Split) -> Any:
    """What the shapes inside the model depend on."""
    leaves, structure = tree_flatten(piece)
    shown = tuple((tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return shown, str(structure)
