"""What a trainer adds to a training step: ours and Lightning's beside a loop written by hand.

Tiny MLP 32-64-64-10, batch 32, SGD, ready-made batches, one thread, so that almost all the time is the trainer's.
Python calls and ATen ops per step are slopes between two run lengths: the same on every machine. CPU times are medians
over interleaved rounds. Lightning is measured where it is installed (`make bench-peers`, then run with that environment).
"""

from __future__ import annotations

import logging
import statistics
import sys
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


def trainer_run(library: Any, base: type, logs: int, bar: bool) -> Run:
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


def main() -> None:
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    runs: dict[str, Run] = {
        "raw loop": raw,
        "Fabric": fabric_run,
        "Trainer": trainer_run(al, al.Module, 0, False),
        "Trainer, 1 logged value": trainer_run(al, al.Module, 1, False),
        "Trainer, 10 logged values": trainer_run(al, al.Module, 10, False),
        "Trainer, 10 logged values, bar": trainer_run(al, al.Module, 10, True),
    }
    try:
        import lightning.pytorch as pl
    except ImportError:
        print("Lightning is not installed here, so its rows are missing: see `make bench-peers`", file=sys.stderr)
    else:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        runs |= {
            "Lightning Trainer": trainer_run(pl, pl.LightningModule, 0, False),
            "Lightning Trainer, 10 logged values, bar": trainer_run(pl, pl.LightningModule, 10, True),
        }
    steps, rounds = (300, 3) if options.quick else (1500, 9)
    calls = {name: slope(python_calls, run) for name, run in runs.items()}
    ops = {name: slope(aten_ops, run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(cpu_seconds(run, steps))
    ratio = {name: [a / b for a, b in zip(times, seconds["raw loop"], strict=True)] for name, times in seconds.items()}
    rows = [
        (
            name, f"{calls[name]:.0f}", f"{calls[name] / calls['raw loop']:.2f}", f"{ops[name] - ops['raw loop']:+.2f}",
            f"{statistics.median(seconds[name]) / steps * 1e6:.0f}", f"{statistics.median(ratio[name]):.2f}", f"{min(ratio[name]):.2f}-{max(ratio[name]):.2f}",
        )
        for name in runs
    ]  # fmt: skip
    figures = {
        "calls_plain_over_raw": calls["Trainer"] / calls["raw loop"],
        "calls_ten_logs_over_raw": calls["Trainer, 10 logged values"] / calls["raw loop"],
        "cpu_plain_over_raw": statistics.median(ratio["Trainer"]),
        "cpu_ten_logs_bar_over_raw": statistics.median(ratio["Trainer, 10 logged values, bar"]),
        "cpu_fabric_over_raw": statistics.median(ratio["Fabric"]),
    }
    if "Lightning Trainer" in runs:
        pairs = zip(seconds["Lightning Trainer"], seconds["Trainer"], strict=True)
        figures["cpu_lightning_over_ours"] = statistics.median(theirs / ours for theirs, ours in pairs)
    publish(
        "trainer_overhead", "What a trainer adds to a step",
        ("", "Python calls a step", "over raw", "ATen ops over raw", "CPU us a step", "over raw", "min-max"), rows, figures,
        options=options, packages=versions("torch", "arclight", "lightning"),
        notes="The time of a run includes its set-up and end, spread over its steps.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
