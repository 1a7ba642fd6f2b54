"""Masks as the server sees them: those of each client in each round, and what its updates may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from arclight.federated.errors import FederatedError
from arclight.federated.masks.experts import assigned, expert_of
from arclight.federated.masks.travel import MODEL, Travel
from arclight.federated.protocol import Entry, Manifest

if TYPE_CHECKING:
    from arclight.federated.settings import Federation


class Travels:
    """What travels, for every client of a run. ``place``: a client's position among the run's clients, None for none of them."""

    def __init__(self, federation: Federation, seed: int, place: Callable[[str], int | None]) -> None:
        self._federation, self._seed, self._place = federation, seed, place
        self._whole: Travel | None = None

    def whole(self, weights: Manifest) -> Travel:
        """Of all clients together. Raises FederatedError where the settings do not fit the model; see `Travel.check`."""
        names = tuple(key.removeprefix(MODEL) for key in weights.tensors if key.startswith(MODEL))
        if self._whole is None or self._whole.names != names:
            travel = Travel.of(self._federation, names)
            travel.check()
            self._whole = travel
        return self._whole

    def of(self, client: str, round: int, weights: Manifest) -> Travel:
        """A client's in a round."""
        travel, experts = self.whole(weights), self._federation.masks.experts
        if experts is None:
            return travel
        place = self._place(client)
        if place is None:
            raise FederatedError(f"{client!r} is no client of this run")
        return replace(travel, experts=assigned(experts, count_of(travel, weights), self._seed, place, round))


def count_of(travel: Travel, weights: Manifest) -> int:
    """How many experts a model has. Raises FederatedError where its stacks do not agree."""
    counts = {
        entry.shape[0] if entry.shape else 0: key for key, entry in weights.tensors.items() if travel.is_stack(key)
    }
    if len(counts) > 1 or 0 in counts:
        said = ", ".join(f"{key} has {count}" for count, key in counts.items())
        raise FederatedError(f"masks.experts.tensors must hold as many experts each: {said}")
    return next(iter(counts))


def sendable(key: str, travel: Travel, round: int, weights: Manifest) -> Entry | None:
    """What a tensor that a client may send in a round is like; None for one that it may not.

    Moments that the server has never had are like their weights; an expert is like a part of its stack.
    """
    found = expert_of(key)
    stack, number = found if found is not None and travel.is_stack(found[0]) else (key, None)
    if key not in travel.up([stack], round):
        return None
    like = weights.tensors.get(stack) or weights.tensors.get(MODEL + stack.partition("/")[2])
    if like is None or number is None:
        return like
    return replace(like, shape=like.shape[1:]) if like.shape and number < like.shape[0] else None
