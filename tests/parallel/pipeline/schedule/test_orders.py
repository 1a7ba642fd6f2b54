"""Orders of schedules: those that torch runs, what papers say of the others, and what is no order is named."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as upstream

from arclight.parallel import Plan, PlanError
from arclight.parallel.pipeline.schedule.actions import Action, Order, read_csv, write_csv
from arclight.parallel.pipeline.schedule.orders import (
    check_order,
    load_order,
    peak_in_flight,
    shape_of,
    splits_backward,
)
from arclight.parallel.pipeline.schedule.simulation import simulate
from arclight.parallel.pipeline.schedule.step_trace import bubble
from arclight.parallel.pipeline.schedule.table import SCHEDULES, check_pipeline, order_of, schedule_kind, that_fits
from arclight.parallel.pipeline.unit_costs import UnitCost

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
SIZES = list(itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12, 17)))


def upstream_order(build: Any, processes: int, micro_batches: int, own: int) -> Order:
    stages: Any = [
        SimpleNamespace(num_stages=own * processes, group_size=processes, group_rank=0, stage_index=i, submod=None)
        for i in range(own)
    ]
    order = build(stages, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False).pipeline_order
    return tuple(
        tuple(
            Action(one.stage_index, KINDS[one.computation_type.name], one.microbatch_index)  # type: ignore[arg-type]
            for many in order[rank] if many is not None for one in many.sub_actions or (many,)
        )
        for rank in range(processes)
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_orders_are_those_of_upstream(name: str) -> None:
    kind, compared = SCHEDULES[name], 0
    for (processes, micro_batches), own in itertools.product(SIZES, (2,) if kind.v_shaped else (2, 3, 4)):
        if kind.fits(micro_batches, processes):
            wanted = upstream_order(upstream.get_schedule_class(name), processes, micro_batches, own)
            assert order_of(name, processes, micro_batches, own) == wanted, (processes, micro_batches, own)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_files_that_torch_writes_are_read(name: str, tmp_path: Path) -> None:
    """With idle places, and with pairs of actions."""
    own: Any = [SimpleNamespace(num_stages=8, group_size=4, group_rank=0, stage_index=i, submod=None) for i in range(2)]
    schedule: Any = upstream.get_schedule_class(name)(own, 8, loss_fn=lambda loss, _: loss)  # type: ignore[arg-type]
    path = tmp_path / "torch.csv"
    schedule._dump_csv(str(path), format="compute_only")
    assert ("OVERLAP_F_B" in path.read_text()) == (name == "DualPipeV")
    assert order_of(str(path), 4, 8) == order_of(name, 4, 8)
    schedule._dump_csv(str(path), format="compute_comms")
    with pytest.raises(PlanError, match=r"torch.csv: '.*' is not an action"):
        order_of(str(path), 4, 8)


class Recorder:
    """Stands in for a stage of one process: notes what a schedule has it do."""

    def __init__(self, number: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.is_last, self.has_backward = number, stages, False, True
        self.submod, self.group_size, self.group_rank = None, stages, number
        self.did: list[Action] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.did.append(Action(self.stage_index, "F", number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.did.append(Action(self.stage_index, "B", number))

    def perform_reduce_grad(self, _: int) -> None: ...

    def get_fwd_recv_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_orders_with_one_stage_a_process_are_what_upstream_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's table of 1F1B is wrong for the last process (forwards 1 to m), so its run is followed."""
    build = upstream.get_schedule_class(name)
    monkeypatch.setattr(build, "_initialize_stage", lambda *_: None)
    for processes, micro_batches in SIZES:
        if not SCHEDULES[name].fits(micro_batches, processes):
            continue
        stages = [Recorder(number, processes) for number in range(processes)]
        for stage in stages:
            schedule: Any = build(stage, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)  # type: ignore[arg-type]
            schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
        assert tuple(tuple(stage.did) for stage in stages) == order_of(name, processes, micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_can_be_run_and_is_kept_by_a_file(name: str, tmp_path: Path) -> None:
    kind = SCHEDULES[name]
    for processes, micro_batches in SIZES:
        if not kind.fits(micro_batches, processes):
            continue
        order = order_of(name, processes, micro_batches)
        check_order(order, kind.stages_per_process * processes, kind.v_shaped, micro_batches)
        assert splits_backward(order) <= kind.splits_backward
        assert read_csv(write_csv(order)) == order
    path = tmp_path / "own.csv"
    path.write_text(write_csv(order_of(name, 4, 8)))
    assert order_of(str(path), 4, 8) == order_of(name, 4, 8)
    found = schedule_kind(str(path))
    of_a_name = ("generate", "fewest", "any_number", "whole_rounds", "held", "idle_per_hop", "receives_when_due")
    known: dict[str, Any] = {field: getattr(kind, field) for field in of_a_name}
    assert replace(found, name=name, only=None, **known) == kind
    assert found.fits(8, 4)
    assert not found.fits(6, 4)
    assert that_fits(found, 6, 4).fits(6, 4)
    assert that_fits(found, 6, 4).v_shaped == kind.v_shaped
    with pytest.raises(PlanError, match=r"own.csv is for 4 processes and 8 micro-batches, not for 4 and 6: set pp = 4"):
        check_pipeline(Plan(pp=4, schedule=str(path), micro_batches=6))
    check_pipeline(Plan(pp=4, schedule=str(path)))


def figures(name: str, processes: int, micro_batches: int) -> tuple[float, float, float]:
    """Bubble of all processes, of the one that takes longest from its first to its last action, in units of a process's F; and the
    most micro-batches held, each until its W.
    """
    order = order_of(name, processes, micro_batches)
    own = shape_of(order)[0] // processes
    trace = simulate(order, [UnitCost(1 / own, 1 / own, 1 / own)] * (own * processes), whole_first=False)
    spans = [trace.of(rank) for rank in range(processes)]
    longest = max(own[-1].end - own[0].start for own in spans)
    work = 3 * micro_batches
    assert bubble(trace) == pytest.approx(1 - work / trace.seconds)
    return trace.seconds - work, longest - work, max(peak_in_flight(order)) / own


@pytest.mark.parametrize("processes", [2, 3, 4, 5, *(pytest.param(p, marks=pytest.mark.slow) for p in (6, 7, 12))])
def test_bubbles_and_activations_are_those_of_the_papers(processes: int) -> None:
    """Qi et al. 2023 (ZB-H1, ZB-H2, ZB-V), Qi et al. 2024 (V-Min, V-Half, V-ZB), Narayanan et al. 2021; F = I = W = 1."""
    p = processes
    for m in (2 * p, 4 * p):
        assert figures("GPipe", p, m) == pytest.approx((3 * (p - 1), 3 * (p - 1), m))
        assert figures("1F1B", p, m) == pytest.approx((3 * (p - 1), 3 * (p - 1), p))
        for own in (2, 3):
            share = (p - 1) / own
            assert figures(f"Interleaved1F1B:{own}", p, m) == pytest.approx((3 * share, 3 * share, p + share))
            assert figures(f"LoopedBFS:{own}", p, m) == pytest.approx((3 * share, 3 * share, m))
            assert figures(f"InterleavedZeroBubble:{own}", p, m) == pytest.approx((share, share, p))
        assert figures("ZB-H1", p, m)[::2] == pytest.approx((p - 1, p))  # (p - 1) (F + I - W)
        assert figures("ZB-H2", p, m) == pytest.approx((p - 1, 0, 2 * p - 1))
        assert figures("ZBVZeroBubble", p, m) == pytest.approx(((p - 1) / 2, 0, p))
        assert figures("V-ZB", p, m) == pytest.approx(((p - 1) / 2, 0, p))
        assert figures("DualPipeV", p, m) == pytest.approx(((p - 1) / 2, (p - 1) / 2, p + 0.5))
        _, idle, held = figures("V-Min", p, m)
        assert idle <= 2 * p
        assert held <= max(2, (p + 4) // 3)
        _, idle, held = figures("V-Half", p, m)
        assert idle <= 1.5 * p
        assert held <= (p + 2) // 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_batch_of_fewer_micro_batches_holds_no_more(name: str, tmp_path: Path) -> None:
    kind = SCHEDULES[name]
    path = tmp_path / "own.csv"
    path.write_text(write_csv(order_of(name, 4, 8)))
    usual = max(peak_in_flight(order_of(name, 4, 8)))
    for number in range(1, 8):
        for whole in (kind, schedule_kind(str(path))):
            found = that_fits(whole, number, 4)
            assert found.fits(number, 4)
            assert (found.name, found.v_shaped) == (whole.name, kind.v_shaped)
            if found is not whole:
                order = found.order(4, number)
                check_order(order, 4 * kind.stages_per_process, kind.v_shaped, number)
                assert max(peak_in_flight(order)) <= usual
    more = that_fits(schedule_kind(str(path)), 9, 4)
    assert more.name in ("GPipe", "LoopedBFS", "ZBVZeroBubble")
    assert (more.stages_per_process, more.v_shaped) == (kind.stages_per_process, kind.v_shaped)
    assert that_fits(kind, 8, 4, backward=False).name in ("GPipe", "LoopedBFS", "ZBVZeroBubble")


def test_names_may_say_how_many_stages_a_process_has() -> None:
    kind = schedule_kind("interleaved1f1b:4")
    assert (kind.name, kind.stages_per_process) == ("Interleaved1F1B:4", 4)
    assert shape_of(order_of("Interleaved1F1B:4", 2, 4)) == (8, 4, False)
    assert schedule_kind("LoopedBFS:2") is SCHEDULES["LoopedBFS"]
    for wrong in ("1F1B:2", "LoopedBFS:0", "LoopedBFS:many", "V-Half:3"):
        with pytest.raises(PlanError, match=r"can follow LoopedBFS, Interleaved1F1B, InterleavedZeroBubble"):
            schedule_kind(wrong)
    with pytest.raises(PlanError, match=r"no pipeline schedule 'ring'; choose GPipe, 1F1B.*or a CSV file"):
        order_of("ring", 2, 4)
    with pytest.raises(PlanError, match=r"none\.csv cannot be read: No such file"):
        schedule_kind("none.csv")


def test_numbers_that_a_schedule_cannot_take_are_named() -> None:
    with pytest.raises(PlanError, match="5 leave some over"):
        order_of("Interleaved1F1B", 2, 5)
    with pytest.raises(PlanError, match="at least 8 micro-batches: 7"):
        order_of("DualPipeV", 4, 7)
    with pytest.raises(PlanError, match="V-Min has 2 stages on each process"):
        order_of("V-Min", 2, 4, 3)
    with pytest.raises(PlanError, match="needs processes and micro-batches"):
        order_of("GPipe", 2, 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0F0,0B0\n1F0,1X0\n", "'1X0' is not an action"),
        ("", "no actions"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "process 0, action 3: 0F0 is there twice"),
        ("0B0,0F0\n1F0,1B0\n", "process 0, action 1: 0B0 comes before its forward"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "process 0, action 2: 0W0 comes before the backward of the inputs"),
        ("0F0,0I0,0B0\n1F0,1B0\n", "process 0, action 3: 0B0 is done twice"),
        ("0F0,0B0,0I0\n1F0,1B0\n", "process 0, action 3: 0I0 is done twice"),
        ("0F0,0I0,0W0,0B0\n1F0,1B0\n", "process 0, action 4: 0B0 is done twice"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "process 0, action 3: 0W0 comes before the backward of the inputs"),
        ("0F0,0I0\n1F0,1B0\n", "process 0 never does 0W0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1\n", "process 1 never does 1I1"),
        ("0F0,0B0\n2F0,2B0\n", "3 stages cannot be divided evenly among 2 processes"),
        ("0F0,1F0,0B0,1B0\n2F0,3F0,2B0,3B0\n", r"process 0 has 1F0, but its stages are \[0, 2\] in a loop, or \[0, 3\] in a V"),
        ("0F0,0B0,3F0,3B0\n1F0,1B0\n", "no process runs stage 2"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "process 0 waits for ever before action 2, 0B0: 1I0 or 1B0 cannot come before it"),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,1B0,2B0\n", "process 0 waits for ever before action 4, 0B0: 1I0 or 1B0"),
    ],
)  # fmt: skip
def test_invalid_orders_are_refused_at_their_first_wrong_action(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=rf"wrong.csv: .*{error}"):
        schedule_kind(str(path))


def test_orders_of_another_shape_are_refused() -> None:
    order = order_of("V-Half", 2, 4)
    for wrong in ({"stages": 2}, {"v_shaped": False}, {"micro_batches": 5}):
        with pytest.raises(PlanError, match=f"the schedule has .*, not {next(iter(wrong.values()))}"):
            check_order(order, **wrong)  # type: ignore[arg-type]


# -- what torch's runtime makes of an order ----------------------------------------------------------------------------


def lowered(order: Order) -> list[list[str]]:
    """For each process its actions with sends and receives, as torch puts them in. Raises AssertionError where it cannot."""
    stages, micro_batches, _ = shape_of(order)
    own: Any = [
        SimpleNamespace(num_stages=stages, group_size=len(order), group_rank=0, stage_index=stage, submod=None)
        for stage in range(stages // len(order))
    ]
    kinds = {letter: upstream._ComputationType[name] for name, letter in KINDS.items()}
    runtime = upstream._PipelineScheduleRuntime(own, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
    actions: Any = {
        rank: [upstream._Action(a.stage, kinds[a.kind], a.micro_batch) for a in one] for rank, one in enumerate(order)
    }
    runtime._prepare_schedule_with_comms(actions)
    return [list(map(str, runtime.pipeline_order_with_comms[rank])) for rank in range(len(order))]


def ends_though_sends_wait(rows: list[list[str]]) -> bool:
    """Return True if all processes end although each send blocks until its receive is posted."""
    place = {name: (rank, i) for rank, row in enumerate(rows) for i, name in enumerate(row) if "RECV" in name}
    at, moved = [0] * len(rows), True
    sent: set[str] = set()
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                found = re.fullmatch(r"(\d+)(SEND_F|SEND_B|F|B|I)(\d+)", row[at[rank]])
                if found and found[2].startswith("SEND"):
                    to = int(found[1]) + (1 if found[2] == "SEND_F" else -1)
                    name = f"{to}RECV_{found[2][-1]}{found[3]}"
                    receiver, index = place[name]
                    if at[receiver] <= index:
                        break
                    sent.add(name)
                elif found:
                    name = f"{found[1]}RECV_{'F' if found[2] == 'F' else 'B'}{found[3]}"
                    if name in place and name not in sent:
                        break
                at[rank] += 1
                moved = True
    return all(place == len(row) for place, row in zip(at, rows, strict=True))


@pytest.mark.parametrize("name", [*SCHEDULES, "Interleaved1F1B:3"])
def test_sends_and_receives_are_in_an_order_that_cannot_lock(name: str) -> None:
    for processes, micro_batches in [(2, 4), (3, 6), (4, 8), (5, 15)]:
        assert ends_though_sends_wait(lowered(order_of(name, processes, micro_batches)))


def test_orders_are_refused_where_torch_would_not_get_to_their_end() -> None:
    generator, refused, trials = random.Random(5), 0, 100
    for _ in range(trials):
        name = generator.choice(list(SCHEDULES))
        rows = [list(one) for one in order_of(name, 3, 6)]
        for _ in range(generator.randrange(1, 4)):
            row = generator.choice(rows)
            i = generator.randrange(len(row))
            row.insert(max(0, i + generator.randint(-3, 3)), row.pop(i))
        order = tuple(map(tuple, rows))
        try:
            rows_with_sends = lowered(order)
        except AssertionError:
            refused += 1
            with pytest.raises(PlanError, match=r"process \d"):
                check_order(order)
        else:
            check_order(order)
            assert ends_though_sends_wait(rows_with_sends)
    assert trials // 10 < refused < trials - trials // 10


def test_files_of_orders_with_a_byte_order_mark_are_read_and_others_explained(tmp_path: Path) -> None:
    order = order_of("1F1B", 2, 4)
    file = tmp_path / "mine.csv"
    file.write_bytes(b"\xef\xbb\xbf" + write_csv(order).replace("\n", "\r\n").encode())
    assert load_order(file) == order
    file.write_bytes(b"\xff\xfe0\x00F\x00")
    with pytest.raises(PlanError, match=r"mine\.csv cannot be read"):
        load_order(file)
