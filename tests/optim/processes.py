"""Several real processes over gloo, each running the same function of the test's file."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arclight.fabric.rank_zero import rank_zero_only

PATIENCE = 600
"""Seconds that all of it may take."""
GRACE = 60
"""Seconds that processes have to say what is wrong after one of them has failed."""


def run(count: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> None:
    """``function(rank, *arguments)`` in ``count`` processes of one group; raises what the first of them raised."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_main, args=(rank, count, folder, function, arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):  # the others may wait for it
            deadline = min(deadline, time.monotonic() + GRACE)
        for process in processes:
            process.join(0.05)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    said = [path.read_text() for path in sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)]
    assert not said, said[0]
    assert [process.exitcode for process in processes] == [0] * count


def _main(rank: int, count: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    del rank_zero_only.rank  # a run in the process that this one is a copy of may have fixed it
    try:
        store = dist.FileStore(str(folder / "store"), count)
        dist.init_process_group("gloo", rank=rank, world_size=count, store=store)
        function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        raise
