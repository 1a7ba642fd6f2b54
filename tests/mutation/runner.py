"""Run the nearest tests against mutants of the arithmetic: ``python -m tests.mutation.runner [FILE ...] [--count N]``.

This process imports torch once and never this package. For each file it forks one that imports a copy of the package and collects the
near tests. A fork of that runs them with nothing changed and notes the lines that each reaches; then every mutant is judged in a fork that
changes the code of its functions and runs, quickest first, the tests that reached its lines. Mutants of what runs at import are
judged in processes that import a changed copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
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
from types import CodeType, FrameType, FunctionType
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
TRACED = 2000
"""Calls and lines of a function that are noted one by one in a test."""
LOOK_SECONDS, FILE_SECONDS = 600, 3600
"""Processor time of a file's near tests with nothing changed, and of the process whose forks they and its mutants are."""


@dataclass
class Near:
    """The near tests of a file: their seconds, the lines that each reaches, and those that run at import."""

    seconds: dict[str, float]
    lines: dict[str, list[int]]
    at_import: list[int]

    def at_import_of(self, mutant: Mutant) -> bool:
        """Return True for a mutant in a statement that runs at import, or in a function that is called there."""
        return bool({*range(mutant.statement, mutant.lines[1] + 1)} & set(self.at_import))

    def limit(self, tests: Sequence[str]) -> float:
        """Seconds of processor time that tests may take with a change."""
        return 5 + 3 * sum(self.seconds[name] for name in tests)

    def of(self, mutant: Mutant) -> list[str]:
        """Tests that reach a mutant, quickest first; all of them for code that runs at import."""
        for first, last in (mutant.lines, (mutant.statement, mutant.lines[1])):
            own = set(range(first, last + 1))
            if own & set(self.at_import):
                return sorted(self.seconds, key=self.seconds.__getitem__)
            if found := [name for name, lines in self.lines.items() if own & set(lines)]:
                return sorted(found, key=self.seconds.__getitem__)
        return []


class Judging:
    """A pytest plugin that runs the collected tests in forked processes: once as they are, and those that reach it for each mutant.

    In the process that forks, ``judged`` holds whether each mutant was noticed, None for those that have to be imported. ``near`` is known
    once the unchanged run has passed; ``code`` is the exit code of the last fork.
    """

    def __init__(self, copy: Path, file: str, drawn: Sequence[Mutant], until: float) -> None:
        self.path, self.drawn, self.until = copy / "arclight" / file, drawn, until
        self.source = self.path.read_text(encoding="utf-8")
        self.near: Near | None = None
        self.judged: list[tuple[int, bool | None]] = []
        self.code, self.forked = 0, False
        self._reached = copy.parent / "reached.json"
        self._lines, self._seconds = defaultdict[str, set[int]](set), dict[str, float]()
        self._into, self._left = self._lines[""], defaultdict[CodeType, int](lambda: TRACED)
        self._file = str(self.path)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Note lines; of a function that goes on and on within a test all, since to be told of each line takes longer than it does."""
        code = frame.f_code
        if code.co_filename != self._file or (left := self._left[code]) == 0:
            return None
        self._left[code] = left - 1
        if event == "line":
            self._into.add(frame.f_lineno)
        if left == 1:
            self._into.update(line for *_, line in code.co_lines() if line)
        return self.trace

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests that start a server to fork from: each mutant would start one."""
        items[:] = [item for item in items if "fork_spawned" not in getattr(item, "fixturenames", ())]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._into, began = self._lines[item.nodeid], time.monotonic()
        self._left.clear()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = time.monotonic() - began

    def pytest_sessionfinish(self) -> None:
        if self.forked and self.near is None:
            lines = {name: sorted(own) for name, own in self._lines.items()}
            found = {"at_import": lines.pop(""), "lines": lines, "seconds": self._seconds}
            self._reached.write_text(json.dumps(found))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Return None in a forked process, where the tests that are left in the session are run then."""
        if self._fork(LOOK_SECONDS):
            return None
        sys.settrace(None), threading.settrace(None)  # type: ignore[arg-type]
        if self.code:
            return True
        self.near = Near(**json.loads(self._reached.read_text()))
        for number, mutant in enumerate(self.drawn):
            if time.monotonic() > self.until:
                break
            tests = self.near.of(mutant)
            changed = None if self.near.at_import_of(mutant) else changed_code(self.source, mutant.source, self.path)
            if tests and changed is None:
                self.judged.append((number, None))
            elif not tests:
                self.judged.append((number, False))
            else:
                put(self.path, mutant.source)  # for processes that tests start
                if self._fork(self.near.limit(tests)):
                    change_functions(changed or {}, self.path)
                    Chosen(tests).pytest_collection_modifyitems(session.items)
                    session.config.option.maxfail, session.config.option.tbstyle = 1, "no"
                    return None
                put(self.path, self.source)
                self.judged.append((number, noticed(self.code)))
        return True

    def _fork(self, seconds: float) -> bool:
        """Return True in a forked process; in this one False, when that has ended."""
        if pid := os.fork():
            self.code = wait(pid, seconds)
            return False
        os.setsid()
        limit(seconds)
        self.forked = True
        return True


def changed_code(source: str, changed: str, path: Path) -> dict[tuple[str, int], CodeType] | None:
    """The code of a changed source by name and first line of the code in whose place it comes; None if the sources have other functions."""
    found: dict[tuple[str, int], CodeType] = {}
    waiting = [tuple(compile(text, str(path), "exec", dont_inherit=True) for text in (source, changed))]
    while waiting:
        before, after = waiting.pop()
        within = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (before, after)]
        if [one.co_qualname for one in within[0]] != [one.co_qualname for one in within[1]]:
            return None
        waiting += zip(*within)
        found[before.co_qualname, before.co_firstlineno] = after
    return found


def change_functions(changed: dict[tuple[str, int], CodeType], path: Path) -> None:
    """Give all functions of a module the code that comes in the place of theirs, whoever holds them."""
    file = str(path)
    gc.unfreeze()
    for one in gc.get_objects():
        if (
            type(one) is FunctionType and one.__code__.co_filename == file
        ):  # what else is there may answer isinstance with a warning
            one.__code__ = changed[one.__code__.co_qualname, one.__code__.co_firstlineno]
    gc.freeze()


@dataclass
class Judged:
    """The near tests of a file and its mutants: whether they notice each, None until one has been imported."""

    near: Near
    seen: dict[Mutant, bool | None]


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
        limit(seconds)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def limit(seconds: float) -> None:
    """Limit the processor time and memory of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def wait(pid: int, seconds: float) -> int:
    """Wait for a process with a limit of processor time, end its group, and return its exit code (negative: its signal)."""
    until = time.monotonic() + 5 * seconds + 60
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until:
            end_group(pid)
        time.sleep(0.01)
    end_group(pid)  # whatever its tests have started
    return os.waitstatus_to_exitcode(found[1])


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def noticed(code: int) -> bool:
    """Return True for pytest's exit codes of failures, and for signals."""
    return code not in (0, 5)


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
            end_group(one)
        if pid not in busy:
            time.sleep(0.02)
            continue
        at, job, _ = busy.pop(pid)
        end_group(pid)
        put(at / "src/arclight" / job.file, (SOURCE / job.file).read_text(encoding="utf-8"))
        copies.append(at)
        job.done(os.waitstatus_to_exitcode(status), at / "log")


def judge_file(file: str, drawn: Sequence[Mutant], until: float, into: dict[str, Judged]) -> Job:
    """Run a file's near tests with nothing changed, and judge its mutants. Raises RuntimeError where they do not pass."""

    def work(copy: Path) -> int:
        judging = Judging(copy, file, drawn, until)
        threading.settrace(judging.trace)
        sys.settrace(judging.trace)
        code = run_tests(copy, SETTINGS["tests"][file], judging)
        if not str(sys.modules["arclight"].__file__).startswith(str(copy)):
            raise RuntimeError(
                f"the tests of {file} import {sys.modules['arclight'].__file__} and not the copy in {copy}"
            )
        if not judging.forked and judging.near is not None:
            found = {"near": dataclasses.asdict(judging.near), "judged": judging.judged}
            (copy.parent / "judged.json").write_text(json.dumps(found))
        return code if judging.forked else judging.code if judging.near is None else 0

    def done(code: int, log: Path) -> None:
        if code:
            raise RuntimeError(
                f"the tests of {file} end with {code} though nothing is changed:\n{log.read_text()[-3000:]}"
            )
        found = json.loads((log.parent / "judged.json").read_text())
        into[file] = Judged(Near(**found["near"]), {drawn[number]: seen for number, seen in found["judged"]})

    return Job(work, file, None, FILE_SECONDS, done)


def judge_afresh(file: str, mutant: Mutant, judged: Judged) -> Job:
    """Import a changed copy and run the tests that reach a mutant."""
    tests = judged.near.of(mutant)
    files = sorted({name.partition("::")[0] for name in tests})

    def done(code: int, _: Path) -> None:
        judged.seen[mutant] = noticed(code)

    return Job(
        lambda copy: run_tests(copy, files, Chosen(tests), "-x", "--tb=no"),
        file, mutant.source, judged.near.limit(tests), done,
    )  # fmt: skip


def is_declared(file: str, mutant: Mutant) -> bool:
    """Return True for a mutant that is declared equivalent: no test can tell it."""
    return any(one["turned"] == mutant.turned for one in SETTINGS["equivalent"].get(file, ()))


def sample(file: str, count: int) -> list[Mutant]:
    """Draw mutants of a file: always the same ones as long as their lines are."""
    found = mutants((SOURCE / file).read_text(encoding="utf-8"))
    return [one for one in found if not is_declared(file, one)][:count]


def measure(files: Sequence[str], count: int, workers: int, seconds: float) -> dict[str, list[tuple[Mutant, bool]]]:
    """Judge `count` mutants a file until `seconds` have passed: those not begun are left out."""
    judged: dict[str, Judged] = {}
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        run_all((judge_file(file, sample(file, count), until, judged) for file in files), Path(folder), workers)
        left = [(file, mutant) for file in files for mutant, seen in judged[file].seen.items() if seen is None]
        jobs = (judge_afresh(file, mutant, judged[file]) for file, mutant in left if time.monotonic() < until)
        run_all(jobs, Path(folder), workers)
    return {file: [(mutant, seen) for mutant, seen in judged[file].seen.items() if seen is not None] for file in files}


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
