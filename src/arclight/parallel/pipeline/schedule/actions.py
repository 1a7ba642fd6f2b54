"""What the processes of a pipeline do in a step, as data: actions in order, in torch's notation (``2F0``), and when each of them ran."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

from arclight.parallel.plan import PlanError

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward in one; backward of what came in; backward of the weights. B is I and then W."""

_WRITTEN = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One stage at work on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``text`` writes, as ``2F0``. Raises PlanError for anything else."""
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise PlanError(f"{text!r} is no action: write <stage><F, B, I or W><micro-batch>, as 2F0")
        return cls(int(found[1]), cast(Kind, found[2]), int(found[3]))


Order = tuple[tuple[Action, ...], ...]
"""For each process of a pipeline its actions, in the order in which it does them."""


def write_csv(order: Order) -> str:
    """``order`` as torch's schedules write theirs (format "compute_only"): a line for each process."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in order)


def read_csv(text: str) -> Order:
    """The order that :func:`write_csv` or torch wrote; idle places (empty) are left out, pairs are one after the other.

    Raises PlanError for what is no action.
    """
    return tuple(
        tuple(Action.parse(part) for cell in line.split(",") for part in _parts(cell) if part.strip())
        for line in text.splitlines()
        if line.strip()
    )


def _parts(cell: str) -> list[str]:
    """Of a forward and a backward that torch has as one, ``(0F7;7B4)OVERLAP_F_B``, both."""
    found = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    return found[1].split(";") if found is not None else [cell]


@dataclass(frozen=True)
class Span:
    """An action as it ran, predicted or measured. Seconds since the step began."""

    rank: int
    action: Action
    start: float
    end: float
    live: int = 0
    """Bytes of activations that the process holds when it is over."""


@dataclass(frozen=True)
class Trace:
    """One step of a pipeline, predicted or measured."""

    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    spans: tuple[Span, ...]
    waits: dict[Action, float] = field(default_factory=dict)
    """Seconds that a process was held up before an action, by what had not arrived."""

    def __str__(self) -> str:
        """A table: for each process how busy it was, and why it was not."""
        from arclight.parallel.pipeline.schedule.step_trace import describe

        return describe(self)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def of(self, rank: int) -> list[Span]:
        """What one process did, by time."""
        return sorted((span for span in self.spans if span.rank == rank), key=lambda span: span.start)

    @classmethod
    def merge(cls, parts: Iterable[Trace]) -> Trace:
        """One trace of those that the processes of one pipeline took of themselves."""
        first, *rest = parts
        spans = (*first.spans, *(span for part in rest for span in part.spans))
        waits = first.waits | {action: wait for part in rest for action, wait in part.waits.items()}
        return cls(first.schedule, first.ranks, first.stages, first.micro_batches, spans, waits)
