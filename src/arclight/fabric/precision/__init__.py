"""Set the precision of forward and backward: full, half, double, mixed, 8 or 4 bits.

In: ``precision=``; out: a Precision that loops, Fabric and strategies apply. Open ``base`` first, the interface and full precision;
``names`` resolves text (a new name goes there), ``mixed``, ``true_precision`` and ``low_bit`` are the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.precision.base import Precision as Precision
    from arclight.fabric.precision.low_bit import BitsandbytesPrecision as BitsandbytesPrecision
    from arclight.fabric.precision.low_bit import Float8Precision as Float8Precision
    from arclight.fabric.precision.low_bit import TransformerEnginePrecision as TransformerEnginePrecision
    from arclight.fabric.precision.mixed import MixedPrecision as MixedPrecision
    from arclight.fabric.precision.names import resolve_precision as resolve_precision
    from arclight.fabric.precision.true_precision import DoublePrecision as DoublePrecision
    from arclight.fabric.precision.true_precision import HalfPrecision as HalfPrecision

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "BitsandbytesPrecision": "arclight.fabric.precision.low_bit",
        "DoublePrecision": "arclight.fabric.precision.true_precision",
        "Float8Precision": "arclight.fabric.precision.low_bit",
        "HalfPrecision": "arclight.fabric.precision.true_precision",
        "MixedPrecision": "arclight.fabric.precision.mixed",
        "Precision": "arclight.fabric.precision.base",
        "TransformerEnginePrecision": "arclight.fabric.precision.low_bit",
        "resolve_precision": "arclight.fabric.precision.names",
    },
)
