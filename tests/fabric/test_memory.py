"""The host allocator's use of freed memory."""

from __future__ import annotations

import multiprocessing
import platform
import resource
from multiprocessing.connection import Connection

import pytest
import torch

from arclight.fabric import memory
from arclight.fabric.accelerators import CPUAccelerator
from arclight.fabric.memory import free_memory, return_freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's malloc")


def faults_of_steps(steps: int, block_mib: int) -> int:
    """Count the page faults of steps that each take and free four blocks."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        _blocks = [torch.ones(block_mib << 18) for _ in range(4)]
        del _blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def count(answer: Connection, serves: bool, block_mib: int) -> None:
    memory._returns_freed = False  # whatever tests before have said
    if serves:
        return_freed_memory()
    CPUAccelerator().setup_device(torch.device("cpu"))
    first, _, then = (faults_of_steps(steps, block_mib) for steps in (1, 4, 3))
    free_memory()
    answer.send((first, then, faults_of_steps(1, block_mib)))


@pytest.mark.parametrize(("serves", "block_mib"), [(False, 24), (False, 64), (True, 24)])
def test_a_process_that_trains_keeps_what_it_frees_and_a_server_gives_it_back(serves: bool, block_mib: int) -> None:
    version = tuple(map(int, platform.libc_ver()[1].split(".")))
    if block_mib > 32 and version < (2, 36):
        pytest.skip("older versions of glibc map all blocks of more than 32 MiB")
    context = multiprocessing.get_context("spawn")  # a forked copy has the heap of whatever was tested before
    here, there = context.Pipe()
    process = context.Process(target=count, args=(there, serves, block_mib))
    process.start()
    first, then, after_trim = here.recv()
    process.join(30)
    pages = 4 * (block_mib << 20) // resource.getpagesize()
    assert first > pages / 2
    if serves:
        assert then > 3 * pages / 2, "each step gets its pages anew"
    else:
        assert then < pages / 2
        assert after_trim > pages / 2, "free_memory has given back what was kept"
