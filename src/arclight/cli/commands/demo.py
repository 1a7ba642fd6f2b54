"""Train a detector on scenes, export it, read and verify payment codes: ``arclight demo``.

`command` calls `demo`, also for ``make demo``; `Demo` has the steps. The benchmark ``benchmarks/qr_photos.py`` imports `Demo`, `recipe_for`,
`SCENES` and `EPOCHS`, and a test reads ``summary.json``: these stay.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError
from arclight.cli.run_setup import build_task, callbacks, make_trainer
from arclight.cli.schema import Recipe
from arclight.cli.style import console_of
from arclight.deploy.settings import Int8
from arclight.optim.schedule_settings import Cosine
from arclight.optim.settings import AdamW
from arclight.trainer.callbacks.settings import EMA, Checkpointing
from arclight.trainer.settings import TrainerSettings
from arclight.vision.data.augment_settings import Augment
from arclight.vision.tasks.settings import DetectionTask

if TYPE_CHECKING:
    from rich.console import Console

    from arclight.deploy import Program
    from arclight.vision.data.dataset import DetectionDataset
    from arclight.vision.tasks.detection import Detector

SCENES, SCENE_SIZE, VALIDATION_SHARE, EPOCHS = 1000, 640, 0.15, 12


def demo(arguments: list[str]) -> None:
    parser = Parser(
        prog="arclight demo",
        description="Draw scenes with payment codes, train a detector on them, evaluate, quantize and export it, read codes with it, and find a "
        "sticker that was pasted over one.",
    )
    parser.add_argument(
        "--root", type=Path, default=Path("runs"), metavar="DIR", help="folder of all runs (default: %(default)s)"
    )
    parser.add_argument(
        "--scenes", type=int, default=SCENES, metavar="N", help="number of scenes (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, metavar="N", help="training epochs (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of every random stream (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        raise UsageError(f"--epochs {options.epochs}: train for 1 or more")

    Demo(options.root, scenes=options.scenes, epochs=options.epochs, seed=options.seed, console=console_of()).run()


def recipe_for(data: Path, root: Path = Path("runs"), *, epochs: int = EPOCHS, seed: int = 0) -> Recipe:
    """Make the demo's recipe.

    Its schedule suits the few steps on this small data set: hardly any warm-up, then down to almost nothing.
    """
    return Recipe(
        name="demo",
        root=root,
        seed=seed,
        task=DetectionTask(
            data=data, model="yolov5n", image_size=320, batch_size=16, workers=1, optimizer=AdamW(lr=2e-3),
            schedule=Cosine(warmup=0.05, final=0.02), augment=Augment(close_mosaic=0.25),
        ),
        trainer=TrainerSettings(max_epochs=epochs, precision="auto", gradient_clip_val=10.0, check_val_every_n_epoch=min(6, epochs), log_every_n_steps=10),
        checkpoint=Checkpointing(monitor="val/map50", mode="max"),
        ema=EMA(decay=0.998, ramp_steps=100),
    )  # fmt: skip


class Demo:
    """Steps of the demo, in order; each prints what it does and what came out."""

    def __init__(self, root: Path, *, scenes: int, epochs: int, seed: int, console: Console) -> None:
        self.folder, self.root, self.scenes, self.epochs, self.seed = root / "demo", root, scenes, epochs, seed
        self.console, self.begun = console, time.monotonic()

    def run(self) -> None:
        """Run all steps. Raises UsageError if another demo is at work in the folder."""
        with _lock(self.folder):
            self._run()

    def _run(self) -> None:
        data = self.draw()
        detector, datamodule, run = self.train(data)
        programs = self.export(detector, datamodule.calibration_dataset())
        results = {name: self.measure(program, datamodule.val) for name, program in programs.items()}
        reading = self.scan(programs["int8"], data.parent)
        latency = self.time(programs)
        fraud = self.verify(programs["int8"])
        self.report(detector, run, programs, results, reading, latency, fraud)

    def print_line(self, text: str) -> None:
        from rich.markup import escape

        minutes, seconds = divmod(int(time.monotonic() - self.begun), 60)
        self.console.print(f"[dim]{minutes}:{seconds:02d}[/dim]  {escape(text)}", soft_wrap=True)

    def draw(self) -> Path:
        """Draw scenes on disk, or reuse those of the same settings."""
        from rich.progress import Progress

        from arclight.vision.qris.scenes.generate import generate

        folder, wanted = self.folder / "data", {"scenes": self.scenes, "seed": self.seed, "size": SCENE_SIZE}
        record = self.folder / "data.json"
        if record.exists() and json.loads(record.read_text()) == wanted and (folder / "data.yaml").exists():
            self.print_line(f"{self.scenes} scenes are in {folder}")
            return folder / "data.yaml"
        shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
        with Progress(console=self.console, transient=True) as progress:
            bar = progress.add_task("drawing scenes", total=self.scenes)
            data = generate(
                folder,
                self.scenes,
                self.seed,
                size=SCENE_SIZE,
                val_share=VALIDATION_SHARE,
                progress=lambda done, _: progress.update(bar, completed=done),
            )
        record.write_text(json.dumps(wanted))
        self.print_line(f"drew {self.scenes} scenes with payment codes, other codes and distractors into {folder}")
        return data

    def train(self, data: Path) -> tuple[Detector, Any, Any]:
        from arclight.cli.run_record import RunRecord
        from arclight.trainer.callbacks import RunReport

        recipe = recipe_for(data, self.root, epochs=self.epochs, seed=self.seed)
        module: Any
        datamodule: Any
        module, datamodule = build_task(recipe)
        trainer = make_trainer(recipe, callbacks=[*callbacks(recipe), RunRecord(recipe), RunReport()])
        self.print_line(f"training {recipe.task.model} from scratch for {self.epochs} epochs ({trainer.precision})")
        trainer.fit(module, datamodule=datamodule)
        self.print_line(f"trained: mAP50 {module.results.map50:.3f} on the {len(datamodule.val)} scenes held out")
        return module, datamodule, trainer.run_folder

    def export(self, detector: Detector, dataset: DetectionDataset) -> dict[str, Program]:
        from arclight.deploy.parity import parity_summary
        from arclight.vision.tasks.deployment import export_module

        programs = {}
        for name, int8 in {"fp32": None, "int8": Int8(calibration_batches=40)}.items():
            path = self.folder / "programs" / f"detector-{name}.onnx"
            programs[name] = export_module(detector, path, dataset, int8)
            size = f"{programs[name].nbytes / 1e6:.1f} MB"
            self.print_line(f"{name} program: {path}, {size}, {parity_summary(programs[name].metadata)}")
        return programs

    def measure(self, program: Program, dataset: DetectionDataset) -> Any:
        from arclight.vision.tasks.deployment import evaluate_program

        results = evaluate_program(program, dataset)
        self.print_line(f"{program.precision} program: mAP50 {results.map50:.3f}, mAP50-95 {results.map50_95:.3f}")
        return results

    def scan(self, program: Program, data: Path) -> dict[str, int]:
        """Count the codes of held-out scenes that are read, and those that are readable.

        Readable is a code that is read, or would be by a reader that is given its corners.

        One process per processor reads, each one scene at a time.
        """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        scenes = [
            (data / name, codes)
            for name, codes in json.loads((data / "codes.json").read_text()).items()
            if "/val/" in name
        ]
        counts = Counter({"codes": 0, "read": 0, "readable": 0, "payments": 0, "wrong": 0})
        spawn = multiprocessing.get_context("spawn")  # a forked copy of a process with threads can hang
        workers = min(os.cpu_count() or 1, len(scenes) or 1)
        with (
            _one_thread_each(),
            ProcessPoolExecutor(workers, mp_context=spawn, initializer=_open_reader, initargs=(program.path,)) as pool,
        ):
            for found in pool.map(_read_scene, scenes, chunksize=4):
                counts.update(found)
        self.print_line(
            f"scanned the held-out scenes: {counts['read']} of {counts['codes']} codes read, {counts['payments']} are payment codes "
            f"(QRIS); {counts['readable']} are readable by a reader that is told their corners"
        )
        return dict(counts)

    def verify(self, program: Program) -> Path:
        """Verify photos of four counters, two with a sticker over the code; write the page."""
        import cv2
        import numpy as np

        from arclight.vision import qris
        from arclight.vision.qris.scenes.fraud import draw_pair
        from arclight.vision.qris.verification.registry import Place, Registry
        from arclight.vision.qris.verification.report import VerificationReport, listed
        from arclight.vision.qris.verification.verifier import Verdict

        folder = self.folder / "fraud"
        folder.mkdir(parents=True, exist_ok=True)
        pairs = [draw_pair(np.random.default_rng([self.seed, 9, number])) for number in range(4)]
        places = []
        for number, pair in enumerate(pairs):
            poster = folder / f"poster-{number}.png"
            cv2.imwrite(str(poster), cv2.cvtColor(pair.poster, cv2.COLOR_RGB2BGR))
            places.append(Place.of(qris.parse(pair.own.text), poster=poster))
        registry = Registry(tuple(places))
        report, found = VerificationReport(f"a registry of {len(places)} places"), Counter[Verdict]()
        for number, (pair, place) in enumerate(zip(pairs, places, strict=True)):
            photo = (pair.forged if number % 2 else pair.clean).image
            cv2.imwrite(str(folder / f"counter-{number}.png"), cv2.cvtColor(photo, cv2.COLOR_RGB2BGR))
            verification = qris.verify(photo, registry, place=place.nmid, detector=program.predict_one)
            found[verification.verdict] += 1
            report.add(f"counter {number + 1}: {place.name}", photo, verification)
        self.print_line(
            f"verified photos of {len(pairs)} counters, two of them with a sticker over the code: {listed(found)}"
        )
        return report.write(folder / "page.html")

    def time(self, programs: dict[str, Program]) -> dict[str, float]:
        import torch

        from arclight.deploy import benchmark

        size = programs["fp32"].metadata["image_size"]
        table = benchmark(programs, torch.rand(1, 3, size, size), rounds=40, threads=1)
        return {name: table[name].wall_ms for name in programs}

    def report(
        self,
        detector: Detector,
        run: Any,
        programs: Any,
        results: Any,
        reading: dict[str, int],
        latency: dict[str, float],
        fraud: Path,
    ) -> None:
        import torch
        from rich.table import Table

        seconds, rate = time.monotonic() - self.begun, reading["read"] / max(1, reading["codes"])
        summary = {
            "map50": detector.results.map50, "map50_95": detector.results.map50_95, "int8_map50": results["int8"].map50,
            "decode_rate": rate, "latency_ms": latency, "seconds": round(seconds, 1), "device": str(detector.device),
        }  # fmt: skip
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        table = Table(title="Results on scenes held out", title_justify="left")
        for name in ("", "torch", "fp32 program", "int8 program"):
            table.add_column(name, justify="right" if name else "left")
        weights = sum(p.numel() * p.element_size() for p in detector.model.state_dict().values())
        table.add_row("mAP50", *(f"{r.map50:.3f}" for r in (detector.results, results["fp32"], results["int8"])))
        table.add_row("mAP50-95", *(f"{r.map50_95:.3f}" for r in (detector.results, results["fp32"], results["int8"])))
        table.add_row(
            "size, MB", *(f"{n / 1e6:.1f}" for n in (weights, programs["fp32"].nbytes, programs["int8"].nbytes))
        )
        table.add_row("latency, ms (1 thread)", "", f"{latency['fp32']:.1f}", f"{latency['int8']:.1f}")
        table.add_row("codes read", "", "", f"{rate:.0%} of {reading['codes']}")
        self.console.print(table)
        self.console.print(f"took {seconds / 60:.1f} minutes on {torch.get_num_threads()} threads\n")
        for name, place in (
            ("report", run.report),
            ("summary", self.folder / "summary.json"),
            ("fraud", fraud),
            ("try it", f"{command()} serve --program {self.folder / 'programs' / 'detector-int8.onnx'}"),
        ):
            self.console.print(f"{name:<8} {place}", soft_wrap=True, markup=False)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process.

    The operating system releases it whenever the process ends. Raises UsageError if another process has it.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "demo.lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UsageError(
                f"another arclight demo ({file.read().strip() or 'process unknown'}) is at work in {folder}: wait until it has ended, or "
                "name another folder with --root"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Start processes with one thread for linear algebra each, as more would compete."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ |= dict.fromkeys(before, "1")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


_READER: list[Program] = []
"""The program of a reading process."""


def _open_reader(program: Path) -> None:
    import cv2

    from arclight.deploy import Program

    cv2.setNumThreads(1)
    _READER[:] = [Program.load(program, threads=1)]


def _read_scene(scene: tuple[Path, list[dict[str, Any]]]) -> dict[str, int]:
    """Read one scene and compare with its codes; read missed ones by their corners."""
    import numpy as np

    from arclight.vision import qris
    from arclight.vision.data.images import decode_image
    from arclight.vision.qris.reading.decode import read_at, to_grey

    path, codes = scene
    image = decode_image(path)
    found = qris.scan(image, _READER[0].predict_one)
    texts = [code.text for code in found if code.text is not None]
    payloads = [code["payload"] for code in codes]
    counts = {"codes": len(codes), "read": sum(payload in texts for payload in payloads)}
    counts["readable"] = counts["read"]
    for code in codes:
        if code["payload"] not in texts:
            decoded = read_at(to_grey(image), np.array(code["corners_px"], np.float32), code["modules"])
            counts["readable"] += decoded is not None and decoded.text == code["payload"]
    counts["wrong"] = sum(text not in payloads for text in texts)
    counts["payments"] = sum(code.kind == "qris" for code in found)
    return counts


def command() -> str:
    """Return the command that calls this program: its name if on the path, else its path."""
    return "arclight" if shutil.which("arclight") else os.path.relpath(sys.argv[0])
