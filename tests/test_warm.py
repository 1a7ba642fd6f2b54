"""Programs of the tests come from a process in which all that is named has been imported."""

from __future__ import annotations

from importlib.util import find_spec

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
