"""Token shards: what is read is what was written, and damage is named before it reaches a model."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.data import TokenShards
from arclight.data.token_shards import TokenShardError, write_index, write_shard

documents_of_shards = st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=1, max_size=5)


def corpus(folder: Path, shards: list[list[int]], vocab_size: int = 70_000, **about: object) -> TokenShards:
    """Documents of the given lengths, with running numbers as tokens."""
    folder.mkdir(exist_ok=True)
    token, names = 0, []
    for number, lengths in enumerate(shards):
        names.append(f"{number}.tokens")
        documents = []
        for length in lengths:
            documents.append(np.arange(token, token + length))
            token += length
        write_shard(folder / names[-1], documents, tokenizer="abc", vocab_size=vocab_size, text_bytes=3 * sum(lengths))
    write_index(folder, names, **about)
    return TokenShards(folder)


@given(shards=documents_of_shards, data=st.data())
@settings(max_examples=25, deadline=None)
def test_several_shards_read_as_one_stream(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], data: st.DataObject
) -> None:
    made = corpus(tmp_path_factory.mktemp("corpus"), shards)
    lengths = [length for shard in shards for length in shard]
    total = sum(lengths)
    assert (made.tokens, made.documents, made.longest) == (total, len(lengths), max(lengths, default=0))
    ends = np.cumsum(lengths).tolist()
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert made.read(start, stop).tolist() == list(range(start, stop))
    assert made.ends().tolist() == ends
    assert made.boundaries(start, stop).tolist() == [end for end in ends if start < end < stop]
    for number, length in enumerate(lengths):
        assert made.document(number).tolist() == list(range(ends[number] - length, ends[number]))


def test_a_shard_of_empty_documents_has_boundaries_like_any_other(tmp_path: Path) -> None:
    for number, shards in enumerate(([[2, 0], [1]], [[2], [0], [1]], [[2], [0], [], [1]])):
        assert corpus(tmp_path / str(number), shards).boundaries(0, 3).tolist() == [2, 2]


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(65_536, 2), (65_537, 4)])
def test_ids_take_two_bytes_where_they_can(tmp_path: Path, vocab_size: int, bytes_each: int) -> None:
    made = corpus(tmp_path / "c", [[1000]], vocab_size)
    assert made.read(0, 1000).itemsize == bytes_each
    assert (tmp_path / "c" / "0.tokens").stat().st_size == 4096 + 1000 * bytes_each + 8


def test_an_id_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"document 1 of x has token ids outside 0\.\.9"):
        write_shard(tmp_path / "x", [[9], [10]], tokenizer="", vocab_size=10, text_bytes=0)
    assert not list(tmp_path.iterdir())


def test_a_shard_cut_short_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    corpus(tmp_path, [[50], [60]])
    os.truncate(tmp_path / "1.tokens", 4200)
    with pytest.raises(TokenShardError, match=r"1\.tokens is cut short: 4,200 bytes.*tokenize again"):
        TokenShards(tmp_path)
    (tmp_path / "1.tokens").write_bytes(b"other")
    with pytest.raises(TokenShardError, match=r"1\.tokens has no readable header"):
        TokenShards(tmp_path)
    (tmp_path / "1.tokens").unlink()
    with pytest.raises(TokenShardError, match=r"1\.tokens is missing"):
        TokenShards(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder of token shards"):
        TokenShards(tmp_path / "elsewhere")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)


def test_one_changed_bit_is_found(tmp_path: Path) -> None:
    corpus(tmp_path, [[50], [60]])
    TokenShards(tmp_path).verify()
    flip(tmp_path / "1.tokens")
    with pytest.raises(TokenShardError, match=r"1\.tokens is damaged"):
        TokenShards(tmp_path).verify()


def test_files_are_read_again_only_where_they_changed(tmp_path: Path) -> None:
    """A stamp stands for the bytes until the file changes; asked to check again, nothing is taken on trust."""
    made = corpus(tmp_path, [[50]])
    path = tmp_path / "0.tokens"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(4100)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    made.verify()
    with pytest.raises(TokenShardError, match="damaged"):
        made.verify(again=True)


def test_a_shard_of_another_corpus_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "a", [[50]])
    corpus(tmp_path / "b", [[49, 1]])
    os.replace(tmp_path / "a" / "0.tokens", tmp_path / "b" / "0.tokens")
    with pytest.raises(TokenShardError):
        TokenShards(tmp_path / "b")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path, [[50]])
    assert TokenShards(tmp_path, "abc").tokens == 50
    with pytest.raises(TokenShardError, match=r"made with another tokenizer.*retokenize"):
        TokenShards(tmp_path, "xyz")


def test_the_digest_depends_on_tokens_and_documents(tmp_path: Path) -> None:
    one, same, other = (
        corpus(tmp_path / name, [lengths]) for name, lengths in {"a": [3, 4], "b": [3, 4], "c": [4, 3]}.items()
    )
    assert one.digest == same.digest != other.digest
    content = (tmp_path / "a" / "0.tokens").read_bytes()[4096:]
    assert one.facts[0].sha256 == hashlib.sha256(content).hexdigest()


def test_other_processes_map_the_files_themselves(tmp_path: Path) -> None:
    made = corpus(tmp_path, [[50]], source="here")
    made.read(0, 50)
    twin = pickle.loads(pickle.dumps(made))
    assert len(pickle.dumps(made)) < 2000
    assert twin.read(10, 12).tolist() == [10, 11]
    assert twin.about["source"] == "here"
