"""Sources: every kind of file gives its documents in one order; what is wrong is named by file and row."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from arclight.text.data.sources import STDLIB, SourceError, documents, files, fingerprint

TEXTS = ["one\n", "zwei é", "", "東京\nline"]


def texts(where: Path, field: str = "text") -> list[str]:
    return [document.text for document in documents(where, field)]


def archive(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def parquet(path: Path, columns: dict[str, list]) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(columns), path)


def test_the_standard_library_is_always_there() -> None:
    found = files(STDLIB)
    names = {path.name for path in found}
    assert {"argparse.py", "json", "decoder.py"} - names == {"json"}
    assert not [path for path in found if {"test", "tests", "site-packages"} & set(path.parts)]
    assert found == files(STDLIB)
    first = next(documents(STDLIB))
    assert first.id == str(found[0])
    assert first.bytes == len(first.text.encode())


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("third")
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    (tmp_path / ".hidden").write_text("not read")
    assert texts(tmp_path) == ["first", "second", "third"]
    assert [document.id for document in documents(tmp_path)][2] == str(tmp_path / "sub" / "a.txt")


def test_lines_of_json(tmp_path: Path) -> None:
    rows = [json.dumps({"body": text, "other": 1}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join([rows[0], "", *rows[1:]]))
    assert texts(tmp_path / "a.jsonl", "body") == TEXTS
    assert [d.id for d in documents(tmp_path / "a.jsonl", "body")][1] == f"{tmp_path / 'a.jsonl'}, line 3"
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    assert texts(tmp_path / "b.jsonl.gz", "body") == TEXTS


def test_parquet_and_archives(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"id": [1, 2, 3, 4], "text": TEXTS})
    assert texts(tmp_path / "a.parquet") == TEXTS
    members = {f"{number}.txt": text.encode() for number, text in enumerate(TEXTS)}
    archive(tmp_path / "a.tar", members)
    archive(tmp_path / "a.tgz", members, "w:gz")
    assert texts(tmp_path / "a.tar") == texts(tmp_path / "a.tgz") == TEXTS


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3, 4]})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "extra": made.select([0])}).save_to_disk(str(tmp_path / "two"))
    assert texts(tmp_path / "one") == TEXTS
    assert texts(tmp_path / "two") == [TEXTS[0], *TEXTS]
    with pytest.raises(SourceError, match=r"row 0 has no field 'body'; it has 'text', 'n'"):
        texts(tmp_path / "one", "body")


def damaged(path: Path) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def test_damage_is_named(tmp_path: Path) -> None:
    many = "".join(json.dumps({"text": f"{number} {number**9}"}) + "\n" for number in range(2000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(many.encode()))
    parquet(tmp_path / "a.parquet", {"text": [str(number**9) for number in range(2000)]})
    archive(tmp_path / "a.tar", {"a.txt": b"x" * 5000})
    archive(tmp_path / "a.tgz", {"a.txt": many.encode()}, "w:gz")
    for name in ("a.jsonl.gz", "a.parquet", "a.tar", "a.tgz"):
        with pytest.raises(SourceError, match=name):
            texts(damaged(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xffc", r"a\.txt: byte 2 \(0xff\) is not UTF-8 text; convert it, as with iconv"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', r"a\.jsonl, line 2 is not valid JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', r"a\.jsonl, line 2 has no field 'text'; it has 'txt'"),
        ("a.jsonl", b'{"text": null}', r"line 1: 'text' is not a text but NoneType"),
        ("a.jsonl", b"[1]", r"line 1: need an object with the field 'text', got list"),
        ("a.jsonl", b'{"text": "a\\ud800"}', r"line 1: character 1 is half of a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}', r"line 1: byte 10 \(0xff\) is not UTF-8"),
        ("a.txt.zst", b"", "unpack it first"),
        ("a.parquet", b"not parquet", "cannot be read as Parquet"),
        ("a.tar", b"not tar" * 200, r"a\.tar is cut short or damaged"),
        ("a.py", b"# -*- coding: nonsense -*-\n", r"a\.py is not the Python source"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        texts(tmp_path)


def test_a_row_of_parquet_without_text_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["x", None], "n": [1, 2]})
    with pytest.raises(SourceError, match=r"a\.parquet, row 1: 'text' is not a text"):
        texts(tmp_path)
    with pytest.raises(SourceError, match=r"has no field 'body'; it has 'text', 'n'"):
        texts(tmp_path, "body")


def test_missing_text_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no files"):
        texts(tmp_path)
    with pytest.raises(FileNotFoundError, match='data is "stdlib", a file or a folder'):
        texts(tmp_path / "nowhere")


def test_python_files_are_read_in_their_declared_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\n# é\n".encode("latin-1"))
    assert texts(tmp_path)[0].endswith("# é\n")


def test_the_fingerprint_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = fingerprint(tmp_path)
    assert before == fingerprint(tmp_path)
    (tmp_path / "a.txt").write_text("three")
    assert fingerprint(tmp_path) != before
