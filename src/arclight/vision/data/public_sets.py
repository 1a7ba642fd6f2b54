"""Describe public data sets: classes, layout, addresses and checksums.

``arclight data sets`` calls this. Nothing is ever fetched: it prints the shell commands to do so. The facts are in public_sets.json: layouts and
classes are those that YOLOv5 trains on, addresses are the publishers' own where they have one, and checksums are those on which
independent projects agree, null if none is known. A new data set is an entry of that file.
"""

from __future__ import annotations

import difflib
import functools
import json
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from arclight.vision.data.data_yaml import write_data_yaml
from arclight.vision.data.labels import DatasetError


@dataclass(frozen=True)
class Archive:
    """One file of a data set."""

    url: str
    md5: str | None
    """None: not known."""
    to: str
    """Folder to unpack it in, from the folder of the data set."""

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """One public data set."""

    name: str
    about: str
    task: Literal["detection", "segmentation", "classification"]
    page: str
    size: str | None
    images: dict[str, int]
    """Number of images by split, if known."""
    layout: dict[str, str | list[str]]
    """``path``, and each split's place in it."""
    files: tuple[Archive, ...]
    by_hand: str | None
    """Page to fetch it from by hand, if that takes an account or several hundred files."""
    then: str
    """Remarks on what is left to do."""
    names: tuple[str, ...]

    def fetch_step(self) -> list[str]:
        """Return shell commands that download, verify and unpack the data set.

        They unpack it into a folder of its name.
        """
        folder = str(self.layout["path"])
        if self.by_hand is not None:
            return [f"# to be fetched by hand: {self.by_hand}, into {folder}"]
        commands = [f"mkdir -p {folder} && cd {folder}"]
        for file in self.files:
            commands.append(f"curl -L -O {shlex.quote(file.url)}")
            if file.md5 is None:
                commands.append(f"# the checksum of {file.name} is not known")
            else:
                commands.append(f"echo '{file.md5}  {file.name}' | md5sum -c")
            unpack = "unzip -q {} -d {}" if file.name.endswith(".zip") else "tar -xf {} -C {}"
            make = f"mkdir -p {file.to} && " if file.to not in (".", "..") else ""
            commands.append(make + unpack.format(file.name, file.to))
        return commands

    def write_data_yaml(self, folder: Path) -> Path:
        """Write the data.yaml of the data set into its ``folder``.

        Raises DatasetError if there is one already.
        """
        if (folder / "data.yaml").exists():
            raise DatasetError(f"{folder / 'data.yaml'} exists already")
        folder.mkdir(parents=True, exist_ok=True)
        splits = {split: place for split, place in self.layout.items() if split != "path"}
        return write_data_yaml(folder, self.names, splits)


@functools.cache
def public_sets() -> dict[str, PublicSet]:
    """Return all descriptions, by name."""
    facts = json.loads(resources.files(__package__).joinpath("public_sets.json").read_text("utf-8"))
    return {name: _described(name, dict(entry), facts["names"]) for name, entry in facts["sets"].items()}


def _described(name: str, entry: dict[str, Any], lists: dict[str, list[str]]) -> PublicSet:
    names = lists[entry.pop("names")][: entry.pop("first", None)]
    files = tuple(Archive(**file) for file in entry.pop("files"))
    return PublicSet(name=name, names=tuple(names), files=files, **entry)


def find_public_set(name: str) -> PublicSet:
    """Return the description of one data set, by its name in any case. Raises DatasetError."""
    known = {known.lower(): found for known, found in public_sets().items()}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"; did you mean {known[near[0]].name}?" if near else "."
        raise DatasetError(f"{name} is not described here{meant} There are {', '.join(public_sets())}")
    return known[name.lower()]
