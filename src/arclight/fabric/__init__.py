"""Where code runs: devices, precision, process groups, launchers, cluster environments, collectives, seeding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.extras import MissingExtraError as MissingExtraError
    from arclight.fabric.seeding import isolate_rng as isolate_rng
    from arclight.fabric.seeding import seed_everything as seed_everything

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "MissingExtraError": "arclight.fabric.extras",
        "isolate_rng": "arclight.fabric.seeding",
        "seed_everything": "arclight.fabric.seeding",
    },
)
