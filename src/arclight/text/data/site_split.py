"""Split a text's documents among the sites of a federation.

`TextDataModule` reads one site's documents through a `SiteSplit`; recipes of ``arclight federate`` choose the partition. Rules of drawing are in
``arclight.data.sites``. Which document lies at which site may never change, or sites would train on documents of others.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arclight.data.sites import (
    IID,
    Dirichlet,
    Division,
    Numbered,
    Size,
    check_enough_sources,
    divide_by_size,
    pack_sources,
    site_at_random,
)

if TYPE_CHECKING:
    from arclight.text.data.sources import Document

By = Literal["folder", "file", "name", "field"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Assign whole sources of text to sites, so that sites differ in kinds of text."""

    by: By = "folder"
    """What counts as one source: a top-level folder (or file beside these), a file, a named source of data = {first = ..., second = ...}, or
    the value of a field of a row."""
    field: str = "source"
    """The field of a row, for by = "field"."""


@dataclass(frozen=True, kw_only=True)
class SiteShare(Numbered):
    """One site's share of the documents.

    A tokenizer is trained on all text, so that every site has the same, unless it is ``by_site``.
    """

    partition: Source | IID | Dirichlet | Size = dataclasses.field(default_factory=IID)
    """Partition of the documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.partition, Dirichlet) and self.partition.by not in (None, "folder", "file", "name", "field"):
            raise ValueError(f"by = {self.partition.by!r} does not divide texts: choose folder, file, name or field")
        if isinstance(self.partition, Size):
            divide_by_size(self.partition, (), self.count)


class SiteSplit:
    """The documents of one site; all of them if no site is given.

    parts: the names of the text's sources, each with the files and folders that it is read from. field: of a row, which holds the text.
    """

    def __init__(self, site: SiteShare | None, parts: dict[str, tuple[str, ...]], field: str) -> None:
        self.site, self.parts, self.field = site, parts, field
        self._divisions: dict[str, Division] = {}

    @cached_property
    def names(self) -> list[str]:
        """List the parts that this site has documents of.

        Raises MisconfigurationError if tokens cannot be divided.
        """
        if self.site is None:
            return list(self.parts)
        self._check_tokens()
        if isinstance(self.site.partition, Source):
            own = {source.partition("\0")[0] for source, site in self._home.items() if site == self.site.number}
            return [name for name in self.parts if name in own]
        return list(self.parts)

    def _check_tokens(self) -> None:
        """Raise MisconfigurationError if tokens are to be divided by properties of their text."""
        from arclight.fabric.errors import MisconfigurationError
        from arclight.text.data.corpus import is_corpus

        assert self.site is not None
        ready = [source for sources in self.parts.values() for source in sources if is_corpus(source)]
        if ready and not (isinstance(self.site.partition, Source) and self.site.partition.by == "name"):
            raise MisconfigurationError(
                f"{ready[0]} holds tokens, which no longer say whose text they were: name the sources, as in "
                'data = {first = ..., second = ...}, and divide them by = "name", or give the text itself'
            )

    def check(self) -> None:
        """Raise MisconfigurationError if any site would get nothing.

        Reads only until it is seen that each gets something.
        """
        if self.site is None:
            return
        self._check_tokens()
        if isinstance(self.site.partition, Source):
            self._enough(source for name in self.parts for source, _ in self._sizes(name))
            return
        for name in self.parts:
            without = set(range(self.site.count))
            for source, document in self._sourced_documents(name):
                without.discard(self._site_of(name, source, document))
                if not without:
                    break
            else:
                raise self._gets_nothing(min(without), name)

    def documents(self, name: str) -> Iterator[Document]:
        """Yield the documents of a part, or those of them that are this site's."""
        from arclight.text.data.sources import documents

        site = self.site
        if site is None or (isinstance(site.partition, Source) and site.partition.by == "name"):
            yield from chain.from_iterable(documents(place, self.field) for place in self.parts[name])
            return
        empty = True
        for source, document in self._sourced_documents(name):
            if self._site_of(name, source, document) == site.number:
                empty = False
                yield document
        if empty:
            raise self._gets_nothing(site.number, name)

    def _site_of(self, name: str, source: str, document: Document) -> int:
        """Return the site that a document of a part lies at."""
        assert self.site is not None
        partition = self.site.partition
        if isinstance(partition, Source):
            return self._home[source]
        key = document.text.encode()
        if isinstance(partition, Size):
            return self._division(partition, name).site_of(key)
        return site_at_random(partition, key, source, self.site.count)

    def _division(self, partition: Size, name: str) -> Division:
        """Divide the documents of a part by their size; reads all of them, once."""
        assert self.site is not None
        if name not in self._divisions:
            sizes = ((document.text.encode(), document.bytes) for _, document in self._sourced_documents(name))
            self._divisions[name] = divide_by_size(partition, sizes, self.site.count)
        return self._divisions[name]

    def _gets_nothing(self, number: int, name: str) -> Exception:
        from arclight.fabric.errors import MisconfigurationError

        assert self.site is not None
        return MisconfigurationError(
            f"site {number} of {self.site.count} gets no document of {name or ', '.join(self.parts[name])}: there must be "
            "more text, fewer sites, or another partition"
        )

    def _enough(self, sources: Iterable[str]) -> None:
        """Raise MisconfigurationError if there are fewer sources than sites."""
        from arclight.fabric.errors import MisconfigurationError

        assert self.site is not None
        found = dict[str, None]()
        for source in sources:
            found[source] = None
            if len(found) == self.site.count:
                return
        try:
            check_enough_sources([self._shown(source) for source in found], self.site.count)
        except ValueError as error:
            raise MisconfigurationError(str(error)) from error

    def _shown(self, source: str) -> str:
        """Format a source as a person would name it."""
        name, *place = source.split("\0")
        inside = "/".join(place if self._by == "field" else place[1:])
        return ": ".join(part for part in (name, inside) if part)

    @cached_property
    def _home(self) -> dict[str, int]:
        """Map every source to its site."""
        assert self.site is not None
        sizes: dict[str, int] = {}
        for name in self.parts:
            for source, size in self._sizes(name):
                sizes[source] = sizes.get(source, 0) + size
        self._enough(sizes)
        return pack_sources(sizes, self.site.count)

    def _sizes(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the sources of a part, in pieces, with their sizes.

        Text is read only if nothing else tells.
        """
        if self._by == "field":
            yield from ((source, document.bytes) for source, document in self._sourced_documents(name))
            return
        from arclight.text.data.sources import files, fingerprint

        for order, place in enumerate(self.parts[name]):
            for path in files(place):
                size = sum(entry[1] for entry in fingerprint(path)) if path.is_dir() else os.path.getsize(path)
                yield self._source(name, order, path), size

    def _sourced_documents(self, name: str) -> Iterator[tuple[str, Document]]:
        """Yield every document of a part, with its source."""
        from arclight.text.data.sources import documents, files

        for order, place in enumerate(self.parts[name]):
            for path in files(place):
                if self._by == "field":
                    yield from self._by_field(name, path)
                else:
                    source = self._source(name, order, path)
                    yield from ((source, document) for document in documents(path, self.field))

    def _by_field(self, name: str, path: Path) -> Iterator[tuple[str, Document]]:
        from arclight.text.data.sources import SourceError, document_of, rows

        if not path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".parquet")):
            raise SourceError(f'{path} has no rows whose fields tell sources apart: by = "folder" or "file" needs none')
        field = self.site.partition.field if self.site and isinstance(self.site.partition, Source) else "source"
        for place, row in rows(path):
            for wanted in (self.field, field):
                if not isinstance(row, dict) or not isinstance(row.get(wanted), str):
                    raise SourceError(f"{place} has no text in a field {wanted!r}")
            yield f"{name}\0{row[field]}", document_of(place, row[self.field])

    def _source(self, name: str, order: int, path: Path) -> str:
        """Return the source that a file belongs to: part, number of its place, and path below.

        Nothing in it says where the text lies.
        """
        if self._by == "name":
            return name
        from arclight.text.data.sources import root_of

        inside = path.relative_to(root_of(self.parts[name][order])).parts or (path.name,)
        return "\0".join((name, str(order), *(inside[:1] if self._by == "folder" else inside)))

    @property
    def _by(self) -> str:
        assert self.site is not None
        return getattr(self.site.partition, "by", None) or "folder"
