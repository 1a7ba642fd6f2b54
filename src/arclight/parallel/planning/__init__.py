"""Predict memory, traffic and time of plans, and search the fastest that fits.

``arclight plan`` calls it. A `chain.Workload` comes in. ``chain`` traces its links with fake tensors, as one process of a plan has them
(``sharded_shapes``, ``fsdp_shards``, ``pp_layout``); ``memory`` and ``timing`` add them up; ``estimates`` gives one plan's `Estimate`,
``mesh_search`` the best of all plans, ``explain`` why not others. No device and no process group are needed. Predictions follow what
``parallel.model`` does, and change with it. Open ``estimates.py`` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.parallel.planning.estimates import estimate as estimate
    from arclight.parallel.planning.mesh_search import search as search

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {"estimate": "arclight.parallel.planning.estimates", "search": "arclight.parallel.planning.mesh_search"},
)
