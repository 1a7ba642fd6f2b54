"""Tune glibc's malloc for a process that only serves: freed memory goes back to the system."""

from __future__ import annotations

import ctypes

_ARENAS, _MAPPED_FROM = -8, -3  # M_ARENA_MAX and M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE = 1 << 20


def tune_malloc() -> bool:
    """Let glibc map large blocks one by one and keep few arenas; False with another C library.

    By itself it takes to pooling blocks of up to 32 MB once some were freed, in a pool for each few threads: a server that handles
    many clients' tensors then holds more with every client. Training allocates the same blocks again and again and wants the
    pools, so this is for processes that do nothing else.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_ARENAS, 2)) and bool(mallopt(_MAPPED_FROM, _LARGE))
