"""Simulated steps of models and of split ones: costs are found out, the schedule is followed, and it is what then happens."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.parallel.pipeline.emulated import Sleeper
from tests.parallel.pipeline.naps import undisturbed
from torch import Tensor, nn

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import Plan, PlanError, pipeline
from arclight.parallel.pipeline.cost.measure import measure_stages, predict
from arclight.parallel.pipeline.cost.pipeline_search import choose
from arclight.parallel.pipeline.runtime.split_backward import backward_of_inputs
from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.step_trace import busy, peak_bytes
from arclight.parallel.pipeline.splitting.capture import capture_call_graph
from arclight.parallel.pipeline.unit_costs import Link, UnitCost
from arclight.text import build_model

COST = UnitCost(0.006, 0.004, 0.005)


class Sleepers(nn.Module):
    """Units of known durations; what it counts and draws must not be disturbed by timing it."""

    def __init__(self, count: int, cost: UnitCost | None = None) -> None:
        super().__init__()
        self.units = nn.Sequential(*(Sleeper(cost or COST, first=False) for _ in range(count)))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.units(x)
        return out


def test_stages_cost_what_their_units_do() -> None:
    def check(longer: float) -> None:
        unit = UnitCost(longer * COST.forward, longer * COST.inputs, longer * COST.weights)
        stages_cost_what_their_units_do(unit)

    undisturbed(check)


def stages_cost_what_their_units_do(unit: UnitCost) -> None:
    model, x = Sleepers(5, unit), torch.ones(3, 16)
    pipe = pipeline.split(model, (x,), at=["units.1", "units.3", "units.4"])
    before = torch.get_rng_state()
    found = measure_stages(pipe.stages, [0, 1, 1, 1], (x,), repetitions=3)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for stage in pipe.stages for p in stage.parameters())
    for number, (cost, units) in enumerate(zip(found, (1, 2, 1, 1), strict=True)):
        assert 0.98 * units < cost.forward / unit.forward < 2 * units
        inputs = cost.inputs / unit.inputs
        assert inputs == 0 if number == 0 else 0.98 * units < inputs < 2 * units
        assert cost.backward >= 0.98 * units * unit.weights
        assert cost.parameters == 4 * units
        assert cost.output == (3 * 16 * 4 if number < 3 else 0)
        assert cost.saved_activation_bytes >= 3 * 16 * 4 * (number > 0)


def test_a_split_model_is_simulated_as_it_is_cut() -> None:
    model, x = Sleepers(8), torch.ones(3, 16)
    pipe = pipeline.split(model, (x,), stages=4)
    step = pipeline.simulate(pipe, (x,), "ZB-H1", micro_batches=6)
    assert (step.schedule, step.ranks, step.stages, step.micro_batches) == ("ZB-H1", 4, 4, 6)
    assert min(busy(step)) >= 0.98 * 6 * 2 * (COST.forward + COST.weights)
    folded = pipeline.simulate(pipe, (x,), Plan(pp=2, schedule="V-Half", micro_batches=4))
    assert (folded.schedule, folded.ranks, folded.stages, folded.micro_batches) == ("V-Half", 2, 4, 4)
    with pytest.raises(PlanError, match="V-Half has 6 stages: 4 costs were given"):
        pipeline.simulate(pipe, (x,), "V-Half", 4, processes=3)


class Kept:
    """Hold a tensor that a graph saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_the_backward_of_the_inputs_frees_nothing_and_keeps_gradients() -> None:
    """So a step with a split backward is not predicted to hold less before its W."""
    parts = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    model, x = nn.Sequential(*parts), torch.randn(5, 8)
    seen: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        seen.append(weakref.ref(kept))
        return kept

    given = torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        output = parts[1](given)
    alive = [one for one in seen if one() is not None]
    inner, rest = backward_of_inputs([output], [torch.ones(5, 8)], [given], parts[1].parameters())
    assert inner[0] is not None
    del output
    assert all(one() is not None for one in alive)
    assert sum(gradient.nbytes for gradient in rest.kept) == 5 * (16 + 8) * 4
    rest.run()
    assert rest.kept == []
    del rest
    assert all(one() is None for one in alive)

    model.zero_grad()
    pipe = pipeline.split(model, (x,), at=["1"])
    held = measure_stages(pipe.stages, [0, 1], (x,), repetitions=1)[1].saved_activation_bytes
    step = pipeline.simulate(pipe, (x,), "ZB-H1", micro_batches=4)
    last = {span.action: span.live for span in step.of(1)}
    assert last[Action(1, "F", 0)] == held
    assert last[Action(1, "I", 0)] == held + 5 * (16 + 8) * 4
    assert all(parameter.grad is None for stage in pipe.stages for parameter in stage.parameters())


def small(**fields: Any) -> nn.Module:
    sizes = {"vocab_size": 2048, "dim": 64, "layers": 8, "heads": 4, "kv_heads": 2, "hidden": 128}
    return build_model("llama3-debug", **(sizes | fields))


def test_a_model_that_is_nowhere_is_cut_and_simulated() -> None:
    with torch.device("meta"):
        model, tokens = small(layers=2), torch.zeros(2, 64, dtype=torch.long)
    example = ((tokens,), {})
    step = pipeline.simulate(model, example, "Interleaved1F1B", 8, processes=2, device="h100", optimizer=1.0)
    assert (step.ranks, step.stages, step.micro_batches) == (2, 4, 8)
    assert step.step_seconds == pytest.approx(step.seconds + 1.0)
    assert max(peak_bytes(step)) > 8 * 2 * 64 * 64
    slow = pipeline.simulate(model, example, "Interleaved1F1B", 8, processes=2, device="h100", link=Link(1e-3))
    assert slow.seconds > step.seconds + 2 * 3 * 1e-3
    costs = predict(model, capture_call_graph(model, None, *example), example, device="h100")
    best = choose(costs, batch=16, processes=2, stages=2, schedules="Interleaved1F1B", micro_batches=8).best[0]
    assert pipeline.simulate(best) is best.prediction
    assert best.prediction.seconds <= step.seconds * (1 + 1e-9)


def test_invalid_simulations_are_refused() -> None:
    model = small(layers=2)
    example = ((torch.zeros(2, 16, dtype=torch.long),), {})
    with pytest.raises(PlanError, match="say what the model is called with"):
        pipeline.simulate(model)
    with pytest.raises(PlanError, match="say over how many processes"):
        pipeline.simulate(model, example)
    with pytest.raises(PlanError, match=r"LoopedBFS makes 16 stages over 8 processes, and the model has \d+ parts"):
        pipeline.simulate(model, example, "LoopedBFS", processes=8, measured=False)
    with torch.device("meta"):
        nowhere = small(layers=2)
    pipe = pipeline.split(nowhere, example, stages=2)
    with pytest.raises(PlanError, match="on the meta device cannot be timed"):
        pipeline.simulate(pipe, example)


def steps_of_a_pipe(schedule: str) -> Any:
    torch.set_num_threads(1)
    model, x = Sleepers(8), torch.ones(8, 16)
    pipe = pipeline.split(model, (x[:1],), stages=8 if schedule == "V-Half" else 4)
    runner = pipe.on(schedule=schedule, micro_batches=8, loss=lambda output, _: (output.sum(), output.numel()))
    with pipeline.record(skip=1, steps=2) as run:
        for _ in range(3):
            runner.step(x)
    return min(run.traces, key=lambda trace: trace.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "V-Half"])
def test_a_split_model_takes_as_long_as_was_simulated(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "COST", replace(COST, forward=0.03, inputs=0.02, weights=0.025))
    model, x = Sleepers(8), torch.ones(1, 16)
    pipe = pipeline.split(model, (x,), stages=8 if schedule == "V-Half" else 4)
    expected = pipeline.simulate(pipe, (x,), schedule, micro_batches=8)

    def run(fabric: al.Fabric) -> list[Any]:
        return fabric.strategy.all_gather_object(steps_of_a_pipe(schedule))

    found = al.Fabric(accelerator="cpu", devices=4, strategy=DDPStrategy(start_method="fork")).launch(run)[0]
    assert found.schedule == expected.schedule
    assert found.seconds / expected.seconds == pytest.approx(1, abs=0.1)
