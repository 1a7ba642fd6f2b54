"""Programs of the tests come from a process in which all that is named has been imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import warm


@pytest.mark.parametrize("name", warm.PRELOADED)
def test_each_preloaded_module_exists(name: str) -> None:
    """A fork server passes over a name that is wrong, and every program would then import by itself what it lacks."""
    assert find_spec(name) is not None


def test_programs_find_torch_imported_and_their_lines_at_once() -> None:
    code = "import sys; print('torch' in sys.modules, sys.argv[1:]); import time; time.sleep(300)"
    with warm.Program("-c", code, "a", env={"PYTHONUNBUFFERED": "1", "PATH": ""}) as program:
        assert program.until("True", 100) == "True ['a']"
    assert program.returncode != 0


def test_output_is_passed_over_line_by_line() -> None:
    code = "for i in range(5): print('line', i)"
    with warm.Program("-c", code, merged=True) as program:
        assert program.until("1", 100) == "line 1"
        assert program.communicate(100) == ("line 2\nline 3\nline 4\n", "")
        with pytest.raises(AssertionError, match="has ended without 'line 9'"):
            program.until("line 9", 100)


SPAWNING = """
import multiprocessing, os, child

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(pool.apply(child.report))
    process = context.Process(target=child.end, args=(3,))
    process.start()
    process.join()
    print(process.exitcode)
"""
CHILD = """
import os, sys

def report():
    return os.environ["WORD"], os.getcwd(), "torch" in sys.modules

def end(status):
    print("ends")
    sys.exit(status)
"""


@pytest.mark.parametrize("spawns", [False, True])
def test_spawned_processes_inherit_folder_environment_and_output(tmp_path: Path, spawns: bool) -> None:
    (tmp_path / "program.py").write_text(SPAWNING)
    (tmp_path / "child.py").write_text(CHILD)
    environment = {**os.environ, "WORD": "given"}
    with warm.Program(tmp_path / "program.py", cwd=tmp_path, env=environment, spawns=spawns) as program:
        assert program.wait(100) == 0, program.said()
        report, *rest = program.said()[0].splitlines()
    assert report == repr(("given", str(tmp_path), not spawns))
    assert sorted(rest) == ["3", "ends"]
