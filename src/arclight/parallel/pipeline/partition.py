"""Which layers each stage gets: the cut whose slowest stage is fastest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from arclight.parallel.plan import PlanError


def balance(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Contiguous ranges of ``costs``, one for each stage, whose largest sum is least.

    first, last: what the first and the last stage compute besides (embeddings, the output). Exact, by dynamic programming over
    ends of stages: best(s, j) = min over i of max(best(s - 1, i), cost of i to j). Of cuts that are as good, the one whose
    earlier stages are shorter. Raises PlanError for fewer costs than stages.
    """
    count = len(costs)
    if count < stages:
        raise PlanError(f"{count} layers are too few for {stages} stages: use a plan with {count} or less")
    sums = [0.0, *itertools.accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + first * (stage == 0) + last * (stage == stages - 1)

    best = [cost(0, 0, end) if end else float("inf") for end in range(count + 1)]
    begins: list[list[int]] = []
    for stage in range(1, stages):
        at, new = [0] * (count + 1), [float("inf")] * (count + 1)
        for end in range(stage + 1, count + 1):
            for begin in range(stage, end):
                slowest = max(best[begin], cost(stage, begin, end))
                if slowest < new[end]:
                    new[end], at[end] = slowest, begin
        best = new
        begins.append(at)
    ends = [count]
    for at in reversed(begins):
        ends.insert(0, at[ends[0]])
    return [range(begin, end) for begin, end in itertools.pairwise([0, *ends])]


def stages_of(rank: int, ranks: int, stages: int, v_shaped: bool) -> list[int]:
    """Numbers of the stages that process ``rank`` of ``ranks`` has: every ``ranks``-th, or forth and back in a V."""
    if not v_shaped:
        return list(range(rank, stages, ranks))
    return [rank, stages - 1 - rank]
