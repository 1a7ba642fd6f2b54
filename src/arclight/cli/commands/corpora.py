"""Write and summarise token shards: ``arclight data tokenize|pack|inspect|retokenize``.

`tokenize` reads text, or with ``--ids`` rows that hold token ids; `inspect` writes nothing but the digests of ``--sums``. `commands.data` adds
these verbs by `add_verbs`, and calls `show_corpus` for ``arclight data sets``. ``data.token_shards``, ``data.packing`` and ``text.data`` do the
work; here are flags and what is printed. Verbs, flags and the keys of ``--json`` are public and stay.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arclight.data.remote.block_reader import BlockReader
    from arclight.text.data.tokenizer import Tokenizer


def add_verbs(verbs: Any) -> None:
    """Add the verbs for text to those of ``arclight data``."""
    verb = verbs.add_parser("tokenize", help="tokenize text into shards")
    verb.add_argument("sources", nargs="+", metavar="SOURCE", help='"stdlib", or files and folders of text')
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    _add_tokenizer(verb)
    verb.add_argument("--field", default="text", help="column of a row with the text (default: %(default)s)")
    verb.add_argument(
        "--ids", action="store_true", help="the column holds ids of --tokenizer (MDS folders): take them as they are"
    )
    verb.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fraction of the documents for the validation split",
    )
    verb.add_argument("--shard-bytes", type=int, default=2**26, metavar="N", help="bytes of text per shard")
    verb.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes")
    _add_engine(verb)
    verb.set_defaults(run=tokenize)

    verb = verbs.add_parser("retokenize", help="convert shards from one tokenizer to another")
    verb.add_argument("source", type=Path, metavar="CORPUS")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    _add_tokenizer(verb)
    verb.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes")
    _add_engine(verb)
    verb.set_defaults(run=retokenize)

    verb = verbs.add_parser("pack", help="pack whole documents into samples of one length")
    verb.add_argument("corpus", type=Path)
    verb.add_argument("--length", type=int, required=True, metavar="N", help="tokens per sample")
    _add_engine(verb)
    verb.set_defaults(run=pack)

    verb = verbs.add_parser("inspect", help="summarise shards; status 1 if --verify finds damage")
    verb.add_argument("corpus", metavar="CORPUS", help="a folder, or an address such as s3://bucket/corpus")
    verb.add_argument("--verify", action="store_true", help="read and verify every byte")
    verb.add_argument(
        "--sums", action="store_true", help="write the digests of blocks that a corpus of an older version lacks"
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=inspect)


def _add_engine(verb: Any) -> None:
    verb.add_argument(
        "--engine", choices=("local", "ray"), default="local",
        help="ray: on the Ray cluster of RAY_ADDRESS, else one started here; what is written is the same (default: %(default)s)",
    )  # fmt: skip


def show_corpus(options: Namespace) -> int:
    """Print the description of a public corpus, and the commands that fetch and tokenize it."""
    from arclight.cli.arguments import UsageError
    from arclight.text.data.public_corpora import find_public_corpus

    corpus = find_public_corpus(options.name)
    if options.data_yaml is not None:
        raise UsageError(f"--data-yaml: {corpus.name} is text; data.yaml is of image sets")
    print(f"{corpus.name}: {corpus.about}; {corpus.page}")
    print(f"licence: {corpus.licence}")
    print(
        ", ".join(
            [corpus.size or "size not published", *(f"{part}: {n:,} documents" for part, n in corpus.documents.items())]
        )
    )
    print(f"columns: {', '.join(corpus.columns)}; files: {', '.join(corpus.files)}")
    print("checksums: SHA-256 of each file, in the Git LFS pointers of the repository")
    print("\nNothing is fetched. Check the licence of the corpus, then run (needs git-lfs):\n")
    print("\n".join(f"    {command}" for command in corpus.fetch_step()))
    if corpus.sources:
        print("\nand tokenize it:\n")
        print("\n".join(f"    {command}" for command in corpus.tokenize_step()))
    print(f"\n{corpus.then}")
    return 0


def _add_tokenizer(verb: Any) -> None:
    verb.add_argument(
        "--tokenizer",
        default="bpe",
        help='"bytes", "bpe" to train one, or a folder or tokenizer.json (default: %(default)s)',
    )
    verb.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help="vocabulary of a trained tokenizer (default: %(default)s)",
    )


def tokenize(options: Namespace) -> int:
    from functools import partial
    from itertools import chain

    from arclight.cli.arguments import UsageError
    from arclight.text.data.corpus import held_out, write_corpus
    from arclight.text.data.sources import documents, token_documents

    given = options.sources
    names = [
        name if name not in given[:at] else f"{name} ({given[: at + 1].count(name)})" for at, name in enumerate(given)
    ]

    if options.ids and options.tokenizer == "bpe":
        raise UsageError("--ids: give the tokenizer that the ids are of, as --tokenizer FOLDER")
    one_source = partial(token_documents, tokenizer=_tokenizer(options, ())) if options.ids else documents

    def read() -> Any:
        return chain.from_iterable(
            (document._replace(source=name) for document in one_source(source, options.field))
            for name, source in zip(names, given, strict=True)
        )

    started, split = time.monotonic(), held_out(options.held_out)
    _refuse_existing(options.out)
    tokenizer = _tokenizer(options, (document.text for document in read() if split(document) == "train"))
    _write(
        write_corpus, options.out, read(), tokenizer, split=split, shard_bytes=options.shard_bytes,
        workers=options.workers, engine=options.engine, about={"sources": given},
    )  # fmt: skip
    return _report(options.out, started)


def retokenize(options: Namespace) -> int:
    from arclight.text.data.corpus import documents_of, retokenize, shards_in
    from arclight.text.data.tokenizer import Tokenizer

    started = time.monotonic()
    _refuse_existing(options.out)
    before = Tokenizer.load(options.source / "tokenizer")
    first = next(iter(shards_in(options.source).values()))
    tokenizer = _tokenizer(options, (document.text for document in documents_of(first, before)))
    _write(retokenize, options.source, options.out, tokenizer, workers=options.workers, engine=options.engine)
    return _report(options.out, started)


def pack(options: Namespace) -> int:
    from arclight.cli.arguments import UsageError
    from arclight.data.packing import Packed
    from arclight.data.unigrams import has_unigrams, write_unigrams
    from arclight.text.data.corpus import shards_in

    if options.length < 1:
        raise UsageError(f"--length {options.length}: a sample has 1 token or more")
    for split, shards in shards_in(options.corpus).items():
        if not has_unigrams(shards):  # a corpus of an older version
            write_unigrams(shards)
        packed = Packed.build(shards, options.length, options.engine)
        print(f"{split}: {shards.documents:,} documents in {len(packed):,} samples, {packed.padding:.2%} padding")
    return 0


def inspect(options: Namespace) -> int:
    from arclight.cli.arguments import UsageError
    from arclight.data.remote.ranges import is_address
    from arclight.data.token_shards import TokenShardError, write_sums
    from arclight.text.data.corpus import shards_in

    if options.sums and is_address(options.corpus):
        raise UsageError(
            f"--sums: {options.corpus} is an address, where nothing is written; write them where the corpus lies"
        )
    problems = []
    with _reader(options.corpus) as reader:
        found = shards_in(options.corpus, reader)
        if options.sums:
            for shards in found.values():
                write_sums(shards.folder)
        facts = {split: _facts(shards) for split, shards in found.items()}
        names = _token_names(options.corpus, reader)
        counted = {split: _counted(shards, names) for split, shards in found.items()}
        for shards in found.values() if options.verify else ():
            try:
                shards.verify(again=True)
            except TokenShardError as error:
                problems.append(str(error))
    if options.json:
        splits = {split: {**known, "unigrams": counted[split]} for split, known in facts.items()}
        print(json.dumps({"splits": splits} | ({"problems": problems} if options.verify else {}), indent=2))
    else:
        _show(options.corpus, facts)
        _show_counts(counted)
        print("\n".join(problems) if problems else "every byte is what was written" if options.verify else "", end="")
        print("\n" if options.verify else "", end="")
    return 1 if problems else 0


def _facts(shards: Any) -> dict[str, Any]:
    from arclight.data.packing import Packed

    lengths = sorted(int(path.name.removeprefix("packed-")) for path in shards.folder.glob("packed-*"))
    packed = {length: Packed(shards, length) for length in lengths}
    return {
        "documents": shards.documents,
        "tokens": shards.tokens,
        "text_bytes": shards.text_bytes,
        "bytes_per_token": round(shards.text_bytes / shards.tokens, 4) if shards.tokens else None,
        "longest": shards.longest,
        "mean_length": round(shards.tokens / shards.documents, 1) if shards.documents else None,
        "vocab_size": shards.vocab_size,
        "vocabulary": shards.facts[0].tokenizer if shards.facts else None,
        "shards": len(shards.names),
        "digest": shards.digest,
        "packed": {str(n): {"samples": len(p), "padding": round(p.padding, 6)} for n, p in packed.items()},
    }


_MAX_FREQUENT = 8  # tokens that are shown of a source


@contextmanager
def _reader(corpus: str) -> Iterator[BlockReader | None]:
    """Open a reader for a corpus at an address, with a temporary cache; None for one on disk."""
    from arclight.data.remote.block_reader import BlockReader
    from arclight.data.remote.ranges import is_address

    if not is_address(corpus):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, closing(BlockReader(Path(folder), 2**28)) as reader:
        yield reader


def _token_names(corpus: str, reader: BlockReader | None) -> list[str]:
    """Return the token names of a corpus or its split; empty if the tokenizer is missing."""
    from arclight.text.data.corpus import open_tokenizer
    from arclight.text.data.tokenizer import Tokenizer

    if reader is not None:
        for address in (corpus.rstrip("/"), corpus.rstrip("/").rpartition("/")[0]):
            with suppress(FileNotFoundError):
                return open_tokenizer(address, reader).names
        return []
    for place in (Path(corpus), Path(corpus).parent):
        if (place / "tokenizer").is_dir():
            return Tokenizer.load(place / "tokenizer").names
    return []


def _counted(shards: Any, names: list[str]) -> dict[str, Any] | None:
    """Return the token frequencies by source; None for a corpus of an older version."""
    from arclight.data.unigrams import merge_counts, read_unigrams

    try:
        sources = read_unigrams(shards)
    except FileNotFoundError:
        return None
    return {
        "entropy": round(merge_counts(sources).entropy, 6),
        "sources": {
            one.source: {
                "documents": one.documents,
                "tokens": one.tokens,
                "entropy": round(one.entropy, 6),
                "most_frequent": [
                    {"id": token, "token": names[token] if token < len(names) else None, "count": count}
                    for token, count in one.most_frequent(_MAX_FREQUENT)
                ],
            }
            for one in sources
        },
    }


_ROWS = {
    "documents": "documents", "tokens": "tokens", "text_bytes": "bytes of text", "bytes_per_token": "bytes per token",
    "longest": "longest document", "mean_length": "mean document", "vocab_size": "vocabulary", "shards": "shards",
}  # fmt: skip


def _show(folder: Path | str, facts: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from arclight.cli.style import console_of

    table = Table(title=str(folder), title_justify="left")
    table.add_column()
    for split in facts:
        table.add_column(split, justify="right")
    for key, title in _ROWS.items():
        values = [found[key] for found in facts.values()]
        table.add_row(title, *("-" if value is None else f"{value:,}" for value in values))
    for length in sorted({length for found in facts.values() for length in found["packed"]}, key=int):
        packed = [found["packed"].get(length) for found in facts.values()]
        table.add_row(f"padding, packed for {length}", *("-" if p is None else f"{p['padding']:.2%}" for p in packed))
    console_of().print(table)


def _show_counts(counted: dict[str, dict[str, Any] | None]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from arclight.cli.style import console_of

    table = Table(title="tokens, entropy in nats per token", title_justify="left")
    for title in ("split", "source", "tokens", "entropy", "most frequent"):
        table.add_column(title, justify="right" if title in ("tokens", "entropy") else "left")
    for split, found in counted.items():
        for name, one in found["sources"].items() if found else ():
            frequent = " ".join(repr(entry["token"] or entry["id"]) for entry in one["most_frequent"])
            table.add_row(split, escape(name or "all"), f"{one['tokens']:,}", f"{one['entropy']:.4f}", escape(frequent))
    if table.row_count:
        console_of().print(table)


def _tokenizer(options: Namespace, texts: Any) -> Tokenizer:
    from arclight.text.data.tokenizer import ByteTokenizer, Tokenizer

    if options.tokenizer == "bytes":
        return ByteTokenizer()
    return (
        Tokenizer.train(texts, options.vocab_size) if options.tokenizer == "bpe" else Tokenizer.load(options.tokenizer)
    )


def _refuse_existing(folder: Path) -> None:
    """Refuse an existing folder before anything is read, which may take long."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another folder, or delete it first")


def _write(function: Any, *arguments: Any, **options: Any) -> None:
    """Call what writes a corpus, and show how far it is."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("tokenizing"), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("", done="", total=None)

        def show(documents: int, size: int) -> None:
            progress.update(bar, done=f"{documents:,} documents, {size / 2**20:,.0f} MiB")

        function(*arguments, progress=show, **options)


def _report(folder: Path, started: float) -> int:
    from arclight.text.data.corpus import shards_in

    found, seconds = shards_in(folder), time.monotonic() - started
    tokens = sum(shards.tokens for shards in found.values())
    _show(folder, {split: _facts(shards) for split, shards in found.items()})
    print(f"{tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} per second): {folder}")
    return 0
