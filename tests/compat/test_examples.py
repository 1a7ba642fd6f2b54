"""Programs as users of Lightning write them learn what they are about; only their import lines are ours."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from tests import warm

EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.py"))
SLOW = {"dcgan", "dqn", "kfold", "language_model"}  # the others go through two optimizers, loops and all stages
IMPORT = re.compile(r"^(?:import|from) arclight\.compat\.lightning\b")


def run(script: Path, folder: Path) -> None:
    """Runs a program in a process and a folder of its own; its assertions say whether it learned."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = warm.run(script, folder, cwd=folder, env=environment, timeout=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize(
    "script",
    [pytest.param(one, marks=pytest.mark.slow) if one.stem in SLOW else one for one in EXAMPLES],
    ids=lambda script: script.stem,
)
def test_the_program_learns(script: Path, tmp_path: Path) -> None:
    run(script, tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="compares with lightning where it is installed"
)
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_the_program_is_one_of_lightnings(script: Path, tmp_path: Path) -> None:
    theirs = tmp_path / script.name
    theirs.write_text(script.read_text().replace("arclight.compat.lightning", "lightning"))
    run(theirs, tmp_path)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_only_its_import_lines_are_ours(script: Path) -> None:
    lines = script.read_text().splitlines()
    ours = [line for line in lines if "arclight" in line]
    assert ours
    assert [line for line in ours if not IMPORT.match(line)] == []


def test_a_program_that_does_not_learn_fails(tmp_path: Path) -> None:
    (source,) = (script for script in EXAMPLES if script.stem == "gan")
    idle = tmp_path / "gan.py"
    idle.write_text(source.read_text().replace("lr=0.01", "lr=0.0"))
    with pytest.raises(AssertionError, match="assert distance < 1"):
        run(idle, tmp_path)
