"""Profile the functions of each action with cProfile.

``Trainer(profiler="advanced")`` makes one, or users do. Name and arguments are Lightning's; the text of the report is Python's own.
"""

from __future__ import annotations

import cProfile
import io
import marshal
import os
import pstats
from collections import defaultdict
from typing import Any

import fsspec

from arclight._intervals import Fraction, NonNegativeInt, check
from arclight.trainer.profilers.profiler import Profiler


class AdvancedProfiler(Profiler):
    """Python's cProfile for each action.

    ``line_count_restriction``: how many functions an action's report lists, a count or a share in [0, 1]. ``dump_stats``
    also writes ``<action>.prof`` files for tools that show them. One cProfile can run at a time: while an action
    lies within another, the time is the inner one's alone.
    Raises ValueError if an action is stopped and was never started.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        check("line_count_restriction", line_count_restriction, NonNegativeInt | Fraction)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = defaultdict(cProfile.Profile)
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions[action_name].enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        self.profiled_actions[self._running[-1]].disable()
        del self._running[len(self._running) - 1 - self._running[::-1].index(action_name)]
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        sections = []
        for name, profile in self.profiled_actions.items():
            if self.dump_stats:
                self._dump(name, profile)
            text = io.StringIO()
            statistics = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative")
            statistics.print_stats(self.line_count_restriction)
            sections.append((name, text.getvalue()))
        return self._titled("Profiler Report", sections)

    def _dump(self, name: str, profile: cProfile.Profile) -> None:
        if self.dirpath is None:
            raise ValueError(
                "AdvancedProfiler(dump_stats=True) needs dirpath: outside a trainer there is no default folder to write to"
            )
        files, folder = fsspec.core.url_to_fs(os.fspath(self.dirpath))
        files.makedirs(folder, exist_ok=True)
        profile.create_stats()
        files.pipe_file(os.path.join(folder, self._prepare_filename(name, ".prof")), marshal.dumps(profile.stats))

    def teardown(self, stage: str | None) -> None:
        super().teardown(stage)
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.clear()
        self.profiled_actions.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the records in this process."""
        return {**self.__dict__, "profiled_actions": defaultdict(cProfile.Profile), "_running": []}
