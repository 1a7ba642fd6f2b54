"""A run that goes on with other ranks or another batch size trains on every sample of an epoch exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests import warm
from tests.trainer import world_script

from arclight.checkpoint import CheckpointError

SCRIPT = Path(__file__).parent / "world_script.py"
EVERYTHING = Counter((epoch, sample) for epoch in range(world_script.EPOCHS) for sample in range(world_script.SIZE))


def seen(root: Path) -> Counter[tuple[int, int]]:
    lines = [line.split() for path in root.glob("seen-*") for line in path.read_text().splitlines()]
    return Counter((int(epoch), int(sample)) for epoch, sample in lines)


def run(root: Path, devices: int, *arguments: object) -> None:
    words = (SCRIPT, root, "--devices", str(devices), *map(str, arguments))
    for done in warm.run_ranks(devices, *words, timeout=300):
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
    run(tmp_path, 2, "--batch", 3, "--resume", tmp_path / "a.ckpt")
    assert seen(tmp_path) == EVERYTHING


@pytest.mark.slow
def test_four_processes_then_two_then_three(tmp_path: Path) -> None:
    """First with the global batch size that it had, then with another."""
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    run(tmp_path, 4, "--batch", 2, "--stop", 5, "--save", first)
    run(tmp_path, 2, "--batch", 4, "--stop", 20, "--resume", first, "--save", second)
    run(tmp_path, 3, "--batch", 3, "--resume", second)
    assert seen(tmp_path) == EVERYTHING
    ranks = {path.name for path in tmp_path.glob("seen-*")}
    assert ranks == {f"seen-{world}-{rank}.txt" for world in (4, 2, 3) for rank in range(world)}


@pytest.mark.parametrize("batch", [4, 6])
def test_an_accumulation_window_is_recomputed_for_another_world_size(tmp_path: Path, batch: int) -> None:
    """A checkpoint that says it was made by two processes: what came before the window, and all of it, once."""
    save = str(tmp_path / "a.ckpt")
    (tmp_path / "before").mkdir()
    world_script.main([str(tmp_path / "before"), "--accumulate", "4", "--stop", "6", "--save", save])
    words = ["--batch", str(batch), "--accumulate", "4", "--resume", save, "--pretend", "2"]
    world_script.main([str(tmp_path), *words])
    before, after = seen(tmp_path / "before"), seen(tmp_path)
    assert (before + after).total() == EVERYTHING.total() + 8
    assert after.total() == EVERYTHING.total() - 16
    assert not after - EVERYTHING


def test_an_accumulation_window_over_a_stream_is_refused_at_another_world_size(tmp_path: Path) -> None:
    """A list of batches has no place in samples to go back to."""
    save = str(tmp_path / "a.ckpt")
    world_script.main([str(tmp_path), "--stream", "--accumulate", "4", "--stop", "6", "--save", save])
    with pytest.raises(CheckpointError, match="after 2 of its batches, whose gradients belong to 2 processes"):
        world_script.main([str(tmp_path), "--stream", "--accumulate", "4", "--resume", save, "--pretend", "2"])


@pytest.mark.slow
def test_batches_of_an_open_accumulation_window_are_trained_again_at_another_world_size(tmp_path: Path) -> None:
    """Its gradients lie with processes that are gone: the batches since its beginning are trained on again, no others."""
    run(tmp_path, 2, "--batch", 2, "--accumulate", 4, "--stop", 6, "--save", tmp_path / "a.ckpt")
    before = seen(tmp_path)
    assert before.total() == 24
    world_script.main([str(tmp_path), "--batch", "4", "--accumulate", "4", "--resume", str(tmp_path / "a.ckpt")])
    repeated = seen(tmp_path) - EVERYTHING
    assert repeated.total() == 8
    assert repeated <= before
    assert not EVERYTHING - seen(tmp_path)
