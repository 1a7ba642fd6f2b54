"""Rank checkpoints, plan a save, write it and delete what it replaces.

`ModelCheckpoint` is the only user. In: monitored values; out: `SavePlan` objects, applied so that the new checkpoint is complete before
an old one is deleted. Keys of `CheckpointHistory.state_dict` are in checkpoints; those of its `attributes` are Lightning's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from arclight.checkpoint import CheckpointError
from arclight.checkpoint.remote import to_path
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies.sharded import ShardedStrategy
from arclight.trainer.callbacks.checkpoint.file_ops import (
    copy_checkpoint,
    is_within,
    link_checkpoint,
    remove_checkpoint,
)
from arclight.trainer.callbacks.monitored import check_mode
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO

if TYPE_CHECKING:
    from concurrent.futures import Future

    from arclight.fabric.strategies import Strategy
    from arclight.trainer.fabric.checkpoint_io import CheckpointIO


def check_retention(mode: str, monitor: str | None, save_top_k: int, save_last: Any) -> None:
    """Raise MisconfigurationError for ModelCheckpoint settings that do not say what to keep."""
    check_mode(mode)
    if save_top_k < -1:
        raise MisconfigurationError(
            f"Invalid value for save_top_k={save_top_k}: -1 keeps all, 0 none, k the best k. Must be >= -1"
        )
    if monitor is None and save_top_k not in (-1, 0, 1):
        raise MisconfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration: say which logged value "
            "ranks checkpoints, or keep 1, all (-1) or none (0)"
        )
    if save_last not in (None, True, False, "link"):
        raise MisconfigurationError(f"ModelCheckpoint(save_last={save_last!r}): choose True, False or 'link'")


@dataclass(frozen=True)
class TopK:
    """Order of checkpoints by a monitored value; at most ``keep`` of them stay (-1: all)."""

    mode: str
    keep: int

    @property
    def worst_value(self) -> float:
        return math.inf if self.mode == "min" else -math.inf

    def score(self, value: Any) -> float:
        """Return the value to rank by: NaN counts as the worst possible."""
        score = float(value)
        return self.worst_value if math.isnan(score) else score

    def worst(self, scores: dict[str, float]) -> str:
        return (max if self.mode == "min" else min)(scores, key=lambda path: scores[path], default="")

    def best(self, scores: dict[str, float]) -> str:
        """Return the best path, or "" if no value is better than the worst possible."""
        best = (min if self.mode == "min" else max)(scores, key=lambda path: scores[path], default="")
        return best if best and scores[best] != self.worst_value else ""

    def replaced(self, scores: dict[str, float]) -> str:
        """Return the checkpoint that the next better one replaces, or "" while there is room.

        If all are kept it is the worst.
        """
        return self.worst(scores) if self.keep == -1 or len(scores) >= self.keep > 0 else ""

    def qualifies(self, scores: dict[str, float], score: float) -> bool:
        """Return True if a checkpoint with ``score`` would be kept among ``scores``."""
        if self.keep == -1 or len(scores) < self.keep:
            return True
        if self.keep == 0:
            return False
        worst = scores[self.worst(scores)]
        return score < worst if self.mode == "min" else score > worst


@dataclass(frozen=True)
class CheckpointHistory:
    """Checkpoints that are kept. A checkpoint's own history counts itself."""

    scores: dict[str, float] = field(default_factory=dict)
    """The kept checkpoints that were judged, and the monitored value of each."""
    best: str = ""
    last: str = ""
    newest: str = ""
    current_score: float | None = None
    judged: int = 0
    """Optimizer steps when a save was last due."""
    saved: int = 0
    """Optimizer steps at the last save."""
    kept: tuple[str, ...] = ()
    """Checkpoints that stay without a value to rank them by, if all are kept."""
    interim: tuple[str, ...] = ()
    """Checkpoints for a resume only, written if a run was broken off: they are deleted when there is a newer one."""

    def paths(self) -> set[str]:
        return {*self.scores, self.best, self.last, self.newest, *self.kept, *self.interim} - {""}

    def state_dict(self, ranking: TopK) -> dict[str, Any]:
        """Return plain data and scalars, under the names of the callback's attributes."""
        own = {
            "newest_path": self.newest, "judged": self.judged, "saved": self.saved, "kept": list(self.kept),
            "interim": list(self.interim),
        }  # fmt: skip
        return self.attributes(ranking) | own

    def attributes(self, ranking: TopK) -> dict[str, Any]:
        """Return the public attributes of the callback that say the same."""
        scores = {path: torch.tensor(score) for path, score in self.scores.items()}
        replaced = ranking.replaced(self.scores)
        highest = (min if ranking.mode == "min" else max)(self.scores.values(), default=None)
        return {
            "best_k_models": scores,
            "best_model_path": self.best,
            "best_model_score": None if highest is None else torch.tensor(highest),
            "kth_best_model_path": replaced,
            "kth_value": scores.get(replaced, torch.tensor(ranking.worst_value)),
            "last_model_path": self.last,
            "current_score": None if self.current_score is None else torch.tensor(self.current_score),
        }

    @classmethod
    def load(cls, state: dict[str, Any], ranking: TopK, before: str, folder: str) -> CheckpointHistory:
        """Restore the history from ``state``, without checkpoints that no longer exist.

        ``before`` is the folder that they were saved in; paths within it are looked up in ``folder``.
        """

        def find(path: str) -> str:
            inside = path and before and is_within(path, before)
            path = os.path.join(folder, os.path.relpath(path, before)) if inside else path
            return path if path and to_path(path).exists() else ""

        scores = {path: float(score) for name, score in state["best_k_models"].items() if (path := find(name))}
        score = state.get("current_score")
        return cls(
            scores=scores,
            best=find(state["best_model_path"]) or ranking.best(scores),
            last=find(state["last_model_path"]),
            newest=find(state.get("newest_path", "")),
            current_score=None if score is None else float(score),
            judged=state.get("judged", 0),
            saved=state.get("saved", 0),
            kept=tuple(path for name in state.get("kept", ()) if (path := find(name))),
            interim=tuple(path for name in state.get("interim", ()) if (path := find(name))),
        )


@dataclass(frozen=True)
class SavePlan:
    """Plan of one save: what to write, what to delete afterwards, and the resulting history."""

    record: CheckpointHistory
    path: str = ""
    last: str = ""
    drop: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()
    """Interim checkpoints to drop, even the one that the run was resumed from."""

    @classmethod
    def after(
        cls,
        old: CheckpointHistory,
        ranking: TopK,
        step: int,
        free_path: Callable[[str | None, str], str],
        *,
        rank: bool = True,
        score: float | None = None,
        keep: bool = False,
        last: str | None = None,
        needed: str | None = "",
    ) -> SavePlan:
        """Return the save at optimizer step ``step``, when ``old`` is the record.

        ``rank``: it may be one of the kept (by its ``score``; None: the newest is best); ``keep``: it is written
        whatever its rank, until there is a newer one; ``last``: name of the one that is always the newest;
        ``free_path(name, replaces)`` gives a path that is not in use; ``needed``: the interim one that a person named to resume
        from, None if all are needed, as nothing can be resumed from this one.
        """
        path, drop, record = "", "", replace(old, judged=step)
        if keep:
            path = free_path(None, "")
        elif rank and ranking.keep != 0 and score is None:
            drop = old.best if ranking.keep == 1 else ""
            path = free_path(None, drop)
            kept = () if ranking.keep == 1 else tuple(dict.fromkeys((*old.kept, path)))  # a name may be used again
            record = replace(record, best=path, kept=kept)
        elif rank and ranking.keep != 0 and score is not None:
            record = replace(record, current_score=score)
            if ranking.qualifies(old.scores, score):
                drop = ranking.worst(old.scores) if len(old.scores) == ranking.keep else ""
                path = free_path(None, drop)
                scores = {name: value for name, value in old.scores.items() if name != drop} | {path: score}
                record = replace(record, scores=scores, best=ranking.best(scores))
        newest = free_path(last, old.last) if last else ""
        record = replace(record, last=newest or old.last, newest=path or newest or old.newest)
        record = replace(record, saved=step if path or newest else old.saved)
        gone = (drop, old.last) if newest else (drop,)
        drops = tuple(name for name in gone if name and name not in (path, newest))
        superseded = () if needed is None or not (path or newest) else tuple(p for p in old.interim if p != needed)
        left = tuple(name for name in old.interim if name not in superseded)
        record = replace(record, interim=(*left, path) if keep else left)
        return cls(record, path, newest, drops, superseded)


@dataclass
class CheckpointWriter:
    """Writer of one checkpoint at a time: :meth:`write` starts it, :meth:`take` completes it."""

    asynchronous: bool | None
    """None: True if several processes write their own shards."""
    plan: SavePlan | None = None
    """What is being written."""
    _future: Future[Any] | None = None
    _before: CheckpointIO | None = None

    def begin(self, strategy: Strategy, io: CheckpointIO) -> CheckpointIO:
        """Return what a fit writes with: ``io``, in the background if asked to."""
        self.plan = self._future = None
        sharded = strategy.world_size > 1 and isinstance(strategy, ShardedStrategy) and strategy.saves_shards
        wanted = sharded if self.asynchronous is None else self.asynchronous
        if not wanted or isinstance(io, AsyncCheckpointIO):
            return io
        self._before = io
        return AsyncCheckpointIO(io)

    def end(self, io: CheckpointIO, failed: bool = False) -> CheckpointIO:
        """Return the checkpoint IO that was in use before the fit.

        After a failure other ranks' shards are waited for only briefly.
        """
        if failed and isinstance(io, AsyncCheckpointIO):
            io.limit_wait()
        before, self._before = self._before, None
        return io if before is None else before

    def write(self, plan: SavePlan, save: Callable[[str], None], io: CheckpointIO) -> None:
        """Start writing the checkpoint of ``plan`` by ``save``. A collective: every rank calls it."""
        if path := plan.path or plan.last:
            save(path)
            self._future = getattr(io, "in_flight", None)
        self.plan = plan

    def _in_background(self, io: CheckpointIO) -> bool:
        """Return True if the save may still be written.

        Also if another callback has ended the use of an AsyncCheckpointIO, and ``io`` is none.
        """
        return self._future is not None or isinstance(io, AsyncCheckpointIO)

    def _is_complete(self, strategy: Strategy, io: CheckpointIO) -> bool:
        """Return True if every rank knows without asking that no save is in flight."""
        if not self._in_background(io):
            return True
        return strategy.world_size == 1 and (self._future is None or self._future.done())

    def take(self, strategy: Strategy, io: CheckpointIO, wait: bool = True) -> SavePlan | None:
        """Return the plan whose checkpoint is complete, or None.

        None means that nothing was written, or (without ``wait``) that it is still being written.

        Raises CheckpointError on every rank if writing in the background failed.
        """
        plan, future = self.plan, self._future
        if plan is None or not (wait or self._is_complete(strategy, io)):
            return None
        background = self._in_background(io)
        self.plan = self._future = None
        error = None
        if background:
            try:
                if future is not None:
                    io.wait() if isinstance(io, AsyncCheckpointIO) and io.in_flight is future else future.result()
            except Exception as problem:  # every rank must raise it
                error = problem
            if message := strategy.broadcast(None if error is None else str(error) or repr(error)):
                raise CheckpointError(message) from error
        return plan


def apply_plan(
    plan: SavePlan,
    folder: str,
    resumed: str | os.PathLike[str] | None,
    io: CheckpointIO,
    link: bool,
    keep: Container[str] = (),
) -> None:
    """Update ``last`` and delete the checkpoints that a complete one replaces. For rank 0.

    ``io``: the plugin that wrote them; ``keep``: paths never to delete; ``resumed``: the checkpoint that the run began from.
    """
    if plan.path and plan.last:
        (link_checkpoint if link else copy_checkpoint)(to_path(plan.path), to_path(plan.last))
    begun_from = "" if resumed is None else str(resumed) if "://" in str(resumed) else os.path.abspath(resumed)
    for path in plan.drop:  # never reach into another run's folder, nor take away what this one began from
        if is_within(path, folder) and path != begun_from and path not in keep:
            remove_checkpoint(path, io)
    for path in plan.superseded:
        if is_within(path, folder) and path not in keep:
            remove_checkpoint(path, io)
