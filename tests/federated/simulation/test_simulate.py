"""Simulated runs against closed forms and hand-made calendars, and what a million clients take."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest

from arclight.federated.codecs.settings import Int8
from arclight.federated.coordination.records import Record, RoundClosed, RoundCommitted, RoundOpened, RoundSkipped
from arclight.federated.coordination.settings import Buffered, Sampling, Streaming, Waiting
from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Costs, Fleet, Links, Speeds
from arclight.federated.simulation.result import SimulationRecorder
from arclight.federated.simulation.simulate import simulate
from arclight.federated.simulation.sizes import Sizes

MODEL = 10_000_000
CALM = Waiting(heartbeat_interval_s=10.0)


def federation(**options: Any) -> Federation:
    return Federation(**{"clients": 4, "rounds": 3, "local_steps": 50, "waiting": CALM, "evaluate_every": 0} | options)


def test_a_round_is_the_sum_of_its_parts() -> None:
    fleet = Fleet(links=Links(up=20e6, down=80e6, latency_s=0.05), speeds=Speeds(step_s=0.1, overhead_s=0.3))
    result = simulate(federation(), MODEL, fleet)
    size, costs = Sizes(federation(), MODEL), fleet.costs
    answer, down, up = 0.05, 8 * size.whole / 80e6 + 0.05, 8 * size.up(None) / 20e6 + 0.05
    fold = costs.round_s + costs.step * size.model + 4 * costs.fold * size.model
    expected = answer + down + 0.3 + 50 * 0.1 + up + costs.check * size.up(None) + fold
    assert [r.seconds for r in result.rounds[1:]] == pytest.approx([expected] * 2, rel=1e-3)
    assert result.round_seconds == pytest.approx(expected, rel=1e-3)
    assert result.rounds[1].compute == pytest.approx(5.3)
    assert (result.bytes_down, result.bytes_up) == (12 * size.whole, 12 * size.up(None))
    assert result.fold_seconds == pytest.approx(3 * fold)
    assert result.check_seconds == pytest.approx(12 * costs.check * size.up(None))
    assert (result.ended, result.failed) == ("all 3 rounds are done", False)


def test_the_servers_line_is_shared() -> None:
    """Eight clients with quick lines of their own: the server's line carries one after another."""
    fleet = Fleet(
        links=Links(up=1e12, down=1e12, latency_s=0.0),
        speeds=Speeds(step_s=0.001),
        costs=Costs(rate=100e6, check=0.0, fold=0.0, step=0.0, round_s=0.0),
    )
    result = simulate(federation(clients=8), MODEL, fleet)
    size = Sizes(federation(), MODEL)
    first_trained, transfer = 8 * size.whole / 100e6 + 0.05, 8 * size.up(None) / 100e6
    last_fetched = 8 * 8 * size.whole / 100e6
    expected = max(last_fetched + 0.05 + transfer, first_trained + 8 * transfer)
    assert result.rounds[1].seconds == pytest.approx(expected, rel=1e-3)


def test_measured_speeds_decide_who_is_waited_for() -> None:
    """A calendar by hand: steps of 0.1, 0.2 or 0.4 s; rounds last as long as the slowest client of each."""
    fleet = Fleet(
        links=Links(up=1e15, down=1e15, latency_s=0.0), speeds=Speeds(measured_s=(0.1, 0.2, 0.4)),
        costs=Costs(check=0.0, fold=0.0, step=0.0, round_s=1.0),
    )  # fmt: skip
    result = simulate(federation(clients=30, rounds=2), 1000, fleet)
    assert [r.seconds for r in result.rounds] == pytest.approx([50 * 0.4 + 1.0] * 2, rel=1e-3)
    half = simulate(
        federation(clients=30, rounds=2, waiting=Waiting(quorum=0.2, grace_s=0.0, heartbeat_interval_s=1.0)),
        1000,
        fleet,
    )
    assert half.rounds[0].seconds == pytest.approx(50 * 0.1 + 1.0, rel=1e-3)
    assert half.rounds[0].accepted < 30
    assert half.rounds[0].late > 10
    assert 0 < len(half.rounds[0].late_names) <= 10


def test_a_grace_and_a_deadline_bound_a_round() -> None:
    fleet = Fleet(
        links=Links(up=1e15, down=1e15, latency_s=0.0), speeds=Speeds(measured_s=(0.1, 10.0)), costs=Costs(round_s=0.0, check=0.0)
    )  # fmt: skip
    waiting = Waiting(quorum=0.3, grace_s=7.0, heartbeat_interval_s=10.0)
    result = simulate(federation(clients=20, rounds=1, waiting=waiting), 1000, fleet)
    assert result.rounds[0].closed - result.rounds[0].opened == pytest.approx(5.0 + 7.0, rel=1e-3)
    none = simulate(
        federation(
            clients=20, rounds=1, waiting=Waiting(quorum=1.0, deadline_s=60.0, heartbeat_interval_s=10.0, retries=1)
        ),
        1000,
        fleet,
    )
    assert none.failed
    assert none.seconds == pytest.approx(120.0, rel=1e-2)
    assert "of the 20 updates" in none.ended


def test_nodes_that_fall_silent_are_missed() -> None:
    waiting = Waiting(quorum=0.5, grace_s=1000.0, heartbeat_interval_s=0.5, lease_s=10.0)
    fleet = Fleet(links=Links(latency_s=0.01), vanish=0.2)
    result = simulate(federation(clients=20, rounds=1, waiting=waiting), 1000, fleet)
    only = result.rounds[0]
    assert result.lost == only.failed == 20 - only.accepted
    assert 0 < only.failed < 10
    assert 5.0 + 1.5 < only.seconds < 5.0 + 1.5 + 10.0 + 1.0
    failing = simulate(federation(clients=20, rounds=2, waiting=waiting), 1000, Fleet(fail=0.2))
    assert failing.lost == 0
    assert all(r.accepted + r.failed == 20 and r.failed > 0 for r in failing.rounds)


def test_fragments_that_overlap_hide_the_exchange() -> None:
    """100 MB in four fragments over 100 Mb/s, a fragment each 8 s of training: 2 s up and 2 s down are not seen."""
    fleet = Fleet(links=Links(up=100e6, down=100e6), speeds=Speeds(step_s=0.4))
    took = {}
    for overlap in (0, 1):
        streaming = Streaming(fragments=4, overlap=overlap)
        result = simulate(federation(rounds=20, local_steps=80, streaming=streaming), 100_000_000, fleet)
        assert not result.failed
        took[overlap] = result.round_seconds / 8.0
    assert took[1] <= 1.05
    assert took[0] > 1.5


def test_buffered_rounds_do_not_wait_for_the_slow() -> None:
    fleet = Fleet(
        links=Links(up=1e15, down=1e15, latency_s=0.0), speeds=Speeds(measured_s=(0.1, 1.0)), costs=Costs(round_s=0.0, check=0.0)
    )  # fmt: skip
    slow = simulate(federation(clients=10, rounds=12), 1000, fleet)
    quick = simulate(federation(clients=10, rounds=12, buffered=Buffered(size=3, max_staleness=20)), 1000, fleet)
    assert slow.round_seconds == pytest.approx(50.0, rel=1e-3)
    assert quick.round_seconds < 10.0
    assert all(r.accepted == 3 for r in quick.rounds)


def test_the_same_seed_gives_the_same_run() -> None:
    fleet = Fleet(links=Links(spread=0.5), speeds=Speeds(spread=0.5, jitter=0.2, stragglers=0.1), vanish=0.02)
    wait = Waiting(quorum=0.7, grace_s=5.0, heartbeat_interval_s=1.0, lease_s=5.0)
    runs = [simulate(federation(clients=50, waiting=wait), 1_000_000, fleet, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert "50 clients, 3 rounds in" in str(runs[0])
    assert f"\n{'round':>6}" in str(runs[0])


@pytest.mark.parametrize("per_round", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_of_a_million_clients_need_neither_memory_nor_torch(per_round: int) -> None:
    program = """
import resource, sys
per_round = int(sys.argv[1])
from arclight.federated.codecs.settings import Int8
from arclight.federated.coordination.settings import Sampling, Waiting
from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Fleet, Links, Speeds
from arclight.federated.simulation.simulate import simulate
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = simulate(
    Federation(
        clients=1_000_000, rounds=2, local_steps=100, up=Int8(), down=Int8(), evaluate_every=0,
        sampling=Sampling(per_round=per_round, over_provision=0.3), waiting=Waiting(heartbeat_interval_s=30.0, quorum=0.8, grace_s=30.0, lease_s=60.0),
    ),
    100_000_000, Fleet(links=Links(spread=0.5), speeds=Speeds(step_s=0.5, spread=0.4, stragglers=0.05), vanish=0.05),
)
assert [r.accepted for r in result.rounds] == [per_round] * 2, result
assert all(r.asked == 1.3 * per_round and r.late > per_round / 10 for r in result.rounds), result
assert result.bytes_down == sum(r.bytes_down for r in result.rounds) >= 2.6 * per_round * result.weights_bytes * 0.95
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
assert grown < 10 + 0.05 * per_round, f"{grown} MB for {per_round} clients at a time"
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(per_round)], timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_connected_clients_that_are_not_drawn_cost_no_heartbeats() -> None:
    result = simulate(federation(clients=300, sampling=Sampling(per_round=5), waiting=Waiting()), MODEL)
    assert [r.accepted for r in result.rounds] == [5, 5, 5]
    assert result.events < 5 * 300


def test_a_node_that_has_had_no_work_for_long_is_not_lost_when_it_gets_some() -> None:
    waiting = Waiting(heartbeat_interval_s=10.0, no_progress_timeout_s=60.0)
    fleet = Fleet(speeds=Speeds(spread=1.0, jitter=0.5), vanish=1e-9)
    result = simulate(federation(clients=20, rounds=4, local_steps=400, waiting=waiting), 1_000_000, fleet, seed=3)
    assert (result.lost, [r.accepted for r in result.rounds]) == (0, [20] * 4)


def test_bytes_go_by_codec() -> None:
    plain, short = (simulate(federation(rounds=4, up=codec, down=codec), MODEL) for codec in (Federation().up, Int8()))
    first, later = short.rounds[0], short.rounds[-1]
    assert first.bytes_down == plain.rounds[0].bytes_down
    assert later.bytes_down <= 0.27 * plain.rounds[-1].bytes_down
    assert later.bytes_up <= 0.27 * plain.rounds[-1].bytes_up


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Links(up=0.0), "up: need number > 0"), (lambda: Speeds(measured_s=(0.1, 0.0)), "measured_s: need"),
        (lambda: Speeds(stragglers=2.0), "stragglers: need number in"), (lambda: Costs(threads=0), "threads"),
        (lambda: Fleet(vanish=1.5), "vanish: need number in"),
        (lambda: Speeds(slowdown=0.5), "slowdown"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_sampled_rounds_ask_other_clients_each_time() -> None:
    result = simulate(
        federation(clients=100_000, rounds=3, sampling=Sampling(per_round=20)), 1000, Fleet(connected=100)
    )
    assert [(r.asked, r.accepted) for r in result.rounds] == [(20, 20)] * 3
    assert not result.failed


def test_names_of_a_rounds_clients_are_forgotten_with_the_round() -> None:
    class Name(str):
        __slots__ = ("__weakref__",)

    def open_and_end(recorder: SimulationRecorder, round: int, *ends: Record) -> list[weakref.ref[Name]]:
        names = tuple(Name(f"site {round} {number}") for number in range(12))
        opened = RoundOpened(round=round, base="", clients=names[:8], wanted=8, clock=0, steps=1)
        for record in (opened, replace(opened, clients=names[6:]), *ends):  # retried
            recorder.note(record, 1.0 + round)
        assert recorder.asked(round) == (() if ends else names)
        return [weakref.ref(name) for name in names]

    recorder = SimulationRecorder()
    committed = RoundCommitted(round=1, base="", checkpoint="", norm=0.0)
    kept = open_and_end(recorder, 1, RoundClosed(round=1, clients=()), committed)
    kept += open_and_end(recorder, 2, RoundSkipped(round=2, why=""))
    still_open = open_and_end(recorder, 3)
    assert [name() for name in kept] == [None] * 24
    assert all(name() is not None for name in still_open)
    for number in (2, 3):
        recorder.note(replace(committed, round=number), 9.0)
    known = dict.fromkeys(("seconds", "check_seconds", "fold_seconds"), 0.0) | {"ended": "", "failed": False}
    sizes = dict.fromkeys(("events", "model_bytes", "update_bytes", "weights_bytes"), 0)
    assert [round.asked for round in recorder.result(**known, **sizes).rounds] == [12, 12, 12]
