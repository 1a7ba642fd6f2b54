"""Rendezvous at a store that an earlier attempt has used; reports of the watchdog."""

from __future__ import annotations

import datetime
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.ports import free_port
from tests.waiting import patiently

from arclight.fabric.distributed import rendezvous
from arclight.fabric.distributed.hang_report import RankMissingError, main_thread_location
from arclight.fabric.distributed.rendezvous import agree_on_attempt
from arclight.fabric.distributed.stop_signal import StopSignal
from arclight.fabric.distributed.watchdog import Watchdog


def meet(store: dist.Store, ranks: list[int], world_size: int, timeout: float = 10) -> dict[int, object]:
    found: dict[int, object] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = agree_on_attempt(store, rank, world_size, timeout)
        except TimeoutError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("lost", [[], [0], [1, 2]])
def test_each_rendezvous_attempt_gets_its_own_name(lost: list[int]) -> None:
    store = dist.HashStore()
    before = meet(store, [rank for rank in range(3) if rank not in lost], 3, timeout=0.3)
    assert len(before) == 3 - len(lost)
    if lost:
        missing = ", ".join(map(str, lost))
        assert set(before.values()) == {f"rank {missing} did not join the rendezvous of all processes"}
    first, second = (meet(store, [2, 0, 1], 3) for _ in range(2))
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]
    assert "join" not in str(first[0])


@pytest.mark.parametrize(("came", "missing"), [([0], "rank 1, 2"), ([0, 2], "rank 1"), ([1], "rank 0")])
def test_missing_ranks_are_named(came: list[int], missing: str) -> None:
    def check(seconds: float) -> None:
        port = free_port()
        said: dict[int, str] = {}

        def join(rank: int) -> None:
            try:
                rendezvous.open_rendezvous_store("127.0.0.1", port, rank, 3, datetime.timedelta(seconds=seconds))
            except RankMissingError as error:
                said[rank] = str(error)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in came]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert f"{missing} did not join the rendezvous" in said[came[0]], said

    patiently(check, 1, 15)


def test_watchdogs_that_query_each_other_at_once_all_answer() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    watches = [Watchdog(store, rank, 2, 600.0, StopSignal()) for rank in range(2)]
    for watch in watches:
        watch.close()  # each asks in a thread of this test
    both, answers, end = threading.Barrier(2), {}, time.monotonic() + 60

    def ask(watch: Watchdog) -> None:
        watch._end.clear()
        both.wait()
        answers[watch.rank] = watch._question(30)
        while len(answers) < 2 and time.monotonic() < end:  # as its thread goes on to do
            watch._answer_new()
            time.sleep(0.001)

    threads = [threading.Thread(target=ask, args=(watch,)) for watch in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert len(answers[rank]) == 2
        assert all("entered" in answer for answer in answers[rank])


def test_the_users_line_is_named_in_a_checkout_that_is_called_like_the_package(tmp_path: Path) -> None:
    file = tmp_path / "arclight" / "mine.py"
    code = "def wait(look):\n    return look()\n"
    space: dict[str, Any] = {}
    exec(compile(code, str(file), "exec"), space)
    assert "mine.py:2 wait" in space["wait"](main_thread_location)


def test_a_timed_out_collective_names_the_lagging_rank() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    watch = Watchdog(store, 0, 3, 600.0, StopSignal())
    watch.close()
    watch._since = time.monotonic() - 599  # its thread was given no time while the collective waited
    answers = [{"entered": {"0": count}, "place": place} for count, place in ((7, "mine"), (6, "its sleep"), (7, ""))]
    watch._question = lambda: answers  # type: ignore[method-assign]
    found = watch.explain(RuntimeError("Connection closed by peer [127.0.0.1]:4333"))
    assert re.search(r"rank 0 has waited 599 s at .* for rank 1 \(.*\), which is at its sleep", found), found
