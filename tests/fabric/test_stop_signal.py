"""Stop signal: all ranks stop at one position, whichever requests it and however far apart they are."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch.distributed as dist

from arclight.fabric.distributed.stop_signal import StopSignal


def connected(world_size: int, timeout: float = 20.0) -> list[StopSignal]:
    """One signal per rank over one store, each with a thread that looks after it, as in a process of its own."""
    store = dist.HashStore()
    signals = [StopSignal() for _ in range(world_size)]
    for rank, signal in enumerate(signals):
        signal.connect(store, rank, world_size, timeout)
    return signals


def watch(signal: StopSignal, end: threading.Event, pause: float) -> None:
    while not end.wait(pause):
        signal.poll()


def run_ranks(signals: list[StopSignal], asking: dict[int, int], lead: int, seed: int) -> list[int | None]:
    """Every rank loops over positions, at most ``lead`` ahead of the slowest; gives where each one stopped."""
    end, passed, stopped = threading.Event(), [0] * len(signals), [None] * len(signals)

    def loop(rank: int) -> None:
        draw = random.Random(seed * 100 + rank)
        for position in range(400):
            while position > min(p for r, p in enumerate(passed) if stopped[r] is None or r == rank) + lead:
                time.sleep(0.0002)
            if asking.get(rank) == position:
                signals[rank].request("enough")
            if signals[rank].due(position):
                stopped[rank] = position  # type: ignore[call-overload]
                passed[rank] = 10**9
                return
            passed[rank] = position
            time.sleep(draw.random() * 0.001)
        passed[rank] = 10**9

    threads = [threading.Thread(target=loop, args=(rank,)) for rank in range(len(signals))]
    threads += [threading.Thread(target=watch, args=(s, end, 0.001 + 0.004 * r)) for r, s in enumerate(signals)]
    for thread in threads:
        thread.start()
    for thread in threads[: len(signals)]:
        thread.join(60)
    end.set()
    return stopped


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lead", [1, 7])
def test_all_ranks_stop_at_one_position(seed: int, lead: int) -> None:
    signals = connected(3)
    stopped = run_ranks(signals, asking={seed % 3: 20}, lead=lead, seed=seed)
    assert stopped[0] is not None
    assert stopped[0] >= 20
    assert stopped == [stopped[0]] * 3
    assert {signal.reason for signal in signals} == {f"rank {seed % 3}: enough"}


def test_several_ranks_may_request_a_stop_at_once() -> None:
    stopped = run_ranks(connected(3), asking={0: 30, 1: 30, 2: 31}, lead=1, seed=9)
    assert stopped[0] is not None
    assert stopped == [stopped[0]] * 3


def test_no_rank_stops_without_a_request() -> None:
    assert run_ranks(connected(2), asking={}, lead=3, seed=1) == [None, None]


def test_a_single_process_stops_at_once_and_can_be_reset() -> None:
    signal = StopSignal()
    assert not signal.due(0)
    signal.request("the clock")
    assert signal.asked
    assert signal.due(1)
    assert signal.reason == "the clock"
    signal.begin()
    assert not signal.asked
    assert not signal.due(0)


def test_a_request_at_the_end_of_a_loop_does_not_stop_the_next_loop() -> None:
    """Rank 1 has gone on to another loop when rank 0 asks: rank 0 finishes its own, both go through the next."""
    first, second = connected(2)
    first.due(9)
    second.due(9)
    second.begin()
    first.request("too late")
    first.poll()
    second.poll()
    assert first.asked
    assert not first.due(10)
    assert not second.asked
    first.begin()
    for position in range(3):
        first.poll()
        second.poll()
        assert not first.due(position)
        assert not second.due(position)


def test_a_silent_rank_is_named() -> None:
    first, _ = connected(2, timeout=0.2)
    first.request("time is up")
    first.poll()
    with pytest.raises(TimeoutError, match=r"time is up.*rank 1 did not answer"):
        first.due(0)
