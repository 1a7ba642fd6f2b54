"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import zlib
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest
from tests import warm

# Small test models are faster on one thread, and two workers of the suite then share the machine fairly.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"

# Checkpoints and records are written through to the disk: thousands of waits for it, where there is no memory to spare instead.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > 12 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# What a forked rank inherits, it does not search for garbage: it would copy every page of hundreds of thousands of objects.
os.register_at_fork(after_in_child=gc.freeze)


# A shell starts what runs in the background without interrupts, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real photos and texts beside the project; tests that need it skip where it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder} does not exist")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="K/N", help="run the K-th (from 0) of N parts of the tests, divided by their names"
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        warm.find_server()
    elif config.getoption("numprocesses", None):
        warm.start_server()


@pytest.fixture
def fork_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test spawns do not import torch again; for tests of what they do rather than of how they start."""
    warm.fork_spawned(monkeypatch)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (part := config.getoption("--part")) is None:
        return
    number, count = map(int, part.split("/"))
    if not 0 <= number < count:
        raise pytest.UsageError(f"--part {part}: need K/N with 0 <= K < N")
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while modules are imported and tests are made of them: nearly all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.freeze()  # a search takes a second, and what it finds among modules and tests is too small to be seen


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _take_out_of_collections()


def _take_out_of_collections() -> None:
    """Keep what is alive between two files out of searches for garbage: a million objects, a second for each search, and some tests make dozens."""
    gc.collect()
    gc.freeze()
