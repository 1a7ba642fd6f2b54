"""What a trainer adds to a training step: ours and Lightning's beside a loop written by hand.

Tiny MLP 32-64-64-10, batch 32, SGD, ready-made batches, one thread, so that almost all the time is the trainer's.
Python calls and ATen ops per step are slopes between two run lengths: the same on every machine. CPU times are medians
over interleaved rounds. Lightning is measured where it is installed (`make bench-peers`, then run with that environment).
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import arclight as al
from arclight.checkpoint import AsyncSaver
from benchmarks.results import parser, publish, versions

Run = Callable[[int], None]
BATCHES = 64


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

    def __iter__(self) -> Any:
        return (self.stored[i % BATCHES] for i in range(self.count))


def raw(steps: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in Batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def raw_accumulating(steps: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, (x, y) in enumerate(Batches(steps)):
        (nn.functional.cross_entropy(model(x), y) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def raw_clipping(steps: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in Batches(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


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

    def run(steps: int) -> None:
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
        trainer.fit(model(logs), Batches(steps))

    return run


def fabric_run(steps: int) -> None:
    fabric = al.Fabric(accelerator="cpu", devices=1)
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for x, y in Batches(steps):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def slope(count: Callable[[Run, int], int], run: Run) -> float:
    run(5)
    return (count(run, 300) - count(run, 100)) / 200


def python_calls(run: Run, steps: int) -> int:
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        run(steps)
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
        run(steps)
    return ops.count


def cpu_seconds(run: Run, steps: int) -> float:
    start = time.process_time()
    run(steps)
    return time.process_time() - start


def beside(name: str) -> str:
    """The loop by hand that does what a run does."""
    kind = name.partition(", ")[2]
    return f"raw loop, {kind}" if kind in ("4 batches a step", "clipping") else "raw loop"


def over(times: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(times, others, strict=True)]


def set_up_milliseconds(run: Run) -> float:
    """Wall time of a fit of one step, the smallest of many: what does not grow with the steps."""
    times = []
    for _ in range(30):
        start = time.perf_counter()
        run(1)
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def import_seconds(module: str) -> float:
    """CPU time of a process that imports ``module``, the median of seven."""
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(7)]
    return statistics.median(float(run.stdout) for run in runs)


def blocked_by_saving(megabytes: int = 500) -> float:
    """Time that a loop waits for an asynchronous save, over that of a synchronous ``torch.save``; the median of three."""
    state = {"model": {f"w{i}": torch.randn(megabytes * 2500) for i in range(100)}}
    ratios = []
    with tempfile.TemporaryDirectory() as folder, AsyncSaver() as saver:
        saver.prepare(state)
        for number in range(3):
            start = time.perf_counter()
            torch.save(state, Path(folder) / "plain.pt")
            middle = time.perf_counter()
            future = saver.save(Path(folder) / str(number), state)
            ratios.append((time.perf_counter() - middle) / (middle - start))
            future.result()
    return statistics.median(ratios)


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    runs: dict[str, Run] = {
        "raw loop": raw,
        "Fabric": fabric_run,
        "Trainer": trainer_run(al, al.Module),
        "Trainer, 1 logged value": trainer_run(al, al.Module, 1),
        "Trainer, 10 logged values": trainer_run(al, al.Module, 10),
        "Trainer, 10 logged values, bar": trainer_run(al, al.Module, 10, True),
        "raw loop, 4 batches a step": raw_accumulating,
        "Trainer, 4 batches a step": trainer_run(al, al.Module, accumulate_grad_batches=4),
        "raw loop, clipping": raw_clipping,
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
    steps, rounds = (300, 3) if options.quick else (1500, 9)
    calls = {name: slope(python_calls, run) for name, run in runs.items()}
    ops = {name: slope(aten_ops, run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(cpu_seconds(run, steps))
    ratio = {name: over(seconds[name], seconds[beside(name)]) for name in runs}
    rows = [
        (
            name, f"{calls[name]:.0f}", f"{calls[name] - calls[beside(name)]:+.1f}", f"{ops[name] - ops[beside(name)]:+.2f}",
            f"{statistics.median(seconds[name]) / steps * 1e6:.0f}", f"{statistics.median(ratio[name]):.2f}",
            f"{min(ratio[name]):.2f}-{max(ratio[name]):.2f}",
        )
        for name in runs
    ]  # fmt: skip
    figures = {
        "calls_plain_over_raw": calls["Trainer"] / calls["raw loop"],
        "calls_ten_logs_over_raw": calls["Trainer, 10 logged values"] / calls["raw loop"],
        "calls_more_plain": calls["Trainer"] - calls["raw loop"],
        "calls_more_one_log": calls["Trainer, 1 logged value"] - calls["raw loop"],
        "calls_more_each_further_log": (calls["Trainer, 10 logged values"] - calls["Trainer, 1 logged value"]) / 9,
        "cpu_plain_over_raw": statistics.median(ratio["Trainer"]),
        "cpu_ten_logs_bar_over_raw": statistics.median(ratio["Trainer, 10 logged values, bar"]),
        "cpu_fabric_over_raw": statistics.median(ratio["Fabric"]),
        "fit_fixed_milliseconds": set_up_milliseconds(runs["Trainer"]) - set_up_milliseconds(raw),
        "import_over_torch": import_seconds("arclight, torch") / import_seconds("torch"),
        "import_trainer_over_torch": import_seconds("arclight, torch; arclight.Trainer") / import_seconds("torch"),
        "async_save_blocked_over_torch_save": blocked_by_saving(50 if options.quick else 500),
    }
    if "Lightning" in runs:
        figures["cpu_lightning_over_ours"] = statistics.median(over(seconds["Lightning"], seconds["Trainer"]))
        figures["fit_fixed_lightning_over_ours"] = set_up_milliseconds(runs["Lightning"]) / set_up_milliseconds(
            runs["Trainer"]
        )
        figures["import_ours_over_lightning"] = import_seconds("arclight, torch; arclight.Trainer") / import_seconds(
            "lightning"
        )
    publish(
        "trainer_overhead", "What a trainer adds to a step",
        ("", "Python calls a step", "more than raw", "ATen ops more than raw", "CPU us a step", "over raw", "min-max"), rows, figures,
        options=options, packages=versions("torch", "arclight", "lightning"),
        notes="Raw is the loop written by hand that does the same. The time of a run includes its set-up and end, spread over its steps.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
