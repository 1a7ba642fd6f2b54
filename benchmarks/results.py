"""Summarise ratios with their spread; print a benchmark's table, write it beside the script, and its figures as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from arclight.trainer.run.folder import cpu_name

PEERS = Path(".bench-venv/bin/python")
"""Interpreter of the environment that `make bench-peers` makes, with what benchmarks are measured beside."""
ENOUGH = 6
"""Samples below which no interval of a median is one of 95 %: all of them lie on one side of it with probability 2 ** (1 - n)."""
FEW = 10
"""Samples below which a bootstrap's interval is too narrow: that of the median is then their range."""
RESAMPLES = 4000
SPREAD = "median [95 % interval] (min-max)"
"""What `Ratio` prints, for headers of tables."""
READING = (
    "Ratios: the value, [the 95 % bootstrap interval of it; of a few samples their range], (the range of samples). "
    "Where the interval includes no difference, none was seen."
)


@dataclass(frozen=True)
class Ratio:
    """Hold a ratio, the 95 % bootstrap interval of it, and the range of the samples behind it."""

    value: float
    low: float
    high: float
    smallest: float | None = None
    """None for a ratio of sums, of which no sample is a ratio by itself."""
    largest: float | None = None
    samples: int = 0
    same: float | None = 1.0
    """The value that means no difference; None for shares and other figures that are compared with nothing."""

    def __str__(self) -> str:
        around = "" if self.smallest is None else f" ({self.smallest:.3g} to {self.largest:.3g})"
        return f"{self.value:.4g} [{self.low:.4g} to {self.high:.4g}]{around}"

    @property
    def difference(self) -> str:
        """Say the difference in words: none seen where the interval includes `same`, or where samples are too few for one."""
        if self.same is None:
            return ""
        if self.samples < ENOUGH:
            return "too few samples to tell"
        if self.low <= self.same <= self.high:
            return "no difference seen"
        more = self.value - self.same
        return f"{100 * more:+.1f} %" if more < 1 else f"{1 + more:.3g} times"

    def minus_one(self) -> Ratio:
        """Return what is more than 1, as overheads and gaps are given."""
        smallest, largest, same = (None if end is None else end - 1 for end in (self.smallest, self.largest, self.same))
        return Ratio(self.value - 1, self.low - 1, self.high - 1, smallest, largest, self.samples, same)

    def figures(self, name: str) -> dict[str, float]:
        """Return the numbers for JSON: ``name`` and, with an ending each, the interval, the range and the number of samples."""
        found = {
            name: self.value, f"{name}_low": self.low, f"{name}_high": self.high, f"{name}_min": self.smallest,
            f"{name}_max": self.largest, f"{name}_samples": self.samples,
        }  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}


def paired(above: Sequence[float], below: Sequence[float], *, same: float | None = 1.0) -> Ratio:
    """Return the median of ``above[i] / below[i]``, which were measured directly after one another, with its interval.

    Whatever slows the machine for longer than a pair takes strikes both, and a few pairs that it struck unevenly move no median.
    Raises ValueError for lists of different lengths, for values that are not positive, and for fewer than two pairs.
    """
    if len(above) != len(below):
        raise ValueError(f"pairs need lists of one length, got {len(above)} and {len(below)} values")
    if not all(0 < value < math.inf for value in (*above, *below)):
        raise ValueError(f"ratios need positive, finite values, got {min(*above, *below)} to {max(*above, *below)}")
    return median([a / b for a, b in zip(above, below, strict=True)], same=same)


def median(values: Sequence[float], *, same: float | None = None) -> Ratio:
    """Return the median of ``values``, in the order they were measured in, with its interval.

    Values next to each other saw the same machine: blocks of neighbours are drawn again, too, so that slow drifts widen the interval;
    it is the wider one of blocks and single values. Of fewer than `FEW` values it is their range.
    Raises ValueError for fewer than two values and for NaN or infinite ones.
    """
    found = np.asarray(values, dtype=np.float64)
    _check(found)
    smallest, largest = float(found.min()), float(found.max())
    ends = [(smallest, largest)]
    if len(found) >= FEW:
        blocks = (1, round(len(found) ** (1 / 3)))
        ends = [_interval(lambda drawn: np.median(found[drawn], axis=1), len(found), block) for block in blocks]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    return Ratio(float(np.median(found)), low, high, smallest, largest, len(found), same)


def totals(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the sum of counts over another's on the same items; the interval is that of other items like them.

    A sum of 0 below counts as 1. Raises ValueError for lists of different lengths and for fewer than two items.
    """
    if len(above) != len(below):
        raise ValueError(f"pairs need lists of one length, got {len(above)} and {len(below)} values")
    counts = np.asarray([above, below], dtype=np.float64)
    _check(counts)

    def ratio(drawn: np.ndarray) -> np.ndarray:
        sums = counts[:, drawn].sum(-1)
        return np.asarray(sums[0] / np.maximum(sums[1], 1))

    low, high = _interval(ratio, counts.shape[1], 1)
    return Ratio(float(ratio(np.arange(counts.shape[1]))), low, high, samples=counts.shape[1])


def _check(samples: np.ndarray) -> None:
    if samples.shape[-1] < 2:
        raise ValueError(f"a spread needs two samples or more, got {samples.shape[-1]}: measure again, in turns")
    if not np.isfinite(samples).all():
        raise ValueError("samples need to be finite, got NaN or infinity")


def _interval(statistic: Callable[[np.ndarray], np.ndarray], count: int, block: int) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile of ``statistic`` over draws of indices (draws, count) in circular blocks; always the same draws."""
    starts = np.random.default_rng(0).integers(0, count, (RESAMPLES, -(-count // block)))
    drawn = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :count] % count
    low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return float(low), float(high)


def timed_in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each call, in turns, after two that do not count."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(rounds):
        for label, call in calls.items():
            started = time.process_time()
            call()
            times[label].append(time.process_time() - started)
    return times


def parser(about: str) -> argparse.ArgumentParser:
    """Build the interface that all benchmarks share."""
    arguments = argparse.ArgumentParser(description=about)
    arguments.add_argument(
        "--quick", action="store_true", help="a smaller run, to see that it works; its table is not written"
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures here, as one flat object of name to number"
    )
    return arguments


def versions(*packages: str) -> str:
    """Name installed versions, and which packages are missing."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def said(figure: float | Ratio) -> str:
    """Return a figure as the page has it: a ratio with its spread, and with the difference in words."""
    if not isinstance(figure, Ratio):
        return f"{figure:.4g}"
    return ", ".join(filter(None, (str(figure), f"{figure.samples} samples", figure.difference)))


def publish(
    script: str, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], figures: Mapping[str, float | Ratio], *,
    options: argparse.Namespace, packages: str, notes: str = "",
) -> None:  # fmt: skip
    """Print the table; write ``<script>.md`` (not for a quick run) and the JSON file, which has the spread of every `Ratio` too."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    numbers = [f"* `{name}` = {said(value)}" for name, value in figures.items()]
    if any(isinstance(value, Ratio) for value in figures.values()):
        numbers.append("")
        numbers.append(READING)
    text = "\n".join([*lines, "", *numbers])
    print(f"{title}\n\n{text}")
    if options.json is not None:
        flat: dict[str, float] = {}
        for name, value in figures.items():
            flat |= value.figures(name) if isinstance(value, Ratio) else {name: value}
        options.json.write_text(json.dumps(flat, indent=1) + "\n")
    if not options.quick:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        machine = f"{today}, {cpu_name()}, {platform.system()}, Python {platform.python_version()}, {packages}"
        page = f"# {title}\n\n{machine}. Written by `benchmarks/{script}.py`.\n\n{text}\n" + (
            f"\n{notes}\n" if notes else ""
        )
        Path(__file__).with_name(f"{script}.md").write_text(page)
