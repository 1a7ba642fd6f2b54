"""Read, verify and write ``program.json``: a program's files by SHA-256, and its signer.

All is checked before a runtime reads a file: a digest covers the description and the list of files, the list covers their contents, and a signature
covers the digest. `formats.export` writes; `Program.load` verifies; the server compares `stamps_at` to notice replaced files, and ``cli`` reads
`description` and `trusted_keys`. The format is that of all exported programs: files that are read today must be read later. A new kind of program
needs an entry in `RUNTIMES`, and one in `EXECUTED` if to open it runs code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arclight.deploy.errors import ProgramError
from arclight.deploy.programs.session import TensorSpec
from arclight.fabric.signing import SigningKey, is_public_key, is_signed

NAME = "program.json"
FORMAT, VERSION = "arclight-program", 1
RUNTIMES: Mapping[str, frozenset[str]] = {
    "onnx": frozenset({"onnxruntime", "openvino", "openvino-bf16"}),
    "openvino": frozenset({"openvino", "openvino-bf16"}),
    "pt2": frozenset({"torch"}),
    "aoti": frozenset({"inductor"}),
    "executorch": frozenset({"executorch"}),
}
"""Maps a format to the runtimes that can run it."""
EXECUTED = {
    "pt2": "torch.export evaluates expressions that the file holds",
    "aoti": "it is compiled code that becomes part of this process",
}
"""Maps a format to the reason why opening such a program runs its author's code."""
Trusted = str | os.PathLike[str] | Sequence[str]
"""Public keys in base64, or a file with one on each line, ``#`` before a comment."""

_LARGEST = 1 << 24
"""Most bytes of a ``program.json``."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PURPOSE = b"arclight program "
"""Prefix of the signed bytes, so that a signature made for something else cannot pass for a program's."""


FileStamp = tuple[int, int, int, int]
"""Device, inode, size and change time (ctime, ns) of a file: a replaced or rewritten file has another stamp."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a program."""

    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a checked folder."""

    format: str
    main: str
    """The file that its runtime opens."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    description: dict[str, Any]
    """What the exporter wrote: precision, parity, versions, names and so on."""
    files: dict[str, FileRecord]
    signer: str | None
    """Public key of the trusted signer, base64; None if none was required."""
    digest: str
    """SHA-256 of the description and the list of files, hexadecimal."""
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)
    """Marks of the files as they were checked."""


def write(
    folder: Path,
    *,
    format: str,
    main: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    description: Mapping[str, Any],
    key: SigningKey | None = None,
) -> None:
    """Write ``program.json`` for the files of ``folder``, durably; sign it with ``key``."""
    files = {file.name: asdict(_recorded(file)) for file in sorted(folder.iterdir()) if file.name != NAME}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "kind": format,
        "main": main,
        "inputs": [spec.to_json() for spec in inputs],
        "outputs": [spec.to_json() for spec in outputs],
        "description": dict(description),
        "files": files,
    }
    digest = _digest(body)
    signature = None if key is None else {"public_key": key.public, "signature": key.sign(_signed_text(digest))}
    text = json.dumps({**body, "digest": digest, "signature": signature}, indent=1, allow_nan=False, ensure_ascii=False)
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, trusted: Trusted | None = None) -> Contents:
    """Verify the program in ``folder`` and return its contents, before any runtime reads it.

    ``trusted`` asks for a signature by one of these keys. Raises ProgramError if anything is missing, changed, added or
    not signed as asked.
    """
    keys = None if trusted is None else trusted_keys(trusted)
    body, digest, signature, stamp = _read_body(folder)
    if digest is None:
        raise ProgramError(
            f"{folder / NAME} was changed after the export: its digest does not fit; export or copy it again"
        )
    signer = _signer(folder, digest, signature, keys)
    try:
        contents = _contents(body, signer, digest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"{folder / NAME} is malformed: {error!r}") from error
    if contents.format in EXECUTED and signer is None:
        raise ProgramError(
            f"{folder} is of format {contents.format}, and to open one is to run it: {EXECUTED[contents.format]}. Name the public keys "
            "that you trust with trusted=, or take a program of format onnx or openvino"
        )
    return replace(contents, stamps={folder / NAME: stamp, **_check_files(folder, contents.files)})


def foreign_files(folder: Path) -> list[str]:
    """Return the names in ``folder`` that are no part of a program of ours, even a damaged one.

    An export refuses to replace a folder that has some.
    """
    listed: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged, or another tool's program.json
        body = json.loads((folder / NAME).read_bytes())
        if body["format"] == FORMAT:
            listed = {NAME, *body["files"]}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in listed)


def description(folder: Path) -> dict[str, Any] | None:
    """Return the description of the program in ``folder``, unverified; None if unreadable."""
    try:
        body, _, _, _ = _read_body(folder)
    except ProgramError:
        return None
    found = body.get("description")
    return found if isinstance(found, dict) else None


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of the file ``path``."""
    return _stamp(path.stat())


def stamps_at(path: Path) -> dict[Path, FileStamp] | None:
    """Return the stamps of the files at ``path``, unverified; None if they cannot be read.

    They equal `Program.stamps` as long as the program is the one that was loaded.
    """
    try:
        return {file: stamp_of(file) for file in (path.iterdir() if path.is_dir() else [path])}
    except OSError:  # missing, or being replaced
        return None


@contextmanager
def unchanged(stamps: Mapping[Path, FileStamp]) -> Iterator[None]:
    """Raise ProgramError after the block if a file of ``stamps`` was replaced meanwhile.

    The runtime that opened it in the block may then have read another file than the checked one.
    """
    with ExitStack() as held:
        for path in stamps:
            with suppress(FileNotFoundError):  # reported below
                held.enter_context(path.open("rb"))  # while it is open, no other file gets its number
        yield
        for path, stamp in stamps.items():
            if not path.exists() or stamp_of(path) != stamp:
                raise ProgramError(f"{path} was replaced while the program was opened: load it again")


def trusted_keys(trusted: Trusted) -> frozenset[str]:
    """Return the public keys that ``trusted`` names.

    Raises ProgramError for a file or text that holds none.
    """
    if isinstance(trusted, str) and is_public_key(trusted):
        return frozenset({trusted})
    if isinstance(trusted, (str, os.PathLike)):
        try:
            lines = Path(trusted).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ProgramError(f"the file of trusted keys {os.fspath(trusted)} cannot be read: {error}") from error
        if any("PRIVATE KEY" in line for line in lines):
            raise ProgramError(
                f"{os.fspath(trusted)} holds a private key: name a file of the public keys that you trust"
            )
        found = [line.partition("#")[0].strip() for line in lines]
        keys, source = [key for key in found if key], os.fspath(trusted)
    else:
        keys, source = list(trusted), "trusted"
    if not keys or not all(isinstance(key, str) and is_public_key(key) for key in keys):
        raise ProgramError(f"{source} must hold public keys, each of 32 bytes in base64, got {str(keys)[:200]}")
    return frozenset(keys)


def _read_body(folder: Path) -> tuple[dict[str, Any], str | None, Any, FileStamp]:
    """Return the body of ``program.json``, its digest, signature and stamp.

    The digest is None if it does not fit.
    """
    path = folder / NAME
    try:
        found = path.lstat()
    except OSError:
        raise ProgramError(f"there is no program at {folder}: it has no {NAME}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ProgramError(f"{path} is a link or no file: copy the program itself")
    if found.st_size > _LARGEST:
        raise ProgramError(
            f"{path} has {found.st_size} bytes, and at most {_LARGEST} are read: copy or export it again"
        )
    try:
        body = json.loads(path.read_bytes(), object_pairs_hook=_without_twins, parse_constant=_no_constant)
        form, version, digest, signature = body["format"], body["version"], body.pop("digest"), body.pop("signature")
        fits = digest == _digest(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProgramError(f"{path} is truncated or malformed: {error!r}") from error
    if form != FORMAT or version != VERSION:
        raise ProgramError(
            f"{path} is of format {form!r}, version {version!r}; this arclight reads {FORMAT}, version {VERSION}: update it"
        )
    return body, digest if fits else None, signature, _stamp(found)


def _without_twins(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) != len(items):
        raise ValueError("a key is repeated")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _contents(body: dict[str, Any], signer: str | None, digest: str) -> Contents:
    files = {name: FileRecord(**record) for name, record in body["files"].items()}
    for name, record in files.items():
        if not _FILE.fullmatch(name) or name == NAME:
            raise ValueError(f"{name!r} is not the name of a file in the folder itself")
        if type(record.bytes) is not int or record.bytes < 0 or not isinstance(record.sha256, str):
            raise ValueError(f"{name} has size {record.bytes!r} and digest {record.sha256!r}")
    form, main, description = body["kind"], body["main"], body["description"]
    if form not in RUNTIMES:
        raise ValueError(f"the program is of kind {form!r}; this arclight knows {', '.join(RUNTIMES)}")
    if main not in files or not isinstance(description, dict):
        raise ValueError(f"its main file is {main!r}, which it does not list, or its description is not an object")
    if description.get("runtime") not in RUNTIMES[form]:
        raise ValueError(f"{form} programs do not run in {description.get('runtime')!r}")
    specs = [tuple(TensorSpec.from_json(value) for value in body[key]) for key in ("inputs", "outputs")]
    return Contents(
        format=form, main=main, inputs=specs[0], outputs=specs[1], description=description, files=files,
        signer=signer, digest=digest,
    )  # fmt: skip


def _signer(folder: Path, digest: str, signature: Any, keys: frozenset[str] | None) -> str | None:
    """Return the trusted key that signed ``digest``; None if none is asked for."""
    if keys is None:
        return None
    if signature is None:
        raise ProgramError(
            f"{folder} is not signed, and only programs signed by a trusted key may be loaded: export it with sign=, or load it without trusted="
        )
    public, text = (signature.get(key) if isinstance(signature, dict) else None for key in ("public_key", "signature"))
    if not isinstance(public, str) or public not in keys:
        raise ProgramError(
            f"{folder} is signed by {str(public)[:60]!r}, which is not among the {len(keys)} trusted keys"
        )
    if not isinstance(text, str) or not is_signed(_signed_text(digest), text, public):
        raise ProgramError(
            f"the signature of {folder} is not the one of {public} for this program: copy or export it again"
        )
    return public


def _check_files(folder: Path, files: Mapping[str, FileRecord]) -> dict[Path, FileStamp]:
    """Verify the files of ``folder`` and return their stamps.

    Raises ProgramError if it holds one that is not listed, or one listed is not what it was.
    """
    added = sorted(entry.name for entry in folder.iterdir() if entry.name != NAME and entry.name not in files)
    if added:
        raise ProgramError(f"{folder} holds {', '.join(added[:5])}, which {NAME} does not list: remove what was added")
    stamps: dict[Path, FileStamp] = {}
    for name, wanted in files.items():
        path = folder / name
        try:
            found = path.lstat()
        except FileNotFoundError:
            raise ProgramError(f"{path} is missing: copy the program again") from None
        if not stat.S_ISREG(found.st_mode):
            raise ProgramError(f"{path} is a link or no file: copy the program itself")
        if found.st_size != wanted.bytes or file_digest(path) != wanted.sha256:
            raise ProgramError(
                f"{path} was changed or cut short after the export: its digest does not fit; copy it again"
            )
        stamps[path] = _stamp(found)
    return stamps


def _stamp(found: os.stat_result) -> FileStamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def _recorded(path: Path) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(sha256=file_digest(path), bytes=path.stat().st_size)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _signed_text(digest: str) -> bytes:
    return _PURPOSE + digest.encode()
