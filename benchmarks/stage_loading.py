"""How much memory a process needs to load one of four stages: ``load_peak``, which other benchmarks and tests call.

Each way to load runs in a process of its own, which watches its anonymous memory (RssAnon: what must be in memory or in swap;
pages of a mapped file are not, since they can be read again at any time) from when the stage is known until it has its weights.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from arclight.fabric.modules import SkipInit
from arclight.parallel import pipeline
from arclight.parallel.pipeline.weights.save import save

WAYS = ("mapped", "copied", "converted", "whole")
"""As `load` does by default; copied out of the file; made bfloat16; and what it replaces: a model in memory, of which a part is kept."""


class Rows(nn.Module):
    """An embedding that is larger than all else, and a row of layers: for a width of 2048 about 400 MB, for 1024 a quarter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with SkipInit():
            self.embed = nn.Embedding(4 * width, width)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(20))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return x


def load_peak(folder: Path, ways: Sequence[str] = WAYS, width: int = 2048) -> dict[str, dict[str, float]]:
    """For each way the ``peak`` of anonymous memory, the ``stage``, and its ``largest`` tensor as it is in the file, all in bytes.

    folder: where the checkpoint of all four stages is written.
    """
    checkpoint = folder / f"rows-{width}"
    if not checkpoint.exists():
        save(Rows(width), checkpoint, max_shard_size="64MB")
    command = [sys.executable, "-m", "benchmarks.stage_loading", str(width), str(checkpoint), *ways]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(ways):
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return {way: json.loads(line) for way, line in zip(ways, lines, strict=True)}


def load_peak_over_stage(folder: Path) -> float:
    """Measure the largest peak of the ways that `load` has, in stages."""
    found = load_peak(folder, [way for way in WAYS if way != "whole"])
    return max(peak["peak"] / peak["stage"] for peak in found.values())


class _Watch(threading.Thread):
    """The most anonymous memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = _anonymous()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.001):
            self.peak = max(self.peak, _anonymous())

    def stop(self) -> float:
        self._over.set()
        self.join()
        return max(self.peak, _anonymous()) - self.first


def _anonymous() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024.0 * int(line.split()[1])


def _measure(way: str, width: int, checkpoint: str) -> None:
    """Print what one way takes, as a line of JSON."""
    with torch.device("meta"):
        model = Rows(width)
    pipe = pipeline.split(model, (torch.zeros(1, 2, dtype=torch.int64),), at=["layers.2", "layers.8", "layers.14"])
    names = set(pipe.stages[0].state_dict())
    watch = _Watch()
    watch.start()
    if way == "whole":
        whole = Rows(width)
        state: dict[str, Tensor] = {}
        for file in Path(checkpoint).glob("*.safetensors"):
            state |= load_file(file)
        whole.load_state_dict(state)
        kept = {name: tensor.clone() for name, tensor in whole.state_dict().items() if name in names}
        del whole, state
    else:
        pipe.load(checkpoint, [0], mapped=way == "mapped", dtype=torch.bfloat16 if way == "converted" else None)
        kept = pipe.stages[0].state_dict()
    peak = watch.stop()
    largest = max(tensor.numel() for tensor in kept.values()) * torch.float32.itemsize
    stage = sum(tensor.nbytes for tensor in kept.values())
    print(json.dumps({"peak": peak, "stage": stage, "largest": largest}), flush=True)


if __name__ == "__main__":
    for chosen in sys.argv[3:]:  # forked before anything was computed, so that none finds memory that another has left
        process = multiprocessing.get_context("fork").Process(
            target=_measure, args=(chosen, int(sys.argv[1]), sys.argv[2])
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{chosen} ended with status {process.exitcode}")
