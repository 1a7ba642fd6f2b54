"""What can be known of a loader before it is read."""

from __future__ import annotations

import os

from torch.utils.data import IterableDataset

from arclight.fabric.rank_zero import rank_zero_warn


def reads_a_stream(loader: object) -> bool:
    """Whether its dataset is an IterableDataset."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def sized_len(loader: object) -> int | None:
    """Its length; None where it has none, or does not know it."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_len(loader: object) -> bool:
    """Whether it knows its length; warns where that is 0, and where a stream's length may be wrong with workers."""
    length = sized_len(loader)
    if length == 0:
        rank_zero_warn(f"`{type(loader).__name__}` returned 0 length. Please make sure this was your intention.")
    if length is not None and reads_a_stream(loader):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when"
            " num_workers > 1), it is right only where each worker reads its own share of the stream."
        )
    return length is not None


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suggested_max_num_workers(local_world_size: int) -> int:
    """The most loader workers that leave a CPU for each of ``local_world_size`` training processes; at least 1."""
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}.")
    return max(1, available_cpus() // local_world_size - 1)
