"""Programs that are written, replaced and read at once: by two writers, a killed one, and on a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exports import compare_here
from torch import nn

from arclight.checkpoint import files
from arclight.deploy import ExportError, Program, ProgramError, export
from arclight.deploy.formats import export as exporting
from arclight.deploy.formats import onnx_graph
from arclight.deploy.programs import folder
from arclight.fabric import atomic_replace

VALUES = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_here(monkeypatch)


class Constant(nn.Module):
    """A model that says which one it is."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((8, 64), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.value


def written(path: Path, value: float) -> Program:
    return export(Constant(value), path, example_inputs=VALUES, format="onnx", metadata={"value": value})


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a program that is written once and copied by the tests that change what it says."""
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        return written(tmp_path_factory.mktemp("one") / "p", 1.0).path


@pytest.fixture
def one(of_one: Path, tmp_path: Path) -> Program:
    """The program of 1 in the folder p."""
    return Program.load(shutil.copytree(of_one, tmp_path / "p"))


def value_of(program: Program) -> float:
    """The value of a program; it computes what it says."""
    said: float = program.metadata["value"]
    assert torch.equal(program(VALUES), torch.full((2, 64), 8 * said))
    return said


def described_as(path: Path, program: Program, **fields: Any) -> None:
    """Describe the program in the folder ``path`` again, with other ``fields``: anybody can."""
    given = {"inputs": program.inputs, "outputs": program.outputs, "description": program.metadata} | fields
    folder.write(path, format="onnx", main="model.onnx", **given)


@pytest.mark.parametrize("name", ["current", "current.onnx"])
def test_a_link_to_a_program_is_not_replaced(one: Program, tmp_path: Path, name: str) -> None:
    for target in ("p", "missing"):
        link = tmp_path / name
        link.symlink_to(target)
        with pytest.raises(ExportError, match=f"{name} is a link to {target}, .* name the path that it leads to"):
            written(link, 2.0)
        assert link.is_symlink()
        link.unlink()
    assert value_of(Program.load(tmp_path / "p")) == 1


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, and what it leaves is not tidied."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise Killed at the ``step``-th rename, exchange or sync of the next publication."""
    left = [step]

    def counted(call: Any) -> Any:
        def maybe(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args, **kwargs)

        return maybe

    publish = exporting._Draft.publish

    def publish_in_part(self: Any) -> None:
        for place, name in (
            (atomic_replace, "sync_folder"),
            (atomic_replace, "_exchange"),
            (os, "fsync"),
            (Path, "replace"),
            (Path, "rename"),
        ):
            patch.setattr(place, name, counted(getattr(place, name)))
        patch.setattr(files, "discard", lambda path: None)
        patch.setattr(atomic_replace, "discard", lambda path: None)
        publish(self)

    with monkeypatch.context() as patch:
        patch.setattr(exporting._Draft, "publish", publish_in_part)
        yield


@pytest.mark.parametrize(
    ("name", "every"),
    [("p", 4), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("p", "p.onnx", "large.onnx"))],
)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(
    name: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "large.onnx":
        monkeypatch.setattr(onnx_graph, "LARGEST_FILE", 1)
    path, steps, now, kept = tmp_path / name, -every, 1000.0, 0
    written(path, now)
    while True:
        steps += every
        try:
            with killed_at(steps, monkeypatch):
                written(path, float(steps))
            break
        except Killed:
            found = value_of(Program.load(path))
            assert found in (now, float(steps))
            kept += found == now
            now = found
    assert kept >= (2 if every == 1 else 1)
    assert value_of(Program.load(path)) == steps


def test_leftovers_of_a_killed_export_are_removed_by_the_next(tmp_path: Path) -> None:
    gone = tmp_path / f".p.saving-{atomic_replace._HOST}-{2**22 + 5}-00000000-0"  # no process has this number
    gone.mkdir()
    written(tmp_path / "q", 1.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["q"]


@pytest.mark.slow
def test_new_weights_take_the_place_of_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "LARGEST_FILE", 1)
    (tmp_path / "p.txt").write_text("mine")
    for value in (1.0, 2.0, 2.0):
        assert value_of(written(tmp_path / "p.onnx", value)) == value
        assert len(list(tmp_path.glob("p-*.data"))) == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_two_first_writers_leave_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes between the look at the destination and the rename."""
    written(tmp_path / "other", 2.0)
    path, rename = tmp_path / "p", Path.rename

    def late(self: Path, target: Path) -> Path:
        if target == path and not path.exists():
            shutil.copytree(tmp_path / "other", path)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    written(path, 1.0)
    assert value_of(Program.load(path)) == 1.0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "p"]


@pytest.mark.parametrize("name", ["p", pytest.param("p.onnx", marks=pytest.mark.slow)])
def test_a_reader_beside_a_writer_gets_one_program_or_an_error(name: str, tmp_path: Path) -> None:
    path, drafts = tmp_path / name, []
    for value in (1.0, 2.0):
        written(tmp_path / f"{value}" / name, value)
        drafts.append(tmp_path / f"{value}" / name)
    written(path, 1.0)
    stop = threading.Event()

    def replace() -> None:
        place = 0
        while not stop.is_set():
            place = 1 - place
            new = files.temporary_file(path)
            if path.suffix:
                shutil.copy(drafts[place], new)
                files.replace_file(path, new)
            else:
                shutil.copytree(drafts[place], new)
                files.publish(new, path)

    writer = threading.Thread(target=replace)
    read: set[float] = set()
    refusals: set[str] = set()
    writer.start()
    try:
        for _ in range(1000):
            try:
                read.add(value_of(Program.load(path, threads=1)))
            except ProgramError as error:
                refusals.add(
                    re.sub(r".*(was replaced|was changed|is missing|there is no program).*", r"\1", str(error))
                )
            if len(read) == 2:
                break
    finally:
        stop.set()
        writer.join()
    assert read == {1.0, 2.0}
    assert refusals <= {"was replaced", "was changed", "is missing", "there is no program"}


def test_a_program_that_was_replaced_is_not_opened_again(tmp_path: Path) -> None:
    for name in ("p", "p.onnx"):
        program = written(tmp_path / name, 1.0)
        assert value_of(program.with_threads(1)) == 1.0
        written(tmp_path / name, 2.0)
        with pytest.raises(ProgramError, match="was replaced while the program was opened"):
            program.with_threads(1)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["p", pytest.param("p.onnx", marks=pytest.mark.slow)])
def test_a_full_disk_is_named_and_leaves_the_program_before(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    written(path, 1.0)
    before = {entry.name: entry.stat().st_ino for entry in tmp_path.rglob("*")}
    with (
        largest_file(20_000),
        pytest.raises(ExportError, match=r"cannot be written: File too large; what was there is as it was"),
    ):
        export(nn.Linear(100, 100), path, example_inputs=torch.randn(2, 100), format="onnx")
    assert value_of(Program.load(path)) == 1.0
    assert {entry.name: entry.stat().st_ino for entry in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("failing", ["write", "publish"])
def test_several_formats_are_published_all_or_none_on_a_full_disk(
    before: bool, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while the second of two programs is described, or renamed."""
    forms: list[exporting.Format] = ["onnx", "openvino"]

    def everything(value: float) -> None:
        export(Constant(value), tmp_path / "p", example_inputs=VALUES, format=forms, metadata={"value": value})

    if before:
        everything(1.0)
    holder = {"write": folder, "publish": files}[failing]
    real, calls = getattr(holder, failing), [0]

    def full(*given: Any, **named: Any) -> Any:
        last = given[0 if failing == "write" else 1]
        calls[0] += "openvino" in last.name
        if calls[0] == (2 if failing == "write" else 1) and "openvino" in last.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given, **named)

    monkeypatch.setattr(holder, failing, full)
    with pytest.raises(
        ExportError, match=r"openvino cannot be written: No space left on device; what was there is as it"
    ):
        everything(2.0)
    monkeypatch.setattr(holder, failing, real)
    assert sorted(entry.name for entry in (tmp_path / "p").iterdir()) == (forms if before else [])
    assert all(value_of(Program.load(tmp_path / "p" / form)) == 1.0 for form in forms if before)


def test_a_description_of_other_tensors_than_the_model_has_is_refused(one: Program, tmp_path: Path) -> None:
    (spec,) = one.inputs
    (given,) = one.outputs
    for wrong in ({"name": "other"}, {"dtype": "int64"}, {"shape": (2, 8, 1)}, {"shape": ("batch", 9)}):
        changed = replace(spec, **wrong)
        described = [((changed,), (given,)), ((spec, changed), (given,)), ((spec,), (replace(changed, name="out"),))]
        for inputs, outputs in described[: 2 if "name" in wrong else 3]:
            described_as(tmp_path / "p", one, inputs=inputs, outputs=outputs)
            with pytest.raises(
                ProgramError, match=r"program\.json describes the (inputs|outputs) .*, and the model has"
            ):
                Program.load(tmp_path / "p")


def test_weights_that_a_folder_does_not_list_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "LARGEST_FILE", 1)
    program = written(tmp_path / "p", 1.0)
    (weights,) = (tmp_path / "p").glob("*.data")
    weights.rename(tmp_path / weights.name)
    main = tmp_path / "p" / "model.onnx"
    content = main.read_bytes()
    for name in (weights.name, "../" + weights.name[3:]):
        main.write_bytes(content.replace(weights.name.encode(), name.encode()))
        described_as(tmp_path / "p", program)
        with pytest.raises(ProgramError, match=r"keeps weights in .*, which its digests do not cover"):
            Program.load(tmp_path / "p")


@pytest.mark.parametrize(
    "fields",
    [
        {"requires": 7}, {"requires": [["avx2"]]}, {"requires_machine": []}, {"precision": {}}, {"quantization": []},
        {"processing_args": "x"}, {"processing": ["arclight.x:Y"]},
    ],
    ids=str,
)  # fmt: skip
def test_descriptions_of_other_types_are_refused(fields: dict[str, Any], one: Program, tmp_path: Path) -> None:
    described_as(tmp_path / "p", one, description={**one.metadata, **fields})
    with pytest.raises(ProgramError, match=next(iter(fields))):
        Program.load(tmp_path / "p")


@pytest.mark.usefixtures("one")
def test_infinite_numbers_in_a_description_are_refused(tmp_path: Path) -> None:
    text = (tmp_path / "p" / "program.json").read_text()
    (tmp_path / "p" / "program.json").write_text(text.replace('"value": 1.0', '"value": 1e999'))
    with pytest.raises(ProgramError, match="malformed"):
        Program.load(tmp_path / "p")


@pytest.mark.usefixtures("one")
def test_a_private_key_among_the_trusted_is_refused_without_showing_it(tmp_path: Path) -> None:
    from arclight.fabric.signing import SigningKey

    SigningKey.make(tmp_path / "key.pem")
    with pytest.raises(ProgramError, match="holds a private key") as caught:
        Program.load(tmp_path / "p", trusted=tmp_path / "key.pem")
    secret = (tmp_path / "key.pem").read_text().splitlines()[1]
    assert secret not in str(caught.value)


def test_modules_of_the_current_folder_do_not_run_in_the_fresh_process(
    one: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arclight.deploy.programs.fresh import run_fresh

    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the folder was imported')")
    monkeypatch.chdir(tmp_path)
    (outputs,) = run_fresh(one, [[VALUES.numpy()]]).outputs
    assert json.dumps(outputs[0].shape) == "[2, 64]"
