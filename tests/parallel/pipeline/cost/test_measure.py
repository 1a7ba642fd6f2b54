"""Measured costs of parts with known answers: parts that sleep, products and tensors counted by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.processes import run
from tests.parallel.pipeline.naps import undisturbed
from tests.parallel.pipeline.zoo import ZOO
from torch import Tensor, nn

from arclight.parallel import PlanError
from arclight.parallel.hardware import hardware
from arclight.parallel.pipeline import split
from arclight.parallel.pipeline.call_graph import Call, CallGraph, Value
from arclight.parallel.pipeline.cost.measure import closed_places, measure, measure_link, predict, predict_stages
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.splitting.stage_assignment import StageAssignment
from arclight.parallel.pipeline.splitting.traced.traced_stage import trace_model
from arclight.parallel.pipeline.unit_costs import Link, ModelCosts, Tie, UnitCost

EXACT = replace(hardware("cpu"), fp32=1.0, bf16=1.0, achieved=1.0, attention=1.0, bandwidth=1e9, launch=1e-9)
"""A device that makes a TFLOP/s of products, and for which all else takes no time."""


def chain(model: nn.Module, outputs: list[int], **fields: Any) -> CallGraph:
    """The graph of children that follow one another."""
    calls = []
    for number, (name, child) in enumerate(model.named_children()):
        parameters = tuple(f"{name}.{own}" for own, _ in child.named_parameters())
        reads = frozenset({Value(number - 1)}) if number else frozenset[Value]()
        calls.append(Call(name, parameters, reads, (outputs[number],)))
    return CallGraph(tuple(calls), frozenset({Value(len(calls) - 1)}), **fields)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(there / 1e3)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.back / 1e3)
        return gradient, None, None


class Sleeping(nn.Module):
    """Sleeps so many milliseconds in forward, for the gradient of its input, and for that of its weight."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.milliseconds = forward, inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        forward, inputs, weights = self.milliseconds
        out: Tensor = _Sleep.apply(x, forward, inputs) * _Sleep.apply(self.weight, 0, weights)
        return out


def test_forward_and_both_halves_of_backward_are_timed_separately() -> None:
    asleep = [(20, 60, 40), (40, 80, 20), (60, 20, 100)]
    wanted = [(20, 0, 40), *asleep[1:]]  # before the first one there is nothing to go back to

    def check(longer: float) -> None:
        model = nn.Sequential(*(Sleeping(*(longer * part for part in one)) for one in asleep))
        found = measure(model, chain(model, [16] * 3), (torch.ones(4),), repetitions=3)
        for unit, milliseconds in zip(found.units, wanted, strict=True):
            measured = [1e3 * part / longer for part in (unit.forward, unit.inputs, unit.weights)]
            assert measured == pytest.approx(milliseconds, rel=0.1, abs=12)
        assert [unit.parameters for unit in found.units] == [4, 4, 4]
        assert found.source.startswith("measured on cpu")

    undisturbed(check)


def test_frozen_parts_have_no_half_of_the_weights() -> None:
    def check(longer: float) -> None:
        model = nn.Sequential(*(Sleeping(5 * longer, 60 * longer, 60 * longer) for _ in range(3)))
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        found = measure(model, chain(model, [16] * 3), (torch.ones(4),), repetitions=1).units
        assert found[0].inputs == found[0].weights == found[1].inputs == found[2].weights == 0
        assert 1e3 * found[1].weights / longer == pytest.approx(60, abs=25)
        assert 1e3 * found[2].inputs / longer == pytest.approx(60, abs=25)

    undisturbed(check)


def test_products_are_counted_by_hand() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False), nn.Linear(32, 512, bias=False)
        )
    found = predict(model, chain(model, [0] * 3), (torch.empty(16, 64, device="meta"),), device=EXACT).units
    flops = [2 * 16 * a * b for a, b in ((64, 128), (128, 32), (32, 512))]
    for number, (unit, count) in enumerate(zip(found, flops, strict=True)):
        assert unit.forward * 1e12 == pytest.approx(count, rel=1e-3)
        assert unit.inputs * 1e12 == pytest.approx(count if number else 0, rel=1e-3, abs=1)
        assert unit.weights * 1e12 == pytest.approx(count, rel=1e-3)


@pytest.mark.parametrize("how", [measure, predict])
def test_saved_activations_match_a_count_by_hand(how: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.5))
    n = 4 * 32
    outputs = [n * 16] * 5
    found = how(model, chain(model, outputs), (torch.ones(32, 8),))
    # What a call gives is held once, by it. A dropout keeps a mask besides: of bytes, where it is drawn on a CPU as numbers.
    assert [unit.saved_activation_bytes for unit in found.units[:4]] == outputs[:4]
    assert outputs[4] < found.units[4].saved_activation_bytes <= 2 * outputs[4]
    assert [found.before(at) for at in (0, 1, 3, 5)] == [0, n * 16, n * 16, 0]
    stages = found.stages((0, 2))
    assert [stage.saved_activation_bytes for stage in stages] == [
        2 * n * 16,
        sum(u.saved_activation_bytes for u in found.units[2:]) + n * 16,
    ]


class Glued(nn.Module):
    """Glue before, between and after, a parameter that is used in glue, one module that is called twice, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        mask = x > 0
        if not mask.any():  # looks at numbers that every process has
            raise ValueError("no positive number")
        a = self.first((x + self.position) * mask)
        b = self.second(a.relu_() * scale)
        c = self.second(a + b)
        return {"loss": (c * mask).square().mean(), "out": c}


GLUED = CallGraph(
    (
        Call("first", ("position", "first.weight", "first.bias"), frozenset(), (128,)),
        Call("second", ("second.weight", "second.bias"), frozenset({Value(0)}), (128,)),
        Call("second", ("second.weight", "second.bias"), frozenset({Value(0), Value(1)}), (128,)),
    ),
    frozenset({Value(2)}),
)


@pytest.mark.parametrize("how", [measure, predict])
def test_glue_belongs_to_the_call_after_it(how: Any) -> None:
    model = Glued()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = how(model, GLUED, ((torch.randn(4, 8),), {"scale": 2.0}))
    assert all(unit.forward > 0 and unit.backward > 0 for unit in found.units)
    assert [unit.inputs > 0 for unit in found.units] == [False, True, True]
    if how is predict:
        assert all(unit.weights > 0 for unit in found.units)
    assert found.ties == (Tie((1, 2), 4 * 72),)
    assert found.stages((0, 1))[1].parameters == 4 * 72  # held once by the stage that calls it twice
    assert found.crossing == (0, 128, 256)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "name",
    ["timm-resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-tied", "timm-vit", "yolov5"))],
)
def test_real_models_hold_what_is_predicted(name: str) -> None:
    """Everything that autograd keeps of a real forward is foreseen to the byte, part by part (dropout off: its kernels differ)."""
    torch.manual_seed(0)
    kind = ZOO[name]
    model = kind.build()
    for module in model.modules():
        module.dropout = (
            0.0 if isinstance(getattr(module, "dropout", None), float) else getattr(module, "dropout", None)
        )
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    example = kind.example(2, kind.lengths[0])
    graph = capture_call_graph(model, None, *example)
    predicted, measured = predict(model, graph, example), measure(model, graph, example, repetitions=1)
    for one, other, call in zip(predicted.units, measured.units, graph.calls, strict=True):
        assert one.saved_activation_bytes == pytest.approx(other.saved_activation_bytes, rel=0.02), call.name
        assert (one.parameters, one.output) == (other.parameters, other.output)
        assert (one.forward > 0) == bool(one.saved_activation_bytes)
        assert one.backward > 0 or not one.parameters
    assert predicted.ties == measured.ties
    assert bool(predicted.ties) == kind.shared
    assert predicted.samples == 2


def test_a_traced_graph_costs_what_its_modules_do() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32), nn.Linear(32, 512))
    example = (torch.randn(16, 64),)
    traced = trace_model(model, example, {})
    found = predict_stages(
        traced.stages(StageAssignment(traced.graph, (0, 1, 2))), (0, 1, 1), model, traced.graph, example, device=EXACT
    )
    expected = predict(model, chain(model, [0] * 3), example, device=EXACT)
    assert len(found.units) == 3
    for one, other in zip(found.units, expected.units, strict=True):
        assert one.forward == pytest.approx(other.forward, rel=1e-3)
        assert one.inputs == pytest.approx(other.inputs, rel=1e-3, abs=1e-12)
        assert one.weights == pytest.approx(other.weights, rel=1e-3)
        assert one.parameters == other.parameters


def test_there_is_no_cut_between_a_change_in_place_and_its_reader() -> None:
    first, second, third = (Call(name, outputs=(8,), reads=reads) for name, reads in
                            (("a", frozenset[Value]()), ("b", frozenset({Value(0)})), ("c", frozenset({Value(0), Value(1)}))))  # fmt: skip
    changing = replace(second, modifies=frozenset({Value(0)}))
    assert closed_places(CallGraph((first, second, third), frozenset({Value(2)}))) == ()
    assert closed_places(CallGraph((first, changing, third), frozenset({Value(2)}))) == (2,)
    drawing = [replace(call, draws=frozenset({1})) for call in (first, third)]
    assert closed_places(CallGraph((drawing[0], second, drawing[1]), frozenset({Value(2)}))) == (1, 2)


def test_a_large_vocabulary_counts_where_parameters_do_not_say() -> None:
    """An embedding has as many parameters as the output, and computes next to nothing."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50_000, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 50_000))
    example = (torch.empty(64, 128, dtype=torch.long, device="meta"),)
    pipe = split(model, example, stages=2)
    assert pipe.cuts == (0, 9)
    equal = tuple(UnitCost(1.0, 1.0, 1.0) for _ in pipe.graph.calls)
    assert split(model, example, stages=2, costs=ModelCosts(equal)).cuts == (0, 5)


def test_numbers_that_batches_draw_and_statistics_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    found = measure(model, chain(model, [64] * 3), (torch.ones(4, 4),), repetitions=1)
    assert torch.equal(torch.rand(3), expected)
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert len(found.units) == 3


def test_a_graph_of_another_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = chain(model, [64] * 2)
    other = CallGraph((graph.calls[1], graph.calls[0]), graph.result)
    with pytest.raises(PlanError, match="the forward calls 0 where the graph has 1: capture the model again"):
        measure(model, other, (torch.ones(4, 4),))
    more = CallGraph((*graph.calls, graph.calls[1]), graph.result)
    with pytest.raises(PlanError, match="the forward made 2 of the 3 calls"):
        predict(model, more, (torch.ones(4, 4),))
    with pytest.raises(PlanError, match="a model on the meta device cannot be timed: use predict"):
        measure(model.to("meta"), graph, (torch.ones(4, 4),))
    assert not any(module._forward_hooks for module in model.modules())


def test_costs_of_other_sizes_lie_on_a_line() -> None:
    one = ModelCosts((UnitCost(1.0, 2.0, 3.0, 10, 100, 20),), (0,), samples=1)
    four = ModelCosts((UnitCost(2.5, 5.0, 3.0, 10, 400, 80),), (0,), samples=4)
    two = one.line_to(four, 2)
    assert two.samples == 2
    assert two.units[0] == UnitCost(1.5, 3.0, 3.0, 10, 200, 40)
    assert four.scaled(2).units[0] == UnitCost(1.25, 2.5, 1.5, 10, 200, 40)
    again = one.recomputed()
    assert again.units[0] == UnitCost(1.0, 3.0, 3.0, 10, 20, 20)
    assert one.moment == 100
    assert Link(0.5, 100.0).seconds(200) == 2.5


def _links_agree(rank: int, folder: Path) -> None:
    link = measure_link()
    (folder / f"link-{rank}").write_text(f"{link.latency!r} {link.bandwidth!r}")
    alone = dist.new_group([0])
    if rank == 0:
        with pytest.raises(PlanError, match="a link joins two processes"):
            measure_link(alone)


def test_a_link_is_measured_once_for_all(tmp_path: Path) -> None:
    run(3, tmp_path, _links_agree, tmp_path)
    (said,) = {path.read_text() for path in tmp_path.glob("link-*")}
    latency, bandwidth = map(float, said.split())
    assert 0 < latency < 1
    assert 1e6 < bandwidth < 1e12
