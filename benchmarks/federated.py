"""Federation beside plain Flower FedAvg and beside training in one place: seconds, memory, bytes, losses, bits.

Rounds under Flower's SuperLink are run in turns, with models that are not trained; losses are those of a small Llama. ``--qris`` adds a
detector that four sites train on with merchants of their own each (an hour); ``benchmarks.federated_qris`` measures it alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tests.federated.transports.superlink import ABSENT, BIN, installed

from benchmarks.federated_flower import Peers, compare
from benchmarks.federated_parity import OUTER, parity
from benchmarks.federated_plane import digests, in_process, over_http
from benchmarks.federated_qris import compare as compare_detectors
from benchmarks.federated_qris import row
from benchmarks.results import Ratio, median, paired, parser, publish, versions

TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "shakespeare.txt"
Row = tuple[str, str, str]


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3g} s ({low:.3g} to {high:.3g})"


class Table:
    """Rows and figures as they come, each part with the load that it was measured under."""

    def __init__(self, folder: Path) -> None:
        self.rows: list[Row] = []
        self.figures: dict[str, float | Ratio] = {}
        self.folder = folder
        self.loads: list[float] = []

    def part(self, name: str, work: Callable[[Path], None]) -> None:
        self.loads.append(os.getloadavg()[0])
        began, here = time.monotonic(), self.folder / name
        here.mkdir()
        work(here)
        shutil.rmtree(here, ignore_errors=True)
        print(f"{name}: {time.monotonic() - began:.0f} s, load {self.loads[-1]:.1f}", flush=True)

    def add(self, about: str, ours: str, other: str = "", **figures: float | Ratio) -> None:
        self.rows.append((about, ours, other))
        self.figures |= figures


def beside_flower(table: Table, megabytes: int, *, repeats: int, theirs: int, ours: int) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        if not installed():
            table.add(f"round of {megabytes} MB x 2 clients: ours under Flower, plain Flower", "not measured", ABSENT)
            return
        found = compare(folder, megabytes, repeats=repeats, theirs=theirs, ours=ours)
        ratio = paired(found.medians["flower"], found.medians["ours"])
        table.add(
            f"round of {megabytes} MB x 2 clients: ours under Flower, plain Flower",
            spread(found.rounds["ours"]),
            spread(found.rounds["flower"]),
            **{f"flower_round_over_ours_{megabytes}mb": ratio},
        )
        _peaks(table, megabytes, found)
        for about, seconds, name in (
            ("start of all processes to the first fit", found.starts, "start_seconds"),
            ("`flwr run` to the first fit", found.runs, "run_seconds"),
        ):
            if seconds["ours"] and megabytes == 10:
                said = [spread(seconds[kind]) if seconds[kind] else "not measured" for kind in ("ours", "flower")]
                table.add(
                    f"{about}: ours, plain Flower", *said, **{f"{name}_flower": statistics.median(seconds["ours"])}
                )

    return work


def _peaks(table: Table, megabytes: int, found: Peers) -> None:
    said = (f"{found.peaks[kind] / 1e6:.0f} MB" for kind in ("ours", "flower"))
    table.add(f"most memory of the server's process, {megabytes} MB x 2 clients: ours, plain Flower", *said)


def starts(table: Table) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        config = {"clients": 2, "rounds": 1, "megabytes": 10.0}
        here = [in_process(folder / f"here-{number}", config)[1] for number in range(4)][1:]
        blob = [over_http(folder / f"blob-{number}", config).first for number in range(3)]
        table.add(
            "start to the first fit, 10 MB x 2: in this process; server and nodes as new processes", spread(here), spread(blob),
            start_seconds_inprocess=statistics.median(here), start_seconds_blob=statistics.median(blob),
        )  # fmt: skip

    return work


def memory(table: Table, megabytes: float, clients: Sequence[int], *, repeats: int) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        def peak(size: float, count: int) -> float:
            config = {"clients": count, "rounds": 3, "megabytes": size}
            found = over_http(folder / f"{size:g}-{count}", config).peak
            shutil.rmtree(folder / f"{size:g}-{count}", ignore_errors=True)
            return found

        bases, runs = [], []
        for _ in range(repeats):
            bases.append(peak(0.02, clients[0]))
            runs.append([peak(megabytes, count) for count in clients])
        extra = median([(one[-1] - one[0]) / (clients[-1] - clients[0]) / (megabytes * 1e6) for one in runs])
        total = median([(max(one) - base) / (megabytes * 1e6) for one, base in zip(runs, bases, strict=True)])
        base, said = (
            statistics.median(bases),
            ", ".join(f"{statistics.median(one) / 1e6:.0f}" for one in zip(*runs, strict=True)),
        )
        table.add(
            f"most memory of the server, {megabytes:g} MB, {', '.join(map(str, clients))} clients", f"{said} MB",
            f"{base / 1e6:.0f} MB for a model of 20 kB", server_models_per_extra_client=extra, server_models_total=total,
        )  # fmt: skip

    return work


def wire(table: Table) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        few, many, size = 2, 6, 10.0

        def each(codec: str) -> tuple[float, float]:
            """Count the bytes of one client in one round, up and both ways, by the difference of two runs: without what happens once."""
            config = {"clients": 1, "megabytes": size, "codec": codec, "noise": True}
            runs = [
                over_http(Path(tempfile.mkdtemp(dir=folder)) / "run", {**config, "rounds": rounds}, counted=True)
                for rounds in (few, many)
            ]
            return (runs[1].up - runs[0].up) / (many - few), (runs[1].wire - runs[0].wire) / (many - few)

        turns = [{codec: each(codec) for codec in ("fp32", "int8", "topk")} for _ in range(2)]
        plain, int8, topk = (
            [statistics.median(way) for way in zip(*(one[codec] for one in turns), strict=True)]
            for codec in ("fp32", "int8", "topk")
        )
        table.add(
            "bytes on the wire for a client and round, 10 MB of float32: up, both ways",
            f"{plain[0] / 1e6:.3f} MB", f"{plain[1] / 1e6:.3f} MB",
            bytes_fp32_over_payload=median([one["fp32"][1] / (2 * size * 1e6) for one in turns]),
        )  # fmt: skip
        table.add(
            "int8 both ways",
            f"{int8[0] / 1e6:.3f} MB",
            f"{int8[1] / 1e6:.3f} MB",
            bytes_int8_over_fp32=median([one["int8"][1] / one["fp32"][1] for one in turns]),
        )
        table.add(
            "3 % in 2 bits up, int8 down",
            f"{topk[0] / 1e6:.3f} MB",
            f"{topk[1] / 1e6:.3f} MB",
            bytes_topk_over_fp32=median([one["topk"][0] / one["fp32"][0] for one in turns]),
        )

    return work


def bits(table: Table, *, quick: bool) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        count = digests(folder, quick=quick)
        table.add(
            "different results over arrival orders, threads and transports", str(count), "", digests_over_orders=count
        )

    return work


def losses(table: Table, *, quick: bool) -> Callable[[Path], None]:
    seeds, warm, steps, rates = (2, 60, 100, (2e-3,)) if quick else (6, 1500, 300, (2e-3, 4e-3))

    def work(folder: Path) -> None:
        start, found, about = parity(TEXT, folder, seeds=seeds, warm=warm, steps=steps, rates=rates)
        for name, key, values in (
            ("4 clients, H = 50", "loss_gap_iid", [(one.iid, one.central) for one in found]),
            ("each with a quarter of the text in a row", "loss_gap_noniid", [(one.skewed, one.central) for one in found]),
            ("int8 with error feedback both ways, over float32", "loss_gap_int8", [(one.int8, one.iid) for one in found]),
        ):  # fmt: skip
            gap = paired([a for a, _ in values], [b for _, b in values]).minus_one()
            mean, against = (statistics.mean(column) for column in zip(*values, strict=True))
            table.add(
                f"loss, {name}: federated, against", f"{mean:.4f}",
                f"{against:.4f} ({gap.smallest:+.2%} to {gap.largest:+.2%}, {gap.samples} seeds)", **{key: gap},
            )  # fmt: skip
        table.add(f"the same before: a start of {warm} steps on {about}", f"{start:.4f}")

    return work


def detector(table: Table, *, quick: bool) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (about, ours, central), figures = row(compare_detectors(folder, range(1 if quick else 2), quick=quick))
        table.add(about, ours, central, **figures)

    return work


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--qris", action="store_true", help="also train the detector (an hour; minutes with --quick)"
    )
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended from outside")
    )  # what was started here is then stopped too
    with tempfile.TemporaryDirectory(prefix="arclight-federated-") as temporary:
        table = Table(Path(temporary))
        parts(table, options)
    loads = f"load {min(table.loads):.1f} to {max(table.loads):.1f} on {os.cpu_count()} processors"
    flower = _version_of_flower() if installed() else "flwr not installed"
    publish(
        "federated", "Federation", ("", "", ""), table.rows, table.figures, options=options,
        packages=f"{versions('torch', 'arclight-torch')}, {flower}, {loads}",
        notes="Rounds are from opened to committed, with journal, SHA-256 of all blobs and a checkpoint on the disk; Flower's are from one "
        "`configure_train` to the next and keep nothing. Both run in turns under one SuperLink on loopback, with clients that add a "
        "constant: a sample of the ratio is that of the median rounds in one deployment; Flower's settings are its defaults. "
        "Memory is the process's peak resident size. `server_models_total` is what the largest number of clients takes beyond a "
        "model of 20 kB, `server_models_per_extra_client` the slope. Bytes are counted on the connection, requests and headers included. "
        f"Losses: a Llama of 0.1 million parameters on characters, {OUTER}, all runs from the same weights, on as many tokens, and at IID "
        "clients on the same ones; training in one place has the best of two rates, the federation the first of them."
        " A detector: [federated_qris.md](federated_qris.md).",
    )  # fmt: skip


def parts(table: Table, options: argparse.Namespace) -> None:
    if options.quick:
        table.part("flower-10", beside_flower(table, 10, repeats=2, theirs=1, ours=3))
        table.part("memory", memory(table, 20.0, (1, 2), repeats=2))
    else:
        table.part("flower-10", beside_flower(table, 10, repeats=6, theirs=3, ours=10))
        table.part("flower-200", beside_flower(table, 200, repeats=6, theirs=2, ours=5))
        table.part("memory", memory(table, 100.0, (2, 4, 8), repeats=3))
    table.part("starts", starts(table))
    table.part("wire", wire(table))
    table.part("digests", bits(table, quick=options.quick))
    table.part("losses", losses(table, quick=options.quick))
    if options.qris:
        table.part("qris", detector(table, quick=options.quick))


def _version_of_flower() -> str:
    ask = "from importlib.metadata import version; print(version('flwr'))"
    said = subprocess.run([str(BIN / "python"), "-c", ask], capture_output=True, text=True, check=True)
    return f"flwr {said.stdout.strip()}"


if __name__ == "__main__":
    main()
