"""Count how often each token occurs in each source of a corpus; write and read counts.

The file ``unigrams.counts`` beside the shards is a line ``arclight unigrams 1``, a line of JSON (``tokenizer``, ``vocab_size``, the ``corpus``
digest of the shards that were counted, ``sources`` with name, documents and tokens of each, ``sha256`` of what follows),
spaces up to a multiple of 8 bytes, then for each source ``vocab_size`` counts (uint64, little-endian). All tokens of the
shards are counted, those that mark where documents begin and end too. The documents of a source follow one another.

``text.data.corpus`` writes the counts after it has tokenized, ``arclight data pack`` if they are missing, ``inspect`` prints them;
``text.site_vocabularies`` and losses normalised by unigrams (``text.data.data_module``) read them. The file format stays, since corpora
are kept and shared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.data.token_shards import TokenShardError, TokenShards, is_sha256
from arclight.fabric.atomic_replace import replace_bytes

UNIGRAMS = "unigrams.counts"
_MAGIC = b"arclight unigrams 1\n"
_HEADER_BYTES = 2**24
"""Most bytes of the line of JSON; that of 100,000 sources has 10 MB."""
_CHUNK = 2**22  # tokens counted in one call
_FIX = "delete it and count again (arclight data pack)"


@dataclass(frozen=True)
class Unigrams:
    """Counts of each token in one source of a corpus, or in all of them."""

    source: str
    documents: int
    counts: npt.NDArray[np.uint64]
    """Counts by token id."""

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def entropy(self) -> float:
        """Entropy of the unigram distribution in nats per token: the loss of a model of it."""
        found = self.counts[self.counts > 0].astype(np.float64)
        shares = found / found.sum()
        return float(-(shares * np.log(shares)).sum()) if found.size else 0.0

    def most_frequent(self, number: int) -> list[tuple[int, int]]:
        """Return the most frequent tokens with their counts; of equal counts the smaller id first."""
        order = np.lexsort((np.arange(self.counts.size), -self.counts.astype(np.int64)))[:number]
        return [(int(token), int(self.counts[token])) for token in order if self.counts[token]]


def merge_counts(sources: list[Unigrams]) -> Unigrams:
    """Return the counts of all sources together."""
    return Unigrams("", sum(one.documents for one in sources), np.sum([one.counts for one in sources], 0, np.uint64))


def count_tokens(corpora: Iterable[TokenShards]) -> npt.NDArray[np.uint64]:
    """Count each token (V,) of ``corpora``, by the counts beside their shards.

    Raises FileNotFoundError for shards without counts.
    """
    return merge_counts([one for shards in corpora for one in read_unigrams(shards)]).counts


def write_unigrams(shards: TokenShards, sources: Mapping[str, int] | None = None) -> list[Unigrams]:
    """Count the tokens of ``shards``, write the counts beside them atomically, and return them.

    sources: number of documents of each source, in the order of the shards; None: one source without a name. Raises ValueError if
    these do not add up to the documents of the shards, TokenShardError for tokens outside the vocabulary.
    """
    sources = {"": shards.documents} if sources is None else sources
    if sum(sources.values()) != shards.documents:
        raise ValueError(f"{shards.place} has {shards.documents:,} documents, not {sum(sources.values()):,}")
    found, first = [], 0
    for name, documents in sources.items():
        ends = [0 if at == 0 else int(shards.ends(at - 1, at)[0]) for at in (first, first + documents)]
        found.append(Unigrams(name, documents, _count(shards, *ends)))
        first += documents
    body = b"".join(one.counts.astype("<u8").tobytes() for one in found)
    header: dict[str, Any] = {
        "tokenizer": _tokenizer_of(shards),
        "vocab_size": shards.vocab_size,
        "corpus": shards.digest,
        "sources": [{"name": one.source, "documents": one.documents, "tokens": one.tokens} for one in found],
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    line = json.dumps(header).encode() + b"\n"
    if len(line) > _HEADER_BYTES:
        raise ValueError(f"{shards.place} has too many sources for one header, {len(found):,}: merge sources")
    content = _MAGIC + line + b" " * (-len(_MAGIC + line) % 8) + body
    replace_bytes(shards.folder / UNIGRAMS, content, durable=False)
    return found


def has_unigrams(shards: TokenShards) -> bool:
    """Return True if the shards have a file of counts, which older versions did not write."""
    try:
        shards.open_beside(UNIGRAMS).close()
    except FileNotFoundError:
        return False
    return True


def read_unigrams(shards: TokenShards) -> list[Unigrams]:
    """Read the counts beside ``shards``, source by source.

    Raises FileNotFoundError if there are none, TokenShardError for a damaged file and for counts of other shards. Every
    length is checked before memory is allocated for it.
    """
    path = f"{shards.place}/{UNIGRAMS}"
    try:
        with shards.open_beside(UNIGRAMS) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("the magic word is missing")
            line = file.readline(_HEADER_BYTES)
            if not line.endswith(b"\n"):
                raise ValueError("its header has no end")
            tokenizer, vocab_size, corpus, sha256, sources = _parse(line)
            file.seek(-len(_MAGIC + line) % 8, os.SEEK_CUR)
            begin = file.tell()
            size, needed = file.seek(0, os.SEEK_END), begin + 8 * vocab_size * len(sources)
            if size != needed:
                raise ValueError(f"it has {size:,} bytes, by its header {needed:,}")
            file.seek(begin)
            body = file.read()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{shards.place} has no {UNIGRAMS}: arclight data pack writes it") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenShardError(f"{path} holds no counts of tokens ({error}): {_FIX}") from error
    if (tokenizer, vocab_size, corpus) != (_tokenizer_of(shards), shards.vocab_size, shards.digest):
        raise TokenShardError(f"{path} was made of other shards: {_FIX}")
    if hashlib.sha256(body).hexdigest() != sha256:
        raise TokenShardError(f"{path} is damaged: its content is not what was written; {_FIX}")
    counts = np.frombuffer(body, "<u8").astype(np.uint64).reshape(len(sources), vocab_size)
    found = []
    for (name, documents, tokens), row in zip(sources, counts, strict=True):
        if int(row.max(initial=0)) > shards.tokens or _sum(row) != tokens:
            raise TokenShardError(f"{path}: the counts of source {name!r} are not those of {tokens:,} tokens; {_FIX}")
        found.append(Unigrams(name, documents, row))
    for kind, here, there in (
        ("tokens", sum(one.tokens for one in found), shards.tokens),
        ("documents", sum(one.documents for one in found), shards.documents),
    ):
        if here != there:
            raise TokenShardError(f"{path} counts {here:,} {kind}, of {there:,} in the shards: {_FIX}")
    return found


def _tokenizer_of(shards: TokenShards) -> str:
    return shards.facts[0].tokenizer if shards.facts else ""


def _parse(line: bytes) -> tuple[str, int, str, str, list[tuple[str, int, int]]]:
    """Parse the header: digest and size of the vocabulary, other digests, and sources."""
    header = json.loads(line)
    vocab_size, corpus, sha256 = header["vocab_size"], header["corpus"], header["sha256"]
    if type(vocab_size) is not int or not 0 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size {vocab_size!r}, need an integer from 0 to 2**32")
    if not is_sha256(corpus) or not is_sha256(sha256):
        raise ValueError("corpus or sha256 is not a digest")
    sources = []
    for entry in header["sources"]:
        name, documents, tokens = entry["name"], entry["documents"], entry["tokens"]
        if not isinstance(name, str):
            raise ValueError(f"a source is called {name!r}")
        for number in (documents, tokens):
            if type(number) is not int or not 0 <= number < 2**48:
                raise ValueError(f"source {name!r} has {number!r} documents or tokens")
        sources.append((name, documents, tokens))
    if len({name for name, _, _ in sources}) != len(sources):
        raise ValueError("two sources have one name")
    return header["tokenizer"], vocab_size, corpus, sha256, sources


def _count(shards: TokenShards, start: int, stop: int) -> npt.NDArray[np.uint64]:
    counts = np.zeros(shards.vocab_size, np.uint64)
    for at in range(start, stop, _CHUNK):
        found = np.bincount(shards.read(at, min(stop, at + _CHUNK)), minlength=shards.vocab_size)
        if found.size > shards.vocab_size:
            raise TokenShardError(
                f"{shards.place} has token {found.size - 1:,}, beyond its vocabulary of {shards.vocab_size:,}: "
                "delete the folder and tokenize again (arclight data tokenize)"
            )
        counts += found.astype(np.uint64)
    return counts


def _sum(counts: npt.NDArray[np.uint64]) -> int:
    """Return the exact sum of counts below 2**48, which may be beyond 64 bits."""
    return (int((counts >> np.uint64(24)).sum()) << 24) + int((counts & np.uint64(2**24 - 1)).sum())
