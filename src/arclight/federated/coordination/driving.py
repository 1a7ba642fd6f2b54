"""The one right way to carry an event through: decide, write down, apply; and on, until nothing follows any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.events import Command, Event, Tick
from arclight.federated.coordination.records import Record
from arclight.federated.errors import FederatedError

_MOST = 1_000_000


class BrokenError(FederatedError):
    """A decision that was written down and then not carried through: this coordinator must not be asked again."""


def drive(
    coordinator: Coordinator, append: Callable[[Sequence[Record]], None], event: Event, now: float
) -> Iterator[tuple[tuple[Record, ...], tuple[Command, ...]]]:
    """What an event leads to, step by step: records that are on disk now, and commands to carry out, in their order.

    append: the journal's. What it raises comes through, and then the step has not happened. To be run through to its end, under
    one lock, and again with `Tick` whenever `Coordinator.next_deadline` has come. Raises BrokenError if a step is in the journal
    and the coordinator could not follow it.
    """
    for number in range(_MOST):
        decision = coordinator.decide(event if number == 0 else Tick(), now)
        if number and not decision:
            return
        append(decision.records)
        try:
            coordinator.apply(decision)
        except Exception as error:
            raise BrokenError(
                f"{type(decision.event).__name__} is in the journal and could not be applied ({type(error).__name__}: {error}): what "
                "this process knows of the run is half true, so it does nothing more; start the server again, it goes on from the journal"
            ) from error
        if decision:
            yield decision.records, decision.commands
    raise FederatedError(f"the coordinator does not come to rest; it says: {coordinator.about(now)}")
