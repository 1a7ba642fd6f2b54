"""What has been saved, and which of it is best."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ranking:
    """Order of checkpoints by a monitored value; at most ``keep`` of them stay (-1: all)."""

    mode: str
    keep: int

    @property
    def worst_value(self) -> float:
        return math.inf if self.mode == "min" else -math.inf

    def score(self, value: Any) -> float:
        """The value to rank by: NaN counts as the worst possible."""
        score = float(value)
        return self.worst_value if math.isnan(score) else score

    def worst(self, scores: dict[str, float]) -> str:
        return (max if self.mode == "min" else min)(scores, key=lambda path: scores[path], default="")

    def best(self, scores: dict[str, float]) -> str:
        """The best path; empty where there is none, or none with a value better than the worst possible."""
        best = (min if self.mode == "min" else max)(scores, key=lambda path: scores[path], default="")
        return best if best and scores[best] != self.worst_value else ""

    def qualifies(self, scores: dict[str, float], score: float) -> bool:
        """Whether a checkpoint with ``score`` would be kept beside or instead of one of ``scores``."""
        if self.keep == -1 or len(scores) < self.keep:
            return True
        if self.keep == 0:
            return False
        worst = scores[self.worst(scores)]
        return score < worst if self.mode == "min" else score > worst


@dataclass(frozen=True)
class Record:
    """What has been saved. A checkpoint holds the record that is true once it is complete, so it counts itself."""

    scores: dict[str, float] = field(default_factory=dict)
    """The kept checkpoints that were judged, and the monitored value of each."""
    best: str = ""
    last: str = ""
    newest: str = ""
    current_score: float | None = None
    step: int = 0
    """Optimizer steps at the last save."""

    def paths(self) -> set[str]:
        return {*self.scores, self.best, self.last, self.newest} - {""}

    def state_dict(self, folder: str) -> dict[str, Any]:
        """Plain data; paths in ``folder`` are relative to it, so that it can be moved."""
        return {
            "dirpath": folder,
            "scores": [[relative(path, folder), score] for path, score in self.scores.items()],
            "best": relative(self.best, folder),
            "last": relative(self.last, folder),
            "newest": relative(self.newest, folder),
            "current_score": self.current_score,
            "step": self.step,
        }

    @classmethod
    def load(cls, state: dict[str, Any], folder: str, best: Callable[[dict[str, float]], str]) -> Record:
        """The record of ``state``; its checkpoints are in ``folder`` now or where they were. Lost ones are left out."""

        def find(name: str) -> str:
            candidates = (os.path.join(place, name) for place in (folder, state["dirpath"]))
            return next((path for path in candidates if name and os.path.exists(path)), "")

        scores = {path: float(score) for name, score in state["scores"] if (path := find(name))}
        return cls(
            scores=scores,
            best=find(state["best"]) or best(scores),
            last=find(state["last"]),
            newest=find(state["newest"]),
            current_score=state["current_score"],
            step=state["step"],
        )


def relative(path: str, folder: str) -> str:
    return os.path.relpath(path, folder) if path and folder and Path(path).is_relative_to(folder) else path
