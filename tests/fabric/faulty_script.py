"""Runs one of several faults on several ranks; the test reads what it prints and how it ends."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch

import arclight as al
from arclight.fabric.strategies import DDPStrategy


def main(fault: str, start_method: str = "popen", seconds: str = "300", meeting: str = "ddp") -> None:
    """Within ``seconds`` ranks have to meet, and one that hangs is waited for so long.

    meeting: in the backward passes of DDP ("ddp"), or in all-reduces alone ("reduce"), for which much less is imported.
    """
    strategy = DDPStrategy(timeout=datetime.timedelta(seconds=float(seconds)), start_method=start_method)
    fabric = al.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    if start_method == "popen":
        fabric.launch()
        work(fabric, fault, meeting)
    else:
        fabric.launch(work, fault, meeting)


def work(fabric: al.Fabric, fault: str, meeting: str) -> None:
    print(f"process {os.getpid()}", flush=True)
    model = fabric.setup(torch.nn.Linear(2, 2)) if meeting == "ddp" else None
    for step in range(5):
        if step == 3 and fabric.global_rank == 1:
            globals()[fault]()
        if model is not None:
            fabric.backward(model(torch.ones(1, 2)).sum())
        else:
            fabric.all_reduce(torch.ones(2))
    print("finished", flush=True)


def crash() -> None:
    raise ValueError("the original fault")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    oversleep()


def oversleep() -> None:
    time.sleep(600)


def orphan() -> None:
    """The process that started the ranks ends while rank 0 is in a collective, and this one ignores what ends others."""
    for number in (signal.SIGTERM, signal.SIGINT):  # as if it were inside native code
        signal.signal(number, signal.SIG_IGN)
    print("now", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
