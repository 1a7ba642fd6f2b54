"""Reactions of a pipeline to a process that dies, fails, does not come, or gets other arguments."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn

from arclight.fabric.distributed.hang_report import RankMissingError
from arclight.parallel import PlanError
from arclight.parallel.pipeline import split

WIDTH, PROCESSES = 6, 4
TIMEOUT = 120
"""Seconds after which a process would stop waiting by itself: far more than it takes to hear from another."""


class Trouble(nn.Module):
    """A product, before which something happens on the ``at``-th call, and a loss that can be computed."""

    def __init__(self, what: Callable[[], None], at: int) -> None:
        super().__init__()
        self.product, self.what, self.at, self.calls = nn.Linear(WIDTH, WIDTH), what, at, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        if self.calls == self.at:
            self.what()
        return self.product(x)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise KeyError("the original fault")


def oversleep() -> None:
    time.sleep(600)


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return (output - targets).square().sum(), targets.numel()


def batch(samples: int = 8) -> Tensor:
    return torch.ones(samples, WIDTH)


def one(rank: int, schedule: str, stages: int, troubled: int, what: Callable[[], None] | None) -> None:
    """Steps of a pipeline of which stage ``troubled`` has trouble in the second step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages)))
    pipe = split(model, (batch(),), stages=stages, policy=even_cuts)
    group = dist.new_group(list(range(PROCESSES)), timeout=datetime.timedelta(seconds=TIMEOUT))
    runner = pipe.on(group, schedule=schedule, micro_batches=4, loss=squares)
    runner.step(batch(), targets=batch())
    dist.barrier()  # all have come through the first step
    if what is not None and troubled in runner.stages:
        trouble = Trouble(what, 3)

        def before(*_: Any) -> None:
            trouble(batch())

        runner.stages[troubled].register_forward_pre_hook(before)
    for _ in range(3):
        runner.step(batch(), targets=batch())


def _main(rank: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        # The store is in process 0, as in a run; it must not die with it here.
        store = dist.FileStore(str(folder / "store"), PROCESSES)
        dist.init_process_group("gloo", rank=rank, world_size=PROCESSES, store=store)
        function(rank, *arguments)
        said = "finished"
    except BaseException as error:
        notes = " | ".join(getattr(error, "__notes__", []))
        said = f"{type(error).__name__}: {error} | {notes} | {isinstance(error, RankMissingError)}"
    draft = folder / f"draft-{rank}"
    draft.write_text(f"{time.monotonic() - began:.1f} {said}")
    draft.rename(folder / f"said-{rank}")
    while not (folder / "over").exists() and time.monotonic() < began + 2 * TIMEOUT:
        time.sleep(0.05)  # what others hear must not come from this process's end
    os._exit(0)


def everyone(
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    asleep: tuple[int, ...] = (),
    limit: float = 1.5 * TIMEOUT,
) -> dict[int, str]:
    """Return the last output of each process that ended. asleep: ranks that are not waited for."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_main, args=(r, folder, function, arguments)) for r in range(PROCESSES)]
    for process in processes:
        process.start()
    deadline, found = time.monotonic() + limit, {rank: folder / f"said-{rank}" for rank in range(PROCESSES)}
    while time.monotonic() < deadline and any(
        process.is_alive() and not found[rank].exists() and rank not in asleep for rank, process in enumerate(processes)
    ):
        time.sleep(0.05)
    (folder / "over").touch()
    for rank, process in enumerate(processes):
        process.join(10 if found[rank].exists() else 0)
        if process.is_alive():
            process.kill()
            process.join()
    return {rank: path.read_text() for rank, path in found.items() if path.exists()}


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1F1B", 4), pytest.param("ZBVZeroBubble", 8, marks=pytest.mark.slow)]
)
def test_a_killed_process_ends_the_others_which_say_what_they_waited_for(
    schedule: str, stages: int, tmp_path: Path
) -> None:
    said = everyone(tmp_path, one, schedule, stages, 1, die)
    assert sorted(said) == [0, 2, 3]
    for rank, text in said.items():
        assert float(text.split()[0]) < TIMEOUT / 2
        assert "StageLostError: " in text
        assert text.endswith("True")
        assert f"process {rank} (stage " in text
    assert any(" on process 1: " in text for text in said.values())
    assert any("and stops because of another: process " in text for text in said.values())


def test_an_error_in_a_stage_is_named_there_and_everywhere_else(tmp_path: Path) -> None:
    said = everyone(tmp_path, one, "1F1B", 4, 2, fail)
    assert sorted(said) == [0, 1, 2, 3]
    assert "KeyError: 'the original fault' | process 2 (stage 2) failed in 2F2 | False" in said[2]
    for rank in (0, 1, 3):
        assert "StageLostError: " in said[rank]
        assert float(said[rank].split()[0]) < TIMEOUT / 2  # though the process that failed is still there
        assert "because of another: process 2 (stage 2) failed in 2F2: KeyError: 'the original fault'" in said[rank]


@pytest.mark.slow
def test_a_process_that_does_not_come_is_waited_for_no_longer_than_the_time(tmp_path: Path) -> None:
    began = time.monotonic()
    said = everyone(tmp_path, slow, asleep=(2,))
    assert sorted(said) == [0, 1, 3]
    for rank in (0, 1, 3):
        assert "StageLostError: " in said[rank]
        assert float(said[rank].split()[0]) < 40
    assert "from stage 2 on process 2" in said[1] + said[3]
    assert time.monotonic() - began < 60


def slow(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pipe = split(model, (batch(),), stages=4, policy=even_cuts)
    group = dist.new_group(list(range(PROCESSES)), timeout=datetime.timedelta(seconds=8))
    runner = pipe.on(group, schedule="GPipe", micro_batches=4, loss=squares)
    runner.step(batch(), targets=batch())
    if rank == 2:
        oversleep()
    runner.step(batch(), targets=batch())


def different(rank: int) -> None:
    """Every disagreement is an error on all processes, in the same words."""
    messages = []

    def refused(what: str, make: Callable[[], Any], samples: int = 8) -> None:
        torch.manual_seed(0)
        runner = make()
        with pytest.raises(PlanError, match=what) as caught:
            runner.step(batch(samples), targets=batch(samples))
        messages.append(str(caught.value))

    def runner(stages: int = 4, seed: int = 0, tied: bool = False, **options: Any) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages)))
        if tied:
            model[-1].weight = model[0].weight
        pipe = split(model, (batch(),), at=options.pop("at", ["1", "2", "3"]))
        change = options.pop("change", None)
        if change is not None:
            change(pipe)
        return pipe.on(schedule=options.pop("schedule", "1F1B"), loss=squares, **({"micro_batches": 4} | options))

    def other(value: Any, usual: Any) -> Any:
        return value if rank == 2 else usual

    refused(
        r"process 0 and process 2 .*the number of micro-batches is 4 on one and 8 on the other",
        lambda: runner(micro_batches=other(8, 4)),
    )
    refused(
        r"process 0 and process 2 .*the schedule is '1F1B' on one and 'GPipe' on the other",
        lambda: runner(schedule=other("GPipe", "1F1B")),
    )
    refused(
        r"the calls at which stages begin is \[0, 1, 2, 3\] on one and \[0, 1, 2, 4\] on the other",
        lambda: runner(stages=5, at=other(["1", "2", "4"], ["1", "2", "3"])),
    )
    refused(
        r"process 0 and process 2 .*the model's graph is",
        lambda: runner(stages=other(6, 5)),
    )

    def unequal(pipe: Any) -> None:
        if rank == 3:
            with torch.no_grad():
                pipe.stages[3].get_parameter("0.weight").add_(1e-3)

    refused(
        r"0.weight is shared, and has other values: \w+ on process 0, \w+ on process 3",
        lambda: runner(tied=True, change=unequal),
    )

    def unmade(pipe: Any) -> None:
        if rank == 1:
            pipe.stages[1] = pipe.stages[2]

    refused(
        r"stage 1 \(process 1\) and stage 2 \(process 2\) have 2.weight, but the plan says that no stages share it",
        lambda: runner(change=unmade),
    )
    refused(
        r"batches of different shapes: process 0 4 micro-batches, the first of \(2, 6\) .*process 2 4, the first of \(4, 6\)",
        runner,
        samples=other(16, 8),
    )
    everyones: list[Any] = [None] * PROCESSES
    dist.all_gather_object(everyones, messages)
    assert all(theirs == messages for theirs in everyones)
    assert len(messages) == 7


def test_disagreements_are_reported_alike_on_every_process(tmp_path: Path) -> None:
    said = everyone(tmp_path, different)
    assert {rank: text.split(maxsplit=1)[1] for rank, text in said.items()} == dict.fromkeys(range(4), "finished")


def frozen_on_one(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    pipe = split(model, (batch(),), stages=4, policy=even_cuts)
    group = dist.new_group(list(range(PROCESSES)), timeout=datetime.timedelta(seconds=8))
    runner = pipe.on(group, schedule="1F1B", micro_batches=4, loss=squares)
    runner.step(batch(), targets=batch())
    if rank == 1:
        runner.stages[1].requires_grad_(False)
    runner.step(batch(), targets=batch())


@pytest.mark.slow
def test_changes_on_a_single_rank_are_detected_in_time(tmp_path: Path) -> None:
    said = everyone(tmp_path, frozen_on_one)
    assert sorted(said) == [0, 1, 2, 3]
    assert "has waited 8 s for processes 0 and 2 and 3 to say the same" in said[1]
    assert all("StageLostError" in text and float(text.split()[0]) < 40 for text in said.values())
