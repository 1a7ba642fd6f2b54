"""A pipeline gives what one process gives: on every schedule, for batches of any size, with parts frozen, and when it only evaluates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import arclight as al
from arclight.fabric.distributed.sharding import accept_full_weights
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import Mesh, Plan, PlanError, initialize, parallelize
from arclight.parallel.pipeline.runtime.install import install
from arclight.parallel.pipeline.schedule.actions import write_csv
from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.table import SCHEDULES, check_pipeline, order_of
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers
from arclight.parallel.step_protocol import Split, batch_loss, check_samples
from arclight.text import build_model
from arclight.text.model.balance import routers

# -- the cut -------------------------------------------------------------------------------------------------------


def small(**fields: Any) -> nn.Module:
    sizes = {"vocab_size": 96, "dim": 32, "layers": 8, "heads": 4, "kv_heads": 2, "hidden": 48}
    return build_model("llama3-debug", **(sizes | fields))


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    cuts = assign_layers(small(vocab_size=4096), 4)
    assert [cut.others for cut in cuts] == [("tok_embeddings",), (), (), ("norm", "output")]
    assert [len(cut.layers) for cut in cuts] == [2, 2, 3, 1]
    assert [name for cut in cuts for name in cut.layers] == [str(i) for i in range(8)]
    assert [stages_of(rank, 2, 4, v_shaped=True) for rank in range(2)] == [[0, 3], [1, 2]]
    assert [stages_of(rank, 2, 4, v_shaped=False) for rank in range(2)] == [[0, 2], [1, 3]]


def test_infeasible_pipelines_are_refused_with_the_fix() -> None:
    with pytest.raises(PlanError, match=r"tok_embeddings.weight and output.weight are one parameter.*tied = false"):
        assign_layers(small(tied=True), 2)
    with pytest.raises(PlanError, match="8 layers are too few for 16 stages"):
        assign_layers(small(), 16)
    with pytest.raises(PlanError, match="no ModuleDict `layers`"):
        assign_layers(nn.Sequential(nn.Linear(2, 2)), 2)
    loose = small()
    loose.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(PlanError, match="extra is a parameter of the model itself"):
        assign_layers(loose, 2)
    with pytest.raises(PlanError, match="no pipeline schedule 'ring'; choose GPipe, 1F1B"):
        check_pipeline(Plan(pp=2, schedule="ring"))
    with pytest.raises(PlanError, match="DualPipeV over pp = 4 cannot take 6 micro-batches: set micro_batches = 8"):
        check_pipeline(Plan(pp=4, schedule="DualPipeV", micro_batches=6))
    with pytest.raises(
        PlanError, match="Interleaved1F1B over pp = 4 cannot take 9 micro-batches: set micro_batches = 10"
    ):
        check_pipeline(Plan(pp=4, schedule="Interleaved1F1B", micro_batches=9))
    with pytest.raises(PlanError, match="compiled blocks cannot: set compile = none"):
        check_pipeline(Plan(pp=2, schedule="ZBVZeroBubble", compile="aot_eager"))
    with pytest.raises(PlanError, match="4 and 8 samples in dimension 0"):
        check_samples(((torch.zeros(4, 2),), {"mask": torch.zeros(8, 2)}, torch.zeros(4)))


# -- running it ----------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """A module as a pipeline wants it; what a batch counts differs from micro-batch to micro-batch."""

    def __init__(self, frozen: int = 0, layers: int = 8) -> None:
        super().__init__()
        self.model = small(layers=layers).double()
        initialize(self.model, 3)
        self.runner: Any = None
        self.calls = 0
        trained = [f"layers.{i}." for i in range(frozen, layers)] + ["norm", "output"]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not frozen or name.startswith(tuple(trained)))

    def split_batch(self, batch: tuple[Tensor, Tensor]) -> Split:
        return (batch[0],), {"positions": None, "documents": None}, batch[1]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        total = cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def batch_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != -100).sum()


def batch(samples: int, length: int = 24) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 96, (samples, length + 1), generator=torch.Generator().manual_seed(samples))
    labels = tokens[:, 1:].clone()
    for row in range(samples):
        labels[row, : 5 * row % length] = -100
    return tokens[:, :-1].contiguous(), labels


def one_step(module: Language, samples: int) -> tuple[float, int, dict[str, Tensor | None]]:
    module.zero_grad()
    total, count = batch_loss(module, batch(samples))
    (total / count).backward()
    gradients = {
        name: None if p.grad is None else getattr(p.grad, "full_tensor", lambda g=p.grad: g)()
        for name, p in module.named_parameters()
    }
    return float(total.detach()), int(count), gradients


@functools.cache
def alone(frozen: int, layers: int, samples: int) -> tuple[float, int, dict[str, Tensor | None]]:
    """A step of one process that has the whole model; all schedules are compared with it."""
    total, count, gradients = one_step(Language(frozen, layers), samples)
    return total, count, {name: None if g is None else g.clone() for name, g in gradients.items()}


def on_stages(schedule: str, samples: list[int], frozen: int, layers: int = 8) -> dict[str, float]:
    """Largest differences of each step from one process."""
    plan = Plan(pp=dist.get_world_size(), schedule=schedule, micro_batches=2 * dist.get_world_size())
    mesh, module, errors = Mesh(plan), Language(frozen, layers), {}
    install(module, mesh, lambda model, root: parallelize(model, mesh, root=root), torch.device("cpu"))
    for number, size in enumerate(samples):
        total, count, wanted = alone(frozen, layers, size)
        found_total, found_count, found = one_step(module, size)
        assert found_count == count
        assert found_total == pytest.approx(total, rel=1e-13)
        worst = 0.0
        for name, gradient in found.items():
            reference = wanted[name]
            assert (gradient is None) == (reference is None), name
            if gradient is not None and reference is not None:
                worst = max(worst, float((gradient - reference).abs().max()))
        errors[f"{schedule} {number} {size} {frozen}"] = worst
        with torch.no_grad():
            evaluated = batch_loss(module, batch(size))
        assert (float(evaluated[0]), int(evaluated[1])) == pytest.approx((total, count), rel=1e-13)
    return errors


def everywhere(processes: int, function: Any, *arguments: Any) -> list[Any]:
    """Return the result of ``function(...)`` on each of several real processes."""

    def run(fabric: al.Fabric) -> list[Any]:
        torch.set_num_threads(1)
        return fabric.strategy.all_gather_object(function(*arguments))

    fabric = al.Fabric(accelerator="cpu", devices=processes, strategy=DDPStrategy(start_method="fork"))
    return fabric.launch(run)


QUICK = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""One stage on a process or two, interleaved or V-shaped, with whole or split backward passes."""


def all_schedules(schedules: Sequence[str], sizes: list[int], frozen: Sequence[str]) -> dict[str, float]:
    """frozen: schedules of which a stage trains nothing, and one in part."""
    errors: dict[str, float] = {}
    pairs = dist.get_world_size() // 2
    layers = 4 * pairs  # one for each of two stages on a process
    for schedule in schedules:
        errors |= on_stages(schedule, [*(size * pairs for size in sizes), 1], 0, layers)
        if schedule in frozen:
            errors |= on_stages(schedule, [6 * pairs], 3 * pairs - 2, layers)
    return errors


@pytest.mark.parametrize(
    ("processes", "schedules", "sizes", "frozen"),
    [
        (2, QUICK, [7, 8], QUICK),
        pytest.param(2, tuple(SCHEDULES), [8, 7, 8, 3], tuple(SCHEDULES), marks=pytest.mark.slow),
        pytest.param(4, tuple(SCHEDULES), [7, 8], QUICK, marks=pytest.mark.slow),
    ],
    ids=["quick", "2", "4"],
)
def test_all_schedules_equal_one_process(
    processes: int, schedules: Sequence[str], sizes: list[int], frozen: Sequence[str]
) -> None:
    """Uneven micro-batches, batches that shrink and grow again, fewer samples than micro-batches or stages."""
    pairs = processes // 2
    for size in (*(size * pairs for size in sizes), 1):
        alone(0, 4 * pairs, size)  # known to the processes, which are forked
    alone(3 * pairs - 2, 4 * pairs, 6 * pairs)
    for errors in everywhere(processes, all_schedules, schedules, sizes, frozen):
        assert len(errors) == (len(sizes) + 1) * len(schedules) + len(frozen)
        assert max(errors.values()) < 1e-12, {name: error for name, error in errors.items() if error >= 1e-12}


def other_orders(path: str) -> dict[str, float]:
    return on_stages(path, [8, 7, 3], frozen=0) | on_stages("InterleavedZeroBubble:4", [8, 7], frozen=3)


@pytest.mark.slow
def test_a_file_of_actions_and_more_stages_on_each_process_run_too(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(write_csv(order_of("V-Min", 2, 4)))
    for errors in everywhere(2, other_orders, str(path)):
        assert len(errors) == 5
        assert max(errors.values()) < 1e-12


def accumulated() -> tuple[float, float]:
    plan = Plan(pp=2, schedule="InterleavedZeroBubble", micro_batches=2)
    mesh, module = Mesh(plan), Language()
    install(module, mesh, lambda model, root: parallelize(model, mesh, root=root), torch.device("cpu"))
    first, second = (one_step(module, size)[2] for size in (4, 5))
    module.zero_grad()
    for size in (4, 5):
        total, count = batch_loss(module, batch(size))
        (total / count * size).backward()
    both = dict(module.named_parameters())
    error = max(
        float((both[name].grad.full_tensor() - 4 * first[name] - 5 * second[name]).abs().max()) for name in first
    )
    return error, max(float(gradient.abs().max()) for gradient in first.values())


def test_gradients_of_several_batches_add_up_each_with_its_own_scale() -> None:
    for error, size in everywhere(2, accumulated):
        assert error < 1e-14
        assert size > 1e-2


def different_batches() -> str:
    mesh, module = Mesh(Plan(pp=2)), Language()
    install(module, mesh, lambda model, root: parallelize(model, mesh, root=root), torch.device("cpu"))
    with pytest.raises(ValueError, match="given batches of different shapes") as caught:
        batch_loss(module, batch(4 + 4 * dist.get_rank()))
    return str(caught.value)


def test_processes_of_a_pipeline_that_read_different_batches_are_reported() -> None:
    for message in everywhere(2, different_batches):
        assert "(1, 24)" in message
        assert "(2, 24)" in message


def parts_of_a_model() -> tuple[list[str], int]:
    """Names that this process holds of a model that was nowhere, and how often its last stage's loss was asked for."""
    mesh = Mesh(Plan(pp=2, schedule="ZBVZeroBubble", micro_batches=3))
    module = Language()
    with torch.device("meta"):
        module.model = small()
    install(module, mesh, lambda model, root: parallelize(model, mesh, seed=3, root=root), torch.device("cpu"))
    whole = small()
    initialize(whole, 3)
    wanted = dict(whole.named_parameters())
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), wanted[name])
    batch_loss(module, batch(6))[0].backward()
    accept_full_weights(module)
    module.load_state_dict({f"model.{name}": 2 * parameter for name, parameter in wanted.items()})
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), 2 * wanted[name])
    return [name for name, _ in module.model.named_parameters()], module.calls


def test_each_process_has_its_stages_under_their_names_and_first_weights() -> None:
    (first, calls), (second, none) = everywhere(2, parts_of_a_model)
    assert {name.split(".")[1] for name in first if "layers" in name} == {"0", "1", "6", "7"}
    assert {name.split(".")[1] for name in second if "layers" in name} == {"2", "3", "4", "5"}
    assert set(first) | set(second) == {name for name, _ in small().named_parameters()}
    assert not set(first) & set(second)
    assert (calls, none) == (3, 0)  # the micro-batch that shows the shapes ends before the loss


class Experts(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(
            "deepseek-v3-debug", vocab_size=96, dim=32, layers=4, heads=4, hidden=48, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=8,
        ).double()  # fmt: skip
        initialize(self.model, 3)

    def counted(self) -> dict[str, list[int]]:
        return {name: router.counts.tolist() for name, router in routers(self.model)}


def expert_loads(schedule: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    alone, module = Experts(), Experts()
    mesh = Mesh(Plan(pp=2, schedule=schedule, micro_batches=4))
    install(module, mesh, lambda model, root: parallelize(model, mesh, root=root), torch.device("cpu"))
    for one in (alone, module):
        for _ in range(2):
            batch_loss(one, batch(6))[0].backward()
    return alone.counted(), module.counted()


@pytest.mark.parametrize(
    "schedule",
    [pytest.param("1F1B", marks=pytest.mark.slow), "ZBVZeroBubble"],
)
def test_expert_loads_of_backward_are_counted_once(schedule: str) -> None:
    found: dict[str, list[int]] = {}
    for wanted, own in everywhere(2, expert_loads, schedule):
        assert own == {name: wanted[name] for name in own}
        found |= own
    assert len(found) == 3
