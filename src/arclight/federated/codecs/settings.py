"""Which codec, in a recipe (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Values as they are."""
