"""Write and open corpora: text tokenized in order into shards, by one or more processes.

``arclight data`` (`cli.commands.corpora`) and `TextDataModule` write and open corpora by it. A corpus is a folder: ``tokenizer/`` as
`Tokenizer.load` reads it, and a folder of shards for each split (``train``, ``val``), with counts of tokens by source beside the shards.
Folders must stay readable. What is in one depends on documents, tokenizer, split and ``shard_bytes``, not on the number of processes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.checkpoint.files import discard, make_staging, sweep
from arclight.data.ray_tasks import Engine, on_ray
from arclight.data.remote.block_reader import BlockReader
from arclight.data.remote.ranges import RemoteFiles, is_address
from arclight.data.remote.remote_shards import RemoteTokenShards
from arclight.data.token_shards import INDEX, TokenShards, write_index, write_shard
from arclight.data.unigrams import has_unigrams, read_unigrams, write_unigrams
from arclight.fabric.errors import MisconfigurationError
from arclight.text.data.sources import Document
from arclight.text.data.tokenizer import FILES, Tokenizer

SPLITS = ("train", "val")
SHARD_BYTES = 2**26
"""UTF-8 bytes of text at which a shard is full."""
FEW = 256
"""Documents up to which `with_tails` holds out their ends, if the split would put all of them on one side."""
_TOGETHER = 512  # documents tokenized in one call


def write_corpus(
    folder: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    split: Callable[[Document], str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int = 1,
    engine: Engine = "local",
    about: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Tokenize ``documents`` into ``folder``, which appears when all is written.

    split: the split of a document, see `held_out`; all are ``train`` by default. workers: processes that tokenize; 1
    does it here, on the tokenizer's own threads. (More of them import the main script: it needs its ``if __name__ ==
    "__main__"``.) engine: "ray" tokenizes on the Ray cluster that RAY_ADDRESS names, or on one that is started here, with as
    many shards at a time as it has CPUs, or ``workers`` if that is more; what a lost node was at work on is done again elsewhere.
    about: noted in the index of each split. progress: called with documents and bytes so far.
    Raises FileExistsError if the folder is there already, SourceError for documents that cannot be read, and
    MisconfigurationError if there are none, or those of one source do not follow one another.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another folder, or delete it first")
    sweep(folder.parent)
    staging = make_staging(folder)
    try:
        tokenizer.save(staging / "tokenizer")
        names: dict[str, list[str]] = {}
        sources: dict[str, dict[str, int]] = {}
        jobs = _jobs(_counted(documents, split, sources), shard_bytes, staging, names, progress)
        if engine == "ray":
            _on_ray(jobs, staging, workers)
        elif workers > 1:
            _in_processes(jobs, staging, workers)
        else:
            for job in jobs:
                _write(tokenizer, *job)
        if not names:
            raise MisconfigurationError(f"no documents to write to {folder}")
        for name, shards in names.items():
            write_index(staging / name, shards, vocabulary=tokenizer.digest, **(about or {}))
            write_unigrams(TokenShards(staging / name), sources[name])
        os.rename(staging, folder)
    except OSError as error:
        if not folder.exists():
            raise
        raise FileExistsError(f"{folder} was made by another process meanwhile") from error
    finally:
        discard(staging)


def held_out(share: float) -> Callable[[Document], str]:
    """Return a function that splits documents: about ``share`` of them are ``val``.

    It goes by text alone: equal texts never lie on both sides.
    """
    if not 0 <= share < 1:
        raise MisconfigurationError(f"held_out is a share in [0, 1), got {share}")

    def split(document: Document) -> str:
        if isinstance(document, Head | Tail):
            return "val" if isinstance(document, Tail) else "train"
        digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
        return "val" if int.from_bytes(digest, "little") < share * 2**64 else "train"

    return split


class Head(Document):
    """The beginning of a document whose end is held out."""


class Tail(Document):
    """The end of a document, held out."""


def with_tails(documents: Iterable[Document], share: float) -> Iterator[Document]:
    """Split off the last ``share`` of each document, if there are few documents.

    There are few if they are under `FEW` and `held_out` would put all on one side. Others pass as they are.
    """
    found, split, sides, first = iter(documents), held_out(share), set[str](), list[Document]()
    for document in found:
        first.append(document)
        sides.add(split(document))
        if len(sides) > 1 or len(first) == FEW:
            break
    if share == 0 or len(sides) > 1 or len(first) == FEW:
        yield from chain(first, found)
        return
    for document in first:
        yield from _cut(document, share)


def _cut(document: Document, share: float) -> Iterator[Document]:
    """Yield both parts of a document, cut at the end of a line if one is near.

    A short document is yielded whole.
    """
    text = document.text
    place = round(len(text) * (1 - share))
    line = text.rfind("\n", place - max(1, round(0.2 * share * len(text))), place) + 1
    place = line or place
    if not 0 < place < len(text):
        yield document
        return
    for kind, part in ((Head, text[:place]), (Tail, text[place:])):
        yield kind(document.id, part, len(part.encode()), document.source)


def documents_of(shards: TokenShards, tokenizer: Tokenizer) -> Iterator[Document]:
    """Decode the texts that shards were made of.

    Raises TokenShardError if ``tokenizer`` is not the one they were made with, or the counts beside them are damaged.
    """
    TokenShards(shards.folder, tokenizer.digest)
    found = read_unigrams(shards) if has_unigrams(shards) else []
    names = chain.from_iterable(repeat(one.source, one.documents) for one in found) if found else repeat("")
    for number, source in zip(range(shards.documents), names, strict=False):
        text = tokenizer.decode(shards.document(number).tolist())
        yield Document(f"{shards.folder}, document {number}", text, len(text.encode()), source)


def retokenize(
    source: str | Path, target: str | Path, tokenizer: Tokenizer, *, workers: int = 1, engine: Engine = "local",
    progress: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Write the same documents, in the same splits, in another tokenizer's tokens.

    Errors are those of `write_corpus`.
    """
    source = Path(source)
    found = shards_in(source)
    before = Tokenizer.load(source / "tokenizer")
    home: dict[str, str] = {}

    def documents() -> Iterator[Document]:
        for name, shards in found.items():
            shards.verify()
            for document in documents_of(shards, before):
                home[document.id] = name
                yield document

    write_corpus(
        target,
        documents(),
        tokenizer,
        split=lambda d: home.pop(d.id),
        workers=workers,
        engine=engine,
        about={"made_of": str(source)},
        progress=progress,
    )


def shards_in(folder: str | Path, reader: BlockReader | None = None) -> dict[str, TokenShards]:
    """Open the splits of a corpus, or the one that ``folder`` is, also at an address.

    An address is read through ``reader``. Raises FileNotFoundError for no corpus.
    """
    if is_address(folder):
        return _shards_at(str(folder).rstrip("/"), reader)
    folder = Path(folder)
    if (folder / INDEX).is_file():
        return {folder.name: TokenShards(folder)}
    found = {name: TokenShards(folder / name) for name in SPLITS if (folder / name).is_dir()}
    if not found:
        raise FileNotFoundError(f"{folder} is not a corpus: it has neither {' nor '.join(SPLITS)}")
    return found


def _shards_at(address: str, reader: BlockReader | None) -> dict[str, TokenShards]:
    assert reader is not None
    found: dict[str, TokenShards] = {}
    for name in SPLITS:
        with suppress(FileNotFoundError):
            found[name] = RemoteTokenShards(f"{address}/{name}", reader)
    if not found:
        try:
            found[address.rpartition("/")[2]] = RemoteTokenShards(address, reader)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{address} is not a corpus: it has neither {' nor '.join(SPLITS)}") from error
    return found


def is_corpus(folder: str | Path) -> bool:
    """Return True if ``folder`` is a corpus by `write_corpus`, or an address.

    An address can be nothing else.
    """
    if is_address(folder):
        return True
    return (Path(folder) / "tokenizer").is_dir() and any((Path(folder) / name / INDEX).is_file() for name in SPLITS)


def corpora_among(sources: Iterable[str]) -> list[Path | str]:
    """List the folders and addresses of those ``sources`` that are corpora."""
    return [source if is_address(source) else Path(source) for source in sources if is_corpus(source)]


def find_split(folder: Path | str, split: str, tokenizer: Tokenizer, reader: BlockReader) -> TokenShards | None:
    """Open one split of a corpus as `open_split` does; None if it has none."""
    if isinstance(folder, Path) and not (folder / split).is_dir():
        return None
    try:
        return open_split(folder, split, tokenizer, reader)
    except FileNotFoundError:
        if isinstance(folder, Path):
            raise
        return None


def open_split(
    folder: str | Path, split: str, tokenizer: Tokenizer | None = None, reader: BlockReader | None = None
) -> TokenShards:
    """Open one split of a corpus; one at an address is read through ``reader``.

    Raises FileNotFoundError if it has none, TokenShardError for another tokenizer's.
    """
    digest = None if tokenizer is None else tokenizer.digest
    if is_address(folder):
        assert reader is not None
        return RemoteTokenShards(f"{str(folder).rstrip('/')}/{split}", reader, digest)
    return TokenShards(Path(folder) / split, digest)


_TOKENIZER_BYTES = 2**28
"""No file of a tokenizer has more bytes."""


def open_tokenizer(folder: str | Path, reader: BlockReader) -> Tokenizer:
    """Load the tokenizer of a corpus, also of one at an address.

    Raises FileNotFoundError if it has none.
    """
    if not is_address(folder):
        return Tokenizer.load(Path(folder) / "tokenizer")
    address = f"{str(folder).rstrip('/')}/tokenizer"
    files = RemoteFiles(address, patience_s=reader.patience_s, request_timeout_s=reader.request_timeout_s)
    with tempfile.TemporaryDirectory() as temporary:
        for name in FILES:
            with suppress(FileNotFoundError):
                (Path(temporary) / name).write_bytes(files.read_whole(name, _TOKENIZER_BYTES))
        if not any(Path(temporary).iterdir()):
            raise FileNotFoundError(f"{folder} is not a corpus: there is no tokenizer at {address}")
        return Tokenizer.load(temporary)


_Texts = list[str | npt.NDArray[Any]]
_Job = tuple[Path, _Texts, int]


def _counted(
    documents: Iterable[Document], split: Callable[[Document], str] | None, sources: dict[str, dict[str, int]]
) -> Iterator[tuple[str, Document]]:
    """Yield each document with its split, counting those of each source in ``sources``."""
    for document in documents:
        name = split(document) if split else SPLITS[0]
        counts = sources.setdefault(name, {})
        if document.source in counts and document.source != next(reversed(counts)):
            raise MisconfigurationError(
                f"{document.id}: a document of source {document.source!r} after those of {next(reversed(counts))!r}; "
                "documents of one source must follow one another"
            )
        counts[document.source] = counts.get(document.source, 0) + 1
        yield name, document


def _jobs(
    documents: Iterable[tuple[str, Document]], shard_bytes: int, folder: Path, names: dict[str, list[str]],
    progress: Callable[[int, int], None] | None,
) -> Iterator[_Job]:  # fmt: skip
    """Yield file, texts and bytes of each shard, adding its name to the split's in ``names``."""
    waiting: dict[str, _Texts] = {}
    sizes: dict[str, int] = {}
    count = total = 0

    def job(name: str) -> _Job:
        shards = names.setdefault(name, [])
        shards.append(f"{len(shards):05d}.tokens")
        (folder / name).mkdir(exist_ok=True)
        return folder / name / shards[-1], waiting.pop(name), sizes.pop(name)

    for name, document in documents:
        waiting.setdefault(name, []).append(document.text if document.ids is None else document.ids)
        sizes[name] = sizes.get(name, 0) + document.bytes
        count, total = count + 1, total + document.bytes
        if sizes[name] >= shard_bytes:
            yield job(name)
            if progress:
                progress(count, total)
    for name in sorted(waiting):
        yield job(name)
    if progress:
        progress(count, total)


def _write(tokenizer: Tokenizer, path: Path, texts: _Texts, text_bytes: int) -> None:
    before = [] if tokenizer.bos in (None, tokenizer.eos) else [tokenizer.bos]
    after = [] if tokenizer.eos is None else [tokenizer.eos]

    def documents() -> Iterator[npt.NDArray[Any]]:
        for first in range(0, len(texts), _TOGETHER):
            part = texts[first : first + _TOGETHER]
            yield from (ids for ids in part if not isinstance(ids, str))  # tokenized already: all of them or none
            for ids in tokenizer.encode_batch([text for text in part if isinstance(text, str)]):
                yield np.concatenate([np.array(before, np.int32), ids, np.array(after, np.int32)])

    write_shard(path, documents(), tokenizer=tokenizer.digest, vocab_size=tokenizer.vocab_size, text_bytes=text_bytes)


_tokenizer: Tokenizer | None = None


def _begin_worker(folder: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = Tokenizer.load(folder)


def _write_in_worker(path: Path, texts: _Texts, text_bytes: int) -> None:
    assert _tokenizer is not None
    _write(_tokenizer, path, texts, text_bytes)


def _in_processes(jobs: Iterator[_Job], staging: Path, workers: int) -> None:
    """Write shards in ``workers`` processes.

    No more shards are read ahead than processes are at work on.
    """
    context = multiprocessing.get_context("spawn")  # threads of libraries do not survive a fork
    running: deque[Future[None]] = deque()
    with ProcessPoolExecutor(workers, context, _begin_worker, (staging / "tokenizer",)) as pool:
        try:
            for job in jobs:
                running.append(pool.submit(_write_in_worker, *job))
                if len(running) > workers:
                    running.popleft().result()
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _on_ray(jobs: Iterator[_Job], staging: Path, workers: int) -> None:
    """Tokenize on a Ray cluster: text goes there, files of shards come back.

    Nodes need no file of this machine.
    """
    files = {path.name: path.read_bytes() for path in (staging / "tokenizer").iterdir()}
    paths: deque[Path] = deque()

    def calls() -> Iterator[tuple[str, _Texts, int]]:
        for path, texts, text_bytes in jobs:
            paths.append(path)
            yield path.name, texts, text_bytes

    for made in on_ray(_files_of_shard, calls(), shared=(files,), together=workers):
        folder = paths.popleft().parent
        for name, content in made.items():
            (folder / name).write_bytes(content)


def _files_of_shard(tokenizer: dict[str, bytes], name: str, texts: _Texts, text_bytes: int) -> dict[str, bytes]:
    """Return the files that `_write` makes of a shard, by name; on whatever node this is."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are the parallelism
    with tempfile.TemporaryDirectory() as folder:
        own, made = Path(folder) / "tokenizer", Path(folder) / "shard"
        own.mkdir()
        made.mkdir()
        for file, content in tokenizer.items():
            (own / file).write_bytes(content)
        _write(Tokenizer.load(own), made / name, texts, text_bytes)
        return {path.name: path.read_bytes() for path in made.iterdir()}
