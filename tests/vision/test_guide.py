"""The guide's examples run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import warm
from tests.test_readme import block
from tests.vision.conftest import write_dataset

from arclight.cli.command import main


def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/vision.md"))
    lines = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert sum(line.endswith("('qr_code',)") for line in lines) == 6
    assert (tmp_path / "detector.ckpt").is_dir()


def test_commands_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block("sh", "docs/vision.md").splitlines():
        verb, *words = line.partition("  #")[0].split()
        assert verb == "arclight"
        assert main(words) == 0, line
    assert (tmp_path / "worst.html").is_file()
    assert (tmp_path / "mended/data.yaml").is_file()


def test_a_recipe_that_mixes_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, names in (("photos", "[qr, text]"), ("scenes", "[qr_code, text]")):
        yaml = write_dataset(tmp_path / folder, 3)
        write_dataset(tmp_path / folder, 2, split="val")
        yaml.write_text(f"train: images/train\nval: images/val\nnames: {names}\n")
    recipe = block("toml", "docs/vision.md").replace('weights = "runs/detect-qris/1"', "image_size = 64\nworkers = 0")
    Path("photos.toml").write_text(recipe)
    flags = "--trainer.max_epochs 1 --task.batch_size 2 --trainer.log_every_n_steps 1"
    assert main(["train", "photos.toml", *flags.split()]) == 0
    rows = Path("runs/photos/1/metrics.csv").read_text().splitlines()
    steps = [row.split(",")[1] for row in rows[1:]]
    assert "val/map50" in rows[0]
    assert len(steps) >= 3  # six images in batches of two
