"""Steps of pipelines worked out in few lines, for tests to compare with."""

from __future__ import annotations

from arclight.parallel.pipeline.schedule.actions import Action, Order
from arclight.parallel.pipeline.schedule.step_trace import Span, Trace


def gpipe(ranks: int, micro_batches: int) -> Order:
    return tuple(
        tuple(Action(rank, kind, number) for kind in ("F", "B") for number in range(micro_batches))
        for rank in range(ranks)
    )  # fmt: skip


def one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    rows = []
    for rank in range(ranks):
        warm = min(micro_batches, ranks - rank)
        row = [Action(rank, "F", number) for number in range(warm)]
        for number in range(micro_batches):
            row.append(Action(rank, "B", number))
            if warm + number < micro_batches:
                row.append(Action(rank, "F", warm + number))
        rows.append(tuple(row))
    return tuple(rows)


def run(
    order: Order,
    took: dict[str, float],
    slow: dict[int, float] | None = None,
    transfer: float = 0.0,
    name: str = "test",
) -> Trace:
    """Every action as soon as it can: forwards wait for the stage before, backwards for the stage after."""
    ranks, spans, clocks, rows = len(order), dict[Action, Span](), [0.0] * len(order), [list(row) for row in order]
    held = [0] * ranks
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                stage, kind, number = row[0].stage, row[0].kind, row[0].micro_batch
                needs = Action(stage - 1, "F", number) if kind == "F" else Action(stage + 1, "B", number)
                if 0 <= needs.stage < ranks and needs not in spans:
                    break
                ready = spans[needs].end + transfer if needs in spans else 0.0
                start = max(clocks[rank], ready)
                clocks[rank] = start + took[kind] * (slow or {}).get(stage, 1.0)
                held[rank] += 1000 if kind == "F" else -1000
                spans[row.pop(0)] = Span(rank, Action(stage, kind, number), start, clocks[rank], held[rank])
    micro_batches = 1 + max(action.micro_batch for action in spans)
    return Trace(name, ranks, ranks, micro_batches, tuple(spans.values()))
