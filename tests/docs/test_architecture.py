"""The picture of the rooms agrees with the source, and its marks with the steps of the journeys beside it."""

from __future__ import annotations

import re
import tomllib
from xml.etree import ElementTree

from tests.docs.test_links import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PICTURE = ElementTree.parse(ROOT / "docs" / "rooms.svg").getroot()
SVG = "{http://www.w3.org/2000/svg}"
JOURNEYS = {"b": "A training batch", "c": "A checkpoint", "r": "A federated round"}


def rows() -> list[list[str]]:
    """Return the names of the drawn rooms, row by row."""
    drawn: dict[float, list[str]] = {}
    for group in PICTURE.iter(f"{SVG}g"):
        drawn.setdefault(float(group.find(f"{SVG}rect").get("y")), []).append(group.find(f"{SVG}text").text)
    return [drawn[top] for top in sorted(drawn)]


def marks() -> set[tuple[str, int, str]]:
    """Return (journey, step, room) of every mark."""
    found = set()
    for group in PICTURE.iter(f"{SVG}g"):
        parts = list(group)
        room = parts[1].text
        found |= {
            (shape.get("class"), int(label.text), room) for shape, label in zip(parts[3::2], parts[4::2], strict=True)
        }
    return found


def steps() -> set[tuple[str, int, str]]:
    """Return (journey, step, room of the first function that it links to) of every step on the page."""
    found = set()
    for kind, title in JOURNEYS.items():
        section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
        for number, text in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section, re.MULTILINE | re.DOTALL):
            room = re.search(r"\]\(\.\./src/arclight/(\w+)/", text)
            assert room, f"step {number} of {title} links to no function"
            found.add((kind, int(number), room[1]))
    return found


def test_the_picture_has_the_layers_that_imports_keep() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["arclight"])
    rooms = [[name.strip() for name in layer.split("|")] for layer in layers if not layer.startswith("_")]
    assert [sorted(row) for row in rows()] == [sorted(row) for row in rooms]


def test_the_picture_marks_each_step_in_its_room() -> None:
    assert len(steps()) > 20
    assert marks() == steps()
