"""What a simulation has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """One round. Times are seconds since the run began."""

    round: int
    opened: float
    closed: float
    committed: float
    asked: int
    accepted: int
    failed: int
    compute: float
    """The longest training among the contributors, seconds."""
    bytes_down: int
    bytes_up: int
    late: int
    """Clients whose work was not wanted any more when they had done it, or were told so."""
    late_names: tuple[str, ...]
    """The first ten of them."""

    @property
    def seconds(self) -> float:
        return self.committed - self.opened


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A run of a federation on a virtual clock. ``print(result)`` shows a summary."""

    rounds: tuple[RoundTimes, ...]
    seconds: float
    """Virtual time of the whole run, evaluation included."""
    bytes_down: int
    bytes_up: int
    check_seconds: float
    """Server time for updates that arrived, over all threads."""
    fold_seconds: float
    """Server time for folds, steps and checkpoints."""
    lost: int
    """Nodes that fell silent."""
    events: int
    ended: str
    failed: bool
    model_bytes: int
    update_bytes: int
    weights_bytes: int
    clients: int = 0
    messages: tuple[str, ...] = field(default=())
    """What the coordinator had to say."""

    @property
    def round_seconds(self) -> float:
        """Median time of a round from one commit to the next; of the first, from its opening."""
        ends = [self.rounds[0].opened, *(r.committed for r in self.rounds)] if self.rounds else []
        return median(b - a for a, b in pairwise(ends)) if self.rounds else 0.0

    @property
    def busy(self) -> float:
        """Share of the run that the server folds, steps and writes checkpoints."""
        return self.fold_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.clients} clients, {len(self.rounds)} rounds in {_time(self.seconds)}: {self.ended}",
            f"a round takes {_time(self.round_seconds)} (median); the server folds {100 * self.busy:.1f} % of the time "
            f"and checks updates for {_time(self.check_seconds)}",
            f"model {_size(self.model_bytes)}, update {_size(self.update_bytes)}; "
            f"in all {_size(self.bytes_down)} down and {_size(self.bytes_up)} up; {self.lost} nodes fell silent",
            f"{'round':>6} {'took':>9} {'training':>9} {'asked':>6} {'taken':>6} {'failed':>6} {'late':>5} {'down':>9} {'up':>9}",
        ]
        shown = self.rounds if len(self.rounds) <= 12 else (*self.rounds[:6], *self.rounds[-6:])
        for r in shown:
            lines.append(
                f"{r.round:>6} {_time(r.seconds):>9} {_time(r.compute):>9} {r.asked:>6} {r.accepted:>6} {r.failed:>6} {r.late:>5} "
                f"{_size(r.bytes_down):>9} {_size(r.bytes_up):>9}"
            )
        return "\n".join(lines)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if bytes < 1000:
            return f"{bytes:.3g} {unit}"
        bytes /= 1000
    return f"{bytes:.3g} TB"
