"""The folder of a program: what is checked before a runtime sees a file, and who signed it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from arclight.deploy import ExportError, Program, ProgramError, export
from arclight.deploy.programs import program as programs
from arclight.deploy.programs.processor import check_processor
from arclight.fabric.signing import SigningKey


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return SigningKey.make(tmp_path_factory.mktemp("keys") / "key.pem")


@pytest.fixture(scope="module")
def written(key: SigningKey, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("programs") / "signed"
    export(
        nn.Linear(4, 3), path, example_inputs=torch.randn(3, 4), format="onnx", metadata={"names": ["código"]}, sign=key
    )
    return path


@pytest.fixture
def copied(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage; a runtime that reads it fails the test."""
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: pytest.fail("the runtime was given a file"))
    return Path(shutil.copytree(written, tmp_path / "copy"))


def sealed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``program.json`` and give it the digest that fits, as anybody can."""
    body = json.loads((path / "program.json").read_text())
    del body["digest"]
    signature = body.pop("signature")
    change(body)
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    body |= {"digest": hashlib.sha256(text.encode()).hexdigest(), "signature": signature}
    (path / "program.json").write_text(json.dumps(body))


def test_a_program_is_loaded_with_and_without_trust(written: Path, key: SigningKey, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"# ours\n{SigningKey.make(tmp_path / 'other').public}\n{key.public} # release\n")
    for trusted in (None, key.public, [key.public], keys, str(keys)):
        program = Program.load(written, trusted=trusted)
        assert program.signer == (key.public if trusted else None)
        assert program.metadata["names"] == ["código"]
    assert program.nbytes == (written / "model.onnx").stat().st_size


def test_every_cut_is_noticed(copied: Path) -> None:
    for name in ("program.json", "model.onnx"):
        whole = (copied / name).read_bytes()
        for length in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            (copied / name).write_bytes(whole[:length])
            with pytest.raises(ProgramError, match=rf"{name} (is truncated|was changed or cut short)"):
                Program.load(copied)
        (copied / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["program.json", "model.onnx"])
def test_every_changed_byte_is_noticed(copied: Path, name: str) -> None:
    whole = (copied / name).read_bytes()
    digests = whole.index(b'"digest"') if name == "program.json" else len(whole)
    for place in range(0, digests, max(1, len(whole) // 40)):
        (copied / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ProgramError, match=name):
            Program.load(copied)


def test_spaces_in_the_description_do_not_matter(written: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(written, tmp_path / "copy"))
    (path / "program.json").write_text(json.dumps(json.loads((path / "program.json").read_text())))
    assert Program.load(path).metadata["names"] == ["código"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parity", 5),
        ("parity", None),
        ("parity", {}),
        ("parity", {"sqnr_db": "high"}),
        ("parity", {"sqnr_db": 80.0, "outputs": [1]}),
        ("parity", {"sqnr_db": 80.0, "outputs": {"y": {"max_difference": None, "largest": 1}}}),
        ("quantization", {"speed": {}}),
        ("quantization", {"speed": 2.0}),
        ("quantization", {"metric": {"program": "good", "float": 1.0}}),
    ],
)
def test_measurements_without_numbers_are_refused(copied: Path, field: str, value: Any) -> None:
    sealed(copied, lambda body: body["description"].update({field: value}))
    with pytest.raises(ProgramError, match=rf"describes its .*{field}.* lacks the numbers"):
        Program.load(copied)


def test_swapped_missing_and_added_files_are_refused(copied: Path, tmp_path: Path) -> None:
    main = copied / "model.onnx"
    main.rename(tmp_path / "aside")
    with pytest.raises(ProgramError, match=r"model\.onnx is missing"):
        Program.load(copied)
    main.write_bytes((tmp_path / "aside").read_bytes()[::-1])
    with pytest.raises(ProgramError, match=r"model\.onnx was changed"):
        Program.load(copied)
    main.unlink()
    main.symlink_to(tmp_path / "aside")
    with pytest.raises(ProgramError, match=r"model\.onnx is a link"):
        Program.load(copied)
    main.unlink()
    main.mkdir()
    with pytest.raises(ProgramError, match=r"model\.onnx is a link or no file"):
        Program.load(copied)
    main.rmdir()
    (tmp_path / "aside").rename(main)
    (copied / "weights.bin").write_bytes(b"more")
    with pytest.raises(ProgramError, match=r"holds weights\.bin, which program\.json does not list"):
        Program.load(copied)


def test_a_linked_description_and_a_pipe_are_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "program.json").rename(tmp_path / "aside.json")
    with pytest.raises(ProgramError, match="there is no program at"):
        Program.load(copied)
    (copied / "program.json").symlink_to(tmp_path / "aside.json")
    with pytest.raises(ProgramError, match=r"program\.json is a link"):
        Program.load(copied)
    (copied / "program.json").unlink()
    os.mkfifo(copied / "program.json")
    with pytest.raises(ProgramError, match=r"program\.json is a link or no file"):
        Program.load(copied)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b'{"format": NaN}', b'{"a": 1, "a": 2}',
        b'{"format": ' + b"9" * 10_000 + b"}", b'{"format": "arclight-program", "version": 1, "digest": 1, "signature": null}',
    ],
)  # fmt: skip
def test_malformed_program_descriptions_are_refused(copied: Path, text: bytes) -> None:
    (copied / "program.json").write_bytes(text)
    with pytest.raises(ProgramError, match=r"program\.json (is truncated or malformed|was changed)"):
        Program.load(copied)


def test_a_huge_description_is_not_read(copied: Path) -> None:
    with (copied / "program.json").open("r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(ProgramError, match="at most 16777216 are read"):
        Program.load(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; this arclight reads"),
        ({"kind": "exe"}, "is of kind 'exe'"),
        ({"main": "../model.onnx"}, "main file is"),
        ({"main": "program.json"}, "main file is"),
        ({"description": []}, "is not an object"),
        ({"description": {"runtime": "torch"}}, "onnx programs do not run in 'torch'"),
        ({"description": {"runtime": ["onnxruntime"]}}, "malformed"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [1e300]}]}, "describes no tensor"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}, "describes no tensor"),
        ({"outputs": [{"name": "x"}]}, "malformed"),
        ({"outputs": 3}, "malformed"),
        ({"files": []}, "malformed"),
        ({"files": {"model.onnx": {"sha256": "0", "bytes": 1.5}}}, "has size 1.5"),
        ({"files": {"model.onnx": {"sha256": "0", "bytes": True}}}, "has size True"),
        ({"files": {"model.onnx": {"sha256": "0", "bytes": 10**400}}}, "was changed"),
        ({"files": {"model.onnx": {"sha256": "0", "bytes": 1, "mode": 7}}}, "malformed"),
    ]
    + [
        ({"files": {name: {"sha256": "0", "bytes": 1}}}, "is not the name of a file in the folder itself")
        for name in (
            "../secret",
            "/etc/passwd",
            "a/b",
            "..",
            ".",
            "",
            "a\\b",
            "a\x00b",
            "x" * 300,
            "program.json",
            ".hidden",
        )
    ],
)
def test_hostile_descriptions_are_refused(copied: Path, change: dict[str, Any], message: str) -> None:
    sealed(copied, lambda body: body.update(change))
    with pytest.raises(ProgramError, match=message):
        Program.load(copied)


def test_a_changed_program_loses_its_signature(copied: Path, key: SigningKey) -> None:
    sealed(copied, lambda body: body["description"].update(names=["other"]))
    with pytest.raises(ProgramError, match=r"is not the one of .* for this program"):
        Program.load(copied, trusted=key.public)


def test_only_trusted_signatures_count(copied: Path, key: SigningKey, tmp_path: Path) -> None:
    other = SigningKey.make(tmp_path / "other.pem")
    with pytest.raises(ProgramError, match="which is not among the 1 trusted keys"):
        Program.load(copied, trusted=other.public)
    body = json.loads((copied / "program.json").read_text())
    for signature, message in [
        (None, "is not signed"),
        ({"public_key": key.public, "signature": other.sign(body["digest"].encode())}, "is not the one of"),
        ({"public_key": key.public, "signature": "?"}, "is not the one of"),
        ({"public_key": key.public, "signature": 7}, "is not the one of"),
        ({"public_key": [], "signature": ""}, "malformed|not among the 1 trusted keys"),
        (["x"], "not among the 1 trusted keys"),
    ]:
        (copied / "program.json").write_text(json.dumps({**body, "signature": signature}))
        with pytest.raises(ProgramError, match=message):
            Program.load(copied, trusted=key.public)


def test_trusted_keys_are_checked(written: Path, fp32_program: Program, key: SigningKey, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    (tmp_path / "bad").write_text("ssh-ed25519 AAAA\n")
    for trusted in (tmp_path / "empty", tmp_path / "bad", [], ["x"], [7]):
        with pytest.raises(ProgramError, match="must hold public keys"):
            Program.load(written, trusted=trusted)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="cannot be read"):
        Program.load(written, trusted=tmp_path / "missing")
    with pytest.raises(ProgramError, match="only a program's folder is signed"):
        Program.load(fp32_program.path, trusted=key.public)


def test_formats_that_run_their_file_are_not_opened_without_trust(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "TorchSession", lambda *_, **__: pytest.fail("the file was opened"))
    for form, runtime in (("pt2", "torch"), ("aoti", "inductor")):
        sealed(copied, lambda body, f=form, r=runtime: body.update(kind=f, description={"runtime": r}))  # type: ignore[misc]
        with pytest.raises(ProgramError, match=r"to open one is to run it.*trusted="):
            Program.load(copied)


def test_invalid_signing_options_are_refused(key: SigningKey, tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(3, 4)
    SigningKey.make(tmp_path / "key.pem")
    (tmp_path / "open.pem").write_bytes((tmp_path / "key.pem").read_bytes())
    (tmp_path / "open.pem").chmod(0o644)
    (tmp_path / "text").write_text("no key")
    for path, options, message in [
        ("p.onnx", {"sign": key}, "only a folder is signed"),
        ("p", {"sign": tmp_path / "missing"}, "cannot sign with .*missing"),
        ("p", {"sign": tmp_path / "text"}, "holds no private key"),
        ("p", {"sign": tmp_path / "open.pem"}, "others on this machine may read"),
        ("p", {"format": "aoti"}, "loaded only if somebody who is trusted signed them"),
        ("p", {"format": "pt2"}, "openssl genpkey"),
    ]:
        with pytest.raises(ExportError, match=message):
            export(model, tmp_path / path, example_inputs=x, **options)  # type: ignore[arg-type]
        assert not (tmp_path / path).exists()


def test_a_program_for_another_processor_is_refused() -> None:
    with pytest.raises(ProgramError, match="compiled for avx9000, which this processor lacks"):
        check_processor({"requires": ["avx9000"]})
    with pytest.raises(ProgramError, match="compiled for z80, this machine is"):
        check_processor({"requires_machine": "z80"})


def test_eight_bits_without_vnni_warn(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr("arclight.deploy.programs.processor.instruction_sets", lambda: frozenset({"avx2"}))
    check_processor({"precision": "int8", "quantization": {"reduce_range": True}})
    check_processor({"precision": "fp32"})
    check_processor({"precision": "int8", "quantization": {"reduce_range": False, "target": "executorch"}})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="has no VNNI"):
        check_processor({"precision": "dynamic int8", "quantization": {"kind": "dynamic_int8", "reduce_range": False}})
    with pytest.warns(UserWarning, match="has no VNNI"):
        check_processor({"precision": "int8", "quantization": {"reduce_range": False}})
