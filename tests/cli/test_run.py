"""``arclight run`` starts a script's processes and says how; the script itself names nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import warm

SCRIPT = """
import sys
import torch
import arclight as al

fabric = al.Fabric()
model = fabric.setup(torch.nn.Linear(2, 1))
total = fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum")
fabric.print(type(fabric.strategy).__name__, fabric.world_size, model(torch.ones(1, 2)).dtype, float(total), *sys.argv[1:])
if "--launch" in sys.argv:
    fabric.launch()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "arclight.cli", "run", *words, timeout=180)


@pytest.mark.slow
def test_two_processes_and_the_scripts_own_arguments(script: Path) -> None:
    done = run(
        "--devices", "2", "--strategy", "ddp", "--precision", "64-true", "--accelerator", "cpu", str(script), "--x", "1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "DDPStrategy 2 torch.float32 3.0 --x 1"


def test_one_process_has_the_scripts_own_arguments_and_a_second_launch_is_refused(script: Path) -> None:
    done = run("--accelerator", "cpu", "--precision", "64-true", str(script), "--launch")
    assert done.stdout.strip() == "SingleDeviceStrategy 1 torch.float32 1.0 --launch"
    assert done.returncode != 0
    assert "this script was launched through the CLI" in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--strategy", "ddp_spawn", "{script}"), "--strategy ddp_spawn starts its processes itself"),
        (("--accelerator", "cpu", "--devices", "0", "{script}"), "--devices 0: "),
        (("missing.py",), "missing.py is not a file"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(script: Path, words: tuple[str, ...], complaint: str) -> None:
    done = run(*(word.format(script=script) for word in words))
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
