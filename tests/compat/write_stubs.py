"""The stubs by which type checkers know Lightning's modules: run this file to write them anew from the table of names.

A stub names what its module promises, re-exported so that ``mypy --strict`` accepts it, and the modules below it.
"""

from __future__ import annotations

from pathlib import Path

from arclight.compat.lightning import modules
from arclight.compat.lightning.names import NAMES, REFUSED

HOME = Path(modules.__file__).parent
HEADER = "# Written by tests/compat/write_stubs.py from the table of names.\n"


def paths() -> list[str]:
    """List every module below the root, which is the empty path, and the root."""
    found = {""}
    for path in (*NAMES, *REFUSED):
        parts = path.split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return sorted(found)


def file_of(path: str) -> Path:
    """Return where the stub of a module lies: a folder has modules below it."""
    place = HOME.joinpath(*path.split(".")) if path else HOME
    return place / "__init__.pyi" if modules.children(path) else place.with_suffix(".pyi")


def text_of(path: str) -> str:
    """Return a module's stub.

    A name that differs from ours is public only in ``__all__``; one that is private, too, gets an assignment.
    """
    public, lines, others = [], [], []
    for name, target in sorted(NAMES.get(path, {}).items()):
        home, _, own = target.partition(":")
        if not name.startswith("_") or name == "__version__":
            public.append(name)
        if own == name or name in public:
            lines.append(f"from {home} import {own} as {name}")
        else:
            lines.append(f"from {home} import {own} as _{name}")
            others.append(f"{name} = _{name}")
    lines += [f"from . import {child} as {child}" for child in modules.children(path)]
    refused = [name for name in sorted(REFUSED.get(path, {})) if name not in NAMES.get(path, {})]
    if refused:
        lines.append("from arclight._lazy import Refused as _Refused")
        others += [f"class {name}(_Refused): ..." for name in refused]
    listed = "".join(f"    {name!r},\n".replace("'", '"') for name in public)
    return HEADER + "\n".join([*lines, "", f"__all__ = [\n{listed}]", *others]) + "\n"


def stubs() -> dict[Path, str]:
    """Return the text of each stub by its file."""
    return {file_of(path): text_of(path) for path in paths()}


def written() -> dict[Path, str]:
    """Return the stubs that are there."""
    return {file: file.read_text(encoding="utf-8") for file in HOME.rglob("*.pyi")}


if __name__ == "__main__":
    for file in written().keys() - stubs().keys():
        file.unlink()
    for file, text in stubs().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
