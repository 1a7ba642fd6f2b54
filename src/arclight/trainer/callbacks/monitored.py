"""The logged value that a callback watches."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MissingMetricError(ValueError):
    """A callback watches a value that is not logged."""

    def __init__(self, who: str, monitor: str, logged: Iterable[str]) -> None:
        names = sorted(logged)
        near = difflib.get_close_matches(monitor, names, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        super().__init__(
            f"{who}(monitor={monitor!r}): no such value is logged; {hint}logged: {', '.join(names) or 'nothing'}. "
            f"Call self.log({monitor!r}, value) in the module, or monitor one of these",
        )


def check_mode(who: str, mode: str) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f"{who}(mode={mode!r}): choose 'min' (lower is better) or 'max'")
