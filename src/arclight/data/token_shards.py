"""Write and memory-map shards of tokens; read a folder of them as one long stream.

A shard is one file: a header of 4,096 bytes (a magic word, then JSON), the tokens (uint16 or uint32, little-endian, filled up
to 8 bytes), then the end of each document (uint64, counted in tokens from the shard's start). ``corpus.json`` beside
the shards lists them in order with their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.data.permutation import Ints

INDEX = "corpus.json"
_STAMPS = ".verified.json"
_MAGIC = b"arclight tokens 1\n"
_HEADER = 4096
_FIX = "delete the folder and tokenize again (arclight data tokenize)"


class TokenShardError(ValueError):
    """Token shards that are damaged, incomplete or of another tokenizer; the message says what to do."""


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
    """Of everything behind the header."""

    @property
    def token_bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize

    @property
    def file_bytes(self) -> int:
        return _HEADER + self.token_bytes + -self.token_bytes % 8 + 8 * self.documents


def write_shard(
    path: str | Path, documents: Iterable[npt.ArrayLike], *, tokenizer: str, vocab_size: int, text_bytes: int
) -> ShardFacts:
    """Write documents (token ids, 1-D each) as one shard, which is at ``path`` when it is complete and not before.

    Raises ValueError for a token id outside the vocabulary.
    """
    path = Path(path)
    dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.saving")
    digest, ends, longest, total = hashlib.sha256(), [], 0, 0
    try:
        with temporary.open("wb") as file:
            file.write(bytes(_HEADER))
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
            facts = ShardFacts(
                dtype=dtype.name, tokens=total, documents=len(ends), text_bytes=text_bytes, longest=longest,
                tokenizer=tokenizer, vocab_size=vocab_size, sha256=digest.hexdigest(),
            )  # fmt: skip
            file.seek(0)
            file.write(_MAGIC + json.dumps(asdict(facts)).encode().ljust(_HEADER - len(_MAGIC)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return facts


def read_header(path: Path) -> ShardFacts:
    """Read a shard's header. Raises TokenShardError if it is no shard, or cut off."""
    try:
        with path.open("rb") as file:
            header, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
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


def hash_shard(path: Path) -> str:
    """SHA-256 of what is behind the header, read again."""
    with path.open("rb") as file:
        file.seek(_HEADER)
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_index(folder: str | Path, names: Sequence[str], **about: Any) -> None:
    """Make the shards ``names`` in ``folder`` one corpus, in that order; ``about``: what else to note of it (JSON)."""
    folder = Path(folder)
    shards = [{"file": name, **asdict(read_header(folder / name))} for name in names]
    _write_json(folder / INDEX, {"format": 1, **about, "shards": shards})
    _stamp(folder, names)


class TokenShards:
    """A folder of shards, read as one stream of tokens in which documents follow one another.

    Opening checks every shard's header and size, which costs next to nothing; `verify` checks every byte. Raises
    FileNotFoundError where there is no corpus and TokenShardError where it is damaged, or where ``tokenizer`` (the
    digest of a vocabulary) is not the one it was made with.
    """

    def __init__(self, folder: str | Path, tokenizer: str | None = None) -> None:
        self.folder = Path(folder)
        try:
            self.about: dict[str, Any] = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            listed = self.about.pop("shards")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.folder} is no folder of token shards: it has no {INDEX}") from error
        except (ValueError, KeyError) as error:
            raise TokenShardError(f"{self.folder / INDEX} cannot be read ({error!r}): {_FIX}") from error
        self.names: list[str] = [entry["file"] for entry in listed]
        self.facts = [read_header(self.folder / name) for name in self.names]
        for entry, facts in zip(listed, self.facts, strict=True):
            if entry["sha256"] != facts.sha256:
                raise TokenShardError(f"{self.folder / entry['file']} is not the shard that {INDEX} lists: {_FIX}")
            if tokenizer is not None and facts.tokenizer != tokenizer:
                raise TokenShardError(
                    f"{self.folder} was made with another tokenizer (vocabulary {facts.tokenizer[:12]}, not "
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

    @property
    def digest(self) -> str:
        """SHA-256 over the shards' own, in order: the same for the same tokens in the same documents."""
        return hashlib.sha256("".join(facts.sha256 for facts in self.facts).encode()).hexdigest()

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``start`` up to ``stop`` of the stream; a view of the file where they lie in one shard."""
        parts = [self._map(shard)[0][a:b] for shard, a, b in self._spans(self._first_token, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])

    def ends(self, first: int = 0, last: int | None = None) -> Ints:
        """Return the ends of documents ``first`` up to ``last`` in the stream (int64)."""
        last = self.documents if last is None else last
        parts = [
            self._map(shard)[1][a:b].astype(np.int64) + self._first_token[shard]
            for shard, a, b in self._spans(self._first_document, first, last)
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def boundaries(self, start: int, stop: int) -> Ints:
        """Return the document boundaries strictly between ``start`` and ``stop`` of the stream, ascending."""
        found = []
        spans = self._spans(self._first_token, start, stop)
        for shard in range(spans[0][0], spans[-1][0] + 1) if spans else ():  # also those of empty documents alone
            if self.facts[shard].documents:
                ends, first = self._map(shard)[1], self._first_token[shard]
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
        """Check every byte of the shards that were not checked since they last changed, or of all of them ``again``.

        Raises TokenShardError. What was checked is noted beside the shards, where that can be written.
        """
        stamps = {} if again else _read_stamps(self.folder)
        for name, facts in zip(self.names, self.facts, strict=True):
            path = self.folder / name
            if stamps.get(name) != _identity(path) and hash_shard(path) != facts.sha256:
                raise TokenShardError(f"{path} is damaged: its content is not what was written; {_FIX}")
        _stamp(self.folder, self.names)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # another process maps the files itself

    def _map(self, shard: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if shard not in self._maps:
            facts = self.facts[shard]
            data = np.memmap(self.folder / self.names[shard], np.uint8, "r", _HEADER).view(np.ndarray)
            tokens = data[: facts.token_bytes].view(np.dtype(facts.dtype).newbyteorder("<"))
            ends = data[facts.token_bytes + -facts.token_bytes % 8 :].view("<u8")
            self._maps[shard] = (tokens, ends)
        return self._maps[shard]

    def _spans(self, firsts: list[int], start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, from, to) within each shard, for the range [start, stop) of the whole."""
        if not 0 <= start <= stop <= firsts[-1]:
            raise IndexError(f"{start}..{stop} of {firsts[-1]} in {self.folder}")
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.saving")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
