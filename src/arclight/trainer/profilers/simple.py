"""Measure the time of each action.

``Trainer(profiler="simple")`` makes one, or users do. Name and arguments are Lightning's.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence

from arclight.trainer.profilers.profiler import Profiler


class SimpleProfiler(Profiler):
    """Time each action by the wall clock.

    ``extended`` adds the number of calls and the share of the time since the profiler was made; rows are in order of
    that share, else of the mean duration. An action that lies within another counts for both.
    Raises ValueError if an action is started twice, or stopped and never started.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        """Start of each action under way, in seconds of ``time.perf_counter``."""
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        """Seconds of each run of each action."""
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        if action_name in self.current_actions:
            raise ValueError(f"Attempted to start {action_name} which has already started.")
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        now = time.perf_counter()
        if action_name not in self.current_actions:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        self.recorded_durations[action_name].append(now - self.current_actions.pop(action_name))

    def _make_report_extended(self) -> tuple[list[tuple[str, float, int, float, float]], int, float]:
        """Return rows of (action, mean, calls, sum, percentage), all calls, and seconds."""
        whole = time.perf_counter() - self.start_time
        sums = [(name, math.fsum(times), len(times)) for name, times in self.recorded_durations.items()]
        rows = [(name, total / count, count, total, 100.0 * total / whole) for name, total, count in sums]
        return sorted(rows, key=lambda row: row[4], reverse=True), sum(row[2] for row in rows), whole

    def _make_report(self) -> list[tuple[str, float, float]]:
        """Return rows of (action, mean, sum), the largest mean first."""
        sums = [(name, math.fsum(times), len(times)) for name, times in self.recorded_durations.items()]
        return sorted(
            ((name, total / count, total) for name, total, count in sums), key=lambda row: row[1], reverse=True
        )

    def summary(self) -> str:
        title = self._title("Profiler Report") + os.linesep
        if not self.recorded_durations:
            return title + os.linesep
        if not self.extended:
            short = [(name, f"{mean:.5}", f"{total:.5}") for name, mean, total in self._make_report()]
            return title + _table([("Action", "Mean duration (s)", "Total time (s)")], short)
        rows, calls, whole = self._make_report_extended()
        cells = [
            (name, f"{mean:.5}", str(count), f"{total:.5}", f"{share:.5}") for name, mean, count, total, share in rows
        ]
        header = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
        return title + _table([header, ("Total", "-", str(calls), f"{whole:.5}", "100 %")], cells)


def _table(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> str:
    """Format a table of cells under one or more heads, each between two rules."""
    width = max(len(row[0]) for row in rows)

    def line(cells: Sequence[str]) -> str:
        name, *others = cells
        return f"{os.linesep}|  {name:<{width}}\t|" + "".join(f"  {cell:<15}\t|" for cell in others)

    rule = os.linesep + "-" * len(line(heads[0]).expandtabs())
    return rule + "".join(line(head) + rule for head in heads) + "".join(map(line, rows)) + rule + os.linesep
