"""Seed the global random generators, save and restore their state, and isolate blocks.

Fabric, the Trainer, launchers, tasks and federated clients call this (``data.seeding`` takes `ProcessLock` alone). Checkpoints hold what
`rng_state` returns: it stays readable. Seeded runs stay reproducible across versions: a change of which generators are seeded, or with
what, shows in ``tests/house/digests.json``.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from arclight.fabric.rank_zero import rank_zero_only, rank_zero_warn

_LOG = logging.getLogger("arclight")

MAX_SEED = 2**32 - 1
"""Largest seed that NumPy's legacy generator takes."""


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch (all devices), and return the seed.

    ``None`` takes the seed from the environment variable ``PL_GLOBAL_SEED``, else 0. The seed is left in
    ``PL_GLOBAL_SEED`` so that processes started from here take the same one; ``workers`` is left in
    ``PL_SEED_WORKERS`` for code that reads it (our loader seeds its workers either way). ``verbose`` logs the seed.
    Raises ValueError for a seed outside 0 to 2**32 - 1.
    """
    if seed is None:
        seed = _seed_of_environment(verbose)
    seed = int(seed)
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed {seed} is not in bounds: it must be between 0 and {MAX_SEED}")
    if verbose:
        _LOG.info("Seed set to %d", seed)
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    seed_generators(seed)
    return seed


def _seed_of_environment(verbose: bool) -> int:
    text = os.environ.get("PL_GLOBAL_SEED")
    if text is None:
        if verbose:
            rank_zero_warn("No seed found, seed set to 0")
        return 0
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"Invalid seed specified via PL_GLOBAL_SEED: {text!r}; set it to an integer") from None


def reset_seed() -> None:
    """Repeat the last :func:`seed_everything`; do nothing if it was never called."""
    if "PL_GLOBAL_SEED" in os.environ:
        seed_everything(workers=os.environ.get("PL_SEED_WORKERS", "0") == "1", verbose=False)


def seed_loader_worker(worker_id: int, rank: int | None = None) -> None:
    """Seed a DataLoader's worker (``worker_init_fn``), differently on each worker and rank.

    Our own loader needs none; this is for loaders that are used without it.
    """
    base = torch.initial_seed() - worker_id
    rank = rank_zero_only.rank if rank is None else rank
    words = np.random.SeedSequence([base & 0xFFFF_FFFF_FFFF_FFFF, worker_id, rank]).generate_state(12)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    random.seed(int.from_bytes(words[2:6].tobytes(), "little"))
    np.random.seed(words[6:10])


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of ``device``, and no others.

    ``torch.manual_seed`` seeds those of all devices, and formats a stack trace for each kind that is not in use yet: 0.7 ms under sixty calls.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of every global generator of this process, as plain data and tensors."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore every generator to a state from :func:`rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore all generators after the block; those of CUDA only with ``include_cuda``."""
    state = rng_state()
    if not include_cuda:
        state.pop("cuda", None)
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def deterministic_kernels(warn_only: bool = False) -> Iterator[None]:
    """Run a block with deterministic kernels; torch raises or warns if there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS, which reads it when it starts
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
        torch.backends.cudnn.benchmark = benchmark


class ProcessLock:
    """Reentrant lock that a forked process replaces: its holder may not exist there.

    Use it as ``with lock.current:``, which costs no Python call.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.current = threading.RLock()


generators_lock = ProcessLock()
"""Held by a thread while it seeds the global generators and draws from them, if others may do so too: federated clients that train in
one process, and the server that evaluates there."""
