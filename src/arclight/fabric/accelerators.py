"""Kinds of device behind one small interface."""

from __future__ import annotations

import os

import torch


class Accelerator:
    """A kind of device. A user's own is a subclass passed as ``accelerator=``."""

    name = "cpu"
    backend = "gloo"
    """torch.distributed backend for collectives between these devices."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def setup_device(self, device: torch.device, local_world_size: int) -> None:
        """Prepare this process; processes that share a host's cores share its threads too."""
        if local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))


class CPUAccelerator(Accelerator):
    """The host's processor."""


class CUDAAccelerator(Accelerator):
    """NVIDIA (or ROCm) GPUs."""

    name = "cuda"
    backend = "nccl"

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def auto_device_count() -> int:
        return torch.cuda.device_count()

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank)

    def setup_device(self, device: torch.device, local_world_size: int) -> None:
        torch.cuda.set_device(device)


class MPSAccelerator(Accelerator):
    """Apple's GPU."""

    name = "mps"

    @staticmethod
    def is_available() -> bool:
        return torch.backends.mps.is_available()

    def device(self, local_rank: int) -> torch.device:
        return torch.device("mps")


_BY_NAME: dict[str, type[Accelerator]] = {
    "cpu": CPUAccelerator,
    "cuda": CUDAAccelerator,
    "gpu": CUDAAccelerator,
    "mps": MPSAccelerator,
}


def resolve_accelerator(choice: str | Accelerator) -> Accelerator:
    """The accelerator a user asked for; ``auto`` takes the first of CUDA, MPS, CPU that is there.

    Raises ValueError for an unknown name and RuntimeError for a device that this machine lacks.
    """
    if isinstance(choice, Accelerator):
        return choice
    if choice == "auto":
        return next(kind() for kind in (CUDAAccelerator, MPSAccelerator, CPUAccelerator) if kind.is_available())
    if choice == "gpu" and not torch.cuda.is_available() and torch.backends.mps.is_available():
        return MPSAccelerator()
    if choice not in _BY_NAME:
        raise ValueError(
            f"accelerator={choice!r} is not known; choose auto, {', '.join(_BY_NAME)}, or pass an Accelerator"
        )
    accelerator = _BY_NAME[choice]()
    if not accelerator.is_available():
        raise RuntimeError(
            f'accelerator={choice!r}: this machine has none; use accelerator="auto" or see `arclight doctor`'
        )
    return accelerator
