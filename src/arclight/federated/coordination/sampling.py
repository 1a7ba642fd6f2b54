"""Sample the clients of a round as a function of seed, round and attempt.

Draws are without replacement and usually cost what is drawn, whatever the number of clients. Nothing is kept between rounds.

`round_rules` and `message_rules` draw a round's clients, `run_state` those that evaluate a first round, `server_run` to account privacy, the
simulator those that connect first. A resumed server must draw the same: hash and order of draws stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from arclight.data.permutation import Keys, keys_of, permute
from arclight.federated.coordination.settings import Hours, Sampling

_DRAW, _DROP, _BEGIN, _OUTSIDE, _FIT = range(5)  # what a random number is for


class Roster:
    """The names of a run's clients, in order: given, or "0", "1", ... without being stored."""

    def __init__(self, clients: Sequence[str] | int) -> None:
        self._names = None if isinstance(clients, int) else tuple(clients)
        self._size = clients if isinstance(clients, int) else len(clients)
        self._index = None if self._names is None else {name: n for n, name in enumerate(self._names)}
        if self._size < 1 or (self._index is not None and len(self._index) != self._size):
            raise ValueError(
                "a run needs at least one client, and every client a name of its own: "
                + (f"got {self._size}" if self._names is None else f"got {self._names[:10]}")
            )

    def __len__(self) -> int:
        return self._size

    def name(self, index: int) -> str:
        return str(index) if self._names is None else self._names[index]

    def index(self, name: str) -> int | None:
        """Return the position of a client; None for an unknown name."""
        if self._index is not None:
            return self._index.get(name)
        if not (name.isascii() and name.isdigit()) or str(number := int(name)) != name:
            return None
        return number if number < self._size else None

    def __str__(self) -> str:
        if self._names is None:
            return f"0 to {self._size - 1}"
        return ", ".join(self._names[:8]) + (f" and {self._size - 8} more" if self._size > 8 else "")

    def sort(self, names: Collection[str]) -> tuple[str, ...]:
        """Sort names in the clients' order. Raises KeyError for an unknown one."""
        places = {name: self.index(name) for name in names}
        if strange := [name for name, place in places.items() if place is None]:
            raise KeyError(strange[0])
        return tuple(sorted(names, key=lambda name: places[name] or 0))


class Sampler:
    """Draw clients for the rounds of one run."""

    def __init__(self, sampling: Sampling, roster: Roster, seed: int) -> None:
        self.sampling, self.roster, self._seed = sampling, roster, seed % 2**63

    @property
    def wanted(self) -> int:
        """Return the updates that a full round is for."""
        return min(self.sampling.per_round or len(self.roster), len(self.roster))

    @property
    def asked(self) -> int:
        """Return the clients that a full round asks: those wanted and those to spare."""
        return min(len(self.roster), math.ceil(self.wanted * (1 + self.sampling.over_provision) - 1e-9))

    def draw(
        self, round: int, *, count: int | None = None, attempt: int = 0, without: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Draw a round's clients: ``count`` of them, by default ``asked``, none of ``without``.

        Dropouts are left out, but never all. Fewer if there are no more. All of them come in their own order, a sample
        in that of the draw.
        """
        count = self.asked if count is None else count
        avoided = {index for name in without if (index := self.roster.index(name)) is not None}
        size = len(self.roster)
        key = keys_of(self._seed, _DRAW, round, attempt)
        found: list[int] = []
        for start, stop in _pieces(count + len(avoided), size):
            whole = start == 0 and stop == size
            drawn = range(size) if whole and count >= size else permute(np.arange(start, stop), size, key).tolist()
            found += [index for index in drawn if index not in avoided][: count - len(found)]
            if len(found) >= count:
                break
        kept = self._reachable(np.asarray(found, dtype=np.int64), round, attempt)
        return tuple(self.roster.name(index) for index in (kept.tolist() or found[:1]))

    def seed_of(self, round: int, client: str) -> int:
        """Return the seed of a client's own draws in a round, in [0, 2^63)."""
        return int(keys_of(self._seed, _FIT, round, self.roster.index(client) or 0)[0] >> np.uint64(1))

    def _reachable(self, clients: npt.NDArray[np.int64], round: int, attempt: int) -> npt.NDArray[np.int64]:
        kept = np.ones(clients.shape, bool)
        if self.sampling.dropout and clients.size:
            kept &= _uniform(keys_of(self._seed, _DROP, round, attempt, clients)) >= self.sampling.dropout
        if self.sampling.hours is not None and clients.size:
            kept &= self._awake(self.sampling.hours, clients, round)
        return clients[kept]

    def _awake(self, hours: Hours, clients: npt.NDArray[np.int64], round: int) -> npt.NDArray[np.bool_]:
        begin = 24 * _uniform(keys_of(self._seed, _BEGIN, clients))
        lucky = _uniform(keys_of(self._seed, _OUTSIDE, round, clients)) < hours.outside
        return np.asarray(((round * hours.per_round - begin) % 24 < hours.length) | lucky)


def _pieces(first: int, size: int) -> list[tuple[int, int]]:
    """Split [0, size) into at most two parts, the first of which usually suffices."""
    first = min(first, size)
    return [(0, first)] if first == size else [(0, first), (first, size)]


def _uniform(keys: Keys) -> npt.NDArray[np.float64]:
    """Return floats in [0, 1), from the upper 53 bits."""
    return np.asarray((keys >> np.uint64(11)).astype(np.float64) * 2.0**-53)
