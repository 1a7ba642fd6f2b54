"""Define the settings of codecs, without torch.

A federation's settings hold codecs (``up``, ``down``); `to_table` and `from_table` carry one in orders, `encoding`, `layout` and `sizes` read it.
Names of kinds and fields are in recipes, messages and manifests: they stay. Defaults decide what old recipes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from arclight._intervals import Checked, Fraction, Interval, PositiveFraction
from arclight.federated.errors import ProtocolError

_Block = Annotated[int, Interval(ge=2, le=1 << 20)]


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Values as they are."""


@dataclass(frozen=True, kw_only=True)
class Lossy(Checked):
    """A lossy codec with error feedback."""

    feedback: Fraction = 1.0
    """Share of the compression error that is added to the next message (error feedback, Seide et al. 2014), in [0, 1]: 1 loses
    nothing, 0.95 is SparseLoCo's decay (Sarfi et al. 2025, arXiv 2508.15706), 0 keeps no residual."""


@dataclass(frozen=True, kw_only=True)
class BF16(Lossy):
    """Half the bytes of float32: its 16 upper bits, rounded to nearest."""


@dataclass(frozen=True, kw_only=True)
class Int8(Lossy):
    """A quarter of float32: symmetric integers with a float32 scale for each block."""

    block: _Block = 256
    """Values per scale (block size), an even number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block(self.block)


@dataclass(frozen=True, kw_only=True)
class Int4(Lossy):
    """An eighth of float32: NormalFloat levels (Dettmers et al. 2023, arXiv 2305.14314)."""

    block: _Block = 128
    """Values per scale (block size), an even number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block(self.block)


@dataclass(frozen=True, kw_only=True)
class TopK(Lossy):
    """The largest values of each block, as packed indices and short values.

    3 % in 2 bits are 0.014 of float32.
    """

    share: PositiveFraction = 0.03
    """Share of each block's values that is sent, in (0, 1]."""
    bits: Annotated[int, Interval(ge=1, le=4)] = 2
    """Bits of a value: its sign, and one of 2^(bits - 1) magnitudes of its block; 1 to 4."""
    block: Annotated[int, Interval(ge=2, le=1 << 16)] = 4096
    """Block size from which the largest values are selected, a power of two of at most 65536."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")

    @property
    def keep(self) -> int:
        """Count the values of a whole block that are sent."""
        return max(1, round(self.share * self.block))


Codec = Raw | BF16 | Int8 | Int4 | TopK
KINDS: dict[str, type[Codec]] = {kind.__name__.lower(): kind for kind in (Raw, BF16, Int8, Int4, TopK)}


def to_table(codec: Codec) -> dict[str, Any]:
    """Return the codec as a message holds it: ``{"kind": "int8", "block": 256, ...}``."""
    return {"kind": type(codec).__name__.lower(), **asdict(codec)}


def from_table(table: Mapping[str, Any]) -> Codec:
    """Invert `to_table`; missing fields have their defaults.

    Raises ProtocolError for an invalid codec.
    """
    fields = dict(table)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise ProtocolError(f"there is no codec {kind!r}; there are {', '.join(KINDS)}")
    try:
        return KINDS[kind](**fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"the codec {kind!r} cannot be as it was asked for: {error}") from error


def _check_block(block: int) -> None:
    if block % 2:
        raise ValueError(f"block must be even, got {block}")
