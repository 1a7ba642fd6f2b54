"""Describe public corpora: licence, files, columns and checksums.

``arclight data`` prints the steps that fetch and tokenize one; nothing is fetched here. The facts are in ``public_corpora.json``, as the
publishers state them, with null for a size that is not known: a new corpus is an entry there. Each is a Git repository at a fixed
commit, whose large files are Git LFS pointers that hold each file's SHA-256, with which downloads are compared.
"""

from __future__ import annotations

import difflib
import functools
import json
import shlex
from dataclasses import dataclass
from importlib import resources
from typing import Any

from arclight.text.data.sources import SourceError


@dataclass(frozen=True, kw_only=True)
class PublicCorpus:
    """One public corpus."""

    name: str
    about: str
    page: str
    licence: str
    size: str | None
    """Size of the files to fetch; None if not known."""
    documents: dict[str, int]
    """Number of documents by part, if known."""
    repository: str
    """Git repository with the files, large ones as Git LFS pointers."""
    revision: str
    """Commit that is described: by it the checksums are fixed, too."""
    files: tuple[str, ...]
    """Patterns of the files to fetch, in the repository."""
    columns: tuple[str, ...]
    prepare: tuple[str, ...]
    """Commands that make of the files what is read here."""
    sources: tuple[str, ...]
    """What to tokenize of it; empty for a list of files that lie elsewhere."""
    then: str
    """Remarks on what is left to do."""

    def fetch_step(self) -> list[str]:
        """Return shell commands that fetch and verify the corpus in a folder of its name."""
        commands = [
            f"GIT_LFS_SKIP_SMUDGE=1 git clone {shlex.quote(self.repository)} {self.name} && cd {self.name}",
            f"GIT_LFS_SKIP_SMUDGE=1 git checkout {self.revision}",
        ]
        for pattern in self.files:
            commands.append(f"git lfs pull --include {shlex.quote(pattern)}")
            commands.append(
                f"git lfs ls-files --long --include {shlex.quote(pattern)} | sed 's/ [*-] /  /' | sha256sum -c"
            )
        return [*commands, *self.prepare, "cd .."]

    def tokenize_step(self) -> list[str]:
        """Return the command that tokenizes the downloaded corpus; empty if its rows hold no text."""
        places = " ".join(f"{self.name}/{source}" for source in self.sources)
        return [f"arclight data tokenize {places} --field text --out corpora/{self.name}"] if places else []


@functools.cache
def public_corpora() -> dict[str, PublicCorpus]:
    """Return all descriptions, by name."""
    facts: dict[str, dict[str, Any]] = json.loads(
        resources.files(__package__).joinpath("public_corpora.json").read_text("utf-8")
    )
    lists = ("files", "columns", "prepare", "sources")
    found = {}
    for name, entry in facts.items():
        values: dict[str, Any] = {key: tuple(value) if key in lists else value for key, value in entry.items()}
        found[name] = PublicCorpus(name=name, **values)
    return found


def find_public_corpus(name: str) -> PublicCorpus:
    """Return the description of one corpus, by its name in any case. Raises SourceError."""
    known = {known.lower(): found for known, found in public_corpora().items()}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"; did you mean {known[near[0]].name}?" if near else "."
        raise SourceError(f"{name} is not described here{meant} There are {', '.join(public_corpora())}")
    return known[name.lower()]
