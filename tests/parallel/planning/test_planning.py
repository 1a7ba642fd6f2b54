"""Predictions of a plan match its processes, and published figures of such runs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.parallel.planning.planning_script import CASES, batch, loss
from torch import nn

from arclight.parallel import Plan, PlanError
from arclight.parallel.hardware import HardwareError, hardware
from arclight.parallel.op_recorder import OpRecorder
from arclight.parallel.pipeline.schedule.orders import peak_in_flight
from arclight.parallel.pipeline.schedule.table import SCHEDULES, order_of, schedule_kind
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers
from arclight.parallel.planning import estimate, search
from arclight.parallel.planning.chain import Chain, Workload
from arclight.parallel.planning.mesh_search import Limits
from arclight.parallel.planning.pp_layout import links_of_ranks, max_in_flight, messages_per_micro_batch, stages
from arclight.parallel.planning.sharded_shapes import LayerSharding
from arclight.parallel.planning.timing import exchange_seconds, idle_share
from arclight.text import build_model
from arclight.text.model.decoder import flops_per_token

SCRIPT = Path(__file__).with_name("planning_script.py")
GIB = 2**30


def real_run(processes: int, quick: bool) -> None:
    """Bytes of every collective are predicted exactly, memory within a tenth."""
    first, *others = warm.run_ranks(processes, SCRIPT, "quick" if quick else "others", timeout=900)
    for done in (*others, first):
        assert done.returncode == 0, done.stderr[-4000:]
    found = {(line := json.loads(text))["case"]: line for text in first.stdout.splitlines() if text.startswith("{")}
    cases = [case for case in CASES if case.plan.world_size == processes and case.quick == quick]
    assert found.keys() == {name for case in cases for name in case.names}
    for name, one in found.items():
        measured, predicted = one["measured"], one["predicted"]
        assert predicted["bytes"] == measured["bytes"], name
        assert predicted["parameters"] == measured["parameters"], name
        assert predicted["optimizer"] == pytest.approx(measured["optimizer"], rel=1e-3), name  # it counts its steps too
        assert predicted["peak"] == pytest.approx(measured["peak"], rel=0.1), name


def test_quick_plans_do_what_is_predicted() -> None:
    real_run(2, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("processes", sorted({case.plan.world_size for case in CASES}))
def test_all_other_plans_do_what_is_predicted(processes: int) -> None:
    real_run(processes, quick=False)


def test_the_recorder_counts_by_hand() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 16, requires_grad=True)
    with OpRecorder() as recorder:
        y = x @ w
        z = y * 2
        del y
        assert recorder.live == 4 * 16 * 4  # z; the product is not needed for backward
        z.sum().backward()
    work = recorder.work()
    assert work.products == 2 * 4 * 8 * 16 * 2  # forward, and the gradient of w
    assert recorder.peak >= 2 * 4 * 16 * 4


def llama(name: str, samples: int, sequence: int = 8192, **options: Any) -> Chain:
    """A chain with its own number of samples; traces, which do not depend on it, are shared by all tests of such a model."""
    chain = copy.copy(one_sample(name, sequence, **options))
    chain.workload = dataclasses.replace(chain.workload, samples=samples)
    return chain


@functools.cache
def one_sample(name: str, sequence: int, **options: Any) -> Chain:
    loss = options.pop("loss", whole_logits)
    return Chain(Workload(lambda: build_model(name), batch, loss, 1, sequence, **options))


def whole_logits(model: nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(given[0]).flatten(0, 1).float(), given[1].flatten())


def test_arithmetic_is_that_of_the_usual_formula() -> None:
    """6 N + 12 L H C T for each token, with N without the embeddings: 57.9 GFLOP for Llama 3 8B at 8,192 tokens."""
    chain = llama("llama3-8b", 1)
    matrices = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # of all parameters: neither embeddings nor norms
    assert chain.parameters_in_all == 8_030_261_248
    assert chain.flops_per_sample / 8192 == pytest.approx(6 * matrices + 12 * 32 * 4096 * 8192, rel=1e-9)


# torchtitan's report of December 2024: 8 H100 with 500 W and HBM2e. Their products reach less than those of the usual 700 W.
SLOWER = dataclasses.replace(hardware("h100"), name="H100 500 W", achieved=0.52, attention=0.32, bandwidth=2039.0)


@pytest.mark.parametrize(
    ("compiled", "published"),
    [(False, 5762), pytest.param(True, 6667, marks=pytest.mark.slow)],
    ids=["eager", "compiled"],
)
def test_8b_on_8_gpus_as_published(compiled: bool, published: float) -> None:
    chain = llama("llama3-8b", 16, compiled=compiled, device=SLOWER)
    made = estimate(chain, Plan(dp_shard=8, activation_checkpointing="selective"), 2)
    assert made.tokens_per_second_per_gpu == pytest.approx(published, rel=0.2)
    assert 0.75 * 77 < made.worst.total / GIB < 1.05 * 82  # what their allocator had reserved: 77 and 82 GiB


@pytest.mark.slow
def test_70b_on_256_gpus_as_published() -> None:
    chain = llama("llama3-70b", 512, device=SLOWER)
    made = estimate(chain, Plan(dp_shard=32, tp=8, activation_checkpointing="full"), 16)
    assert made.tokens_per_second_per_gpu == pytest.approx(597, rel=0.25)  # torchtitan, bfloat16, June 2025


@pytest.mark.slow
def test_405b_gains_by_interleaving_as_published() -> None:
    """torchtitan, 512 H100, FSDP 8 x TP 8 x PP 8: 100 tokens/s with 1F1B, 128 interleaved (float8, so a ratio is compared)."""
    chain = llama("llama3-405b", 64)
    plan = Plan(dp_shard=8, tp=8, pp=8, activation_checkpointing="full")
    plain = estimate(chain, plan)
    interleaved = estimate(chain, dataclasses.replace(plan, schedule="Interleaved1F1B"))
    assert plain.step_seconds / interleaved.step_seconds == pytest.approx(1.28, rel=0.1)
    assert 60 < plain.tokens_per_second_per_gpu < 120


def test_8b_on_128_gpus_scales_as_published() -> None:
    """torchtitan, 8B on 8 and on 128 GPUs: 6,667 and 6,514 tokens/s for each, 98 %."""
    few = estimate(llama("llama3-8b", 16), Plan(dp_shard=8, activation_checkpointing="selective"), 2)
    many = estimate(llama("llama3-8b", 256), Plan(dp_shard=128, activation_checkpointing="selective"), 2)
    assert 0.93 < many.tokens_per_second_per_gpu / few.tokens_per_second_per_gpu <= 1.01


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "share"),
    [
        ("1F1B", 4, 8, 0.273), ("GPipe", 8, 32, 0.179), ("Interleaved1F1B", 4, 8, 0.158), ("Interleaved1F1B", 8, 16, 0.179),
        ("InterleavedZeroBubble", 4, 8, 0.059), ("ZBVZeroBubble", 8, 32, 0.035), ("DualPipeV", 4, 8, 0.059), ("DualPipeV", 8, 32, 0.035),
        ("ZB-H1", 4, 8, 0.111), ("ZB-H2", 8, 32, 0.068), ("V-Half", 8, 32, 0.081), ("V-Min", 8, 32, 0.119), ("V-ZB", 4, 8, 0.059),
    ],
)  # fmt: skip
def test_bubbles_of_schedules(schedule: str, stages: int, micro_batches: int, share: float) -> None:
    """Idle shares from simulating the schedules' own instructions, units F = I = W = 1."""
    plan = Plan(pp=stages, schedule=schedule, micro_batches=micro_batches)
    assert idle_share(plan, micro_batches) == pytest.approx(share, abs=0.001)


def test_collectives_by_hand() -> None:
    device = hardware("h100")
    slow = 1e9 / (device.network * 1e9)
    within = exchange_seconds(device, 8, 1, "all_gather", 1e9)
    assert within == pytest.approx(7 / 8 / device.link + 7 * device.link_latency * 1e-6)
    assert exchange_seconds(device, 16, 8, "all_gather", 1e9) == pytest.approx(15 / 16 * slow, rel=0.01)
    assert exchange_seconds(device, 64, 1, "all_gather", 1e9) == pytest.approx(7 / 8 / 8 * slow, rel=0.05)  # 8 adapters
    assert exchange_seconds(device, 8, 1, "all_reduce", 1e9) == pytest.approx(2 * within)
    assert exchange_seconds(device, 1, 1, "all_reduce", 1e9) == 0


def debug(samples: int = 16, sequence: int = 256, **options: Any) -> Chain:
    return llama("llama3-debug", samples, sequence, loss=loss, **options)


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("qwen3-moe", 1),
        *(
            pytest.param(family, 2, marks=pytest.mark.slow)
            for family in ("qwen3-moe", "gpt2", "deepseek-v3", "llama4", "qwen3")
        ),
    ],
)
def test_every_family_can_be_planned(family: str, tp: int) -> None:
    name = f"{family}-debug"
    chain = llama(name, 16, 256, loss=loss)
    assert chain.flops_per_sample / 256 == pytest.approx(flops_per_token(chain.model, 256), rel=0.06)
    for plan in (Plan(dp_shard=4, tp=tp), Plan(dp_shard=4, ep=4) if chain.experts else Plan(dp_shard=2, cp=2)):
        made = estimate(chain, plan, 2)
        whole = 4 * chain.parameters_in_all / plan.world_size  # tp leaves norms and routers whole on each process
        assert whole <= made.worst.parameters < 1.1 * whole


def test_more_cutting_takes_less_memory() -> None:
    chain = debug()
    totals = [
        estimate(chain, plan, 2).worst.total
        for plan in (Plan(), Plan(dp_shard=2), Plan(dp_shard=4), Plan(dp_shard=4, tp=2))
    ]
    assert totals == sorted(totals, reverse=True)
    kept = [
        estimate(chain, Plan(dp_shard=2, activation_checkpointing=how), 4).worst.total
        for how in ("none", "selective", "full")
    ]  # type: ignore[arg-type]
    assert kept == sorted(kept, reverse=True)


def test_a_pipeline_holds_what_is_in_flight() -> None:
    chain = debug(32)
    stages = {s: estimate(chain, Plan(pp=3, schedule=s)) for s in ("1F1B", "GPipe")}
    held = [memory.in_flight for memory in stages["1F1B"].memory]
    assert held[0] > held[1] > held[2] == 0  # the last stage goes back at once
    assert stages["GPipe"].memory[0].in_flight > 10 * held[0]
    assert sum(stages["1F1B"].layers) == 6
    assert any(message.dimension == "pp" for message in stages["1F1B"].traffic[0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_micro_batches_match_the_schedules(name: str) -> None:
    kind, compared = SCHEDULES[name], 0
    for processes, number in itertools.product((2, 4), (2, 3, 4, 6, 8, 12, 16)):
        if number < processes or not kind.fits(number, processes):
            continue
        plan = Plan(pp=processes, schedule=name, micro_batches=number)
        counted = peak_in_flight(order_of(name, processes, number))
        assert [max_in_flight(plan, process, number) for process in range(processes)] == counted, plan
        compared += 1
    assert compared > 4


def test_schedules_that_fill_the_bubble_are_found_where_blocks_are_not_compiled() -> None:
    limits = Limits(4, 1e12, {"pp": 4, "tp": 1, "dp_shard": 1}, samples=1)
    chain = debug(16, compiled=False)
    best = search(chain, limits).best[0]
    assert schedule_kind(best.plan.schedule).splits_backward or best.plan.schedule == "Interleaved1F1B"
    plain = search(chain, dataclasses.replace(limits, fixed=limits.fixed | {"schedule": "1F1B"})).best[0]
    assert best.step_seconds < plain.step_seconds
    assert best.idle < plain.idle
    found = search(debug(16), dataclasses.replace(limits, fixed=limits.fixed | {"compile": "inductor"}))
    (said,) = [one for one in found.rejected if "which compiled blocks cannot" in one.reason]
    assert said.change == "schedule ZB-H1"
    assert not any(schedule_kind(one.plan.schedule).splits_backward for one in found.best)


def test_a_pipeline_is_cut_as_it_is_run() -> None:
    chain = debug(32)
    for plan in (Plan(pp=3), Plan(pp=3, schedule="Interleaved1F1B"), Plan(pp=2, schedule="ZBVZeroBubble")):
        numbers = stages(plan, 0)
        parts = assign_layers(chain.model, plan.pp * len(numbers))
        kinds = links_of_ranks(chain, plan, 6)
        assert [sum(isinstance(kind, int) for kind in one) for one in kinds] == [
            sum(len(parts[stage].layers) for stage in stages(plan, process)) for process in range(plan.pp)
        ]
        assert kinds[0][0] == "first"
        assert [process for process, one in enumerate(kinds) if "last" in one] == [0 if plan.pp == 2 else 2]
    sent = {
        plan.schedule: [messages_per_micro_batch(plan, s) for s in range(3)]
        for plan in (Plan(pp=3, schedule=s) for s in SCHEDULES)
    }
    assert sent["1F1B"] == [1, 2, 1]
    assert sent["Interleaved1F1B"] == [3, 4, 3]
    assert sent["ZBVZeroBubble"] == [2, 4, 2]  # the last process gives its second stage what its first has made
    with pytest.raises(PlanError, match="cannot take 3 micro-batches"):
        estimate(debug(3), Plan(pp=2, schedule="DualPipeV"))


def test_a_search_finds_the_fastest_that_fits() -> None:
    chain = debug(64)
    free = search(chain, Limits(4, 1 * GIB, {"cp": 1}))
    assert free.best[0].plan.world_size == 4
    assert [one.step_seconds for one in free.best] == sorted(one.step_seconds for one in free.best)
    tight = search(chain, Limits(4, 0.5 * free.best[0].worst.total, {"cp": 1}))
    assert tight.best[0].worst.total <= 0.5 * free.best[0].worst.total
    assert tight.best[0].step_seconds >= free.best[0].step_seconds
    reasons = " ".join(one.reason for one in tight.rejected)
    assert "GiB too much" in reasons
    fixed = search(chain, Limits(4, GIB, {"cp": 1, "tp": 2, "activation_checkpointing": "full"}))
    assert {(one.plan.tp, one.plan.activation_checkpointing) for one in fixed.best} == {(2, "full")}


def test_infeasible_plans_are_refused_with_the_fix() -> None:
    chain = debug(16)
    with pytest.raises(PlanError, match=r"fits into 0\.0 GiB: the smallest .* needs .*; take more GPUs"):
        search(chain, Limits(4, 1024))
    with pytest.raises(PlanError, match=r"take more samples"):
        search(debug(3), Limits(16, GIB))
    with pytest.raises(PlanError, match=r"heads cannot be cut into tp = 8"):
        estimate(chain, Plan(tp=8))
    with pytest.raises(PlanError, match=r"use a multiple of 12, such as 24"):
        estimate(chain, Plan(dp_shard=6), 2)
    with pytest.raises(PlanError, match=r"leave some of pp = 4 stages idle"):
        estimate(debug(2), Plan(pp=4))
    with pytest.raises(PlanError, match=r"cpu_offload = True .* not predicted"):
        estimate(chain, Plan(dp_shard=2, cpu_offload=True))
    with pytest.raises(PlanError, match=r"the model has none: set ep = 1"):
        chain.costs(LayerSharding(ep=2), 1, "none")
    fixed = {"pp": 1, "cp": 1, "dp_replicate": 1, "activation_checkpointing": "none"}
    refused = search(chain, Limits(8, GIB, fixed)).rejected
    assert any("tp = 8" in one.reason for one in refused)


def test_any_module_can_be_planned() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 64)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)
            )
            self.last = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    workload = Workload(
        Net, lambda samples, length: torch.empty(samples, length, 32), lambda net, x: net(x).square().mean(), 8, 16,
        compute=torch.float32, compiled=False, device=hardware("cpu"),
    )  # fmt: skip
    chain = Chain(workload)
    assert chain.kinds == [0, 0, 0]
    made = estimate(chain, Plan(dp_shard=2), 2)
    assert made.worst.parameters == pytest.approx(4 * sum(p.numel() for p in Net().parameters()) / 2, rel=0.01)
    assert made.plan.tp == 1
    with pytest.raises(PlanError, match="declares no sharding"):
        estimate(chain, Plan(tp=2))
    with pytest.raises(PlanError, match="no ModuleDict `layers`"):
        estimate(chain, Plan(pp=2))


def test_devices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('like = "h100"\nmemory = 40\nnetwork = 10.5\n')
    mine = hardware(str(file))
    assert (mine.name, mine.memory, mine.network, mine.bf16) == ("H100 SXM 80GB", 40, 10.5, hardware("h100").bf16)
    for text, message in (
        ('like = "h100"\nmemori = 4', "did you mean memory"), ('like = "h100"\nbf16 = "fast"', "bf16 cannot be 'fast'"),
        ("memory = 4", "leaves out .*bf16.* add them"), ('like = "h100"\nbf16 = -1', "positive number"), ("memory =", "cannot be read"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(HardwareError, match=message):
            hardware(str(file))
    with pytest.raises(HardwareError, match="did you mean h100"):
        hardware("h1000")


@pytest.mark.slow
def test_65536_gpus_are_planned_quickly_in_little_memory() -> None:
    """Twenty seconds of a core and a GiB are promised; a busy machine takes longer, so that the processor's time is asked for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(Path(__file__).parents[3] / "benchmarks" / "planning.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["processes"] == 65536
    assert found["considered"] > 500
    assert 0.05 < found["mfu"] < 0.6
    assert found["gib"] < 1
    assert after.ru_utime - before.ru_utime < 60
