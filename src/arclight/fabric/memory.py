"""Recognise out-of-memory errors, free cached memory, and tune the host's allocator.

By itself glibc returns large blocks to the system when they are freed. A training step takes the same blocks as the one before, and each
page that it gets again is zeroed by the kernel at its first use: 33,000 page faults in a step of YOLOv5n at 320 px with a batch of 16.
A process that trains keeps what it frees; one that serves many clients gives it back.

`CPUAccelerator` calls `keep_freed_memory` when it sets up a device, federated servers call `return_freed_memory` at their start.
``trainer.callbacks.micro_batching``, the batch-size search, ``vision.tasks.measuring`` and ``deploy.quantizing.qat`` ask
`is_out_of_memory` whether an error means that memory was too small.
"""

from __future__ import annotations

import ctypes
import gc

import torch

_TRIM_FROM, _MAPPED_FROM, _ARENAS = -1, -3, -8  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc's malloc.h
_NEVER, _LARGE, _TRIMMED = 2**31 - 1, 1 << 20, 128 << 10
_LARGEST_POOLED = (128 << 20, 32 << 20)
"""Sizes from which blocks are mapped, the first that glibc takes: older ones refuse more than 32 MiB."""
_returns_freed = False


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that a device, cuDNN or the host had no memory left."""
    return is_out_of_device_memory(error) or is_out_of_library_memory(error) or is_out_of_host_memory(error)


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of CUDA, MPS or any other accelerator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _contains(error, "CUDA", "out of memory") or _contains(error, "MPS", "out of memory")


def is_out_of_library_memory(error: BaseException) -> bool:
    """Return True for cuDNN's error about too little memory for its workspace."""
    return _contains(error, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


def is_out_of_host_memory(error: BaseException) -> bool:
    return _contains(error, "DefaultCPUAllocator: can't allocate memory") or isinstance(error, MemoryError)


def _contains(error: BaseException, *words: str) -> bool:
    return isinstance(error, RuntimeError) and all(word in str(error) for word in words)


def free_memory() -> None:
    """Collect garbage and return cached blocks to the device, free ones to the host."""
    gc.collect()
    _call_glibc("malloc_trim", 0)
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if not is_out_of_memory(error):  # a device without a free byte may fail even at this
            raise


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 128 MiB in glibc for reuse; return True if that is in effect.

    The largest maps of a detector at 640 px have 50 to 100 MiB. Not with another C library, nor in a process that returns freed
    blocks (`return_freed_memory`).
    """
    return (
        not _returns_freed
        and _tune((_TRIM_FROM, _NEVER))
        and any(_tune((_MAPPED_FROM, size)) for size in _LARGEST_POOLED)
    )


def return_freed_memory() -> bool:
    """Return freed memory to the system: map large blocks in glibc, keep few arenas.

    For the rest of this process; returns False with another C library. A server that handles many clients' tensors would otherwise
    hold more with every client, in a pool for each few threads.
    """
    global _returns_freed
    _returns_freed = _tune((_ARENAS, 2), (_MAPPED_FROM, _LARGE), (_TRIM_FROM, _TRIMMED))
    return _returns_freed


def _tune(*options: tuple[int, int]) -> bool:
    return all(_call_glibc("mallopt", *option) for option in options)


def _call_glibc(name: str, *given: int) -> bool:
    """Call a function of the allocator; False if it refuses, or another C library has none."""
    try:
        return bool(getattr(ctypes.CDLL(None), name)(*given))
    except (OSError, AttributeError, TypeError):
        return False
