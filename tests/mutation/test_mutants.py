"""The near tests notice nine of ten mutants of the arithmetic."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutation.mutate import mutants
from tests.mutation.runner import REPOSITORY, SETTINGS, SOURCE, Near, change_functions, changed_code

TARGETS = SETTINGS["tests"]


def turned(source: str) -> set[str]:
    return {one.turned for one in mutants(source)}


def test_each_kind_of_change_is_made_once() -> None:
    assert turned("def f(a, b):\n    return a < b\n") == {"return (a <= b)"}
    assert turned("x = a + b * 2") == {"x = (a - b * 2)", "x = a + (b / 2)", "x = a + b * (3)"}
    assert turned("x = a and not b") == {"x = (a or not b)"}
    assert turned("if a:\n    pass") == {"if (not a):"}
    assert turned("x = 1000 if a is None else 7") == {
        "x = 1000 if (not a is None) else 7",
        "x = 1000 if (a is not None) else 7",
        "x = 1000 if a is None else (8)",
    }


def test_types_messages_and_what_never_runs_are_left_alone() -> None:
    for source in (
        "x: Literal[1] | None",
        "Both = int | None",
        "isinstance(a, Tensor | list)",
        "raise ValueError(f'{a + 1}' + b)",
        "warnings.warn(a + b, stacklevel=2)",
        "print(f'{a + 1}')",
        "if TYPE_CHECKING:\n    x = 1",
    ):
        assert not turned(source), source
    assert turned("x = MASK | bits") == {"x = (MASK & bits)"}


def test_an_edit_moves_no_other_mutants() -> None:
    source = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x * 3\n"
    longer = "import math\n\n\n" + source.replace("x + 1", "x + 1 - 5")
    kept = [one.turned for one in mutants(longer) if one.turned in turned(source)]
    assert kept == [one.turned for one in mutants(source) if one.turned in kept]
    assert len(kept) == 2


def test_tests_that_reach_a_mutant_are_found_quickest_first() -> None:
    (mutant,) = mutants("def f(a, b):\n    return [\n        a\n        < b\n    ]\n")
    seconds = {"slow": 2.0, "quick": 1.0, "elsewhere": 0.1}
    assert mutant.lines == (3, 4)
    reaches = {"slow": [3], "quick": [2, 3], "elsewhere": [9]}
    assert Near(seconds, reaches, []).of(mutant) == ["quick", "slow"]
    assert Near(seconds, {"slow": [2], "quick": [9], "elsewhere": []}, []).of(mutant) == ["slow"]
    assert Near(seconds, reaches, [3]).of(mutant) == ["elsewhere", "quick", "slow"]
    assert Near(seconds, {"slow": [9]}, []).of(mutant) == []


HELD = """
def twice(function):
    def outer(x):
        return function(x) + function(x)
    return outer


@twice
def tripled(x):
    return x * 3


class Steps:
    def down(self, numbers):
        return [
            number
            - 1 for number in numbers
        ]

    @staticmethod
    def last(numbers):
        return numbers[2]
"""


def test_functions_take_the_code_of_a_mutant_wherever_they_are_held(tmp_path: Path) -> None:
    path = tmp_path / "held.py"
    path.write_text(HELD)
    spec = importlib.util.spec_from_file_location("held", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tripled, down, last = module.tripled, module.Steps().down, module.Steps.last

    now = [HELD]

    def results(source: str) -> tuple[object, ...]:
        changed = changed_code(now.pop(), source, path)
        assert changed is not None
        change_functions(changed, path)
        now.append(source)
        return tripled(2), down([1, 2]), last([4, 5, 6, 7])

    assert results(HELD) == (12, [0, 1], 6)
    assert {one.turned: results(one.source) for one in mutants(HELD)} == {
        "return (function(x) - function(x))": (0, [0, 1], 6),
        "return x * (4)": (16, [0, 1], 6),
        "return (x / 3)": (4 / 3, [0, 1], 6),
        "(number + 1) for number in numbers": (12, [2, 3], 6),  # and all that follows is a line further up
        "- (2) for number in numbers": (12, [-1, 0], 6),
        "return numbers[(3)]": (12, [0, 1], 7),
    }
    assert changed_code(HELD, HELD.replace("def down", "def up"), path) is None


@pytest.mark.parametrize("file", sorted({*TARGETS, *SETTINGS["equivalent"]}))
def test_targets_and_equivalent_mutants_exist(file: str) -> None:
    assert all((REPOSITORY / test).is_file() for test in TARGETS[file])
    found = turned((SOURCE / file).read_text(encoding="utf-8"))
    for one in SETTINGS["equivalent"].get(file, ()):
        assert one["turned"] in found, f"{file} has no such mutant any more: {one['turned']}"
        assert len(one["reason"]) > 20


@pytest.mark.slow
def test_nine_of_ten_mutants_are_noticed() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.mutation.runner"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
