"""Partition data among a federation's sites: disjoint, complete, the same on every machine.

With `IID` and `Dirichlet` the site of a sample depends on the settings and the sample alone; `Size`, and Source (text) and Merchant
(vision), need the sizes of all data first. It never depends on the order of reading.

``text.data.site_split`` and ``vision.data.site_split`` partition with these, by the recipe's table ``partition``. Class and field names
are recipe keys and stay. Which sample is at which site may never change: sites would train on each other's data.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from arclight._intervals import Checked, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class IID:
    """Assign samples at random: all sites have the same distribution."""

    seed: int = 0
    """Seed of the partition."""


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Checked):
    """Draw each site's share of every source from a Dirichlet distribution.

    Hsu, Qi and Brown 2019.
    """

    alpha: PositiveFloat = 0.5
    """Concentration: a small one gives most of a source to one site, a large one equal shares."""
    by: str | None = None
    """What counts as one source, as ``by`` of partition.kind = source (text) or merchant (vision); none for their default."""
    seed: int = 0
    """Seed of the partition."""


@dataclass(frozen=True, kw_only=True)
class Size(Checked):
    """Divide data at random into given shares of its size: sites differ in amount, not in kind."""

    shares: tuple[PositiveFloat, ...] = ()
    """Sizes of the sites relative to each other, such as [4, 2, 1]; empty: equal ones."""
    seed: int = 0
    """Seed of the partition."""


@dataclass(frozen=True, kw_only=True)
class Numbered(Checked):
    """Number one of several sites."""

    number: NonNegativeInt = 0
    """Number of this site, from 0."""
    count: PositiveInt = 1
    """Number of sites."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number >= self.count:
            raise ValueError(f"site {self.number} of {self.count}: sites are numbered from 0 to {self.count - 1}")


def site_at_random(partition: IID | Dirichlet, key: bytes, source: str, count: int) -> int:
    """Return the site (0 to ``count`` - 1) of a sample, as ``partition`` draws it.

    key: the sample's name or content. source: its source, by which `Dirichlet` draws the sites' shares.
    """
    share = _uniform(partition.seed, b"arclight/thing", key)
    if isinstance(partition, IID):
        return int(share * count)
    import numpy as np

    entropy = int(_uniform(partition.seed, b"arclight/source", source.encode()) * 2**53)
    shares = np.random.default_rng(entropy).dirichlet([partition.alpha] * count)
    return min(int(np.searchsorted(np.cumsum(shares), share, side="right")), count - 1)


def divide_by_size(partition: Size, samples: Iterable[tuple[bytes, int]], count: int) -> Division:
    """Divide samples at random so that each site has its share of their size.

    samples: the key (name or content) and the size of every one. A site's size is off by less than the largest sample, or the
    largest group of samples with equal keys, which stay together. Raises ValueError if there are not as many shares as sites.
    """
    import numpy as np

    shares = np.array(partition.shares or (1.0,) * count, np.float64)
    if len(shares) != count:
        raise ValueError(f"shares: need one for each of {count} sites, got {len(shares)}")
    places, sizes = array("d"), array("q")
    for key, size in samples:
        places.append(_uniform(partition.seed, b"arclight/thing", key))
        sizes.append(size)
    at, where = np.unique(np.frombuffer(places, np.float64), return_inverse=True)
    groups = np.zeros(len(at), np.int64)
    np.add.at(groups, where, np.frombuffer(sizes, np.int64))
    ends = np.cumsum(groups)
    total = int(ends[-1]) if len(ends) else 0
    wanted = np.cumsum(shares)[:-1] / shares.sum() * total
    middles = ends - groups / 2  # a sample is at the site that its middle lies at
    cuts = [float(at[place]) if place < len(at) else 1.0 for place in np.searchsorted(middles, wanted)]
    return Division(partition.seed, tuple(cuts))


@dataclass(frozen=True)
class Division:
    """Division of [0, 1) among sites by cuts; a sample's key is hashed to a number in it."""

    seed: int
    cuts: tuple[float, ...]

    def site_of(self, key: bytes) -> int:
        """Return the site of the sample ``key``."""
        return bisect_right(self.cuts, _uniform(self.seed, b"arclight/thing", key))


def check_enough_sources(sources: Collection[str], count: int) -> None:
    """Raise ValueError if there are fewer sources than sites."""
    if len(sources) < count:
        named = ", ".join(sorted(sources)[:8]) + (", ..." if len(sources) > 8 else "")
        raise ValueError(
            f"the data have {len(sources)} source{'s' * (len(sources) != 1)} ({named}), too few for {count} sites: "
            "tell sources apart by something finer, divide with partition.kind = iid, or have fewer sites"
        )


def pack_sources(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Assign whole sources to sites: the largest first, each to the site that has least so far.

    sizes: of every source. Raises ValueError if there are fewer sources than sites.
    """
    check_enough_sources(sizes, count)
    loads, home = [0] * count, {}
    for source in sorted(sizes, key=lambda source: (-sizes[source], source)):
        home[source] = min(range(count), key=lambda site: (loads[site], site))
        loads[home[source]] += sizes[source]
    return home


def _uniform(seed: int, purpose: bytes, key: bytes) -> float:
    """Return a number in [0, 1) that seed, purpose and key decide."""
    digest = hashlib.blake2b(key, digest_size=8, key=str(seed).encode(), person=purpose[:16]).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
