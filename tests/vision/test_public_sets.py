"""Descriptions of public data sets: complete, consistent, and nothing is fetched."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from arclight.vision.data.data_yaml import read_data_yaml
from arclight.vision.data.labels import DatasetError
from arclight.vision.data.public_sets import find_public_set, public_sets


def test_the_fourteen_sets_that_yolov5_knows_are_described() -> None:
    classes = {name: len(described.names) for name, described in public_sets().items()}
    assert classes == {
        "Argoverse": 8, "GlobalWheat2020": 1, "ImageNet": 1000, "ImageNet10": 10, "ImageNet100": 100, "ImageNet1000": 1000,
        "Objects365": 365, "SKU-110K": 1, "VOC": 20, "VisDrone": 10, "coco": 80, "coco128": 80, "coco128-seg": 80, "xView": 60,
    }  # fmt: skip


@pytest.mark.parametrize("name", list(public_sets()))
def test_a_description_is_sound(name: str, tmp_path: Path) -> None:
    described = public_sets()[name]
    assert all(re.fullmatch("[0-9a-f]{32}", file.md5) for file in described.files if file.md5 is not None)
    assert bool(described.files) != (described.by_hand is not None)
    assert len(set(described.names)) == len(described.names) or described.task == "classification"
    assert set(described.images) <= set(described.layout) - {"path"}
    spec = read_data_yaml(described.write_data_yaml(tmp_path / name))
    assert spec.names == described.names
    assert spec.train
    with pytest.raises(DatasetError, match="exists already"):
        described.write_data_yaml(tmp_path / name)


@pytest.mark.parametrize("name", list(public_sets()))
def test_a_fetch_step_is_shell_that_verifies_what_can_be_verified(name: str) -> None:
    described = public_sets()[name]
    commands = described.fetch_step()
    subprocess.run(["bash", "-n"], input="\n".join(commands), text=True, check=True)
    text = "\n".join(commands)
    for file in described.files:
        assert file.url in text
        assert (f"echo '{file.md5}  {file.name}' | md5sum -c" in text) == (file.md5 is not None)
        assert (f"the checksum of {file.name} is not known" in text) == (file.md5 is None)


def test_names_are_found_in_any_case_and_near_ones_are_suggested() -> None:
    assert find_public_set("VISDRONE").name == "VisDrone"
    with pytest.raises(DatasetError, match="did you mean coco128"):
        find_public_set("coco12")
    with pytest.raises(DatasetError, match=r"^zzz is not described here\. There are Argoverse"):
        find_public_set("zzz")
