"""The command as a whole: what it lists, what it imports, how it fails."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import arclight
from arclight.cli.command import VERBS, main

Typed = Callable[[str], tuple[int, str, str]]
verbs = {verb: target for group in VERBS.values() for verb, (target, _) in group.items()}
takes_a_recipe = ["train", "validate", "test"]


def test_the_overview_names_every_verb(typed: Typed) -> None:
    for line in ("", "--help", "-h", "help"):
        status, out, _ = typed(line)
        assert status == 0
        assert all(f"\n  {verb} " in out for verb in verbs)
        assert len(out.splitlines()) < 40
        assert "\x1b" not in out  # this is no terminal


def test_the_version(typed: Typed) -> None:
    assert typed("--version") == (0, f"arclight {arclight.__version__}\n", "")


@pytest.mark.parametrize("verb", verbs)
def test_every_verb_exists_and_has_help(typed: Typed, verb: str) -> None:
    module, _, function = verbs[verb].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    status, out, err = typed(f"{verb} --help")
    assert (status, err) == (0, "")
    assert f"arclight {verb}" in out


@pytest.mark.parametrize("verb", takes_a_recipe)
def test_help_of_a_recipe_verb_lists_every_field(typed: Typed, verb: str) -> None:
    from arclight.cli.help import default_text
    from arclight.cli.schema import Recipe
    from arclight.recipe import explain

    _, out, _ = typed(f"{verb} --help all")
    words, joined = " ".join(out.split()), "".join(out.split())
    settings = explain(Recipe)
    tables = {setting.path.rpartition(".")[0] for setting in settings}
    assert len(settings) > 70
    for setting in settings:
        assert setting.doc, f"{setting.path} has no docstring"
        assert "".join(setting.doc.split()) in joined  # lines may end within "left-right"
        if setting.path not in tables and not setting.path.endswith(".kind"):
            default = default_text(setting.default)
            line = f"{setting.path.rpartition('.')[2]} {setting.type} "
            assert line + ("(required)" if default is None else f"[{default}]") in words
    assert '[task.schedule] kind = "cosine", the default' in out
    assert "arclight train --resume" not in out
    assert out.count("Top-level fields\n") == 1
    assert '\n[[task.optimizer.groups]] kind = "sgd"\n' in out


@pytest.mark.parametrize("verb", takes_a_recipe)
def test_help_of_a_recipe_verb_is_short_and_leads_to_the_rest(typed: Typed, verb: str) -> None:
    _, out, _ = typed(f"{verb} --help")
    assert len(out.splitlines()) < 76
    assert out.count("Top-level fields\n") == 1
    assert "[trainer]" in out
    assert "--help all" in out
    assert "\n  max_epochs " not in out
    _, out, _ = typed(f"{verb} --help trainer")
    assert "\n  max_epochs " in out
    assert "image_size" not in out


@pytest.mark.parametrize(
    "line, said",
    [
        ("trian", "arclight: trian is not a verb; did you mean train?\n"),
        ("qqq", "arclight: qqq is not a verb; see arclight --help\n"),
        ("train x.toml", "arclight: x.toml cannot be read: No such file or directory\n"),
        (
            "train --task.kind detection --task.data x --sed 3",
            "arclight: --sed is not a field of Recipe; did you mean --seed?\n",
        ),
        (
            "train --sed 3",
            "arclight: the recipe cannot be used:\n"
            "  --sed is not a field of Recipe; did you mean --seed?\n"
            "  task is missing; Recipe needs it: detection | segmentation | pose | corners | obb | classification | language | "
            "sequence-classification | token-classification | extractive-qa\n",
        ),
        ("train --resume", "arclight: argument --resume: expected one argument (see arclight train --help)\n"),
        (
            "predict a.jpg",
            "arclight: a.jpg is not a run: name the run of a detector first, as in arclight predict runs/detect-qris/1 a.jpg",
        ),
        (
            "train detect-qris --epochs 3",
            "arclight: --epochs is not a field of Recipe; did you mean --trainer.max_epochs?\n",
        ),
        (
            "train detect-qris --trainer.epochs 3",
            "arclight: --trainer.epochs is not a field of Recipe; did you mean --trainer.max_epochs?\n",
        ),
        (
            "train detect-qris --device cpu",
            "arclight: --device is not a field of Recipe; did you mean --trainer.accelerator?\n",
        ),
        (
            "train detect-qris --batch 8",
            "arclight: --batch is not a field of Recipe; did you mean --task.batch_size or --task.data.batch_size?\n",
        ),
        (
            "train detect-qris --max-epochs=3",
            "arclight: --max-epochs is not a field of Recipe; did you mean --trainer.max_epochs?\n",
        ),
        (
            "train detect-qris --max_epoch 3",
            "arclight: --max_epoch is not a field of Recipe; did you mean --trainer.max_epochs?\n",
        ),
        ("validate runs/none/1", "arclight: there is no run folder runs/none/1, nor a recipe of this name\n"),
        ("predict runs/none photos", "arclight: there is no run folder runs/none, nor images of this name\n"),
        (
            "export runs/none --out .",
            "arclight: --out .: a program is an ONNX file or a folder; call it program.onnx or program\n",
        ),
        (
            "serve --program x.onnx --host a..b --insecure",
            "arclight: a..b is not an address: no machine can have this name\n",
        ),
        ("train detect-qris --trainer.logger wandb", "arclight: --trainer.logger: a recipe has no loggers to choose"),
        ("predict runs/lm --prompt x", "arclight: --prompt needs the run or the program of a language model first"),
        ("serve --program x.onnx --port high", "arclight: argument --port: invalid int value: 'high' (see arclight"),
        ("scan a.jpg --program x.onnx", "arclight: there is no program at x.onnx\n"),
        ("scan a.jpg --stride 0", "arclight: argument --stride: 0 is not 1 or more (see arclight"),
        ("compare a b --seed -3", "arclight: argument --seed: -3 is not 0 or more (see arclight"),
        (
            "data",
            "arclight: the following arguments are required: tokenize|retokenize|pack|inspect|qris|poster|lint|",
        ),
        ("checkpoint inspect x", "arclight: there is no checkpoint at x: nothing has that name\n"),
        ("train --task os.path:join", "arclight: --task.kind: need a kind, got <function join"),
        ("train --task tiny_task:Fit", "arclight: --task.kind: tiny_task:Fit cannot be imported: No module named"),
    ],
)
def test_a_users_mistake_is_one_line_without_a_traceback(typed: Typed, line: str, said: str) -> None:
    status, out, err = typed(line)
    assert (status, out) == (2, "")
    assert err.startswith(said)
    assert "Traceback" not in err


def test_names_that_no_file_can_have_are_one_line(typed: Typed, folder: Path) -> None:
    (folder / "round").symlink_to("round")
    for place, said in (("x" * 300, "File name too long"), ("round", "Too many levels of symbolic links")):
        status, _, err = typed(f"data lint {place}")
        assert status == 2
        assert err.startswith(f"arclight: {place}: {said}")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("arclight.cli.commands.doctor.doctor", broken)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_an_interruption_is_no_fault(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("arclight.cli.commands.doctor.doctor", interrupted)
    assert typed("doctor") == (130, "", "arclight: interrupted\n")


def test_a_reader_who_has_seen_enough_is_no_fault() -> None:
    line = f"{sys.executable} -m arclight.cli train --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    first, status = done.stdout.splitlines()
    assert first.startswith("usage: arclight train")
    assert status in ("0", "141")  # the whole help may fit into the pipe


def test_a_warning_is_one_line_without_code() -> None:
    code = "import warnings; from arclight.cli import command, main\n"
    code += "command.dispatch = lambda *_: warnings.warn('too few', stacklevel=1) or 0\nmain(['doctor'])\n"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr == "arclight: warning: too few\n"


def test_help_imports_no_torch() -> None:
    code = "import sys; from arclight.cli import main; main([]); help = main(['--help'])\n"
    code += "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules or 'pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("2", "2")])
def test_numpy_multiplies_in_one_thread_by_default(given: str | None, used: str) -> None:
    code = "import os, sys; from arclight.cli import main; assert 'numpy' not in sys.modules; main([])\n"
    code += "print(os.environ['OPENBLAS_NUM_THREADS'])"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.splitlines()[-1] == used


def cpu_seconds(*words: str, times: int = 1) -> float:
    """CPU time of a Python process, the least of so many: other processes on the machine disturb it little, and seldom thrice."""

    def once() -> float:
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    return min(once() for _ in range(times))


@pytest.mark.slow
def test_help_is_much_faster_than_importing_torch() -> None:
    torch = cpu_seconds("-c", "import torch")
    assert cpu_seconds("-m", "arclight.cli", "--help", times=3) < 0.3 * torch
    # So that both together are within 1.15 of torch alone.
    assert cpu_seconds("-c", "import arclight", times=3) < 0.15 * torch


def test_the_package_brings_its_names_when_asked() -> None:
    names = ["Trainer", "Fabric", "Module", "DataModule", "Callback", "seed_everything", "ModelCheckpoint"]
    names += ["EarlyStopping", "LearningRateMonitor", "EMAWeightAveraging", "RichProgressBar"]
    assert sorted(names) == dir(arclight)
    for name in names:
        assert callable(getattr(arclight, name)), name
