"""Write and memory-map shards of tokens; read a folder of them as one long stream.

A shard is one file: a header of 4,096 bytes (a magic word, then JSON), the tokens (uint16 or uint32, little-endian, filled up
to 8 bytes), then the end of each document (uint64, counted in tokens from the shard's start). ``NAME.sums`` beside it has the
SHA-256 of each 65,536 bytes behind the header, by which a part that was read alone is verified. ``corpus.json`` beside
the shards lists them in order with their SHA-256.

``text.data.corpus`` writes shards; `packing`, `token_samples`, `unigrams` and ``remote`` read them as `TokenShards`. The format stays, since
corpora are kept and shared; another one needs another magic word.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from arclight.data.permutation import Ints
from arclight.fabric.atomic_replace import replace_bytes, replace_text

INDEX = "corpus.json"
HEADER_BYTES = 4096
BLOCK_BYTES = 2**16
"""Bytes of a block behind a shard's header; each block has a digest of its own. A part of the format."""
SUMS = ".sums"
"""Suffix of the file with the digests of a shard's blocks."""
_STAMPS = ".verified.json"
"""File with size, time and inode of each shard when it was last verified."""
_MAGIC = b"arclight tokens 1\n"
_MOST = 2**48
"""Upper bound of a shard's tokens, documents and bytes."""
_FIX = "delete the folder and tokenize again (arclight data tokenize)"


class TokenShardError(ValueError):
    """Raised for damaged or incomplete token shards, or another tokenizer's."""


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """Content of a shard's header."""

    dtype: str
    tokens: int
    documents: int
    text_bytes: int
    """Bytes of UTF-8 text that the tokens stand for."""
    longest: int
    """Tokens of the longest document."""
    tokenizer: str
    """Digest of the vocabulary."""
    vocab_size: int
    sha256: str
    """Digest of everything after the header."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no shard can have: headers and indexes may come from anywhere."""
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"tokens of dtype {self.dtype!r}, need uint16 or uint32")
        for name in ("tokens", "documents", "text_bytes", "longest", "vocab_size"):
            count = getattr(self, name)
            if type(count) is not int or not 0 <= count < _MOST:
                raise ValueError(f"{name} {count!r}, need a number from 0 to {_MOST - 1:,}")
        if not isinstance(self.tokenizer, str) or not is_sha256(self.sha256):
            raise ValueError("tokenizer or sha256 is not a digest")

    @property
    def token_bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.body_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes behind the header."""
        return self.ends_at + 8 * self.documents

    @property
    def ends_at(self) -> int:
        """The byte behind the header at which the ends of documents begin."""
        return self.token_bytes + -self.token_bytes % 8

    @property
    def blocks(self) -> int:
        return -(-self.body_bytes // BLOCK_BYTES)


class _BodyDigests:
    """SHA-256 of all bytes that pass, and of each block of them."""

    def __init__(self) -> None:
        self._all, self._block, self._filled = hashlib.sha256(), hashlib.sha256(), 0
        self._sums = bytearray()

    def update(self, data: bytes) -> None:
        self._all.update(data)
        rest = memoryview(data)
        while rest:
            piece = rest[: BLOCK_BYTES - self._filled]
            self._block.update(piece)
            self._filled, rest = self._filled + len(piece), rest[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> tuple[str, bytes]:
        """Return the digest of all, and those of the blocks one after another."""
        if self._filled:
            self._end_block()
        return self._all.hexdigest(), bytes(self._sums)

    def _end_block(self) -> None:
        self._sums += self._block.digest()
        self._block, self._filled = hashlib.sha256(), 0


def write_shard(
    path: str | Path, documents: Iterable[npt.ArrayLike], *, tokenizer: str, vocab_size: int, text_bytes: int
) -> ShardFacts:
    """Write documents (token ids, 1-D each) as one shard, atomically.

    Raises ValueError for a token id outside the vocabulary.
    """
    path = Path(path)
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.saving")
    sums_at = path.with_name(path.name + SUMS)
    digest, ends, longest, total = _BodyDigests(), [], 0, 0
    try:
        with temporary.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            for number, document in enumerate(documents):
                ids = np.asarray(document)
                if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                    raise ValueError(f"document {number} of {path.name} has token ids outside 0..{vocab_size - 1}")
                data = ids.astype(dtype).tobytes()
                digest.update(data)
                file.write(data)
                longest, total = max(longest, ids.size), total + ids.size
                ends.append(total)
            rest = bytes(-total * dtype.itemsize % 8) + np.array(ends, "<u8").tobytes()
            digest.update(rest)
            file.write(rest)
            sha256, sums = digest.finish()
            facts = ShardFacts(
                dtype=dtype.name, tokens=total, documents=len(ends), text_bytes=text_bytes, longest=longest,
                tokenizer=tokenizer, vocab_size=vocab_size, sha256=sha256,
            )  # fmt: skip
            file.seek(0)
            file.write(_MAGIC + json.dumps(asdict(facts)).encode().ljust(HEADER_BYTES - len(_MAGIC)))
            file.flush()
            os.fsync(file.fileno())
        replace_bytes(sums_at, sums, durable=False)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return facts


def read_header(path: Path) -> ShardFacts:
    """Read a shard's header. Raises TokenShardError if it is no shard, or cut off."""
    try:
        with path.open("rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise TokenShardError(f"{path} is missing, though {INDEX} lists it: {_FIX}") from error
    try:
        if not header.startswith(_MAGIC):
            raise ValueError("the magic word is missing")
        facts = ShardFacts(**json.loads(header[len(_MAGIC) :]))
    except (ValueError, TypeError) as error:
        raise TokenShardError(f"{path} has no readable header ({error}): {_FIX}") from error
    if size != facts.file_bytes:
        kind = "cut short" if size < facts.file_bytes else "longer than it was written"
        raise TokenShardError(f"{path} is {kind}: {size:,} bytes, its header says {facts.file_bytes:,}; {_FIX}")
    return facts


def hash_shard(path: Path) -> tuple[str, bytes]:
    """Return the SHA-256 of a shard's body, and those of its blocks one after another."""
    digest = _BodyDigests()
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while data := file.read(16 * BLOCK_BYTES):
            digest.update(data)
    return digest.finish()


def write_sums(folder: str | Path) -> int:
    """Write block digests that an older corpus lacks, after checking its shards.

    Returns the number of files written. Raises TokenShardError for a damaged shard.
    """
    folder = Path(folder)
    shards = TokenShards(folder)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    lacking = [entry for entry in index["shards"] if "sums" not in entry]
    for entry, name in ((entry, entry["file"]) for entry in lacking):
        sha256, sums = hash_shard(folder / name)
        if sha256 != entry["sha256"]:
            raise TokenShardError(f"{folder / name} is damaged: its content is not what was written; {_FIX}")
        replace_bytes(folder / (name + SUMS), sums, durable=False)
        entry["sums"] = hashlib.sha256(sums).hexdigest()
    if lacking:
        _write_json(shards.folder / INDEX, index)
    return len(lacking)


def write_index(folder: str | Path, names: Sequence[str], **about: Any) -> None:
    """Write the index of the shards ``names`` in ``folder``, in that order.

    ``about``: what else to record of the corpus (JSON).
    """
    folder = Path(folder)
    shards = []
    for name in names:
        sums = hashlib.sha256((folder / (name + SUMS)).read_bytes()).hexdigest()
        shards.append({"file": name, "sums": sums, **asdict(read_header(folder / name))})
    _write_json(folder / INDEX, {"format": 1, **about, "shards": shards})
    _stamp(folder, names)


@dataclass(frozen=True)
class Listed:
    """A shard as the index lists it."""

    file: str
    sums: str | None
    """SHA-256 of its file of digests; None in a corpus of a version that wrote none."""
    facts: ShardFacts


def read_listing(text: str | bytes, place: str) -> tuple[dict[str, Any], list[Listed]]:
    """Read an index: what it notes of the corpus, and its shards in order.

    place: its name in errors. Raises TokenShardError for a damaged one, and for names that are not those of files beside it.
    """
    try:
        about: dict[str, Any] = json.loads(text)
        listed = []
        for entry in about.pop("shards"):
            entry = dict(entry)
            name, sums = entry.pop("file"), entry.pop("sums", None)
            if not _is_file_name(name):
                raise ValueError(f"{name!r} is not the name of a file beside it")
            if sums is not None and not is_sha256(sums):
                raise ValueError(f"{name} has sums {sums!r}, which is not a SHA-256 digest")
            listed.append(Listed(name, sums, ShardFacts(**entry)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenShardError(f"{place} cannot be read ({error!r}): {_FIX}") from error
    return about, listed


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _is_file_name(name: object) -> bool:
    """Return True for a plain file name."""
    if not isinstance(name, str) or not 0 < len(name) <= 200 or name.startswith("."):
        return False
    return name.isprintable() and not set(name) & set("/\\:?#%*")


class TokenShards:
    """A folder of shards, read as one stream of tokens in which documents follow one another.

    folder: where the shards are, and what is derived from them (packed samples). place: their name in messages.

    Opening checks every shard's header and size, which costs next to nothing; `verify` checks every byte. Raises
    FileNotFoundError if there is no corpus and TokenShardError if it is damaged, or if ``tokenizer`` (the
    digest of a vocabulary) is not the one it was made with.
    """

    def __init__(self, folder: str | Path, tokenizer: str | None = None) -> None:
        self.folder = Path(folder)
        self.place = str(folder)
        try:
            text = (self.folder / INDEX).read_bytes()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.folder} is not a folder of token shards: it has no {INDEX}") from error
        about, listed = read_listing(text, str(self.folder / INDEX))
        for entry in listed:
            if read_header(self.folder / entry.file).sha256 != entry.facts.sha256:
                raise TokenShardError(f"{self.folder / entry.file} is not the shard that {INDEX} lists: {_FIX}")
        self._open(about, listed, tokenizer)

    def _open(self, about: dict[str, Any], listed: Sequence[Listed], tokenizer: str | None) -> None:
        """Set what an index lists. Raises TokenShardError if it is of another tokenizer."""
        self.about = about
        self.names: list[str] = [entry.file for entry in listed]
        self.facts = [entry.facts for entry in listed]
        for facts in self.facts:
            if tokenizer is not None and facts.tokenizer != tokenizer:
                raise TokenShardError(
                    f"{self.place} was made with another tokenizer (vocabulary {facts.tokenizer[:12]}, not "
                    f"{tokenizer[:12]}): use that one, or translate the shards (arclight data retokenize)"
                )
        self.tokens = sum(facts.tokens for facts in self.facts)
        self.documents = sum(facts.documents for facts in self.facts)
        self.text_bytes = sum(facts.text_bytes for facts in self.facts)
        self.longest = max((facts.longest for facts in self.facts), default=0)
        self.vocab_size = max((facts.vocab_size for facts in self.facts), default=0)
        self._first_token = list(accumulate((facts.tokens for facts in self.facts), initial=0))
        self._first_document = list(accumulate((facts.documents for facts in self.facts), initial=0))
        self._maps: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}

    def open_beside(self, name: str) -> BinaryIO:
        """Open a file beside the shards, such as counts of their tokens.

        Raises FileNotFoundError if it does not exist.
        """
        return (self.folder / name).open("rb")

    @property
    def digest(self) -> str:
        """SHA-256 over the shards' own digests, in order.

        The same for the same tokens in the same documents and shards.
        """
        return hashlib.sha256("".join(facts.sha256 for facts in self.facts).encode()).hexdigest()

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read tokens ``start`` up to ``stop``; a view of the file if they lie in one shard."""
        parts = [self._tokens(shard, a, b) for shard, a, b in self._spans(self._first_token, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])

    def ends(self, first: int = 0, last: int | None = None) -> Ints:
        """Return the ends of documents ``first`` up to ``last`` in the stream (int64)."""
        last = self.documents if last is None else last
        parts = [
            self._ends(shard)[a:b].astype(np.int64) + self._first_token[shard]
            for shard, a, b in self._spans(self._first_document, first, last)
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def boundaries(self, start: int, stop: int) -> Ints:
        """Return the document boundaries between ``start`` and ``stop``, ascending."""
        found = []
        spans = self._spans(self._first_token, start, stop)
        for shard in range(spans[0][0], spans[-1][0] + 1) if spans else ():  # also those of empty documents alone
            if self.facts[shard].documents:
                ends, first = self._ends(shard), self._first_token[shard]
                a, b = max(start - first, 0), min(stop - first, self.facts[shard].tokens)
                low, high = np.searchsorted(ends, np.array([a, b + 1], ends.dtype))
                found.append(ends[low:high].astype(np.int64) + first)
        inside = np.concatenate([np.empty(0, np.int64), *found])
        return inside[(inside > start) & (inside < stop)]

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the tokens of one document."""
        ends = self.ends(max(0, number - 1), number + 1)
        return self.read(int(ends[-2]) if number else 0, int(ends[-1]))

    def verify(self, *, again: bool = False) -> None:
        """Verify every byte of shards that changed since the last check, or of all ``again``.

        Raises TokenShardError. What was checked is noted beside the shards, if that can be written.
        """
        stamps = {} if again else _read_stamps(self.folder)
        for name, facts in zip(self.names, self.facts, strict=True):
            path = self.folder / name
            if stamps.get(name) != _identity(path) and hash_shard(path)[0] != facts.sha256:
                raise TokenShardError(f"{path} is damaged: its content is not what was written; {_FIX}")
        _stamp(self.folder, self.names)

    read_ahead = 0
    """How many batches ahead `prefetch` should be called; 0 for files on disk, which it does not speed up."""

    def prefetch(self, spans: Sequence[tuple[int, int]], *, boundaries: bool, consumer: Hashable = None) -> Any:
        """Prefetch what ``read(start, stop)`` of each span needs; return a handle for `release`.

        boundaries: also what ``boundaries(start, stop)`` needs.
        consumer: identifies the reader, such as one pass over a loader; each gets a fair share of the space.
        """
        return None

    def release(self, prefetched: Any) -> None:
        """Release what `prefetch` reserved: it was read, or will not be."""

    def warn_of_shuffling(self, samples: int, *, packed: bool, in_windows: bool) -> None:
        """Warn if shuffled reading costs much more than reading in order."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # another process maps the files itself

    def _tokens(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens of one shard, counted from its start."""
        return self._map(shard)[0][start:stop]

    def _ends(self, shard: int) -> npt.NDArray[Any]:
        """Return the ends of a shard's documents, in tokens from its start."""
        return self._map(shard)[1]

    def _map(self, shard: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if shard not in self._maps:
            facts = self.facts[shard]
            data = np.memmap(self.folder / self.names[shard], np.uint8, "r", HEADER_BYTES).view(np.ndarray)
            tokens = data[: facts.token_bytes].view(np.dtype(facts.dtype).newbyteorder("<"))
            ends = data[facts.ends_at :].view("<u8")
            self._maps[shard] = (tokens, ends)
        return self._maps[shard]

    def _spans(self, firsts: list[int], start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return (shard, from, to) within each shard, for the range [start, stop) of all."""
        if not 0 <= start <= stop <= firsts[-1]:
            raise IndexError(f"{start}..{stop} of {firsts[-1]} in {self.place}")
        shard = bisect_right(firsts, start) - 1
        found = []
        while start < stop:
            to = min(stop, firsts[shard + 1])
            if start < to:
                found.append((shard, start - firsts[shard], to - firsts[shard]))
            start, shard = to, shard + 1
        return found


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _read_stamps(folder: Path) -> dict[str, list[int]]:
    try:
        stamps: dict[str, list[int]] = json.loads((folder / _STAMPS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # then everything is checked
    return stamps


def _stamp(folder: Path, names: Sequence[str]) -> None:
    stamps = {name: _identity(folder / name) for name in names}
    if os.access(folder, os.W_OK) and stamps != _read_stamps(folder):
        _write_json(folder / _STAMPS, stamps)


def _write_json(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value, indent=1) + "\n", durable=False)
