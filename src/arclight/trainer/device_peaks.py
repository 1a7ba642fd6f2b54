"""The arithmetic that a device could do at best, by its name and the number type."""

from __future__ import annotations

import re

import torch

from arclight.fabric.rank_zero import rank_zero_warn

_TYPES: tuple[torch.dtype | str, ...] = (
    torch.float64,
    torch.float32,
    "tfloat32",
    torch.bfloat16,
    torch.float16,
    torch.int8,
    "int4",
)

_PEAKS: dict[str, tuple[float | None, ...]] = {
    # Dense TFLOP/s (TOP/s) in the order of _TYPES, from the makers' data sheets; None: the chip does not have it.
    # Blackwell, Hopper
    "b200": (37, 75, 1100, 2250, 2250, 4500, None),
    "h200 nvl": (30, 60, 420, 840, 840, 1680, None),
    "h200": (34, 67, 494.5, 989.5, 989.5, 1979, None),
    "h100 nvl": (30, 60, 417.5, 835.5, 835.5, 1670.5, None),
    "h100 pcie": (25.6, 51.2, 378, 756, 756, 1513, None),
    "h100": (34, 67, 494.5, 989.5, 989.5, 1979, None),
    # Ada
    "rtx 4090": (None, 82.6, 82.6, 82.6, 82.6, 660.6, 1321.2),
    "rtx 4080 super": (None, 52.2, 52.2, 52.2, 52.2, 417.6, 835.2),
    "rtx 4080": (None, 48.7, 48.7, 48.7, 48.7, 389.9, 779.8),
    "l40s": (None, 91.6, 183, 362, 362, 733, None),
    "l40": (None, 90.5, 90.5, 181, 181, 362, 724),
    "l4": (None, 30.3, 60, 121, 121, 242, 484),
    # Ampere
    "a100": (9.7, 19.5, 156, 312, 312, 624, None),
    "a6000": (None, 38.7, 77.4, 38.7, 38.7, 309.7, 619.3),
    "a40": (None, 37.4, 74.8, 149.7, 149.7, 299.3, 598.7),
    "a10g": (None, 31.2, 62.5, 125, 125, 250, 500),
    "a10": (None, 31.2, 62.5, 125, 125, 250, 500),
    "rtx 3090 ti": (None, 40, 40, 40, 40, 320, 640),
    "rtx 3090": (None, 35.6, 35.6, 35.6, 35.6, 284, 568),
    "rtx 3080 ti": (None, 34.1, 34.1, 34.1, 34.1, 272.8, 546.6),
    "rtx 3080": (None, 29.8, 29.8, 29.8, 29.8, 238, 476),
    "rtx 3070": (None, 20.3, 20.3, 20.3, 20.3, 162.6, 325.2),
    # Turing
    "t4": (None, 8.1, None, None, 65, 130, 260),
    "quadro rtx 5000": (None, 11.2, None, None, 89.2, None, None),
    "rtx 2080 super": (None, 11.2, None, None, 22.3, 178.4, 356.8),
    "rtx 2080 ti": (None, 14.2, None, None, 28.5, 227.7, 455.4),
    "rtx 2080": (None, 10.6, None, None, 21.2, 169.6, 339.1),
    "rtx 2070 super": (None, 9.1, None, None, 18.1, 145, 290),
    "titan rtx": (None, 16.3, None, None, 32.6, 261, 522),
    # Volta
    "v100s": (8.2, 16.4, None, None, 130, None, None),
    "v100 pcie": (7, 14, None, None, 112, None, None),
    "v100": (7.8, 15.7, None, None, 125, None, None),
}


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Dense FLOP/s that ``device`` reaches at most in ``dtype``; None, with a warning, for a GPU that is not known here.

    float32 means TF32 where ``torch.get_float32_matmul_precision()`` allows it and the chip has it. Other kinds of
    device have no published number: None.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    chip = _chip(name)
    if chip is None:
        rank_zero_warn(f"FLOPs not found for {name!r}; the share of its peak (MFU) is not reported")
        return None
    peaks = dict(zip(_TYPES, _PEAKS[chip], strict=True))
    if dtype is torch.float32 and peaks["tfloat32"] and torch.get_float32_matmul_precision() != "highest":
        dtype = "tfloat32"
    peak = peaks.get(dtype)
    if peak is None:
        rank_zero_warn(f"{name!r} does not support {dtype}")
        return None
    return round(peak * 1e12)


def _chip(name: str) -> str | None:
    """The row of the table for a device's name; a variant (Ti, Super) that is not in the table is another chip."""
    words = re.split(r"[\s_-]+", name.lower())
    words = ["pcie" if word == "hbm2e" else re.sub(r"^(nvl|pcie).*", r"\1", word) for word in words]
    for row in sorted(_PEAKS, key=len, reverse=True):
        if not set(row.split()) <= set(words):
            continue
        other = {word for word in words if word in ("super", "ti")} - set(row.split())
        return None if other else row
    return None
