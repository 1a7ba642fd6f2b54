"""Watch each rank from a thread: carry stop signals, name ranks that hang or fail first.

`ParallelStrategy` starts it on each rank once the process group exists; `launchers` ask it which rank failed first and why a collective
failed. `FAILED_KEY` is also read by `store_gather` and ``strategies.parallel``. Keys in the store may change: all ranks run the same
version.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from arclight.fabric.distributed.hang_report import (
    RankMissingError,
    is_collective_error,
    main_thread_location,
    main_thread_stack,
)
from arclight.fabric.distributed.stop_signal import StopSignal, wait_until

POLL_INTERVAL_S = 0.25
"""Seconds between two polls of the store."""

FAILED_KEY = "arclight/failed"
"""Key under which the rank that fails first stores its number."""

EXIT_GRACE_S = 30.0
"""Seconds beyond 1.5 group timeouts after which the thread ends a process that still waits for a missing rank."""

before_exit: list[Callable[[], None]] = []
"""Functions called before this thread ends its process, such as one that ends child processes."""

VERDICT_KEY = "arclight/hang/verdict"
"""Key under which the rank that asked stores which ranks are missing, and where they are."""

ANSWER_TIMEOUT_S = 5.0
"""Least seconds that ranks have to answer; a quarter of ``patience`` if that is more, on a hang."""


class Watchdog:
    """Thread that watches one rank through the store, without collectives or devices.

    * It carries :class:`StopSignal` between ranks.
    * If this rank has entered no collective for ``patience`` (half the timeout) seconds, it asks all ranks for the number of
      collectives that they have entered and for their stacks, and names on standard error those that are behind,
      with their stacks. One rank reports, once. The group's own timeout then ends the run if they never come, with a
      RankMissingError on every rank that waits; if that does not happen, this thread ends the process (`EXIT_GRACE_S`).
    * It remembers which rank failed first (:meth:`failed_first`), so that one traceback is shown and not one per rank.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float, stop: StopSignal) -> None:
        self.store, self.rank, self.world_size, self.timeout = store.clone(), rank, world_size, timeout
        self.patience = timeout / 2
        self.stop = stop
        self.lost = ""
        self.verdict = ""
        """Sentence about which ranks this one has waited for too long, and where; empty otherwise."""
        self._mark: Any = None
        self._since = time.monotonic()
        self._told = False
        self._answered = 0
        self._end = threading.Event()
        stop.connect(store.clone(), rank, world_size, min(timeout, 60.0))
        self.store.set(f"arclight/who/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="arclight-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the store may be closed afterwards."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(ANSWER_TIMEOUT_S + 1)

    def _run(self) -> None:
        pause = POLL_INTERVAL_S
        while not self._end.wait(pause):
            try:
                pause = 0.01 if self.stop.poll() else POLL_INTERVAL_S
                self._look_for_hang()
            except Exception as error:  # the store lives in rank 0: without it there is nobody left to watch with
                self.lost = f"{type(error).__name__}: {error}"
                self.stop.lose(self.lost)
                return

    # -- hangs ---------------------------------------------------------------------------------------------------------

    def _look_for_hang(self) -> None:
        mark = collective_counts()
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since, self._told, self.verdict = mark, now, False, ""
        if self._answer_new():
            return
        if now - self._since > self.patience and not self._told:
            self._told = True
            self._ask()
        elif self._told and not self.verdict and self.store.check([VERDICT_KEY]):
            self._conclude(*json.loads(self.store.get(VERDICT_KEY)))
        elif self.verdict and now - self._since > self.timeout * 1.5 + EXIT_GRACE_S:
            sys.stderr.write(f"arclight: {self.verdict}; the process ends\n")
            sys.stderr.flush()
            for end in before_exit:
                end()
            os._exit(1)

    def _answer(self, question: int) -> None:
        """Answer all questions up to this one: ranks in different collectives may ask at once."""
        answer = {"entered": collective_counts(), "stack": main_thread_stack(), "place": main_thread_location()}
        for number in range(self._answered + 1, question + 1):
            self.store.set(f"arclight/hang/{number}/{self.rank}", json.dumps(answer))
        self._answered = question

    def _ask(self) -> None:
        claim = f"arclight/hang/claim/{json.dumps(self._mark)}"
        if self.store.compare_set(claim, "", str(self.rank)).decode() != str(self.rank):
            return  # another rank in the same collective reports
        answers = self._question(max(ANSWER_TIMEOUT_S, self.patience / 4))  # a busy machine
        behind = lagging_ranks([a and a["entered"] for a in answers], self.rank)
        if behind:
            sys.stderr.write(self._report(answers, behind))
            sys.stderr.flush()
            places = [answers[rank]["place"] if answers[rank] else "" for rank in behind]
            self.store.set(VERDICT_KEY, json.dumps([behind, places]))
            self._conclude(behind, places)

    def _answer_new(self) -> bool:
        question = self.store.add("arclight/hang/question", 0)
        if question <= self._answered:
            return False
        self._answer(question)
        return True

    def _question(self, patience: float = ANSWER_TIMEOUT_S) -> list[Any]:
        """Request collective counts and stacks of every rank; None for those without an answer.

        Others' questions are answered meanwhile: two ranks that ask each other would both take the other for silent.
        """
        question = self.store.add("arclight/hang/question", 1)
        self._answer(question)
        keys = [f"arclight/hang/{question}/{rank}" for rank in range(self.world_size)]
        wait_until(lambda: not self._answer_new() and (self.store.check(keys) or self._end.is_set()), patience)
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def _conclude(self, behind: list[int], places: list[str]) -> None:
        if self.rank in behind:
            return
        missing = [
            f"rank {rank} ({self._who(rank)}), which " + (f"is at {place}" if place else "does not answer")
            for rank, place in zip(behind, places, strict=True)
        ]
        waited = time.monotonic() - self._since
        self.verdict = (
            f"rank {self.rank} has waited {waited:.0f} s at {main_thread_location()} for {' and '.join(missing)}"
        )

    def _who(self, rank: int) -> str:
        key = f"arclight/who/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "unknown"

    def explain(self, error: BaseException) -> str:
        """Explain a failed collective: who was waited for, or who has ended; empty if unknown."""
        if self.verdict or self.store.check([FAILED_KEY]):
            return self.verdict
        answers = self._question()
        behind = lagging_ranks([answer and answer["entered"] for answer in answers], self.rank)
        awake = [rank for rank in behind if answers[rank] is not None]
        if awake and time.monotonic() - self._since > self.patience:  # the thread had no time to look before
            self._conclude(awake, [answers[rank]["place"] for rank in awake])
            return self.verdict
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        ended = " and ".join(f"rank {rank} ({self._who(rank)})" for rank in silent)
        return f"rank {self.rank} lost {ended}, which does not answer any more, and failed with it" if ended else ""

    def _report(self, answers: list[Any], behind: list[int]) -> str:
        waited = time.monotonic() - self._since
        lines = []
        for rank in behind:
            lines.append(
                f"arclight: rank {rank} ({self._who(rank)}) holds the others up: rank {self.rank} has waited {waited:.0f} s for it at "
                f"{answers[self.rank]['place']}; "
                f"the run ends {max(self.timeout - waited, 0):.0f} s from now unless it comes.\n"
            )
            if answers[rank] is None:
                lines.append(
                    "  It does not answer: it is stopped, unreachable, or inside native code that holds the interpreter; "
                    "`py-spy dump --native` on its host shows where.\n"
                )
            else:
                lines.append(f"  Rank {rank} is here (most recent call last):\n{answers[rank]['stack']}")
        return "".join(lines)

    # -- the first failure -----------------------------------------------------------------------------------------

    def failed_first(self) -> int:
        """Return the rank that failed first: this one, unless another reported before.

        -1 if the store has ended with rank 0.
        """
        try:
            return int(self.store.compare_set(FAILED_KEY, "", str(self.rank)).decode())
        except Exception:  # the store is in rank 0, which has ended: its own traceback says why
            return self.rank if self.rank == 0 else -1


def collective_counts() -> dict[str, int]:
    """Count the collectives that this process has entered, per process group."""
    from torch.distributed import distributed_c10d as c10d

    groups: list[tuple[Any, str]] = list(c10d._world.pg_names.items())
    return {name: group._get_sequence_number_for_group() for group, name in groups}


def lagging_ranks(entered_by_rank: list[dict[str, int] | None], asking: int) -> list[int]:
    """List ranks that have entered fewer collectives than ``asking``, or do not answer.

    Only groups that both share are compared.
    """
    mine = entered_by_rank[asking] or {}
    return [
        rank
        for rank, theirs in enumerate(entered_by_rank)
        if theirs is None or any(theirs[group] < count for group, count in mine.items() if group in theirs)
    ]


_current: Watchdog | None = None


def start_watchdog(store: Any, rank: int, world_size: int, timeout: float, stop: StopSignal) -> Watchdog:
    """Start the watchdog of this process, for as long as it is in its process group."""
    global _current
    stop_watchdog()
    _current = Watchdog(store, rank, world_size, timeout, stop)
    if sys.excepthook is not _report_uncaught:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _report_uncaught
    return _current


def carry_stop_signal(stop: StopSignal) -> None:
    """Let this process' watchdog carry ``stop`` from now on."""
    if _current is not None and _current.stop is not stop:
        stop.succeed(_current.stop)
        _current.stop = stop


def stop_watchdog() -> None:
    """Stop this process's watchdog, if it has one."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def explain_failure(error: BaseException) -> BaseException:
    """Return ``error``, or a RankMissingError if a collective failed because of other ranks."""
    if _current is None or isinstance(error, RankMissingError) or not is_collective_error(error):
        return error
    try:
        why = _current.explain(error)
    except Exception:  # the store is in rank 0, which has ended: its own traceback says why
        return error
    if not why:
        return error
    missing = RankMissingError(f"{why}. {str(error).splitlines()[0] if str(error) else ''}".rstrip())
    missing.__cause__ = error
    return missing


def failed_first() -> int | None:
    """Return the rank that failed before this one; None if this is the first.

    None also without a watchdog; -1 if the store has ended with rank 0.
    """
    if _current is None:
        return None
    first = _current.failed_first()
    return None if first == _current.rank else first


_previous_hooks: list[Any] = []


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback on the rank that failed first, and one line on the others."""
    explanation = explain_failure(error)
    if explanation is not error:
        kind, error, trace = type(explanation), explanation, None
    first = failed_first() if issubclass(kind, Exception) else None
    if first is None:
        _previous_hooks[-1](kind, error, trace)
        return
    rank = _current.rank if _current is not None else "?"
    cause = f"because rank {first} failed before it" if first >= 0 else "because rank 0 has ended"
    own = (
        f"; RankMissingError: {error}" if isinstance(error, RankMissingError) else ""
    )  # the first may not come to say it
    sys.stderr.write(f"arclight: rank {rank} stops {cause}{own}\n")
