"""``arclight data`` for text: what a person types, what is there afterwards, what is said when it cannot be done."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from arclight.cli import main
from arclight.text.data.corpus import shards_in

pytest.importorskip("tokenizers")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"Document {number} says {number * 37} things. " * (1 + number % 6))
    return folder


def inspected(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["data", "inspect", str(folder), "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_from_text_to_packed_tokens(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "corpus"
    words = ["--tokenizer", "bytes", "--held-out", "0.2", "--shard-bytes", "1000"]
    assert main(["data", "tokenize", str(texts), "--out", str(out), *words]) == 0
    assert "tokens in" in capsys.readouterr().out
    assert main(["data", "pack", str(out), "--length", "64"]) == 0
    said = capsys.readouterr().out
    facts = inspected(capsys, out, "--verify")
    train, val = facts["splits"]["train"], facts["splits"]["val"]
    assert facts["problems"] == []
    assert train["documents"] + val["documents"] == 30
    size = sum(path.stat().st_size for path in texts.iterdir())
    assert train["text_bytes"] + val["text_bytes"] == size
    assert train["tokens"] + val["tokens"] == size + 2 * 30
    assert train["longest"] == max(path.stat().st_size for path in texts.iterdir()) + 2
    assert train["shards"] > 1
    assert f"{train['packed']['64']['padding']:.2%} padding" in said
    assert main(["data", "inspect", str(out)]) == 0
    table = capsys.readouterr().out
    assert f"{train['tokens']:,}" in table
    assert "padding, packed for 64" in table


def test_learned_and_translated(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (tmp_path / name for name in ("bytes", "bpe", "again"))
    assert main(["data", "tokenize", str(texts), "--out", str(first), "--tokenizer", "bytes", "--held-out", "0.2"]) == 0
    assert main(["data", "retokenize", str(first), "--out", str(second), "--vocab-size", "300"]) == 0
    assert main(["data", "retokenize", str(second), "--out", str(third), "--tokenizer", "bytes"]) == 0
    for split in ("train", "val"):
        assert shards_in(third)[split].digest == shards_in(first)[split].digest
    facts = inspected(capsys, second)["splits"]["train"]
    assert facts["vocab_size"] == 300
    assert facts["bytes_per_token"] > 1.5


def test_damage_is_status_1(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "corpus"
    main(["data", "tokenize", str(texts), "--out", str(out), "--tokenizer", "bytes"])
    path = out / "train" / "00000.tokens"
    content = bytearray(path.read_bytes())
    content[4200] ^= 1
    path.write_bytes(content)
    assert main(["data", "inspect", str(out)]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(out), "--verify"]) == 1
    assert "00000.tokens is damaged" in capsys.readouterr().out


def test_sums_that_an_older_corpus_lacks_are_written(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "corpus"
    words = ["--tokenizer", "bytes", "--held-out", "0.3", "--shard-bytes", "1000"]
    assert main(["data", "tokenize", str(texts), "--out", str(out), *words]) == 0
    indexes = {path: json.loads(path.read_text()) for path in out.rglob("corpus.json")}
    sums = {path: path.read_bytes() for path in out.rglob("*.sums")}
    assert len(sums) > 2 == len(indexes)
    for path in sums:
        path.unlink()
    for path, index in indexes.items():
        lacking = [{name: value for name, value in entry.items() if name != "sums"} for entry in index["shards"]]
        path.write_text(json.dumps({**index, "shards": lacking}))
    inspected(capsys, out)
    assert not list(out.rglob("*.sums"))
    inspected(capsys, out, "--sums")
    assert {path: path.read_bytes() for path in out.rglob("*.sums")} == sums
    assert {path: json.loads(path.read_text()) for path in indexes} == indexes

    (out / "train" / "00000.tokens.sums").unlink()
    index = json.loads((out / "train" / "corpus.json").read_text())
    del index["shards"][0]["sums"]
    (out / "train" / "corpus.json").write_text(json.dumps(index))
    shard = out / "train" / "00000.tokens"
    content = bytearray(shard.read_bytes())
    content[4200] ^= 1
    shard.write_bytes(content)
    assert main(["data", "inspect", str(out), "--sums"]) == 2
    assert "00000.tokens is damaged" in capsys.readouterr().err
    assert not (out / "train" / "00000.tokens.sums").exists()


def test_tokens_are_counted_by_source(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    other, out = tmp_path / "[other].txt", tmp_path / "corpus"
    other.write_text("zzzz")
    words = [str(texts), str(other), str(texts), "--out", str(out), "--tokenizer", "bytes"]
    assert main(["data", "tokenize", *words]) == 0
    found = inspected(capsys, out)["splits"]["train"]["unigrams"]
    assert list(found["sources"]) == [str(texts), str(other), f"{texts} (2)"]
    first, second, third = found["sources"].values()
    assert first == third
    assert (first["documents"], second["documents"], second["tokens"]) == (30, 1, 6)
    assert second["most_frequent"][0] == {"id": ord("z"), "token": "<0x7A>", "count": 4}
    assert second["entropy"] == pytest.approx(math.log(6) - 4 / 6 * math.log(4), abs=1e-6)
    text = "".join(path.read_text() for path in texts.iterdir())
    letter, count = Counter(text).most_common(1)[0]
    assert (first["most_frequent"][0]["id"], first["most_frequent"][0]["count"]) == (ord(letter), count)
    assert main(["data", "inspect", str(out)]) == 0
    assert "[other].txt" in capsys.readouterr().out

    counts = out / "train" / "unigrams.counts"
    content = counts.read_bytes()
    counts.write_bytes(content[:-8])
    assert main(["data", "inspect", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "unigrams.counts holds no counts of tokens" in said
    counts.unlink()
    assert inspected(capsys, out)["splits"]["train"]["unigrams"] is None
    assert main(["data", "pack", str(out), "--length", "64"]) == 0
    again = inspected(capsys, out)["splits"]["train"]["unigrams"]
    assert again["entropy"] == found["entropy"]
    assert {name: one["documents"] for name, one in again["sources"].items()} == {"": 61}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "{tmp}"], "is not a corpus"),
        (["tokenize", "{tmp}/nowhere", "--out", "{tmp}/x"], "does not exist"),
        (["tokenize", "{tmp}/texts", "--out", "{tmp}/texts"], "exists already"),
        (["tokenize", "{tmp}/texts", "--out", "{tmp}/x", "--vocab-size", "9"], "need at least 259"),
        (["tokenize", "{tmp}/texts", "--out", "{tmp}/x", "--held-out", "2"], "share in"),
        (["pack", "{tmp}/texts", "--length", "0"], "1 token or more"),
        (["pack", "{tmp}/texts"], "--length"),
    ],
)
def test_invalid_data_commands_fail_in_one_line(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["data", *(word.format(tmp=tmp_path) for word in words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
    assert not (tmp_path / "x").exists()


def test_a_public_corpus_is_described_and_never_fetched(typed) -> None:
    status, out, _ = typed("data sets c4")
    assert status == 0
    assert "ODC-BY" in out
    assert "Nothing is fetched" in out
    assert "arclight data tokenize C4/en --field text --out corpora/C4" in out
    status, out, err = typed("data sets c4 --data-yaml here")
    assert status != 0
    assert "data.yaml is of image sets" in err
