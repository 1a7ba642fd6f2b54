"""Images divided among sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cv2")

from arclight.data.sites import IID, Dirichlet
from arclight.text.data.site_split import Source
from arclight.vision.data.labels import DatasetError
from arclight.vision.data.site_split import Merchant
from arclight.vision.tasks.detection import DetectionData
from arclight.vision.tasks.settings import DetectionTask


@pytest.fixture
def task(tmp_path: Path, write_dataset: Callable[..., Path]) -> DetectionTask:
    write_dataset(tmp_path, 24, "train")
    yaml = write_dataset(tmp_path, 12, "val")
    images = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jpg"))
    (tmp_path / "merchants.json").write_text(json.dumps({name: f"m{n % 6}" for n, name in enumerate(images)}))
    return DetectionTask(data=yaml, image_size=64, workers=0)


def images(task: DetectionTask) -> dict[str, set[str]]:
    data = DetectionData(task)
    data.trainer = None
    data.setup("fit")
    return {"train": set(map(str, data.train.images)), "val": set(map(str, data.val.images))}


@pytest.mark.parametrize("partition", [Merchant(), IID(), Dirichlet(alpha=5.0, seed=1), None])
def test_sites_are_disjoint_and_together_all(task: DetectionTask, partition: Merchant | IID | Dirichlet | None) -> None:
    sites = [images(task.site(number, 3, partition)) for number in range(3)]
    for split, central in images(task).items():
        assert sum(len(site[split]) for site in sites) == len(central)
        assert set.union(*(site[split] for site in sites)) == central


def test_all_photos_of_a_merchant_are_at_one_site(task: DetectionTask, tmp_path: Path) -> None:
    whose = json.loads((tmp_path / "merchants.json").read_text())
    homes: dict[str, set[int]] = {}
    for number in range(3):
        for found in images(task.site(number, 3, Merchant())).values():
            for image in found:
                homes.setdefault(whose[Path(image).relative_to(tmp_path).as_posix()], set()).add(number)
    assert len(homes) == 6
    assert all(len(sites) == 1 for sites in homes.values())


def test_folders_and_names_tell_merchants_too(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    yaml = write_dataset(tmp_path, 12, "train")
    for split in ("train", "val"):
        write_dataset(tmp_path, 12, split)
        for path in [*(tmp_path / "images" / split).glob("*.jpg"), *(tmp_path / "labels" / split).glob("*.txt")]:
            merchant = "ab"[int(path.stem) % 2]
            (path.parent / merchant).mkdir(exist_ok=True)
            path.rename(path.parent / merchant / f"{merchant}-{path.name}")
    task = DetectionTask(data=yaml, image_size=64, workers=0)
    by_folder = [images(task.site(number, 2, Merchant(by="folder"))) for number in range(2)]
    assert by_folder == [images(task.site(number, 2, Merchant(by="prefix"))) for number in range(2)]
    assert sorted({Path(image).parent.name for image in site["train"]} for site in by_folder) in (
        [{"a"}, {"b"}],
        [{"b"}, {"a"}],
    )


def test_invalid_partitions_are_refused(task: DetectionTask, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source does not divide images"):
        task.site(0, 2, Source())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not divide merchants"):
        task.site(0, 2, Dirichlet(by="field"))
    with pytest.raises(DatasetError, match=r"6 sources .* too few for 7 sites"):
        images(task.site(0, 7, Merchant()))
    with pytest.raises(DatasetError, match=r"site \d+ of 30 gets none of the 24 images of train"):
        for number in range(30):
            images(task.site(number, 30, IID()))
    (tmp_path / "merchants.json").write_text("{}")
    with pytest.raises(DatasetError, match="does not say whose images/"):
        images(task.site(0, 2, Merchant()))
    (tmp_path / "merchants.json").unlink()
    with pytest.raises(DatasetError, match='by = "folder" or "prefix"'):
        images(task.site(0, 2, Merchant()))


def test_shares_of_all_sites_are_checked_beforehand(task: DetectionTask) -> None:
    task.check_sites(6, Merchant())
    with pytest.raises(DatasetError, match=r"6 sources .* too few for 7 sites"):
        task.check_sites(7, Merchant())
    task.check_sites(2)
    with pytest.raises(DatasetError, match=r"site \d+ of 30 gets none of the 24 images of train"):
        task.check_sites(30, IID())
