"""Recognise out-of-memory errors, and release cached device memory."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that a device, or the host, had no memory left."""
    return is_out_of_device_memory(error) or is_out_of_library_memory(error) or is_out_of_host_memory(error)


def is_out_of_device_memory(error: BaseException) -> bool:
    """CUDA's own words or those of Apple's devices, or torch's error class for any accelerator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _says(error, "CUDA", "out of memory") or _says(error, "MPS", "out of memory")


def is_out_of_library_memory(error: BaseException) -> bool:
    """Return True for cuDNN's error about too little memory for its workspace."""
    return _says(error, "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")


def is_out_of_host_memory(error: BaseException) -> bool:
    return _says(error, "DefaultCPUAllocator: can't allocate memory") or isinstance(error, MemoryError)


def _says(error: BaseException, *words: str) -> bool:
    return isinstance(error, RuntimeError) and all(word in str(error) for word in words)


def free_memory() -> None:
    """Collect garbage and return cached blocks to the device."""
    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if not is_out_of_memory(error):  # a device without a free byte may fail even at this
            raise
