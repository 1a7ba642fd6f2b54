"""Replace a file or folder atomically, so that a kill leaves the old or the new one.

A file or folder under construction lies beside its destination as ``.<name>.saving-<host>-<pid>-<process>-<number>``; if the
file system cannot exchange two folders, the old one waits as ``.<name>.replaced-...`` meanwhile. The name tells `sweep` which process of
this host made it, so that it removes leftovers of killed ones only. ``checkpoint.files``, ``federated``, ``deploy``, ``cli`` and the
Trainer's run folder write through this. Temporary names must stay, or leftovers of earlier versions are never swept.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, quota or file."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_PROCESS = secrets.token_hex(
    4
)  # distinguishes this process from an earlier one with the same id, as restarted containers have
_numbers = itertools.count()
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|replaced)-(?P<host>\w+)-(?P<pid>\d+)-(?P<process>\w+)-\d+")


def make_staging(path: Path) -> Path:
    """Make an empty staging folder beside `path`, and missing parents."""
    staging = temporary_path(path)
    staging.mkdir()
    return staging


def temporary_path(path: Path, kind: str = "saving") -> Path:
    """Return a temporary path for a file or folder that is to replace `path`.

    Parents that are missing are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{kind}-{_HOST}-{os.getpid()}-{_PROCESS}-{next(_numbers)}")


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace the file `path` by a text in UTF-8; see `replace_bytes`."""
    replace_bytes(path, text.encode(), durable=durable)


def replace_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace the content of the file `path` atomically.

    durable: whether it is on the disk when this returns, and a power failure may not undo it.
    """
    new = temporary_path(path)
    try:
        with new.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        discard(new)


def replace_folder(staging: Path, path: Path, *, durable: bool = True) -> None:
    """Replace the folder `path` by `staging` atomically.

    durable: whether a power failure may not undo it.
    """
    sync = sync_folder if durable else _leave
    sync(staging)
    if not os.path.lexists(path) and _rename_to_new(staging, path):
        sync(path.parent)
    elif _exchange(staging, path):
        sync(path.parent)
        discard(staging)  # holds what was there before
    else:
        former = temporary_path(path, "replaced")
        path.rename(former)
        staging.rename(path)
        sync(path.parent)
        discard(former)


def _rename_to_new(staging: Path, path: Path) -> bool:
    """Rename the folder to a name that nothing has; False if another process has just taken it."""
    try:
        staging.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def retire(path: Path, *, durable: bool = True) -> None:
    """Remove a folder atomically: never is a half of it seen under its name.

    durable: as for `replace_folder`.
    """
    doomed = temporary_path(path)
    path.rename(doomed)
    (sync_folder if durable else _leave)(path.parent)
    discard(doomed)


def discard(path: Path) -> None:
    """Remove a temporary file or folder; what cannot be removed now is left to the next `sweep`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sweep(folder: Path) -> list[Path]:
    """Remove what killed processes left in `folder`, and put back what was about to be replaced.

    Returns what was removed or put back. Leaves alone what a living process may still be writing.
    """
    handled: list[Path] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or _alive(match):
            continue
        destination = folder / match["name"]
        if match["kind"] == "replaced" and not os.path.lexists(destination):
            with suppress(FileNotFoundError):  # another process has just put it back
                entry.rename(destination)
                sync_folder(folder)
        else:
            discard(entry)
        if not os.path.lexists(entry):
            handled.append(entry)
    return handled


def sync_folder(folder: Path) -> None:
    """Make names and renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leave(folder: Path) -> None:
    """Do nothing: the system writes names to the disk in its own time."""


def _alive(match: re.Match[str]) -> bool:
    """Return True if the process that made a temporary folder may still be at work on it."""
    if match["host"] != _HOST:
        return True  # another machine's processes cannot be seen from here
    pid = int(match["pid"])
    if pid == os.getpid():
        return match["process"] == _PROCESS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; return False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
