"""Parse ``devices=``: a count, a list of ids, or text for either."""

from __future__ import annotations

from typing import Any

from arclight.fabric.errors import MisconfigurationError


def check_devices(devices: Any) -> None:
    """Raise TypeError for what is neither a number, nor text, nor a sequence of numbers."""
    wanted = "Device IDs (GPU/TPU) must be an int, a string, a sequence of ints, but you passed"
    if isinstance(devices, (list, tuple)):
        other = next((type(item).__name__ for item in devices if type(item) is not int), None)
        if other is not None:
            raise TypeError(f"{wanted} a sequence of {other}")
    elif type(devices) not in (int, str):
        raise TypeError(f"{wanted} {devices!r}")


def choose_devices(devices: Any, available: list[int]) -> list[int] | None:
    """Numbers of the devices that a user means, out of those ``available``; None for none at all.

    ``3`` and ``"3"`` are the first three, ``-1`` and ``"-1"`` all, ``[1, 3]``, ``"1, 3"`` and ``"1,"`` those numbers.
    Raises TypeError for another type, MisconfigurationError for a device that is not there or named twice.
    """
    check_devices(devices)
    if isinstance(devices, str):
        text = devices.strip()
        try:
            numbers = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise MisconfigurationError(f"devices={devices!r} is neither a number nor numbers between commas") from None
        devices = numbers if "," in text else numbers[0] if numbers else 0
    if not devices:
        return None
    if isinstance(devices, int):
        if devices < -1:
            raise MisconfigurationError(f"devices={devices}: give a count, or -1 for all")
        if devices == -1 and not available:
            raise MisconfigurationError("GPUs requested but none are available.")
        devices = available if devices == -1 else range(devices)
    chosen = list(devices)
    if len(set(chosen)) != len(chosen):
        raise MisconfigurationError(f"Device ID's (GPU) must be unique, got {chosen}")
    if _one_for_each_process(chosen, available):
        return chosen
    if not set(chosen) <= set(available):
        raise MisconfigurationError(f"You requested gpu: {chosen}\n But your machine only has: {available}")
    return chosen


def _one_for_each_process(chosen: list[int], available: list[int]) -> bool:
    """Torchrun's processes are often shown one device each: the others belong to their siblings."""
    import torch

    several_processes = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    return several_processes and len(chosen) != 1 and len(available) == 1
