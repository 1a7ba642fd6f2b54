"""Samples from shards: nothing lost, nothing twice, nothing learned across documents."""

from __future__ import annotations

import os
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from arclight.data import ResumableLoader, TokenShards
from arclight.data.computed_order import EpochOrder
from arclight.data.fetching import identity
from arclight.data.packing import Packed, Windows
from arclight.data.token_samples import IGNORED, TokenSamples
from arclight.data.token_shards import TokenShardError, write_index, write_shard

VOCABULARY = 1000
BYTES = np.arange(VOCABULARY, dtype=np.int32) % 7
lengths_of_shards = st.lists(st.lists(st.integers(0, 25), max_size=6), min_size=1, max_size=4)


def corpus(folder: Path, shards: list[list[int]]) -> tuple[TokenShards, list[list[int]]]:
    """A corpus of documents of these lengths, in which every token is another; and its documents."""
    documents, token, names = [], 1, []
    for number, lengths in enumerate(shards):
        mine = []
        for length in lengths:
            mine.append(list(range(token, token + length)))
            token += length
        documents += mine
        names.append(f"{number}.tokens")
        write_shard(folder / names[-1], mine, tokenizer="t", vocab_size=VOCABULARY, text_bytes=0)
    write_index(folder, names)
    return TokenShards(folder), documents


def naive(rows: list[list[tuple[int, int]]], documents: list[list[int]], length: int, masked: bool) -> dict[str, list]:
    """One token at a time: rows of (input, label) pairs to batch, from which document each token is found by search."""
    home = {token: number for number, document in enumerate(documents) for token in document}
    out: dict[str, list] = {name: [] for name in ("tokens", "labels", "positions", "documents", "bytes")}
    for row in rows:
        tokens, labels, positions, numbers, count = [], [], [], [], 0
        number, position, before = -1, 0, None
        for token, label in row:
            same = before is not None and home[token] == home[before] and token == before + 1
            number, position = (number, position + 1) if same else (number + 1, 0)
            crossing = masked and home[token] != home[label]
            tokens.append(token)
            labels.append(IGNORED if crossing else label)
            positions.append(position)
            numbers.append(number)
            count += 0 if crossing else int(BYTES[label])
            before = token
        for place in range(length - len(row)):
            tokens.append(0)
            labels.append(IGNORED)
            positions.append(place)
            numbers.append(number + 1)
        for name, value in zip(out, (tokens, labels, positions, numbers, count), strict=True):
            out[name].append(value)
    return out


@given(shards=lengths_of_shards, length=st.integers(1, 12), masked=st.booleans())
@settings(max_examples=40, deadline=None)
def test_windows_predict_every_token_once(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], length: int, masked: bool
) -> None:
    made, documents = corpus(tmp_path_factory.mktemp("c"), shards)
    stream = [token for document in documents for token in document]
    samples = TokenSamples([Windows(made, length)], BYTES, mask_documents=masked)
    pairs = list(pairwise(stream))
    rows = [pairs[start : start + length] for start in range(0, len(pairs), length)]
    assert len(samples) == len(rows)
    batch = samples.__getitems__(list(range(len(rows))))
    expected = naive(rows, documents, length, masked)
    assert set(batch) == set(expected) - (set() if masked else {"positions", "documents"})
    for name, values in batch.items():
        assert values.dtype == torch.int64
        assert values.tolist() == expected[name], name


@given(shards=lengths_of_shards, length=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_packed_documents_are_whole(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], length: int
) -> None:
    made, documents = corpus(tmp_path_factory.mktemp("c"), shards)
    if not any(len(document) > 1 for document in documents):
        with pytest.raises(TokenShardError, match="nothing to pack"):
            Packed.build(made, length)
        return
    packed = Packed.build(made, length)
    stream = [token for document in documents for token in document]
    home = {token: number for number, document in enumerate(documents) for token in document}
    rows = [
        [(stream[i], stream[i + 1]) for start, size in packed.pieces(number) for i in range(start, start + size)]
        for number in range(len(packed))
    ]
    assert all(0 < len(row) <= length for row in rows)
    found = sorted(pair for row in rows for pair in row)
    assert found == sorted(pair for d in documents for pair in pairwise(d))
    for number in range(len(packed)):  # a document is cut only where it has to be, every `length` tokens
        for start, size in packed.pieces(number):
            document = documents[home[stream[start]]]
            assert (stream[start] - document[0]) % length == 0
            assert size == min(length, document[-1] - stream[start])
    batch = TokenSamples([packed], BYTES).__getitems__(list(range(len(packed))))
    expected = naive(rows, documents, length, True)
    assert {name: values.tolist() for name, values in batch.items()} == expected
    assert packed.padding == pytest.approx(float((batch["labels"] == IGNORED).double().mean()))


def test_best_fit_leaves_little_room(tmp_path: Path) -> None:
    """Any two samples together hold more than one; no more of them than Johnson's bound for best fit (1973) allows."""
    lengths = np.random.default_rng(0).integers(2, 60, 400).tolist()
    write_shard(tmp_path / "s", [np.zeros(n, int) for n in lengths], tokenizer="", vocab_size=VOCABULARY, text_bytes=0)
    write_index(tmp_path, ["s"])
    packed = Packed.build(TokenShards(tmp_path), 64)
    sizes = sorted(sum(size for _, size in packed.pieces(n)) for n in range(len(packed)))
    assert sizes[0] + sizes[1] > 64
    fewest = max(-(-sum(n - 1 for n in lengths) // 64), sum(n - 1 > 32 for n in lengths))
    assert len(packed) <= 11 / 9 * fewest + 1


def test_a_sample_of_padding_counts_for_nothing(tmp_path: Path) -> None:
    made, _ = corpus(tmp_path, [[10]])
    batch = TokenSamples([Windows(made, 4)], BYTES, pad=7).__getitems__([-1])
    assert batch["tokens"].tolist() == [[7] * 4]
    assert batch["labels"].tolist() == [[IGNORED] * 4]
    assert batch["bytes"].tolist() == [0]
    assert batch["positions"].tolist() == [[0, 1, 2, 3]]


def test_packed_data_is_reused_until_the_shards_change(tmp_path: Path) -> None:
    made, _ = corpus(tmp_path, [[5, 9], [3]])
    with pytest.raises(FileNotFoundError, match="arclight data pack"):
        Packed(made, 4)
    built = Packed.build(made, 4)
    twin = pickle.loads(pickle.dumps(built))
    assert [twin.pieces(n) for n in range(len(twin))] == [built.pieces(n) for n in range(len(built))]
    other, _ = corpus(tmp_path, [[6, 9], [3]])
    with pytest.raises(TokenShardError, match="of other shards"):
        Packed(other, 4)
    assert len(Packed.build(other, 4)) == 4
    assert not list(tmp_path.glob(".packed*"))


def test_two_processes_that_pack_at_once_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = corpus(tmp_path, [[9, 3, 3]])
    rename, waiting = os.rename, [True]

    def late(source: Path, target: Path) -> None:
        if waiting:
            waiting.clear()
            rename(shutil.copytree(source, tmp_path / "other"), target)  # the other process is quicker
        rename(source, target)

    monkeypatch.setattr("arclight.data.packing.os.rename", late)
    assert len(Packed.build(made, 4)) == len(Packed(made, 4))
    assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []


def test_groups_of_documents_pack_as_one_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, documents = corpus(tmp_path, [[5, 9, 1], [3, 12, 7, 7]])
    monkeypatch.setattr("arclight.data.packing._GROUP", 2)
    packed = Packed.build(made, 4)
    covered = sorted(
        i for n in range(len(packed)) for start, size in packed.pieces(n) for i in range(start, start + size)
    )
    assert covered == [i for i in range(sum(map(len, documents))) if i + 1 not in np.cumsum([*map(len, documents)])]


def test_parts_of_different_lengths_do_not_mix(tmp_path: Path) -> None:
    made, _ = corpus(tmp_path, [[30]])
    with pytest.raises(ValueError, match=r"one length, got \[4, 5\]"):
        TokenSamples([Windows(made, 4), Windows(made, 5)], BYTES)


@pytest.mark.parametrize("workers", [0, 2])
def test_through_a_loader_every_byte_is_counted_once(tmp_path: Path, workers: int) -> None:
    made, documents = corpus(tmp_path, [[5, 9, 1], [3, 12, 7, 7]])
    samples = TokenSamples([Windows(made, 4)], BYTES)
    loader = DataLoader(samples, 3, sampler=EpochOrder(len(samples)), collate_fn=identity, num_workers=workers)
    ranks = [ResumableLoader(loader, seed=1, rank=rank, world_size=2) for rank in range(2)]
    batches = [batch for rank in ranks for batch in rank.batches(0)]
    assert {batch["tokens"].shape for batch in batches} == {(3, 4)}
    expected = sum(int(BYTES[token]) for document in documents for token in document[1:])
    assert sum(int(batch["bytes"].sum()) for batch in batches) == expected
