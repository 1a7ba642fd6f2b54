"""Pipelines: gradients of every schedule, cuts, predictions and the choice of a plan against measured steps, overhead beside bare torch, loading.

Stages whose time matters compute by sleeping, so that four processes take the same time on two processors as on four machines.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.parallel.pipeline.cost import chains
from tests.parallel.pipeline.emulated import emulate_all, median_step
from tests.parallel.pipeline.runtime.schedule_grid import CASES, Words, batch_of, gradient_errors, summed

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import pipeline
from arclight.parallel.pipeline.cost.partition import partition
from arclight.parallel.pipeline.cost.pipeline_search import choose
from arclight.parallel.pipeline.schedule.simulation import simulate
from arclight.parallel.pipeline.schedule.step_trace import bubble
from arclight.parallel.pipeline.schedule.table import SCHEDULES, schedule_kind
from arclight.parallel.pipeline.unit_costs import ModelCosts, UnitCost
from benchmarks.results import Ratio, median, paired, parser, publish, versions
from benchmarks.stage_loading import load_peak_over_stage
from benchmarks.stage_overhead import overhead

RANKS, MICRO_BATCHES = 4, 8
Row = tuple[str, str, str]


def on_processes(count: int, work: Callable[[], Any]) -> Any:
    """What the first of ``count`` processes gets from ``work``, which all of them do."""

    def here(_: al.Fabric) -> Any:
        torch.set_num_threads(1)
        return work()

    fabric = al.Fabric(accelerator="cpu", devices=count, strategy=DDPStrategy(start_method="fork"))
    return fabric.launch(here)


def gradients(schedules: Sequence[str], dtype: torch.dtype) -> float:
    """The largest relative error of any gradient over schedules, cases, and 2 and 4 processes."""
    return max(max(on_processes(ranks, lambda: gradient_errors(dtype, schedules, CASES)).values()) for ranks in (2, 4))


def evaluation(schedules: Sequence[str]) -> float:
    """The largest error of losses that pipelines of 4 evaluate, before and after a step with gradients, in float64."""

    def errors() -> float:
        torch.manual_seed(0)
        whole, worst = Words("plain").double(), 0.0
        for name in schedules:
            (tokens, labels), stages = batch_of("uneven", 1), RANKS * schedule_kind(name).stages_per_process
            total, count = summed(whole(tokens), labels)
            runner = pipeline.split(whole, (tokens,), stages=stages).on(
                schedule=name, micro_batches=MICRO_BATCHES, loss=summed
            )
            for _ in range(2):
                worst = max(
                    worst,
                    abs(float(runner.evaluate(tokens, targets=labels).loss) / float((total / count).detach()) - 1),
                )
                runner.step(tokens, targets=labels)
        return worst

    return float(on_processes(RANKS, errors))


def stages_of(units: Sequence[UnitCost], cuts: Sequence[int]) -> list[UnitCost]:
    return ModelCosts(tuple(units)).stages(cuts)


def balanced(sizes: chains.Sizes, seconds: float, turns: int) -> tuple[Ratio, Ratio]:
    """Compare measured steps of 1F1B over four processes: as many layers on each over ours, and torchtitan's cut over ours.

    seconds: that one micro-batch takes in all stages.
    """
    units = sizes.units()
    scale = seconds / sum(unit.seconds for unit in units)
    units = [UnitCost(u.forward * scale, u.inputs * scale, u.weights * scale, u.parameters) for u in units]
    cuts = [
        partition(units, RANKS, MICRO_BATCHES).cuts, chains.by_layers(sizes.layers, RANKS), chains.by_torchtitan(sizes.layers, RANKS),
    ]  # fmt: skip
    runs = [("1F1B", stages_of(units, cut)) for cut in cuts]
    found = [traces[0].seconds for traces in emulate_all(runs * turns, RANKS, MICRO_BATCHES, steps=1)]
    ours, equal, titan = (found[cut :: len(cuts)] for cut in range(len(cuts)))
    return paired(equal, ours), paired(titan, ours)


def predicted(schedules: Sequence[str], unit: float, steps: int) -> dict[str, tuple[Ratio, float, float]]:
    """Compare each schedule's simulated with its measured seconds; its bubble in the median step, and in theory.

    unit: seconds of a forward, and of each half of a backward, on a process.
    """
    own = {name: SCHEDULES[name].stages_per_process for name in schedules}
    runs = [(name, [UnitCost(*(unit / own[name] for _ in "FIW"))] * (RANKS * own[name])) for name in schedules]
    found = {}
    for (name, costs), traces in zip(runs, emulate_all(runs, RANKS, MICRO_BATCHES, steps=steps), strict=True):
        measured, expected = median_step(traces), simulate(name, costs, RANKS, MICRO_BATCHES)
        ratio = median([expected.seconds / trace.seconds for trace in traces], same=1.0)
        found[name] = ratio, bubble(measured), bubble(expected)
    return found


def regret(seconds: float, steps: int) -> tuple[Ratio, list[tuple[str, float, float]]]:
    """Measure how much longer the planner's choice takes than the fastest of twelve; predicted and measured seconds of each.

    seconds: of the whole batch of 16 samples through all stages. Each action also costs a thirtieth of a micro-batch of one sample.
    """
    units = chains.GPT2.units()
    scale = seconds / 16 / sum(unit.seconds for unit in units)

    def costs(samples: int) -> ModelCosts:
        size = (samples + 0.5) * scale
        return ModelCosts(
            tuple(UnitCost(u.forward * size, u.inputs * size, u.weights * size, u.parameters) for u in units),
            samples=samples,
        )

    tried = []
    for number in (4, 8, 16):
        for name in ("1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble"):
            one = choose(
                (costs(1), costs(4)), 16, RANKS, stages=RANKS, schedules=name, micro_batches=number, recompute=False
            )
            tried.append(one.best[0])
    measured = []
    for option in tried:
        stages = stages_of(costs(option.samples).units, option.cuts)
        traces = emulate_all([(option.setting.schedule, stages)], RANKS, option.setting.micro_batches, steps=steps)[0]
        measured.append([trace.seconds for trace in traces])
    middle = [statistics.median(times) for times in measured]
    chosen = min(range(len(tried)), key=lambda number: tried[number].seconds)
    table = [(str(option.setting), option.seconds, real) for option, real in zip(tried, middle, strict=True)]
    return paired(measured[chosen], measured[middle.index(min(middle))]).minus_one(), table


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    quick, rows, figures = options.quick, list[Row](), dict[str, float | Ratio]()
    names = ("1F1B", "ZBVZeroBubble") if quick else tuple(SCHEDULES)
    steps = 2 if quick else 8
    for dtype, key in ((torch.float64, "f64"), (torch.float32, "f32")):
        figures[f"max_gradient_error_{key}"] = error = gradients(names, dtype)
        rows.append(
            (f"gradients, {key}: {len(names)} schedules x {len(CASES)} cases x 2, 4 processes", f"{error:.1e}", "")
        )
    figures["max_evaluation_error"] = evaluation(names)
    rows.append((f"evaluation, f64: {len(names)} schedules", f"{figures['max_evaluation_error']:.1e}", ""))
    cuts: list[Ratio] = []
    for sizes, key in ((chains.GPT2, "gpt2"), (chains.QWEN2_5, "qwen")):
        equal, figures[f"balanced_over_titan_{key}"] = balanced(sizes, 0.24 if quick else 0.5, steps)
        cuts.append(equal)
        rows.append(
            (
                f"cut of {key}: equal numbers of layers, torchtitan's rule",
                str(equal),
                str(figures[f"balanced_over_titan_{key}"]),
            )
        )
    figures["balanced_over_equal"] = min(cuts, key=lambda ratio: ratio.value)
    compared = predicted(names if quick else tuple(SCHEDULES), 0.03 if quick else 0.06, steps)
    for name, (ratio, there, theory) in compared.items():
        rows.append((f"{name}: simulated over measured, bubble (theory)", str(ratio), f"{there:.1%} ({theory:.1%})"))
    figures["simulated_over_measured"] = max(
        (ratio for ratio, *_ in compared.values()), key=lambda ratio: abs(ratio.value - 1)
    )
    figures["bubble_points_from_theory"] = max(100 * abs(there - theory) for _, there, theory in compared.values())
    figures["planner_regret"], table = regret(1.6 if quick else 4.0, steps)
    rows += [(f"{name}: predicted, measured step", f"{said:.2f} s", f"{real:.2f} s") for name, said, real in table]
    cost = overhead(30 if quick else 200)
    figures["overhead_over_bare"], figures["overhead_over_bare_cpu"] = cost["wall"], cost["cpu"]
    rows.append(
        (
            "step of a tiny MLP, 4 stages x 8 micro-batches, over bare torch: clock, processors",
            str(cost["wall"]),
            str(cost["cpu"]),
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        loads = [load_peak_over_stage(Path(folder)) for _ in range(2 if quick else 4)]
        figures["load_peak_over_stage"] = median(loads)
    rows.append(("peak memory to load a stage of four, over the stage", str(figures["load_peak_over_stage"]), ""))
    publish(
        "pipeline", "Pipelines", ("", "", ""), rows, figures, options=options, packages=versions("torch", "arclight-torch"),
        notes="Gloo processes on one machine. Gradients: largest difference to micro-batches one after another over the largest value. Cuts, predictions "
        "and the planner's choice are measured with stages that sleep as long as their units would take; 4 processes, 8 micro-batches. "
        "`simulated_over_measured` and `bubble_points_from_theory` (percentage points) are the worst of all schedules, "
        "`balanced_over_equal` the worse of the two models. Ratios are of single steps: cuts take turns by steps, as ours and bare torch do.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
