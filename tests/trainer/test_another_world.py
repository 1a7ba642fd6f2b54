"""A run that goes on with other ranks or another batch size trains on every sample of an epoch exactly once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.trainer import world_script

SCRIPT = Path(__file__).parent / "world_script.py"
EVERYTHING = Counter((epoch, sample) for epoch in range(world_script.EPOCHS) for sample in range(world_script.SIZE))


def seen(root: Path) -> Counter[tuple[int, int]]:
    lines = [line.split() for path in root.glob("seen-*") for line in path.read_text().splitlines()]
    return Counter((int(epoch), int(sample)) for epoch, sample in lines)


def run(root: Path, *arguments: object) -> None:
    command = [sys.executable, str(SCRIPT), str(root), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("batches", "stops"), [((8, 4, 6), (7, 21)), ((3, 10, 1), (5, 14)), ((7, 7, 9), (17, 20))])
def test_another_batch_size(tmp_path: Path, batches: tuple[int, ...], stops: tuple[int, ...]) -> None:
    """The stops lie within the first epoch or in the second, where batches of the next size do not begin."""
    saves = [tmp_path / f"{number}.ckpt" for number in range(2)]
    for number, batch in enumerate(batches):
        words = [str(tmp_path), "--batch", str(batch)]
        words += ["--resume", str(saves[number - 1])] if number else []
        words += ["--stop", str(stops[number]), "--save", str(saves[number])] if number < 2 else []
        world_script.main(words)
    assert seen(tmp_path) == EVERYTHING


def test_one_process_then_two(tmp_path: Path) -> None:
    world_script.main([str(tmp_path), "--batch", "8", "--stop", "5", "--save", str(tmp_path / "a.ckpt")])
    run(tmp_path, "--devices", 2, "--batch", 3, "--resume", tmp_path / "a.ckpt")
    assert seen(tmp_path) == EVERYTHING


@pytest.mark.slow
def test_four_processes_then_two_then_three(tmp_path: Path) -> None:
    """First with the global batch size that it had, then with another."""
    run(tmp_path, "--devices", 4, "--batch", 2, "--stop", 5, "--save", tmp_path / "a.ckpt")
    run(
        tmp_path,
        "--devices",
        2,
        "--batch",
        4,
        "--stop",
        20,
        "--resume",
        tmp_path / "a.ckpt",
        "--save",
        tmp_path / "b.ckpt",
    )
    run(tmp_path, "--devices", 3, "--batch", 3, "--resume", tmp_path / "b.ckpt")
    assert seen(tmp_path) == EVERYTHING
    ranks = {path.name for path in tmp_path.glob("seen-*")}
    assert ranks == {f"seen-{world}-{rank}.txt" for world in (4, 2, 3) for rank in range(world)}


@pytest.mark.slow
def test_a_window_under_way_is_summed_anew(tmp_path: Path) -> None:
    """Its gradients lie with processes that are gone: the batches since its beginning are trained on again, no others."""
    run(tmp_path, "--devices", 2, "--batch", 2, "--accumulate", 4, "--stop", 6, "--save", tmp_path / "a.ckpt")
    before = seen(tmp_path)
    assert before.total() == 24
    world_script.main([str(tmp_path), "--batch", "4", "--accumulate", "4", "--resume", str(tmp_path / "a.ckpt")])
    repeated = seen(tmp_path) - EVERYTHING
    assert repeated.total() == 8
    assert repeated <= before
    assert not EVERYTHING - seen(tmp_path)
