"""Side-by-side trainings run on the allocator that a trainer sets up, ours and peers alike."""

from __future__ import annotations

import multiprocessing
import platform
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.fabric.test_memory import faults_of_steps

pytest.importorskip("segno")
pytest.importorskip("yaml")

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's malloc")


def count(answer: Connection, name: str) -> None:
    from benchmarks import equal_minutes, vision_peers

    def measure(work: Path | None = None) -> None:
        faults_of_steps(4, 24)
        answer.send(faults_of_steps(3, 24))
        sys.exit()

    if name == "equal_minutes":
        equal_minutes.equal_minutes(Path("none"), 1.0, seeds=[], models=[])
        measure()
    vision_peers.prepare_libraries = measure  # the first thing that it does with peers
    sys.argv = ["vision_peers", "none", "none"]
    vision_peers.main()


@pytest.mark.parametrize("name", ["equal_minutes", "vision_peers"])
def test_trainings_side_by_side_keep_what_they_free(name: str) -> None:
    context = multiprocessing.get_context("spawn")  # a forked copy has the heap of whatever was tested before
    here, there = context.Pipe()
    process = context.Process(target=count, args=(there, name))
    process.start()
    assert here.poll(120), "the process did not count"
    faults = here.recv()
    process.join(30)
    assert faults < 4 * (24 << 20) // resource.getpagesize() / 2
