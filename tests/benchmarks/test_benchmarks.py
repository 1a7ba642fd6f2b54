"""Every benchmark can be imported, and runs to its end in its short form."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if path.stem != "__init__")
NEED_CHECKOUT = {"torchao_tests"}
"""Programs that run another project's sources, of which none are here: `make bench` leaves them out."""
PROGRAMS = [
    name
    for name in MODULES
    if name not in NEED_CHECKOUT and "parser(__doc__" in (REPOSITORY / f"benchmarks/{name}.py").read_text()
]
NEED_PHOTOS = {"qr_photos"}


def test_programs_are_found() -> None:
    assert {"trainer_overhead", "qr_photos", "vision", "text", "pipeline", "federated", "moe"} <= set(PROGRAMS)


@pytest.mark.parametrize("name", MODULES)
def test_benchmarks_import(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__, "its --help shows it"


def test_make_bench_runs_every_program_as_a_module() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    recipe = makefile.partition("\nbench:")[2].partition("\n\n")[0].splitlines()[1:]
    assert sorted(line.strip() for line in recipe) == sorted(f"$(BIN)/python -m benchmarks.{name}" for name in PROGRAMS)


@pytest.mark.parametrize("name", MODULES)
def test_benchmarks_leave_the_import_path_alone(name: str) -> None:
    assert "sys.path" not in (REPOSITORY / f"benchmarks/{name}.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_benchmarks_run_in_short(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in NEED_PHOTOS:
        request.getfixturevalue("shared_data")
    page = REPOSITORY / "benchmarks" / f"{name}.md"
    before = page.read_bytes() if page.exists() else None
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(tmp_path / "figures.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures
    assert all(isinstance(value, int | float) for value in figures.values())
    assert (page.read_bytes() if page.exists() else None) == before  # a short run never writes the page
