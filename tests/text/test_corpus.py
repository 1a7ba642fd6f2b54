"""Corpora: what goes in comes out, the same for any number of processes, or nothing is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arclight.data.unigrams import read_unigrams
from arclight.fabric.errors import MisconfigurationError
from arclight.text import ByteTokenizer, Tokenizer
from arclight.text.data.corpus import documents_of, held_out, open_split, retokenize, write_corpus
from arclight.text.data.sources import Document, SourceError

pytest.importorskip("tokenizers")

TEXTS = [f"document {number}: " + "naïve 東京 " * (number % 7) for number in range(60)] + ["", "x"]
DOCUMENTS = [Document(str(number), text, len(text.encode())) for number, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


def read(folder: Path, split: str = "train") -> list[str]:
    tokenizer = Tokenizer.load(folder / "tokenizer")
    return [document.text for document in documents_of(open_split(folder, split), tokenizer)]


def test_documents_come_back_with_their_marks(tmp_path: Path, bpe: Tokenizer) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS, bpe, shard_bytes=500, about={"note": "here"})
    shards = open_split(tmp_path / "c", "train", bpe)
    assert read(tmp_path / "c") == TEXTS
    assert len(shards.names) > 3
    assert shards.text_bytes == sum(document.bytes for document in DOCUMENTS)
    assert shards.about["note"] == "here"
    assert shards.document(60).tolist() == [bpe.bos, bpe.eos]
    with pytest.raises(FileExistsError, match="exists already"):
        write_corpus(tmp_path / "c", DOCUMENTS, bpe)


def test_the_number_of_processes_changes_nothing(tmp_path: Path, bpe: Tokenizer) -> None:
    for workers in (1, 2):
        write_corpus(tmp_path / str(workers), DOCUMENTS, bpe, shard_bytes=700, workers=workers, split=held_out(0.3))
    for split in ("train", "val"):
        one, two = (open_split(tmp_path / str(workers), split) for workers in (1, 2))
        assert one.digest == two.digest
        assert one.names == two.names


def test_equal_texts_are_held_out_together() -> None:
    split = held_out(0.25)
    assert all(split(document) == split(document._replace(id="elsewhere")) for document in DOCUMENTS)
    many = [split(Document("", str(number), 0)) for number in range(4000)]
    assert 900 < many.count("val") < 1100
    assert {held_out(0.0)(document) for document in DOCUMENTS} == {"train"}


def test_every_document_is_in_one_split(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS, ByteTokenizer(), split=held_out(0.3))
    train, val = read(tmp_path / "c"), read(tmp_path / "c", "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert 5 < len(val) < 35
    assert [text for text in TEXTS if text in set(val)] == val


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_source_that_fails_leaves_nothing(tmp_path: Path, workers: int) -> None:
    def failing() -> Iterator[Document]:
        yield from DOCUMENTS
        raise SourceError("line 3 is bad")

    with pytest.raises(SourceError, match="line 3"):
        write_corpus(tmp_path / "c", failing(), ByteTokenizer(), shard_bytes=100, workers=workers)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no documents"):
        write_corpus(tmp_path / "c", [], ByteTokenizer())


def test_from_one_tokenizer_to_another(tmp_path: Path, bpe: Tokenizer) -> None:
    write_corpus(tmp_path / "bytes", DOCUMENTS, ByteTokenizer(), split=held_out(0.3))
    retokenize(tmp_path / "bytes", tmp_path / "bpe", bpe)
    write_corpus(tmp_path / "direct", DOCUMENTS, bpe, split=held_out(0.3))
    for split in ("train", "val"):
        assert open_split(tmp_path / "bpe", split, bpe).digest == open_split(tmp_path / "direct", split).digest
    with pytest.raises(FileNotFoundError, match="is not a corpus"):
        retokenize(tmp_path, tmp_path / "x", bpe)


def counted(folder: Path, split: str) -> dict[str, tuple[int, list[int]]]:
    return {one.source: (one.documents, one.counts.tolist()) for one in read_unigrams(open_split(folder, split))}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_counted_by_source(tmp_path: Path, bpe: Tokenizer, workers: int) -> None:
    named = [d._replace(source="first" if number < 23 else "second") for number, d in enumerate(DOCUMENTS)]
    write_corpus(tmp_path / "c", named, bpe, shard_bytes=700, workers=workers, split=held_out(0.3))
    split, expected = held_out(0.3), {}
    for document in named:
        documents, counts = expected.setdefault(split(document), {}).get(document.source, (0, [0] * bpe.vocab_size))
        for token in [bpe.bos, *bpe.encode(document.text), bpe.eos]:
            counts[token] += 1
        expected[split(document)][document.source] = (documents + 1, counts)
    assert {name: counted(tmp_path / "c", name) for name in ("train", "val")} == expected
    retokenize(tmp_path / "c", tmp_path / "again", bpe)
    assert {name: counted(tmp_path / "again", name) for name in ("train", "val")} == expected


def test_sources_that_alternate_are_refused(tmp_path: Path) -> None:
    mixed = [document._replace(source="ab"[number % 2]) for number, document in enumerate(DOCUMENTS)]
    with pytest.raises(MisconfigurationError, match=r"^2: a document of source 'a' after those of 'b'"):
        write_corpus(tmp_path / "c", mixed, ByteTokenizer())
    assert not list(tmp_path.iterdir())
