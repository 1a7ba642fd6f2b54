"""Partition data among the sites of a federation: disjoint, complete, the same on every machine.

The site of a sample depends on the settings and on the sample itself, never on the order of reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from arclight._intervals import Checked, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class IID:
    """Assign samples at random: all sites have the same distribution."""

    seed: int = 0
    """Seed of the partition."""


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Checked):
    """Draw each site's share of every source from a Dirichlet distribution (Hsu, Qi and Brown 2019)."""

    alpha: PositiveFloat = 0.5
    """Concentration: a small one gives most of a source to one site, a large one equal shares."""
    by: str | None = None
    """Definition of a source, as in partition.kind = source or merchant; none for their default."""
    seed: int = 0
    """Seed of the partition."""


@dataclass(frozen=True, kw_only=True)
class Numbered(Checked):
    """One of several sites."""

    number: NonNegativeInt = 0
    """Number of this site, from 0."""
    count: PositiveInt = 1
    """Number of sites."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number >= self.count:
            raise ValueError(f"site {self.number} of {self.count}: sites are numbered from 0 to {self.count - 1}")


def drawn(partition: IID | Dirichlet, key: bytes, source: str, count: int) -> int:
    """Return the site, of ``count``, that the thing ``key`` (its name or its content) of ``source`` lies at."""
    share = _uniform(partition.seed, b"arclight/thing", key)
    if isinstance(partition, IID):
        return int(share * count)
    import numpy as np

    entropy = int(_uniform(partition.seed, b"arclight/source", source.encode()) * 2**53)
    shares = np.random.default_rng(entropy).dirichlet([partition.alpha] * count)
    return min(int(np.searchsorted(np.cumsum(shares), share, side="right")), count - 1)


def enough(sources: Collection[str], count: int) -> None:
    """Raises ValueError where there are fewer sources than sites."""
    if len(sources) < count:
        named = ", ".join(sorted(sources)[:8]) + (", ..." if len(sources) > 8 else "")
        raise ValueError(
            f"the data have {len(sources)} source{'s' * (len(sources) != 1)} ({named}), too few for {count} sites: "
            "tell sources apart by something finer, divide with partition.kind = iid, or have fewer sites"
        )


def packed(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Whole sources to sites: the largest first, each to the site that has least so far.

    sizes: what every source weighs. Raises ValueError where there are fewer sources than sites.
    """
    enough(sizes, count)
    loads, home = [0] * count, {}
    for source in sorted(sizes, key=lambda source: (-sizes[source], source)):
        home[source] = min(range(count), key=lambda site: (loads[site], site))
        loads[home[source]] += sizes[source]
    return home


def _uniform(seed: int, purpose: bytes, key: bytes) -> float:
    """Return a number in [0, 1) that seed, purpose and key decide."""
    digest = hashlib.blake2b(key, digest_size=8, key=str(seed).encode(), person=purpose[:16]).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
