"""Run the nearest tests against mutants of the arithmetic: ``python -m tests.mutation.runner [FILE ...] [--count N]``.

This process imports torch once and never this package. Every mutant is judged in a fork of it, which imports a copy of the package
with that one change and runs, quickest first, those near tests that reached the changed lines when nothing was changed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.mutation.mutate import Mutant, mutants

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SOURCE = REPOSITORY / "src" / "arclight"
SETTINGS: dict[str, Any] = tomllib.loads((HERE / "targets.toml").read_text(encoding="utf-8"))
WARM = ["numpy", "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.data", "hypothesis",
        "hypothesis.extra.numpy", "safetensors.torch", "pydantic", "rich.console"]  # fmt: skip
MEMORY_BYTES = 24 << 30


@dataclass
class Near:
    """The near tests of a file: their seconds, the lines that each reaches, and those that run at import."""

    seconds: dict[str, float]
    lines: dict[str, list[int]]
    at_import: list[int]

    def of(self, mutant: Mutant) -> list[str]:
        """Tests that reach a mutant, quickest first; all of them for code that runs at import."""
        for first, last in (mutant.lines, (mutant.statement, mutant.lines[1])):
            own = set(range(first, last + 1))
            if own & set(self.at_import):
                return sorted(self.seconds, key=self.seconds.__getitem__)
            if found := [name for name, lines in self.lines.items() if own & set(lines)]:
                return sorted(found, key=self.seconds.__getitem__)
        return []


class Reached:
    """A pytest plugin that notes which lines of one file each test reaches."""

    def __init__(self, file: Path) -> None:
        self.file, self.lines, self.seconds = str(file), defaultdict[str, set[int]](set), dict[str, float]()
        self._into = self.lines[""]

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        if event == "line":
            self._into.add(frame.f_lineno)
        return self.trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._into, began = self.lines[item.nodeid], time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - began

    def found(self) -> dict[str, Any]:
        lines = {name: sorted(own) for name, own in self.lines.items()}
        return {"at_import": lines.pop(""), "lines": lines, "seconds": self.seconds}


class Chosen:
    """A pytest plugin that runs only the chosen tests, in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.place = {name: number for number, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])


def run_tests(copy: Path, tests: Sequence[str], plugin: object, *options: str) -> int:
    """In a forked process: import the package from `copy` and run tests. Returns pytest's exit code."""
    from hypothesis import Phase, settings

    os.chdir(REPOSITORY)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), str(REPOSITORY)])
    settings.register_profile("mutants", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    basetemp = f"--basetemp={copy.parent / 'tmp'}"
    return int(
        pytest.main(["-p", "no:cacheprovider", "-m", "not slow and not gpu", basetemp, *options, *tests], [plugin])
    )


def fork(work: Callable[[], int], log: Path, seconds: float) -> int:
    """Start `work` in a process of its own group, with limits on processor time and memory; returns its id."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        os.setsid()
        streams = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(streams, 1), os.dup2(streams, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


@dataclass
class Job:
    """One thing to run on a copy of the package; ``done`` takes its exit code (negative: its signal)."""

    work: Callable[[Path], int]
    file: str
    source: str | None
    seconds: float
    done: Callable[[int, Path], None]


def put(file: Path, source: str) -> None:
    """Write a module, whose compiled form may be of the same second and size."""
    file.write_text(source, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def run_all(jobs: Iterator[Job], folder: Path, workers: int) -> None:
    """Run jobs in `workers` processes at a time, each with a copy of the package of its own."""
    copies = [folder / str(number) for number in range(workers)]
    for at in copies:
        if not at.exists():
            shutil.copytree(SOURCE, at / "src" / "arclight", ignore=shutil.ignore_patterns("__pycache__"))
    busy: dict[int, tuple[Path, Job, float]] = {}
    while True:
        while copies and (job := next(jobs, None)):
            at = copies.pop()
            if job.source is not None:
                put(at / "src/arclight" / job.file, job.source)
            pid = fork(lambda at=at, job=job: job.work(at / "src"), at / "log", job.seconds)
            busy[pid] = at, job, time.monotonic() + 5 * job.seconds + 60
        if not busy:
            return
        pid, status = os.waitpid(-1, os.WNOHANG)
        late = [one for one, (_, _, until) in busy.items() if time.monotonic() > until]
        for one in late:
            os.killpg(one, signal.SIGKILL)
        if pid not in busy:
            time.sleep(0.02)
            continue
        at, job, _ = busy.pop(pid)
        try:
            os.killpg(pid, signal.SIGKILL)  # whatever its tests have started
        except ProcessLookupError:
            pass
        put(at / "src/arclight" / job.file, (SOURCE / job.file).read_text(encoding="utf-8"))
        copies.append(at)
        job.done(os.waitstatus_to_exitcode(status), at / "log")


def look(file: str, into: dict[str, Near]) -> Job:
    """Run a file's near tests with nothing changed. Raises RuntimeError where they do not pass."""
    tests = SETTINGS["tests"][file]

    def work(copy: Path) -> int:
        reached = Reached(copy / "arclight" / file)
        threading.settrace(reached.trace)
        sys.settrace(reached.trace)
        code = run_tests(copy, tests, reached)
        sys.settrace(None)
        if not str(sys.modules["arclight"].__file__).startswith(str(copy)):
            raise RuntimeError(
                f"the tests of {file} import {sys.modules['arclight'].__file__} and not the copy in {copy}"
            )
        (copy.parent / "reached.json").write_text(json.dumps(reached.found()))
        return code

    def done(code: int, log: Path) -> None:
        if code:
            raise RuntimeError(
                f"the tests of {file} end with {code} though nothing is changed:\n{log.read_text()[-3000:]}"
            )
        into[file] = Near(**json.loads((log.parent / "reached.json").read_text()))

    return Job(work, file, None, 600, done)


def judge(file: str, mutant: Mutant, near: Near, into: dict[str, list[tuple[Mutant, bool]]]) -> Job | None:
    """Run the tests that reach a mutant; None, and a survivor, where there are none."""
    tests = near.of(mutant)
    if not tests:
        into[file].append((mutant, False))
        return None
    limit = 20 + 3 * sum(near.seconds[name] for name in tests)
    files = sorted({name.partition("::")[0] for name in tests})
    return Job(
        lambda copy: run_tests(copy, files, Chosen(tests), "-x", "--tb=no"),
        file, mutant.source, limit, lambda code, _: into[file].append((mutant, code not in (0, 5))),
    )  # fmt: skip


def is_declared(file: str, mutant: Mutant) -> bool:
    """Return True for a mutant that is declared equivalent: no test can tell it."""
    return any(one["turned"] == mutant.turned for one in SETTINGS["equivalent"].get(file, ()))


def sample(file: str, count: int) -> list[Mutant]:
    """Draw mutants of a file: always the same ones as long as their lines are."""
    found = mutants((SOURCE / file).read_text(encoding="utf-8"))
    return [one for one in found if not is_declared(file, one)][:count]


def measure(files: Sequence[str], count: int, workers: int, seconds: float) -> dict[str, list[tuple[Mutant, bool]]]:
    """Judge `count` mutants a file, one of each file in turn, until `seconds` have passed: those not begun are left out."""
    near: dict[str, Near] = {}
    judged: dict[str, list[tuple[Mutant, bool]]] = {file: [] for file in files}
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        run_all((look(file, near) for file in files), Path(folder), workers)
        drawn = {file: sample(file, count) for file in files}
        rows = ((file, drawn[file][turn]) for turn in range(count) for file in files if turn < len(drawn[file]))
        jobs = (judge(file, mutant, near[file], judged) for file, mutant in rows if time.monotonic() < until)
        run_all((job for job in jobs if job), Path(folder), workers)
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=list(SETTINGS["tests"]), help="below src/arclight")
    parser.add_argument("--count", type=int, default=SETTINGS["count"], help="mutants a file")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=SETTINGS["seconds"], help="begin no mutant after them")
    options = parser.parse_args()
    for name in WARM:
        importlib.import_module(name)
    began, judged = time.monotonic(), measure(options.files, options.count, options.workers, options.seconds)
    for file, rows in judged.items():
        print(f"{sum(noticed for _, noticed in rows):3} of {len(rows):3}  {file}")
        for mutant, noticed in rows:
            if not noticed:
                print(f"    {mutant.lines[0]}: {mutant.code}\n    {' ' * len(str(mutant.lines[0]))}> {mutant.turned}")
    noticed, total = sum(n for rows in judged.values() for _, n in rows), sum(map(len, judged.values()))
    wanted = sum(min(options.count, len(sample(file, options.count))) for file in options.files)
    print(
        f"{noticed} of {total} mutants noticed ({noticed / total:.1%}) in {time.monotonic() - began:.0f} s; {wanted} drawn"
    )
    return int(noticed < SETTINGS["share"] * total or total < wanted / 2)


if __name__ == "__main__":
    raise SystemExit(main())
