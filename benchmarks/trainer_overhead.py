"""What a trainer adds to a training step: ours and Lightning's beside a loop written by hand.

Tiny MLP 32-64-64-10, batch 32, SGD, ready-made batches, one thread, so that almost all the time is the trainer's.
Python calls and ATen ops per step are slopes between two run lengths: the same on every machine. CPU times are those of single
steps in turns: between any two steps of a trainer the loop by hand that does the same takes one. Lightning is measured where it is
installed (`make bench-peers`, then run with that environment).
"""

from __future__ import annotations

import logging
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import arclight as al
from arclight.checkpoint import AsyncSaver
from benchmarks.results import SPREAD, Ratio, paired, parser, publish, versions

BATCHES = 64
WINDOW = 100
"""Steps in turns that are summed up to one measurement: bars and logs do more in some steps than in others, accumulation in every fourth."""


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Batches:
    """A sized iterable of ready-made batches."""

    stored = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(BATCHES)]

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (self.stored[i % BATCHES] for i in range(self.count))


class Turns(Batches):
    """Batches between which a rival takes a step with the same batch: CPU seconds of each step of both.

    What asks for the next batch has done its step with the one before: its time runs from when it was given that one.
    """

    def __init__(self, count: int, rival: Step) -> None:
        super().__init__(count)
        self.rival = rival
        self.own: list[float] = []
        self.beside: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            began = time.process_time()
            yield batch
            middle = time.process_time()
            self.rival(batch)
            self.beside.append(time.process_time() - middle)
            self.own.append(middle - began)


Run = Callable[[Batches], None]
Step = Callable[[Any], None]


def by_hand(accumulate: int = 1, clip: bool = False) -> Step:
    """Build a step of the loop by hand."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def plain(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def clipping(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    index = 0

    def accumulating(batch: Any) -> None:
        nonlocal index
        x, y = batch
        (nn.functional.cross_entropy(model(x), y) / accumulate).backward()
        index += 1
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    return accumulating if accumulate > 1 else clipping if clip else plain


def raw_run(step: Callable[[], Step]) -> Run:
    """Build a run of the loop by hand."""

    def run(batches: Batches) -> None:
        one = step()
        for batch in batches:
            one(batch)

    return run


def module_class(base: type) -> type:
    """The same user code as a module of either library."""

    class Model(base):  # type: ignore[misc]
        def __init__(self, logs: int) -> None:
            super().__init__()
            self.net, self.names = mlp(), [f"value{i}" for i in range(logs)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            for name in self.names:
                self.log(name, loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model


def trainer_run(library: Any, base: type, logs: int = 0, bar: bool = False, **settings: Any) -> Run:
    model = module_class(base)

    def run(batches: Batches) -> None:
        trainer = library.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=bar,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(model(logs), batches)

    return run


def fabric_run(batches: Batches) -> None:
    fabric = al.Fabric(accelerator="cpu", devices=1)
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in batches:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def slope(count: Callable[[Run, int], int], run: Run) -> float:
    run(Batches(5))
    return (count(run, 300) - count(run, 100)) / 200


def python_calls(run: Run, steps: int) -> int:
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        run(Batches(steps))
    finally:
        sys.setprofile(None)
    return calls


class Ops(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def aten_ops(run: Run, steps: int) -> int:
    with Ops() as ops:
        run(Batches(steps))
    return ops.count


def beside(name: str) -> str:
    """Name the loop by hand that does what a run does."""
    kind = name.partition(", ")[2]
    return f"raw loop, {kind}" if kind in ("4 batches a step", "clipping") else "raw loop"


def in_turns(run: Run, rival: Step, windows: int) -> tuple[list[float], list[float]]:
    """Measure CPU seconds of ``windows`` windows of steps of a run and of its rival, after one window that is not counted."""
    turns = Turns((windows + 1) * WINDOW + 1, rival)  # whoever knows the length does not ask after the last batch
    run(turns)
    starts = range(WINDOW, (windows + 1) * WINDOW, WINDOW)
    own, other = ([sum(times[at : at + WINDOW]) for at in starts] for times in (turns.own, turns.beside))
    return own, other


@dataclass
class Times:
    """CPU seconds of windows of each run, and of the loop by hand in turns with it."""

    own: dict[str, list[float]]
    beside: dict[str, list[float]]

    def over_raw(self, name: str) -> Ratio:
        return paired(self.own[name], self.beside[name])

    def over(self, name: str, other: str) -> Ratio:
        """Compare two runs, of one round each, by what they take over the loop by hand in turns with them."""
        ratios = [[a / b for a, b in zip(self.own[one], self.beside[one], strict=True)] for one in (name, other)]
        return paired(*ratios)

    def microseconds(self, name: str) -> float:
        """Return the median CPU time of a step; that of a loop by hand is over all that it was beside."""
        of_loop = [seconds for run, times in self.beside.items() if beside(run) == name for seconds in times]
        return statistics.median(of_loop or self.own[name]) / WINDOW * 1e6


def measure(runs: dict[str, Run], rounds: int, windows: int) -> Times:
    """Have every run take turns with its loop by hand, in each round in another order."""
    times = Times({name: [] for name in runs}, {name: [] for name in runs})
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            own, other = in_turns(runs[name], LOOPS[beside(name)](), windows)
            times.own[name] += own
            times.beside[name] += other
    return times


def set_up_seconds(*runs: Run) -> list[list[float]]:
    """Measure seconds by the clock of fits of one step, in turns: what does not grow with the steps."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(30):
        for index in random.sample(range(len(runs)), len(runs)):
            start = time.perf_counter()
            runs[index](Batches(1))
            times[index].append(time.perf_counter() - start)
    return times


def import_seconds(modules: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Measure CPU time of processes that import each of ``modules``, in turns."""
    found: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(rounds):
        for module in random.sample(modules, len(modules)):
            code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            found[module].append(float(done.stdout))
    return found


def blocked_by_saving(megabytes: int, rounds: int) -> Ratio:
    """Measure the time that a loop waits for an asynchronous save over that of a synchronous ``torch.save``, in turns."""
    state = {"model": {f"w{i}": torch.randn(megabytes * 2500) for i in range(100)}}
    plain: list[float] = []
    blocked: list[float] = []
    with tempfile.TemporaryDirectory() as folder, AsyncSaver() as saver:
        saver.prepare(state)
        for number in range(rounds):
            for asynchronous in (True, False) if number % 2 else (False, True):
                start = time.perf_counter()
                if asynchronous:
                    future = saver.save(Path(folder) / str(number), state)
                    blocked.append(time.perf_counter() - start)
                    future.result()
                else:
                    torch.save(state, Path(folder) / "plain.pt")
                    plain.append(time.perf_counter() - start)
            shutil.rmtree(Path(folder) / str(number))
    return paired(blocked, plain)


LOOPS: dict[str, Callable[[], Step]] = {
    "raw loop": by_hand,
    "raw loop, 4 batches a step": partial(by_hand, accumulate=4),
    "raw loop, clipping": partial(by_hand, clip=True),
}


def contenders() -> dict[str, Run]:
    """Return the runs to measure; Lightning's where it is installed."""
    runs: dict[str, Run] = {
        "Fabric": fabric_run,
        "Trainer": trainer_run(al, al.Module),
        "Trainer, 1 logged value": trainer_run(al, al.Module, 1),
        "Trainer, 10 logged values": trainer_run(al, al.Module, 10),
        "Trainer, 10 logged values, bar": trainer_run(al, al.Module, 10, True),
        "Trainer, 4 batches a step": trainer_run(al, al.Module, accumulate_grad_batches=4),
        "Trainer, clipping": trainer_run(al, al.Module, gradient_clip_val=1.0),
    }
    try:
        import lightning.pytorch as pl
    except ImportError:
        print("Lightning is not installed here, so its rows are missing: see `make bench-peers`", file=sys.stderr)
    else:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        runs |= {
            "Lightning": trainer_run(pl, pl.LightningModule),
            "Lightning, 1 logged value": trainer_run(pl, pl.LightningModule, 1),
            "Lightning, 10 logged values, bar": trainer_run(pl, pl.LightningModule, 10, True),
            "Lightning, 4 batches a step": trainer_run(pl, pl.LightningModule, accumulate_grad_batches=4),
            "Lightning, clipping": trainer_run(pl, pl.LightningModule, gradient_clip_val=1.0),
        }
    return runs


def imports(runs: dict[str, Run], rounds: int) -> dict[str, Ratio]:
    """Compare the CPU time of imports."""
    ours, trainer = "arclight, torch", "arclight, torch; arclight.Trainer"
    lightning = ("lightning",) if "Lightning" in runs else ()
    seconds = import_seconds(("torch", ours, trainer, *lightning), rounds)
    found = {
        "import_over_torch": paired(seconds[ours], seconds["torch"]),
        "import_trainer_over_torch": paired(seconds[trainer], seconds["torch"]),
    }
    if lightning:
        found["import_ours_over_lightning"] = paired(seconds[trainer], seconds["lightning"])
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    runs = contenders()
    loops = {name: raw_run(step) for name, step in LOOPS.items()}
    # A loop by hand has its step in place: the call of a function is no part of it.
    calls = {name: slope(python_calls, run) - (name in loops) for name, run in (loops | runs).items()}
    ops = {name: slope(aten_ops, run) for name, run in (loops | runs).items()}
    times = measure(runs, rounds=3 if options.quick else 30, windows=2 if options.quick else 4)
    rows = []
    for name in (*loops, *runs):
        over = None if name in loops else times.over_raw(name)
        loop = name if over is None else beside(name)
        rows.append(
            (
                name, f"{calls[name]:.0f}", f"{calls[name] - calls[loop]:+.1f}", f"{ops[name] - ops[loop]:+.2f}",
                f"{times.microseconds(name):.0f}", "1" if over is None else str(over), "" if over is None else over.difference,
            )
        )  # fmt: skip
    own, raw, *lightning = set_up_seconds(
        runs["Trainer"], loops["raw loop"], *(runs[name] for name in ("Lightning",) if name in runs)
    )
    figures: dict[str, float | Ratio] = {
        "calls_plain_over_raw": calls["Trainer"] / calls["raw loop"],
        "calls_ten_logs_over_raw": calls["Trainer, 10 logged values"] / calls["raw loop"],
        "calls_more_plain": calls["Trainer"] - calls["raw loop"],
        "calls_more_one_log": calls["Trainer, 1 logged value"] - calls["raw loop"],
        "calls_more_each_further_log": (calls["Trainer, 10 logged values"] - calls["Trainer, 1 logged value"]) / 9,
        "cpu_plain_over_raw": times.over_raw("Trainer"),
        "cpu_ten_logs_bar_over_raw": times.over_raw("Trainer, 10 logged values, bar"),
        "cpu_fabric_over_raw": times.over_raw("Fabric"),
        "fit_fixed_milliseconds": 1000 * (min(own) - min(raw)),
        "async_save_blocked_over_torch_save": blocked_by_saving(*((50, 2) if options.quick else (500, 7))),
    }  # fmt: skip
    figures |= imports(runs, 2 if options.quick else 9)
    if lightning:
        figures["cpu_lightning_over_ours"] = times.over("Lightning", "Trainer")
        figures["fit_fixed_lightning_over_ours"] = paired(lightning[0], own)
    publish(
        "trainer_overhead", "What a trainer adds to a step",
        ("", "Python calls a step", "more than raw", "ATen ops more than raw", "CPU us a step", f"over raw: {SPREAD}", "difference"),
        rows, figures, options=options, packages=versions("torch", "arclight-torch", "lightning"),
        notes=f"Raw is the loop written by hand that does the same: a step of it after every step of the other, {WINDOW} of both are one sample. "
        "Set-up and end of a run are not in the times but in `fit_fixed_milliseconds`. Calls and ops are counted, and have no spread.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
