"""Define the wire layout of encoded tensors: raw or not, parts, entry settings (no torch).

`encoding` decides by `is_sent_raw` and writes `entry_settings`; `simulation.sizes` counts bytes by all three. `part_shapes` says what `blockwise`
and `sparse` write (tests compare them). All is wire format and stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Raw, TopK

SMALL = 1024
"""Tensors of fewer elements are sent as they are."""
VECTOR = 1 << 16
"""So are vectors of at most this many elements: norms and biases have few bytes and are sensitive to rounding."""


def is_sent_raw(shape: Sequence[int], itemsize: int, codec: Codec) -> bool:
    """Return True if ``codec`` sends floats of ``itemsize`` bytes unencoded.

    It does so with small tensors, and under `BF16` with 16 bits.
    """
    numel = math.prod(shape)
    small = numel < SMALL or (len(shape) < 2 and numel <= VECTOR)
    return isinstance(codec, Raw) or small or (isinstance(codec, BF16) and itemsize == 2)


def part_shapes(shape: Sequence[int], codec: Codec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the parts of an encoded tensor: safetensors' type and shape, by the part's name."""
    numel = math.prod(shape)
    match codec:
        case BF16():
            return {"": ("BF16", tuple(shape))}
        case Int8():
            return {"": ("I8", (numel,)), "scale": ("F32", (-(-numel // codec.block),))}
        case Int4():
            return {"": ("U8", ((numel + 1) // 2,)), "scale": ("F32", (-(-numel // codec.block),))}
        case TopK():
            rows, rest = divmod(numel, codec.block)
            kept = rows * codec.keep + -(-codec.keep * rest // codec.block)
            width = max(1, (codec.block - 1).bit_length())
            width = width if width <= 8 else width + width % 2
            return {
                "index": ("U8", ((kept * width + 7) // 8,)),
                "value": ("U8", ((kept * codec.bits + 7) // 8,)),
                "level": ("F32", ((rows + bool(rest)) << (codec.bits - 1),)),
            }
    raise ValueError(f"{codec} sends tensors as they are, in one part")


def entry_settings(codec: Codec) -> dict[str, int]:
    """Return the settings of ``codec`` in a manifest's entry, to decode by."""
    match codec:
        case Int8() | Int4():
            return {"block": codec.block}
        case TopK():
            return {"block": codec.block, "keep": codec.keep, "bits": codec.bits}
    return {}
