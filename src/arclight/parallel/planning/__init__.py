"""What a plan would do, before anything runs: memory, exchanges, the time of a step; and the fastest plan that fits.

Everything is predicted from one pass through the parts of the model with fake tensors (`chain.Chain` of a `chain.Workload`), and
from figures of devices (`devices.hardware`); no hardware and no process group are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.parallel.planning.estimates import estimate as estimate
    from arclight.parallel.planning.plan_search import search as search

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {"estimate": "arclight.parallel.planning.estimates", "search": "arclight.parallel.planning.plan_search"},
)
