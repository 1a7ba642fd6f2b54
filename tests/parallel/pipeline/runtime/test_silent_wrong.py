"""Cases that torch's own pipelines compute wrongly in silence, or refuse, and ours do right.

Each test shows both, on real processes: the first half fails when torch has mended it, and may then go.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.processes import run
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from arclight.parallel import PlanError
from arclight.parallel.pipeline import PipeRunner, split
from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.table import schedule_kind

CPU, WIDTH, MICRO_BATCHES = torch.device("cpu"), 8, 4
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def chain(length: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(length))).double()


def batch(samples: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def brief_group() -> Any:
    """For what is expected to wait in vain."""
    dist.barrier()  # making a group waits no longer either
    return dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3))


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return mse_loss(output, targets, reduction="sum"), targets.numel()


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Of the whole model in one process."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def wrong(found: nn.Module, wanted: dict[str, Tensor | None]) -> float:
    """The largest relative error of gradients in ``found``; infinite for one that is missing."""
    worst = 0.0
    for name, parameter in found.named_parameters():
        reference = wanted[name]
        if reference is None or parameter.grad is None:
            worst = worst if reference is parameter.grad else float("inf")
        else:
            worst = max(worst, float((parameter.grad - reference).abs().max() / reference.abs().max()))
    return worst


def bare(
    model: nn.Sequential, schedule: str, loss: Callable[..., Tensor] | None = mse_loss, group: Any = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda part: part, micro_batches: int = MICRO_BATCHES,
) -> tuple[Any, dict[int, nn.Module]]:  # fmt: skip
    """torch's schedule over ``model``, of which each stage has as many members; and the parts of this process."""
    kind, ranks, rank = schedule_kind(schedule), dist.get_world_size(group), dist.get_rank(group)
    stages = ranks * kind.stages_per_process
    each = len(model) // stages
    parts = {n: model[each * n : each * (n + 1)] for n in stages_of(rank, ranks, stages, kind.v_shaped)}
    own = [PipelineStage(wrap(part), n, stages, CPU, group=group) for n, part in parts.items()]
    made = get_schedule_class(schedule)
    given = own[0] if issubclass(made, PipelineScheduleSingle) else own
    return made(given, micro_batches, loss_fn=loss), parts


def bare_step(schedule: Any, parts: dict[int, nn.Module], x: Tensor, y: Tensor, last: int) -> Any:
    return schedule.step(*([x] if 0 in parts else []), target=y if last in parts else None)


def ours(
    model: nn.Module, schedule: str, example: Tensor, stages: int | None = None, group: Any = None, **options: Any
) -> PipeRunner:
    ranks = dist.get_world_size(group)
    stages = stages or ranks * schedule_kind(schedule).stages_per_process
    pipe = split(model, (example,), stages=stages, policy=even_cuts)
    return pipe.on(group, schedule=schedule, **({"micro_batches": MICRO_BATCHES, "loss": squares} | options))


def worst_of(runner: PipeRunner, wanted: dict[str, Tensor | None]) -> float:
    return max(wrong(stage, wanted) for stage in runner.stages.values())


def frozen(rank: int) -> None:
    x, y = batch()
    for schedule in SPLIT_BACKWARD:
        whole = chain(8)
        whole[:3].requires_grad_(False)  # stages have two members each: the second is frozen in part
        wanted = gradients_of(whole, mse_loss(whole(x), y))
        model = copy.deepcopy(whole)
        model.zero_grad()
        torchs, parts = bare(model, schedule)
        bare_step(torchs, parts, x, y, 3)
        lost = sum(
            p.requires_grad and (p.grad is None or not torch.allclose(p.grad, wanted[name]))
            for n, part in parts.items()
            for name, p in part.named_parameters()
        )
        everywhere = torch.tensor(lost)
        dist.all_reduce(everywhere)
        assert everywhere > 0
        runner = ours(copy.deepcopy(whole), schedule, x)
        runner.step(x, targets=y)
        assert worst_of(runner, wanted) < 1e-12


class Tied(nn.Module):
    """Tokens to logits by the same weights, and something between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.between = nn.Embedding(20, WIDTH), chain(2)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.between(self.embed(tokens)))


def mean_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), targets.flatten())


def entropy(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, labels = output.flatten(0, 1), targets.flatten()
    return cross_entropy(logits, labels, reduction="sum", ignore_index=-100), (labels != -100).sum()


def words(samples: int = 8) -> tuple[Tensor, Tensor]:
    found = torch.randint(0, 20, (2, samples, 5), generator=torch.Generator().manual_seed(0))
    return found[0], found[1]


def tied(rank: int) -> None:
    x, y = words()
    whole = Tied().double()
    wanted = gradients_of(whole, mean_entropy(whole(x), y))
    model = copy.deepcopy(whole)
    model.zero_grad()
    traced = pipeline(model, (x[:2],), split_spec={"between.1": SplitPoint.BEGINNING})
    stage = traced.build_stage(rank, CPU)
    get_schedule_class("GPipe")(stage, MICRO_BATCHES, mean_entropy).step(*([x] if rank == 0 else []), target=y)
    (shared,) = (p for p in stage.submod.parameters() if p.shape == (20, WIDTH) and p.grad is not None)
    assert (shared.grad - wanted["embed.weight"]).abs().max() / wanted["embed.weight"].abs().max() > 0.1
    for schedule in ("1F1B", "ZBVZeroBubble"):  # in a V both users are on one process
        runner = ours(copy.deepcopy(whole), schedule, x, loss=entropy)
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.1)
        runner.step(x, targets=y)
        assert worst_of(runner, wanted) < 1e-12
        assert float(runner.total_norm()) == pytest.approx(
            float(nn.utils.get_total_norm([gradient for gradient in wanted.values() if gradient is not None]))
        )
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad()
            runner.step(x, targets=y)
            runner.clip_grad_norm_(0.1)
        same_everywhere(runner)
        everyones: list[Any] = [None] * 2
        dist.all_gather_object(everyones, list(runner.state_dict()))
        assert sorted(itertools.chain(*everyones)) == sorted(whole.state_dict())


def same_everywhere(runner: PipeRunner) -> None:
    """Copies of shared parameters have equal bits."""
    for name, users in runner.pipe.shared.items():
        if len({runner.topology.place(stage) for stage in users}) > 1:
            own = next(stage.get_parameter(name) for n, stage in runner.stages.items() if n in users)
            copies = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(copies, own.detach())
            assert torch.equal(*copies)


def shrinking(rank: int) -> None:
    model = chain(2)
    torchs, _ = bare(copy.deepcopy(model), "GPipe", None, micro_batches=2)
    seen = []
    for samples in (8, 4):
        x, _ = batch(samples, samples)
        with torch.no_grad():
            output = torchs.step(*([x] if rank == 0 else []))
        if rank == 1:
            seen.append(output.shape == x.shape and torch.allclose(output, model(x)))
    assert seen == ([True, False] if rank else [])
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", *SPLIT_BACKWARD):
        whole = chain(4)
        runner = ours(copy.deepcopy(whole), schedule, batch()[0])
        for samples in (8, 5, 12, 8):
            x, y = batch(samples, samples)
            for parameter in runner.parameters():
                parameter.grad = None
            runner.step(x, targets=y)
            assert worst_of(runner, gradients_of(whole, mse_loss(whole(x), y))) < 1e-12
            found = runner.evaluate(x, outputs="everywhere").outputs
            assert torch.allclose(found, whole(x), rtol=1e-13)


class Counting(nn.Module):
    """Chooses, by numbers that come from the stage before, what to look up, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Linear(WIDTH, 5), nn.BatchNorm1d(5)
        self.table, self.last = nn.Embedding(5, 5), nn.BatchNorm1d(5)
        self.out = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        chosen = y.argmax(1)
        return self.out(self.last(self.table(chosen) + y))


def statistics(rank: int) -> None:
    x, y = batch(16)
    model = nn.Sequential(chain(1), nn.BatchNorm1d(WIDTH).double())
    torchs, parts = bare(copy.deepcopy(model), "GPipe")
    bare_step(torchs, parts, x, y, 1)
    if rank == 1:
        assert int(parts[1][0].num_batches_tracked) == MICRO_BATCHES + 1
    whole = Counting().double()
    for schedule in ("1F1B", "ZBVZeroBubble"):
        alone = copy.deepcopy(whole)
        losses = [
            mse_loss(alone(some), wanted, reduction="sum") / y.numel()
            for some, wanted in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        ]
        wanted = gradients_of(alone, sum(losses[1:], losses[0]))
        runner = ours(copy.deepcopy(whole), schedule, x)
        runner.step(x, targets=y)
        assert worst_of(runner, wanted) < 1e-12
        buffers = dict(alone.named_buffers())
        found = {name: value for stage in runner.stages.values() for name, value in stage.named_buffers()}
        assert all(torch.equal(value, buffers[name]) for name, value in found.items())
        tracked = [value for name, value in found.items() if name.endswith("num_batches_tracked")]
        assert all(value == MICRO_BATCHES for value in tracked)
        everywhere = torch.tensor(len(tracked))
        dist.all_reduce(everywhere)
        assert everywhere == 2


def masked(rank: int) -> None:
    x, y = words()
    for row in range(len(y)):
        y[row, : row // 2] = -100
    whole = Tied().double()
    whole.head.weight = nn.Parameter(whole.head.weight.detach().clone())
    wanted = gradients_of(whole, mean_entropy(whole(x), y))
    model = nn.Sequential(copy.deepcopy(whole.embed), *copy.deepcopy(whole.between), copy.deepcopy(whole.head))
    model.zero_grad()
    torchs, parts = bare(model, "1F1B", mean_entropy)
    bare_step(torchs, parts, x, y, 1)
    name, own = ("embed.weight", parts[0][0].weight) if rank == 0 else ("head.weight", parts[1][1].weight)
    assert (own.grad - wanted[name]).abs().max() / wanted[name].abs().max() > 0.05
    for options in (
        {"loss": entropy},
        {"loss": mean_entropy, "weight": lambda labels: (labels != -100).sum()},
    ):
        runner = ours(copy.deepcopy(whole), "1F1B", x, **options)
        result = runner.step(x, targets=y)
        assert worst_of(runner, wanted) < 1e-12
        assert float(result.loss) == pytest.approx(float(mean_entropy(whole(x), y)), rel=1e-13)
        assert int(result.count) == int((y != -100).sum())
    blind = ours(copy.deepcopy(whole), "1F1B", x, loss=mean_entropy, group=dist.new_group([0, 1]))
    with pytest.raises((PlanError, RuntimeError), match="what it is the mean of is not known"):
        blind.step(x, targets=y)


def evaluation(rank: int) -> None:
    x, y = batch()
    for schedule in ("ZBVZeroBubble", "DualPipeV"):
        group = brief_group()
        torchs, parts = bare(chain(4), schedule, group=group)
        with pytest.raises((AssertionError, RuntimeError)), torch.no_grad():
            torchs.eval(*([x] if 0 in parts else []), target=y if 3 in parts else None)
            if rank == 1:
                raise AssertionError("this process has nothing to wait for")
        whole = chain(4)
        runner = ours(copy.deepcopy(whole), schedule, x)
        for _ in range(2):
            found = runner.evaluate(x, targets=y, outputs="everywhere")
            assert torch.allclose(found.outputs, whole(x), rtol=1e-13)
            assert float(found.loss) == pytest.approx(float(mse_loss(whole(x), y)), rel=1e-13)
            runner.step(x, targets=y)


def sizes(rank: int) -> None:
    group = brief_group()
    x, y = batch(10)
    torchs, parts = bare(chain(2), "GPipe", group=group)
    with pytest.raises((RuntimeError, ValueError)):  # uneven
        bare_step(torchs, parts, x, y, 1)
        if rank == 0:
            raise RuntimeError("this process only sent")
    x, y = batch(3)
    torchs, parts = bare(chain(2), "GPipe")
    with pytest.raises((ValueError, AssertionError, RuntimeError)):  # fewer samples than micro-batches
        bare_step(torchs, parts, x, y, 1)
    with pytest.raises(ValueError, match="must be greater than or equal to the number of stages"):
        bare(chain(2), "1F1B", micro_batches=1)
    for schedule, samples in itertools.product(("1F1B", "Interleaved1F1B", *SPLIT_BACKWARD), (10, 3, 1)):
        x, y = batch(samples)
        whole = chain(4)
        runner = ours(copy.deepcopy(whole), schedule, x)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                runner.step(x, targets=y)
        told = [str(one.message) for one in said if "Reducing micro-batches from 4 to" in str(one.message)]
        assert len(told) == (rank == 0 and samples < MICRO_BATCHES)
        wanted = gradients_of(whole, 2 * mse_loss(whole(x), y))
        assert worst_of(runner, wanted) < 1e-12


def fewer_than_stages(rank: int) -> None:
    x, y = batch()
    whole = chain(4)
    for schedule in ("1F1B", "ZB-H1", "Interleaved1F1B", "DualPipeV"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            runner = ours(copy.deepcopy(whole), schedule, x, micro_batches=1)
            for samples in (8, 6):
                x, y = batch(samples)
                for parameter in runner.parameters():
                    parameter.grad = None
                runner.step(x, targets=y)
                assert worst_of(runner, gradients_of(whole, mse_loss(whole(x), y))) < 1e-12
        assert len([one for one in said if "runs by a simpler one" in str(one.message)]) <= 1


class Independent(nn.Module):
    """Its middle learns a gate that does not depend on what comes in, and that another part applies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.third, self.fourth = nn.Embedding(1, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        gate = self.gate(torch.zeros(1, dtype=torch.long))
        return self.fourth(self.third(x.tanh()) * gate)


class GateStage(nn.Module):
    def __init__(self, whole: Independent, number: int) -> None:
        super().__init__()
        self.number = number
        for name in (("first",), ("second", "gate"), ("third",), ("fourth",))[number]:
            setattr(self, name, getattr(whole, name))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Any:
        if self.number == 0:
            return self.first(x).tanh()
        if self.number == 1:
            return self.second(x), self.gate(torch.zeros(1, dtype=torch.long)).expand(len(x), -1).contiguous()
        return self.third(x.tanh()) * gate if self.number == 2 else self.fourth(x)


def beside_the_input(rank: int) -> None:
    x, y = batch()
    whole = Independent().double()
    wanted = gradients_of(whole, mse_loss(whole(x), y))
    model = copy.deepcopy(whole)
    model.zero_grad()
    own = [PipelineStage(GateStage(model, n), n, 4, CPU) for n in (rank, rank + 2)]
    torchs = get_schedule_class("InterleavedZeroBubble")(own, MICRO_BATCHES, loss_fn=mse_loss)
    bare_step(torchs, {rank: own[0].submod, rank + 2: own[1].submod}, x, y, 3)
    if rank == 1:
        assert model.gate.weight.grad is None  # and nothing was said
    for schedule in SPLIT_BACKWARD:
        runner = ours(copy.deepcopy(whole), schedule, x)
        runner.step(x, targets=y)
        assert worst_of(runner, wanted) < 1e-12


class Skipping(nn.Module):
    """Use the output of the first part again in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(chain(4))

    def forward(self, x: Tensor) -> Tensor:
        early = self.members[0](x)
        late = self.members[2](self.members[1](early))
        return self.members[3](late + early)


def skips(rank: int) -> None:
    x, y = batch()
    whole = Skipping().double()
    wanted = gradients_of(whole, mse_loss(whole(x), y))
    model = copy.deepcopy(whole)
    model.zero_grad()
    spec = {f"members.{n}": SplitPoint.BEGINNING for n in (1, 2, 3)}
    traced = pipeline(model, (x[:2],), split_spec=spec)
    group = brief_group()
    own = [traced.build_stage(n, CPU, group) for n in (rank, rank + 2)]
    torchs = get_schedule_class("Interleaved1F1B")(own, MICRO_BATCHES, loss_fn=mse_loss)
    with pytest.raises(RuntimeError):
        torchs.step(*([x] if rank == 0 else []), target=y if rank == 1 else None)
    for schedule in ("Interleaved1F1B", *SPLIT_BACKWARD):
        runner = ours(copy.deepcopy(whole), schedule, x)
        runner.step(x, targets=y)
        assert worst_of(runner, wanted) < 1e-12


@pytest.mark.parametrize(
    "what",
    [
        frozen, tied, statistics, masked, fewer_than_stages, beside_the_input,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (shrinking, evaluation, sizes, skips)),
    ],
)  # fmt: skip
def test_on_two_processes(what: Callable[[int], None], tmp_path: Path) -> None:
    run(2, tmp_path, what)


def replicated(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    data, stage = mesh.get_group("data"), mesh.get_group("stage")
    x, y = batch(16)
    some, theirs = x.chunk(2)[mesh.get_local_rank("data")], y.chunk(2)[mesh.get_local_rank("data")]
    for schedule in ("1F1B", *SPLIT_BACKWARD):
        whole = chain(4)
        wanted = gradients_of(whole, mse_loss(whole(x), y))
        if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
            model = copy.deepcopy(whole)
            model.zero_grad()
            torchs, parts = bare(
                model, schedule, group=stage, wrap=lambda part: DistributedDataParallel(part, process_group=data)
            )
            bare_step(torchs, parts, some, theirs, 3)
            lost = [
                float((p.grad - wanted[name]).abs().max() / wanted[name].abs().max())
                for n, part in parts.items()
                for name, p in part.named_parameters()
            ]
            worst = torch.tensor(max(lost))
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            assert worst > 0.1
        runner = ours(copy.deepcopy(whole), schedule, some, group=stage, data=data)
        for _ in range(2):
            result = runner.step(some, targets=theirs)
        assert worst_of(runner, {name: 2 * grad for name, grad in wanted.items() if grad is not None}) < 1e-12
        assert float(result.loss) == pytest.approx(float(mse_loss(whole(x), y)), rel=1e-13)


@pytest.mark.slow
def test_gradients_over_replicas_and_split_backwards(tmp_path: Path) -> None:
    run(4, tmp_path, replicated)


def wrapped(rank: int) -> None:
    model = chain(2)
    pipe = split(model, (batch()[0],), stages=2, policy=even_cuts)
    pipe.stages[rank] = DistributedDataParallel(pipe.stages[rank])  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="misses those of split backwards: give the pipeline the bare model and data="):
        pipe.on(schedule="1F1B", loss=squares)


def test_models_wrapped_in_ddp_are_refused(tmp_path: Path) -> None:
    run(2, tmp_path, wrapped)
