"""Run a training loop on devices: accelerators, precision, strategies and launchers.

In: what a user asks for (accelerator, devices, strategy, precision); out: one strategy that runs it. Open ``selection`` first: how
arguments become a strategy. ``accelerators``, ``precision``, ``strategies`` and ``environments`` hold the classes, ``launchers`` starts
processes, ``distributed`` is their process group. Helpers of the rooms above: ``seeding``, ``batches``, ``modules``, ``memory``,
``rank_zero``, ``errors``, ``warnings``, ``extras`` (optional dependencies), ``registry`` (classes by name), ``atomic_replace``,
``weight_files`` (safetensors), ``signing`` (Ed25519) and ``serving`` (addresses, certificates and threads of HTTP servers).
"""

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
