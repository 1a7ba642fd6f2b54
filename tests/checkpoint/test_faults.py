"""Kills, full disks and folders that cannot be written: a complete checkpoint is there at every instant."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests import warm

from arclight.checkpoint import CheckpointError, files, find_last, load, save, verify
from arclight.fabric import atomic_replace

torch.set_num_threads(1)


def state_at(step: int) -> dict:
    return {
        "model": {str(i): torch.full((20_000,), float(step)) for i in range(8)},
        "opt": [torch.tensor(step)],
        "step": step,
    }


def check(loaded: dict) -> int:
    step = loaded["step"]
    assert loaded["opt"][0] == step
    assert all((tensor == step).all() for tensor in loaded["model"].values())
    return step


def hidden(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


def save_for_ever(path: Path, step: int) -> None:
    while True:
        step += 1
        save(path, state_at(step))


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_a_complete_checkpoint(exchange, tmp_path, monkeypatch) -> None:
    if not exchange:
        monkeypatch.setattr(atomic_replace, "_exchange", lambda a, b: False)
    path = save(tmp_path / "last", state_at(0))
    fork = multiprocessing.get_context("fork")
    rng = random.Random(1)
    step, seen_leftovers = 0, 0
    for number in range(200):  # on a busy machine many processes are killed in their first save
        if number >= 16 and step > 0:
            break
        process = fork.Process(target=save_for_ever, args=(path, step))
        old = set(hidden(tmp_path))
        process.start()
        while not set(hidden(tmp_path)) - old:  # from here on it is at work, however busy the machine
            time.sleep(0.001)
        time.sleep(rng.expovariate(1 / 0.02))
        while number % 2 and not hidden(tmp_path):  # every second kill hits a save in the middle
            time.sleep(0.0005)
        process.kill()
        process.join()
        seen_leftovers += bool(hidden(tmp_path))
        now = check(load(path))
        assert now >= step
        assert verify(path) == []
        assert find_last(tmp_path) == path
        step = now
    assert step > 0
    assert seen_leftovers > 0
    save(path, state_at(step + 1))
    assert hidden(tmp_path) == []


def test_work_of_living_processes_is_left_alone(tmp_path) -> None:
    ours = files.make_staging(tmp_path / "a")
    parent = tmp_path / ours.name.replace(f"-{os.getpid()}-", f"-{os.getppid()}-")
    elsewhere = tmp_path / f".a.saving-00000000-{2**22 + 1}-abcdef01-0"
    earlier = tmp_path / ours.name.replace(atomic_replace._PROCESS, "00000000")
    dead = tmp_path / ours.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-")
    mine = tmp_path / ".a.savings"
    for folder in (parent, elsewhere, earlier, dead, mine):
        folder.mkdir()
    assert sorted(files.sweep(tmp_path)) == sorted([earlier, dead])
    assert all(folder.is_dir() for folder in (ours, parent, elsewhere, mine))


def test_a_checkpoint_set_aside_by_a_killed_process_is_put_back(tmp_path) -> None:
    path = save(tmp_path / "last", state_at(3))
    aside = atomic_replace.temporary_path(path, "replaced")
    path.rename(tmp_path / aside.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"))
    assert check(load(path)) == 3
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_and_links(exchange, tmp_path, monkeypatch) -> None:
    if not exchange:
        monkeypatch.setattr(atomic_replace, "_exchange", lambda a, b: False)
    first = save(tmp_path / "one", state_at(1))
    link = tmp_path / "last"
    link.symlink_to("one")
    assert check(load(link)) == 1
    save(link, state_at(2))  # replaces the link, not what it points to
    assert check(load(link)) == 2
    assert check(load(first)) == 1
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", state_at(3))
    assert hidden(tmp_path) == []


def test_other_things_are_never_overwritten(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "precious.txt").write_text("x")
    file = tmp_path / "file"
    file.write_text("y")
    for path in (folder, file):
        with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
            save(path, state_at(1))
    assert (folder / "precious.txt").read_text() == "x"
    assert file.read_text() == "y"
    with pytest.raises(CheckpointError, match="could not be written"):
        save(file / "below", state_at(1))


def test_a_file_size_limit_leaves_the_previous_checkpoint(tmp_path) -> None:
    path = save(tmp_path / "last", state_at(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"last could not be written: File too large.*before is intact.*ulimit"
        ):
            save(path, state_at(2))
        with pytest.raises(CheckpointError, match="nothing was left there"):
            save(tmp_path / "new", state_at(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert check(load(path)) == 1
    assert os.listdir(tmp_path) == ["last"]


SCRIPT = """
import os, sys, torch
from arclight.checkpoint import CheckpointError, load, save
folder, user = sys.argv[1], int(sys.argv[2])
if user:
    os.setuid(user)
try:
    save(folder + "/last", {"model": {"w": torch.zeros(1_000_000)}, "step": 2})
except CheckpointError as error:
    print(error)
print("step", load(folder + "/last")["step"])
"""


@pytest.mark.parametrize(("numbers", "needed"), [(10, 1), (300_000, 2)])
def test_a_full_disk_reports_at_least_the_size_of_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: int, needed: int
) -> None:
    def full(path: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("arclight.checkpoint.files.make_staging", full)
    with pytest.raises(CheckpointError, match=f"free at least {needed} MB on that disk"):
        save(tmp_path / "last", {"model": {"w": torch.zeros(numbers)}, "step": 1})


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    source = save(tmp_path / "last", {"model": {"w": torch.ones(10)}, "step": 1})
    shell = f'mount -t tmpfs -o size=2m tmpfs "{mounted}" && cp -r "{source}" "{mounted}" && exec "$@"'
    prefix = ["unshare", "-rm", "sh", "-c", shell, "sh"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    command = [*prefix, sys.executable, "-c", SCRIPT, str(mounted), "0"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "No space left on device; the checkpoint that was there before is intact; free at least 4 MB" in said
    assert "step 1" in said


def test_a_read_only_folder_leaves_the_previous_checkpoint() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # not below pytest's own folder, which only its owner can enter
    try:
        save(folder / "last", state_at(1))
        folder.chmod(0o555)
        user = "65534" if os.getuid() == 0 else "0"
        said = warm.run("-c", SCRIPT, folder, user, timeout=60, check=True).stdout
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert (
        "Permission denied; the checkpoint that was there before is intact; choose a folder that you may write" in said
    )
    assert "step 1" in said
