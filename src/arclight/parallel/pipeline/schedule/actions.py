"""Write and read the actions of a pipeline step, in torch's notation (``2F0``).

``schedule`` makes and checks orders of these, ``runtime`` executes them. The notation and the CSV form are torch's, so that schedules
can be exchanged: they stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from arclight.parallel.plan import PlanError

Kind = Literal["F", "B", "I", "W"]
"""Forward (F); backward (B) in one, which is I and then W: backward of the inputs (I), and of the weights (W)."""

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
        """Return the action that ``text`` writes, as ``2F0``. Raises PlanError for anything else."""
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise PlanError(f"{text!r} is not an action: write <stage><F, B, I or W><micro-batch>, as 2F0")
        return cls(int(found[1]), cast(Kind, found[2]), int(found[3]))


Order = tuple[tuple[Action, ...], ...]
"""Actions of each process of a pipeline, in the order of execution."""


def write_csv(order: Order) -> str:
    """Format ``order`` as torch's schedules write theirs (format "compute_only").

    There is a line for each process.
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in order)


def read_csv(text: str) -> Order:
    """Parse the order that :func:`write_csv` or torch wrote.

    Idle places (empty) are left out, pairs are one after the other. Raises PlanError for what is no action.
    """
    return tuple(
        tuple(Action.parse(part) for cell in line.split(",") for part in _parts(cell) if part.strip())
        for line in text.splitlines()
        if line.strip()
    )


def _parts(cell: str) -> list[str]:
    """Split a forward and a backward that torch writes as one, ``(0F7;7B4)OVERLAP_F_B``."""
    found = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell.strip())
    return found[1].split(";") if found is not None else [cell]
