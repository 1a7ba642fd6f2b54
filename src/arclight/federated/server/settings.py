"""What the server takes for an update that can be (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass

from arclight._intervals import Checked, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, kw_only=True)
class Checks(Checked):
    """When an update is refused although it is well-formed. A refused client is named, with the reason, in the round's history."""

    norm_times: NonNegativeFloat = 100.0
    """Changes whose norm is so many times the median of those accepted before are refused; before any was, so many times that of
    the weights. 0 takes any."""
    weight_times: NonNegativeFloat = 1000.0
    """Updates that claim so many times the samples (or tokens) per step of the median accepted before are refused. 0 takes any."""
    bytes_times: PositiveFloat = 2.0
    """Updates larger than this share of the weights that they change are refused, beside 1 MB for names."""
