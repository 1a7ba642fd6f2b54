"""What a process exchanges with others in a step, by dimension of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arclight.parallel.plan import Plan
from arclight.parallel.planning.memory import Link, reduces_once, reshards
from arclight.parallel.planning.sharing import MASTER
from arclight.parallel.planning.stages import crossings
from arclight.parallel.planning.trace import Message, summed


def traffic(links: Sequence[Link], plan: Plan, passes: int, stage: int, boundary: int) -> tuple[Message, ...]:
    """Of a process of ``stage`` with ``links``, through ``passes`` micro-batches; bytes are those of whole tensors.

    boundary: bytes that a micro-batch carries from stage to stage.
    """
    return summed(message for message in _messages(links, plan, passes, stage, boundary) if message.bytes)


def _messages(links: Sequence[Link], plan: Plan, passes: int, stage: int, boundary: int) -> Iterator[Message]:
    once = reduces_once(plan)
    reductions = 1 if once else passes
    for cost, share, last in links:
        for message in (*cost.forward.messages, *cost.backward.messages):
            yield message._replace(bytes=message.bytes * passes, times=message.times * passes)
        if share.exchanged:
            # The last part's weights stay from its forward to the end of backward.
            gathers = 1 if once and not reshards(plan) else 2 * passes if reshards(plan) and not last else passes
            yield Message("all_gather", "dp_shard", gathers * share.exchanged * share.size, gathers)
            yield Message("reduce_scatter", "dp_shard", reductions * share.exchanged * MASTER, reductions)
        if plan.dp_replicate > 1 and not plan.apart:  # those exchange once in many steps, which is left out
            yield Message("all_reduce", "dp_replicate", reductions * share.own * MASTER, reductions)
        for elements in share.summed:
            yield Message("all_reduce", "tp", reductions * elements * share.size, reductions)
    if plan.pp > 1:
        sent = passes * crossings(plan, stage)
        yield Message("send", "pp", sent * boundary, sent)
