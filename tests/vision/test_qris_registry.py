"""Registries of places: every fault is named by file and row, and rows that contradict each other are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arclight.vision.qris import build, parse
from arclight.vision.qris.payload.codec import Account
from arclight.vision.qris.verification.registry import Place, Registry, RegistryError

GOOD = {"name": "KOPI SENJA", "nmid": "ID1020012345678", "guids": ["COM.CONTOHPAY.WWW"], "city": "BANDUNG"}
OTHER = {"name": "SATE MELATI", "nmid": "ID1020099999999", "pan": "936000091000000001", "terminal": "A01"}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write text, or rows as JSON, to a file of this name."""

    def written(name: str, content: Any) -> Path:
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return file

    return written


CSV = """name,nmid,guids,pan,city,terminal,kind,poster
KOPI SENJA,ID1020012345678,COM.CONTOHPAY.WWW; ID.CO.EXAMPLEBANK.WWW,,BANDUNG,,,
SATE MELATI,ID1020099999999,,936000091000000001,,A01,dynamic,
"""
TOML = """
[[place]]
name = "KOPI SENJA"
nmid = "ID1020012345678"
guids = ["COM.CONTOHPAY.WWW", "ID.CO.EXAMPLEBANK.WWW"]
city = "BANDUNG"

[[place]]
name = "SATE MELATI"
nmid = "ID1020099999999"
pan = "936000091000000001"
terminal = "A01"
kind = "dynamic"
"""


def test_the_three_forms_are_equivalent(write: Write) -> None:
    expected = (
        Place(name="KOPI SENJA", nmid="ID1020012345678", guids=("COM.CONTOHPAY.WWW", "ID.CO.EXAMPLEBANK.WWW"), city="BANDUNG"),
        Place(name="SATE MELATI", nmid="ID1020099999999", pan="936000091000000001", terminal="A01", kind="dynamic"),
    )  # fmt: skip
    rows = [GOOD | {"guids": list(expected[0].guids)}, OTHER | {"kind": "dynamic"}]
    for file in (write("a.csv", "\ufeff" + CSV), write("a.toml", TOML), write("a.json", rows)):
        assert Registry.read(file).places == expected
    assert Registry.read(str(file)).of_pan("936000091000000001") == expected[1]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([GOOD | {"nmid": "ID12"}], r"row 1: nmid: expected .*ID and 13 digits, found 'ID12'"),
        ([GOOD, {"name": "X"}], r"row 2: nmid is missing"),
        ([GOOD | {"nmdi": "x"}], r"row 1: unknown field 'nmdi'; there are name, nmid"),
        ([GOOD | {"pan": 936000091000000001}], r"row 1: pan: expected 8 to 19 digits, found 936000091000000001"),
        ([GOOD | {"guids": "COM.X"}], r"row 1: guids: expected a list"),
        ([GOOD | {"kind": "printed"}], r"row 1: kind: expected static or dynamic"),
        ([GOOD | {"poster": "gone.png"}], r"row 1: poster: there is no picture at .*gone\.png"),
        ([GOOD | {"city": "X" * 16}], r"row 1: city: expected a merchant city of 1 to 15"),
        ([["KOPI", "ID1020012345678"]], r"row 1: need an object with name and nmid, found list"),
        ([], r"holds no places"),
        ({"place": GOOD}, r"need a list of objects"),
        (
            [GOOD, OTHER, GOOD | {"name": "KOPI PAGI", "terminal": "A02"}],
            r"row 3: name 'KOPI PAGI' contradicts 'KOPI SENJA' .*row 1",
        ),
        ([GOOD, GOOD | {"city": "MEDAN", "terminal": "A02"}], r"row 2: city 'MEDAN' contradicts 'BANDUNG'"),
        (
            [GOOD | {"city": None}, GOOD | {"terminal": "A02"}, GOOD | {"city": "MEDAN", "terminal": "A03"}],
            r"row 3: city 'MEDAN' contradicts 'BANDUNG' of the same NMID \(.*row 2\)",
        ),
        ([OTHER, GOOD | {"pan": OTHER["pan"]}], r"row 2: PAN 936000091000000001 is that of ID1020099999999 as well"),
        ([GOOD, GOOD], r"row 2: repeats .*row 1"),
        ([GOOD | {"pan": 0}], r"row 1: pan: expected 8 to 19 digits, found 0"),
        ([GOOD | {"guids": False}], r"row 1: guids: expected a list .* found False"),
        ([GOOD | {"poster": "x" * 5000}], r"row 1: poster: there is no picture at .{200}\.\.\.$"),
        ([GOOD | {"name": "A" * 5000}], r"row 1: name: expected .{0,300}\.\.\.$"),
    ],
)
def test_faults_are_named_by_row(write: Write, rows: Any, said: str) -> None:
    with pytest.raises(RegistryError, match=said):
        Registry.read(write("places.json", rows))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "name,nmid\nKOPI,ID1020012345678,BANDUNG\n", r"a\.csv line 2: has another number of values than .* 2 columns"),
        ("a.csv", "name,nmid\nKOPI\n", r"line 2: has another number"),
        ("a.csv", 'name,nmid\n"KOPI,ID1020012345678\n', r"a\.csv: unexpected end of data"),
        ("a.toml", "[[place]\n", r"a\.toml: .*line 1"),
        ("a.toml", 'title = "mine"\n', r"need \[\[place\]\] tables and nothing else; found title"),
        ("a.json", "[{", r"a\.json: Expecting property name"),
        ("a.csv", "name,nmid,pan, pan\nKOPI,ID1020012345678,936000091000000001,\n", r"field 'pan' is given more than once"),
        ("a.json", '[{"name": "A", "nmid": "ID1020012345678", "pan": "12345678", "pan": ""}]', r"field 'pan' is given more than once"),
        ("a.toml", '[[place]]\nname = "A"\nnmid = 0x' + "f" * 9000, r"nmid: .* found a int too large to show"),
        ("a.json", "[" * 100_000, r"a\.json: "),
        ("a.xlsx", "", r"a registry is a \.csv, \.json or \.toml file"),
    ],
)  # fmt: skip
def test_files_that_are_no_registry_are_refused(write: Write, name: str, text: str, said: str) -> None:
    with pytest.raises(RegistryError, match=said):
        Registry.read(write(name, text))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"name,nmid\n\xff\xfe")
    with pytest.raises(RegistryError, match=r"not UTF-8 text \(byte 10\)"):
        Registry.read(tmp_path / "a.csv")


def test_every_faulty_row_is_counted(write: Write) -> None:
    with pytest.raises(RegistryError, match="and 80 more") as caught:
        Registry.read(write("places.json", [{"nmid": "x", "name": "A"}] * 100))
    assert len(caught.value.problems) == 100


def test_a_place_is_found_by_its_number_or_its_name(write: Write) -> None:
    table = Registry.read(write("a.json", [GOOD, GOOD | {"terminal": "A02"}, OTHER]))
    assert {place.terminal for place in table.named("ID1020012345678")} == {None, "A02"}
    assert table.named("kopi senja") == table.of_nmid("ID1020012345678")
    for accented in ("K\u00f6pi S\u00e9nja", "Ko\u0308pi Se\u0301nja", "\uff2bOPI SENJA"):
        assert table.of_name(accented) == table.of_nmid("ID1020012345678"), "a sticker's name may look like a place's"
    with pytest.raises(RegistryError, match="no place has the NMID or name 'KOPI'"):
        table.named("KOPI")


def test_a_genuine_payload_makes_a_row(write: Write) -> None:
    account = Account("26", guid="COM.CONTOHPAY.WWW", fields={"01": "936000091000000001"})
    text = build(merchant_name="SATE MELATI", city="BANDUNG", mcc="5814", nmid="ID1020099999999", accounts=[account])
    place = Place.of(parse(text))
    assert place == Place(name="SATE MELATI", nmid="ID1020099999999", city="BANDUNG", pan="936000091000000001")
    row = {name: value for name, value in place.to_json().items() if value}
    assert Registry.read(write("a.json", [row])).places == (place,)


def test_payloads_that_make_no_single_row_are_refused() -> None:
    names = {"merchant_name": "SATE MELATI", "city": "BANDUNG", "mcc": "5814"}
    accounts = [Account(tag, guid=f"COM.{tag}.WWW", fields={"01": "936000091000000001"}) for tag in ("26", "27")]
    with pytest.raises(ValueError, match="of ID1020099999999 names 2 accounts; give one Place for each"):
        Place.of(parse(build(**names, nmid="ID1020099999999", accounts=accounts)))
    with pytest.raises(ValueError, match="'SATE MELATI' names no NMID"):
        Place.of(parse(build(**names, accounts=accounts[:1])))
