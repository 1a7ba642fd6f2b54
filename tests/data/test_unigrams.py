"""Counts of tokens by source: those of a plain Counter, beside the shards, refused where they cannot be true."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arclight.data.token_shards import TokenShardError, TokenShards, write_index, write_shard
from arclight.data.unigrams import UNIGRAMS, Unigrams, has_unigrams, merge_counts, read_unigrams, write_unigrams

VOCAB = 23
SOURCES = {"web": 7, "code": 0, "books": 12, "last": 1}


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.zipf(1.5, rng.integers(0, 40)) % VOCAB for _ in range(sum(SOURCES.values()))]


@pytest.fixture
def shards(tmp_path: Path) -> TokenShards:
    """Three shards, whose ends are not those of sources."""
    found = documents()
    for number, part in enumerate((found[:5], found[5:11], found[11:])):
        write_shard(tmp_path / f"{number}.tokens", part, tokenizer="t", vocab_size=VOCAB, text_bytes=1)
    write_index(tmp_path, [f"{number}.tokens" for number in range(3)])
    return TokenShards(tmp_path)


def test_counts_are_those_of_a_plain_counter(shards: TokenShards) -> None:
    assert not has_unigrams(shards)
    with pytest.raises(FileNotFoundError, match="arclight data pack writes it"):
        read_unigrams(shards)
    written = write_unigrams(shards, SOURCES)
    rest, expected = iter(documents()), {}
    for name, number in SOURCES.items():
        expected[name] = Counter(token for _ in range(number) for token in next(rest).tolist())
    for found in (written, read_unigrams(shards)):
        assert [(one.source, one.documents) for one in found] == list(SOURCES.items())
        for one in found:
            assert {token: int(count) for token, count in enumerate(one.counts) if count} == expected[one.source]
            assert one.tokens == expected[one.source].total()
    everything = merge_counts(read_unigrams(shards))
    assert everything.tokens == shards.tokens
    assert everything.documents == shards.documents
    total = sum(expected.values(), Counter())
    entropy = -sum(n / shards.tokens * math.log(n / shards.tokens) for n in total.values())
    assert everything.entropy == pytest.approx(entropy, rel=1e-12)
    assert everything.most_frequent(5) == sorted(total.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert written[1].entropy == 0 == written[1].tokens
    assert written[1].most_frequent(3) == []


def test_the_file_is_laid_out_as_documented(shards: TokenShards) -> None:
    found = write_unigrams(shards, SOURCES)
    magic, line, rest = (shards.folder / UNIGRAMS).read_bytes().split(b"\n", 2)
    assert magic == b"arclight unigrams 1"
    header = json.loads(line)
    body = rest[-8 * VOCAB * len(SOURCES) :]
    assert not rest.removesuffix(body).strip(b" ")
    assert len(magic + line + rest.removesuffix(body)) % 8 == 6  # two ends of lines were split off
    assert header["sha256"] == hashlib.sha256(body).hexdigest()
    assert header["corpus"] == shards.digest
    table = np.frombuffer(body, "<u8").reshape(len(SOURCES), VOCAB)
    assert (table == [one.counts for one in found]).all()


def test_all_documents_are_one_source_unless_named(shards: TokenShards) -> None:
    (only,) = write_unigrams(shards)
    assert (only.source, only.documents, only.tokens) == ("", shards.documents, shards.tokens)
    with pytest.raises(ValueError, match="has 20 documents, not 19"):
        write_unigrams(shards, {"a": 19})


def test_uniform_tokens_have_the_greatest_entropy() -> None:
    assert Unigrams("", 1, np.full(50, 3, np.uint64)).entropy == pytest.approx(math.log(50))
    assert Unigrams("", 1, np.array([0, 9], np.uint64)).entropy == 0


def remade(path: Path, body: bytes | None = None, **changes: Any) -> None:
    """Write the file again with another header, whose digest is right unless it is given."""
    magic, line, rest = path.read_bytes().split(b"\n", 2)
    header = json.loads(line)
    body = rest[-8 * VOCAB * len(header["sources"]) :] if body is None else body
    line = json.dumps({**header, "sha256": hashlib.sha256(body).hexdigest(), **changes}).encode() + b"\n"
    start = magic + b"\n" + line
    path.write_bytes(start + b" " * (-len(start) % 8) + body)


SOURCE = {"name": "a", "documents": 20, "tokens": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**40}, "vocab_size 1099511627776"),
        ({"vocab_size": -1}, "vocab_size -1"),
        ({"vocab_size": True}, "vocab_size True"),
        ({"vocab_size": 2**32}, "bytes, by its header"),
        ({"vocab_size": VOCAB + 1}, "bytes, by its header"),
        ({"corpus": "0" * 64}, "made of other shards"),
        ({"corpus": 5}, "is not a digest"),
        ({"sha256": "0" * 64}, "damaged"),
        ({"sources": [SOURCE, SOURCE]}, "two sources have one name"),
        ({"sources": [{**SOURCE, "name": 3}]}, "a source is called 3"),
        ({"sources": [{**SOURCE, "documents": -3}]}, "has -3 documents"),
        ({"sources": [{**SOURCE, "tokens": 2**60}]}, "documents or tokens"),
        ({"sources": [{**SOURCE, "tokens": 1.5}]}, "has 1.5 documents"),
        ({"sources": [SOURCE]}, "not those of 1 tokens"),
        ({"sources": "web"}, "holds no counts"),
        ({"sources": None}, "holds no counts"),
    ],
)
def test_headers_that_cannot_be_true_are_refused(shards: TokenShards, changes: dict[str, Any], message: str) -> None:
    write_unigrams(shards)
    remade(shards.folder / UNIGRAMS, **changes)
    with pytest.raises(TokenShardError, match=message) as raised:
        read_unigrams(shards)
    assert UNIGRAMS in str(raised.value)


def test_counts_that_cannot_be_true_are_refused(shards: TokenShards) -> None:
    path = shards.folder / UNIGRAMS
    (whole_,) = write_unigrams(shards)
    counts = whole_.counts.astype("<u8")
    huge = counts.copy()
    huge[:2] = 2**63  # the sum of which is 0 in 64 bits
    for body in (huge, counts + np.uint64(1)):
        write_unigrams(shards)
        remade(path, body.tobytes())
        with pytest.raises(TokenShardError, match="are not those of"):
            read_unigrams(shards)
    write_unigrams(shards)
    more = counts + np.uint64(1)
    entry = {"name": "", "documents": 20, "tokens": int(more.sum())}
    for sources, message in (([entry], "are not those|tokens, of"), ([{**SOURCE, "documents": 3}], "documents, of")):
        body = more if message.startswith("are") else counts
        remade(path, body.tobytes(), sources=[{**sources[0], "tokens": int(body.sum())}])
        with pytest.raises(TokenShardError, match=message):
            read_unigrams(shards)


def test_files_that_were_cut_or_changed_are_refused(shards: TokenShards) -> None:
    write_unigrams(shards, SOURCES)
    path = shards.folder / UNIGRAMS
    content = path.read_bytes()
    for size in (0, 5, 19, 20, 60, len(content) - 8 * VOCAB, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(TokenShardError, match=UNIGRAMS):
            read_unigrams(shards)
    path.write_bytes(content + b"\0")
    with pytest.raises(TokenShardError, match="by its header"):
        read_unigrams(shards)
    for at in (25, len(content) - 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(TokenShardError, match=UNIGRAMS):
            read_unigrams(shards)
    path.write_bytes(content.replace(b"\n{", b"\n" + b"[" * 100_000, 1))
    with pytest.raises(TokenShardError, match="holds no counts"):
        read_unigrams(shards)


def test_tokens_outside_the_vocabulary_are_refused(shards: TokenShards) -> None:
    path = shards.folder / "1.tokens"
    content = bytearray(path.read_bytes())
    content[4096:4098] = (VOCAB + 4).to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(TokenShardError, match="has token 27, beyond its vocabulary of 23"):
        write_unigrams(shards)
    assert not has_unigrams(shards)
