"""MDS folders: what an independent writer of the published layout wrote is read; what cannot be is refused by its file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arclight.cli import main
from arclight.data.token_shards import TokenShards
from arclight.text.data.mds import MDSError, is_mds, read_column, shards_of
from arclight.text.data.sources import SourceError, documents, files, token_documents
from arclight.text.data.tokenizer import ByteTokenizer, Tokenizer

TEXTS = ["one\n", "zwei é", "", "東京\nline", "five"]
COLUMNS = {"text": ("str", None), "id": ("int", 8), "raw": ("bytes", None), "row": ("json", None)}


def cells(number: int) -> list[bytes]:
    row = json.dumps({"n": number})
    return [TEXTS[number].encode(), struct.pack("<q", number - 2), bytes(range(number)), row.encode()]


def write(
    folder: Path, samples: list[list[bytes]], columns: dict[str, tuple[str, int | None]], together: int = 2
) -> list[Path]:
    """Write shards of ``together`` samples and the index, by struct alone."""
    folder.mkdir()
    entries, paths = [], []
    for first in range(0, len(samples), together):
        packed = []
        for sample in samples[first : first + together]:
            pairs = list(zip(sample, columns.values(), strict=True))
            heads = [struct.pack("<I", len(cell)) for cell, (_, size) in pairs if size is None]
            packed.append(b"".join([*heads, *sample]))
        settings = json.dumps({"columns": list(columns)}).encode()
        at = 4 + 4 * (len(packed) + 1) + len(settings)
        places = [at]
        for sample_bytes in packed:
            places.append(places[-1] + len(sample_bytes))
        data = struct.pack(f"<I{len(places)}I", len(packed), *places) + settings + b"".join(packed)
        paths.append(folder / f"shard.{len(entries):05d}.mds")
        paths[-1].write_bytes(data)
        entries.append(
            {
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_names": list(columns),
                "column_sizes": [size for _, size in columns.values()],
                "compression": None, "format": "mds", "hashes": [], "samples": len(packed), "size_limit": 67108864,
                "raw_data": {"basename": paths[-1].name, "bytes": len(data), "hashes": {}}, "version": 2, "zip_data": None,
            }
        )  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "mds", [cells(number) for number in range(len(TEXTS))], COLUMNS)
    return tmp_path / "mds"


def column(folder: Path, name: str) -> list[Any]:
    return [value for shard in shards_of(folder) for _, value in read_column(shard, name)]


def test_columns_come_back(folder: Path) -> None:
    assert column(folder, "text") == TEXTS
    assert column(folder, "id") == [-2, -1, 0, 1, 2]
    assert column(folder, "raw") == [bytes(range(number)) for number in range(5)]
    assert column(folder, "row") == [{"n": number} for number in range(5)]
    assert is_mds(folder)
    assert not is_mds(folder.parent)


def test_documents_are_the_texts_of_a_column(folder: Path) -> None:
    found = list(documents(folder))
    assert [document.text for document in found] == TEXTS
    assert found[3].id == f"{folder / 'shard.00001.mds'}, sample 1"
    assert files(folder) == [folder]
    with pytest.raises(SourceError, match=r"shard.00000.mds has no field 'body'; it has 'text', 'id', 'raw', 'row'"):
        list(documents(folder, "body"))
    with pytest.raises(SourceError, match="'id' is not a text but int"):
        list(documents(folder, "id"))
    with pytest.raises(SourceError, match="give the folder itself"):
        list(documents(folder / "shard.00000.mds"))


def test_a_folder_is_tokenized_as_its_texts_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    digests = []
    for source, out in ((folder, tmp_path / "a"), (rows, tmp_path / "b")):
        assert main(["data", "tokenize", str(source), "--out", str(out), "--tokenizer", "bytes"]) == 0
        capsys.readouterr()
        assert main(["data", "inspect", str(out), "--json"]) == 0
        digests.append(json.loads(capsys.readouterr().out)["splits"]["train"]["digest"])
    assert digests[0] == digests[1]
    (folder / "shard.00001.mds").write_bytes(b"cut")
    assert main(["data", "tokenize", str(folder), "--out", str(tmp_path / "c"), "--tokenizer", "bytes"]) == 2
    said = capsys.readouterr().err
    assert "shard.00001.mds is cut short" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "c").exists()


def write_ids(folder: Path, tokenizer: Tokenizer, encoding: str, length: int = 37) -> None:
    """Write the stream of all texts' tokens, an end of text behind each, in rows of one length, as such folders are made."""
    stream = np.array(
        [i for text in TEXTS for i in tokenizer.encode(text, eos=True)], "<i8" if encoding == "bytes" else "<u2"
    )
    rows = [stream[first : first + length] for first in range(0, len(stream), length)]
    head = b"" if encoding == "bytes" else None
    cells = [[(bytes([1 << 2, len(row)]) if head is None else head) + row.tobytes()] for row in rows]
    write(folder, cells, {"tokens": (encoding, None)})


@pytest.mark.parametrize("encoding", ["bytes", "ndarray:uint16"])
def test_ids_are_taken_as_they_are(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ByteTokenizer()
    write_ids(tmp_path / "mds", tokenizer, encoding)
    tokenizer.save(tmp_path / "tokenizer")
    found = list(token_documents(tmp_path / "mds", "tokens", tokenizer))
    assert [document.text for document in found] == TEXTS
    line = ["data", "tokenize", str(tmp_path / "mds"), "--out", str(tmp_path / "a"), "--field", "tokens", "--ids"]
    assert main([*line, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    shards = TokenShards(tmp_path / "a" / "train")
    assert [shards.document(number).tolist() for number in range(shards.documents)] == [
        tokenizer.encode(text, eos=True) for text in TEXTS
    ]
    assert shards.text_bytes == sum(len(text.encode()) for text in TEXTS)
    capsys.readouterr()
    assert main(line[:-3] + ["--ids", "--field", "tokens"]) == 2
    assert "give the tokenizer that the ids are of" in capsys.readouterr().err


def test_ids_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", [[np.array([3, 999]).astype("<i8").tobytes()]], {"tokens": ("bytes", None)})
    with pytest.raises(SourceError, match="it is another one's"):
        list(token_documents(tmp_path / "other", "tokens", ByteTokenizer()))
    with pytest.raises(SourceError, match="holds no token ids"):
        list(token_documents(folder, "text", ByteTokenizer()))
    with pytest.raises(SourceError, match="is not a folder of MDS shards"):
        list(token_documents(tmp_path, "tokens", ByteTokenizer()))


ARRAY = np.arange(6, dtype="<u2").reshape(2, 3)


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("ndarray", bytes([16, 2 << 2, 2, 3])),
        ("ndarray", bytes([16, 2 << 2 | 1]) + struct.pack("<HH", 2, 3)),
        ("ndarray", bytes([16, 2 << 2 | 3]) + struct.pack("<QQ", 2, 3)),
        ("ndarray:uint16", bytes([2 << 2, 2, 3])),
        ("ndarray:uint16:2,3", b""),
    ],
)
def test_arrays_of_every_form(tmp_path: Path, encoding: str, head: bytes) -> None:
    cell = head + ARRAY.tobytes()
    write(tmp_path / "mds", [[cell]], {"tokens": (encoding, len(cell) if encoding.count(":") == 2 else None)})
    (found,) = column(tmp_path / "mds", "tokens")
    assert found.dtype == np.uint16
    assert found.tolist() == ARRAY.tolist()
    for number, damaged in enumerate((cell[:-1], cell[: len(head) - 1], b"", cell + b"\0")):
        write(tmp_path / str(number), [[damaged]], {"tokens": (encoding, None)})
        with pytest.raises(MDSError, match=r"shard.00000.mds, sample 0: column 'tokens' is not of type ndarray"):
            column(tmp_path / str(number), "tokens")


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint64", "float16", "float64"])
def test_numbers(tmp_path: Path, kind: str) -> None:
    cell = np.array(3, np.dtype(kind).newbyteorder("<")).tobytes()
    write(tmp_path / "mds", [[cell]], {"n": (kind, len(cell))})
    assert column(tmp_path / "mds", "n") == [3]


@pytest.mark.parametrize(
    ("encoding", "cell", "message"),
    [
        ("pkl", b"cos\nsystem\n(S'exit 3'\ntR.", r"column 'x' is pickled \(pkl\), which is never read"),
        ("jpeg", b"", "has encoding 'jpeg'; str, bytes"),
        ("ndarray:object", b"", "has arrays of 'object'"),
        ("ndarray:uint8:2,x", b"", "of shape '2,x'"),
        ("ndarray:uint8:-2", b"", "of shape '-2'"),
        ("ndarray", bytes([16, 63 << 2 | 3]) + bytes(504), "the shape of 63 axes"),
        ("ndarray", bytes([7, 4, 1]), "column 'x' is not of type ndarray"),
        (
            "ndarray",
            bytes([8, 3 << 2 | 3]) + struct.pack("<QQQ", 2**63, 2**63, 4),
            "is not of type ndarray: 0 bytes, need",
        ),
        ("str", b"\xff\xfe", "sample 0: column 'x' is not of type str"),
        ("json", b"{", "sample 0: column 'x' is not of type json"),
        ("json", b"[" * 100_000, "sample 0: column 'x' is not of type json"),
        ("int", b"123", "sample 0: column 'x' is not of type int: 3 bytes, need 8"),
    ],
)
def test_cells_that_cannot_be_read(tmp_path: Path, encoding: str, cell: bytes, message: str) -> None:
    write(tmp_path / "mds", [[cell]], {"x": (encoding, None)})
    with pytest.raises(MDSError, match=message) as raised:
        column(tmp_path / "mds", "x")
    assert "shard.00000.mds" in str(raised.value)


def test_pickled_columns_beside_the_text_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "mds", [[b"text", b"cos\nsystem\n(S'exit 3'\ntR."]], {"text": ("str", None), "x": ("pkl", None)})
    assert [document.text for document in documents(tmp_path / "mds")] == ["text"]


@pytest.mark.parametrize(
    ("at", "number", "message"),
    [
        (0, 3, "has 3 samples, index.json says 2"),
        (4, 0, "lie in its header, or before one another"),
        (8, 2**32 - 1, "lie in its header, or before one another"),
        (12, 2**32 - 1, "is cut short: .* its last sample ends at 4,294,967,295"),
        (8, None, "sample 0 is damaged"),
        (-1, 2**32 - 1, "sample 0 is damaged: its columns have"),
    ],
)
def test_places_that_are_not_in_the_file_are_refused(folder: Path, at: int, number: int | None, message: str) -> None:
    path = folder / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    (first,) = struct.unpack_from("<I", data, 4)
    struct.pack_into("<I", data, first if at == -1 else at, first + 3 if number is None else number)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=f"shard.00000.mds.*{message}"):
        list(documents(folder))


def test_shards_that_were_cut_anywhere_are_refused(folder: Path) -> None:
    path = folder / "shard.00000.mds"
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(SourceError, match=r"shard.00000.mds is cut short"):
            list(documents(folder))
    path.unlink()
    with pytest.raises(SourceError, match=r"shard.00000.mds is missing"):
        list(documents(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "of version 1; 'mds' of version 2"),
        ({"format": "csv"}, "is 'csv' of version 2"),
        ({"raw_data": {"basename": "../secret"}}, "'../secret' is not the name of a file"),
        ({"raw_data": {"basename": "/etc/passwd"}}, "is not the name of a file"),
        ({"raw_data": {"basename": "\ud800.mds"}}, "is not the name of a file"),
        ({"raw_data": {"basename": "..\\x.mds"}}, "is not the name of a file"),
        ({"raw_data": None}, "is not an index of MDS shards"),
        ({"samples": -1}, "has -1 samples"),
        ({"samples": 2**32}, "has 4294967296 samples"),
        ({"column_sizes": [None]}, "is not an index of MDS shards"),
        ({"column_sizes": [None, -8, None, None]}, "has size -8"),
        ({"column_names": ["text", "text", "raw", "row"]}, "two columns have one name"),
        (
            {"compression": "zstd:3", "raw_data": {"basename": "s.mds"}, "zip_data": {"basename": "s.mds.zstd"}},
            r"is compressed \(zstd:3\), which is not read: decompress s.mds.zstd to s.mds",
        ),
    ],
)
def test_indexes_that_cannot_be_read_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["shards"][1] |= changes
    path.write_text(json.dumps(index))
    with pytest.raises(SourceError, match=message) as raised:
        list(documents(folder))
    assert "index.json" in str(raised.value)


def test_other_versions_are_refused(folder: Path) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    with pytest.raises(SourceError, match=r"index.json is of version 3; version 2 is read"):
        list(documents(folder))
