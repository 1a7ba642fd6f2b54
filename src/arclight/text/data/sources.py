"""Read text files of several kinds as documents, in an order that never changes.

The data module, `site_split`, ``arclight data tokenize`` and ``arclight compare`` read text by `documents`; question sets and labelled rows
use `rows`. Their order is the order of tokens in a corpus and the text that tokenizers learn from, so it stays. A new kind of file is a
reader in `_reader`.
"""

from __future__ import annotations

import gzip
import io
import json
import sysconfig
import tarfile
import tokenize
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.text.data.mds import MDSError, is_mds, read_column, shards_of

if TYPE_CHECKING:
    from arclight.text.data.tokenizer import Tokenizer

STDLIB = "stdlib"
"""The source that every machine has: the Python standard library's own modules, without its tests."""

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")
_UNPACK_FIRST = (".zst", ".bz2", ".xz", ".zip", ".7z")


class SourceError(ValueError):
    """Text that cannot be read; the message names the file and the row."""


class Document(NamedTuple):
    """One text: a file, a row or a member of an archive."""

    id: str
    """Place where it was found: the file, and the row if there is one."""
    text: str
    bytes: int
    """Length in UTF-8."""
    source: str = ""
    """The source that it is counted for (`arclight.data.unigrams`)."""
    ids: npt.NDArray[Any] | None = None
    """Token ids, if it was tokenized already."""


def documents(where: str | Path, field: str = "text") -> Iterator[Document]:
    """Yield the documents of a source, always in the same order.

    where: ``"stdlib"``; a file; or a folder, all of whose files are read in the order of their names (those that begin
    with a dot are not). By its name a file is JSON lines (.jsonl, .ndjson), Parquet (.parquet), an archive of text files
    (.tar, .tgz, .tar.gz) or one document of plain text, UTF-8; lines and text may be compressed (.gz). A folder that HF
    ``datasets`` has saved is read as such, and so is one of MDS shards (`arclight.text.data.mds`). field: the field of a row
    that holds the text.
    Raises SourceError for what cannot be read, FileNotFoundError for what is not there.
    """
    for path in files(where):
        try:
            for place, text in _reader(path)(path, field):
                yield document_of(place, text)
        except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            raise SourceError(f"{path} is cut short or damaged: {error}; fetch it again") from error


def document_of(place: str, text: str) -> Document:
    """Return the document of a text.

    Raises SourceError for half of a surrogate pair, which JSON may hold.
    """
    try:
        return Document(place, text, len(text.encode()))
    except UnicodeEncodeError as error:
        raise SourceError(f"{place}: character {error.start} is half of a surrogate pair, no text") from error


def token_documents(where: str | Path, field: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the documents of a folder of MDS shards that holds ids of ``tokenizer``.

    Ids are taken as they are. The rows (arrays of integers, or their bytes as int64) are one stream, cut behind each
    end of text: so were they written. Without such a token, each row is a document. Raises SourceError for other
    columns and for ids that are no tokens.
    """
    if where == STDLIB or not is_mds(Path(where)):
        raise SourceError(f"{where} is not a folder of MDS shards, the only sources that token ids are read from")
    place, begun = "", list[npt.NDArray[Any]]()
    try:
        for shard in shards_of(Path(where)):
            for place, value in read_column(shard, field):
                row = _ids_of(value, tokenizer, f"{place}: {field!r}")
                ends = np.flatnonzero(row == tokenizer.eos) + 1 if tokenizer.eos is not None else np.array([len(row)])
                *whole, rest = np.split(row, ends)
                for part in whole:
                    yield _of_ids(place, np.concatenate([*begun, part]), tokenizer)
                    begun = []
                begun += [rest] if rest.size else []
    except MDSError as error:
        raise SourceError(str(error)) from error
    if begun:
        yield _of_ids(place, np.concatenate(begun), tokenizer)


def _ids_of(value: Any, tokenizer: Tokenizer, place: str) -> npt.NDArray[Any]:
    """Return a cell as an array of token ids (N,), int64."""
    if isinstance(value, bytes):
        if len(value) % 8:
            raise SourceError(f"{place} has {len(value)} bytes, no number of int64")
        value = np.frombuffer(value, "<i8")
    found = np.asarray(value)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SourceError(
            f"{place} holds no token ids: need an array of integers in one dimension, got {found.dtype} {found.shape}"
        )
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < tokenizer.vocab_size:
        raise SourceError(
            f"{place} has ids {int(found.min())} to {int(found.max())}, the tokenizer has {tokenizer.vocab_size} tokens: it is another one's"
        )
    return found.astype(np.int64)


def _of_ids(place: str, ids: npt.NDArray[Any], tokenizer: Tokenizer) -> Document:
    text = tokenizer.decode(ids.tolist())
    return Document(place, text, len(text.encode()), ids=ids)


def files(where: str | Path) -> list[Path]:
    """List the files (or saved data sets) of a source, in reading order."""
    root = root_of(where)
    if where == STDLIB:
        found = (p for p in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(p.relative_to(root).parts))
        return sorted(found, key=lambda p: p.relative_to(root).parts)
    if not root.exists():
        raise FileNotFoundError(f'{root} does not exist: data is "{STDLIB}", a file or a folder')
    if root.is_file() or _is_saved_dataset(root) or is_mds(root):
        return [root]
    inside = sorted(
        (p for p in root.rglob("*") if p.is_file() and not any(n.startswith(".") for n in p.relative_to(root).parts)),
        key=lambda p: p.relative_to(root).parts,
    )
    if not inside:
        raise FileNotFoundError(f"{root} has no files to read")
    return inside


def root_of(where: str | Path) -> Path:
    """Return the file or folder that a source is."""
    return Path(sysconfig.get_path("stdlib")) if where == STDLIB else Path(where)


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield all rows of a file of JSON lines or a Parquet file, each with its place.

    Errors are those of `documents`.
    """
    try:
        yield from _parquet_rows(path, None) if path.suffix == ".parquet" else _json_rows(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{path} is cut short or damaged: {error}; fetch it again") from error


def fingerprint(where: str | Path) -> list[list[Any]]:
    """List name, size and time of change of every file of a source, to recognise changes."""
    found = []
    for path in files(where):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            facts = file.stat()
            found.append([str(file), facts.st_size, facts.st_mtime_ns])
    return found


def _is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _DATASET_FILES)


_Reader = Callable[[Path, str], Iterator[tuple[str, str]]]


def _reader(path: Path) -> _Reader:
    if path.is_dir():
        return _saved_dataset if _is_saved_dataset(path) else _mds
    name = path.name.lower()
    if name.endswith((".mds", ".mds.zst", ".mds.zstd")):
        raise SourceError(f"{path} is a shard of a folder: give the folder itself, whose index.json lists it")
    if name.endswith((".tar", ".tgz", ".tar.gz")):
        return _archive
    if name.endswith(_UNPACK_FIRST):
        raise SourceError(f"{path}: this kind of file is not read; unpack it first (gzip and tar are read as they are)")
    if name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return _json_lines
    return _parquet if name.endswith(".parquet") else _plain


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _decode(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{place}: byte {error.start} ({data[error.start]:#04x}) is not UTF-8 text; convert it, as with iconv -f ENCODING -t UTF-8"
        ) from error


def _plain(path: Path, field: str) -> Iterator[tuple[str, str]]:
    with _open(path) as file:
        data = file.read()
    if path.suffix == ".py":  # Python says in its first lines which encoding it is in
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            yield str(path), data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise SourceError(f"{path} is not the Python source that it says: {error}") from error
        return
    yield str(path), _decode(data, str(path))


def _json_lines(path: Path, field: str) -> Iterator[tuple[str, str]]:
    for place, row in _json_rows(path):
        yield place, _text_of(row, field, place)


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(_decode(line, place))
            except json.JSONDecodeError as error:
                raise SourceError(f"{place} is not valid JSON: {error}") from error
            yield place, row


def _text_of(row: Any, field: str, place: str) -> str:
    if not isinstance(row, dict):
        raise SourceError(f"{place}: need an object with the field {field!r}, got {type(row).__name__}")
    if field not in row:
        raise SourceError(f"{place} has no field {field!r}; it has {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(row[field], str):
        raise SourceError(f"{place}: {field!r} is not a text but {type(row[field]).__name__}")
    text: str = row[field]
    return text


def _parquet(path: Path, field: str) -> Iterator[tuple[str, str]]:
    for place, row in _parquet_rows(path, field):
        yield place, _text_of(row, field, place)


def _parquet_rows(path: Path, field: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    arrow, parquet = require("pyarrow", extra="text"), require("pyarrow.parquet", extra="text")
    try:
        with parquet.ParquetFile(path) as file:
            if field is not None and field not in file.schema_arrow.names:
                known = ", ".join(map(repr, file.schema_arrow.names))
                raise SourceError(f"{path} has no field {field!r}; it has {known}")
            batches = file.iter_batches(batch_size=1024, columns=None if field is None else [field])
            for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
                yield f"{path}, row {number}", row
    except (arrow.ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read as Parquet: {error}") from error


def _archive(path: Path, field: str) -> Iterator[tuple[str, str]]:
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                place = f"{path}, {member.name}"
                yield place, _decode(file.read(), place)


def _mds(path: Path, field: str) -> Iterator[tuple[str, str]]:
    try:
        for shard in shards_of(path):
            for place, value in read_column(shard, field):
                text = _decode(value, place) if isinstance(value, bytes) else value
                yield place, _text_of({field: text}, field, place)
    except MDSError as error:
        raise SourceError(str(error)) from error


def _saved_dataset(path: Path, field: str) -> Iterator[tuple[str, str]]:
    library = require("datasets", extra="text")
    try:
        found = library.load_from_disk(str(path))
    except Exception as error:  # the library lets through whatever its readers raise
        raise SourceError(f"{path} cannot be read as a saved data set: {error}") from error
    splits = found if isinstance(found, dict) else {"": found}
    for name in sorted(splits):
        rows = splits[name].select_columns([field]) if field in splits[name].column_names else splits[name]
        for number, row in enumerate(rows):
            place = f"{path}, {name + ' ' if name else ''}row {number}"
            yield place, _text_of(row, field, place)
