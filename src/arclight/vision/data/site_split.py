"""Split the images of a data set among the sites of a federation.

``partition`` of a federated recipe gives each site's task a `SiteShare`; `dataset` keeps the images that its `SiteSplit` picks. Every
site works out its share by itself: it must follow from settings and data set alone, the same on every machine. A change of it moves images
between the sites of running federations. ``qris.scenes.generate`` writes `MERCHANT_LIST`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arclight.data.sites import IID, Dirichlet, Numbered, pack_sources, site_at_random

if TYPE_CHECKING:
    from arclight.vision.data.data_yaml import DataSpec

MERCHANT_LIST = "merchants.json"
"""File beside data.yaml that maps images, by paths relative to it, to their merchants."""
By = Literal["list", "folder", "prefix"]


@dataclass(frozen=True, kw_only=True)
class Merchant:
    """Assign all photos of a merchant to one site, so that sites differ in places and habits."""

    by: By = "list"
    """Source of an image's merchant: merchants.json beside data.yaml (list), the name of its folder, or the prefix of its name up to the first - or _."""


@dataclass(frozen=True, kw_only=True)
class SiteShare(Numbered):
    """One site's share of the images of each split."""

    partition: Merchant | IID | Dirichlet = dataclasses.field(default_factory=IID)
    """Partition of the images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.partition, Dirichlet) and self.partition.by not in (None, "list", "folder", "prefix"):
            raise ValueError(f"by = {self.partition.by!r} does not divide merchants: choose list, folder or prefix")


class SiteSplit:
    """Picks the images of a data set that are ``site``'s."""

    def __init__(self, spec: DataSpec, site: SiteShare) -> None:
        self.spec, self.site = spec, site

    def of(self, split: str, images: Sequence[Path]) -> list[int]:
        """Return the indices of the site's images among ``images``.

        Raises DatasetError if it has none.
        """
        own = [index for index, image in enumerate(images) if self.site_of(image) == self.site.number]
        if not own:
            raise self._gets_nothing(self.site.number, split, len(images))
        return own

    def check(self) -> None:
        """Raise DatasetError if any of the sites would have no training or no validation images."""
        for split in ("train", "val"):
            images = self.spec.images(split)
            without = set(range(self.site.count)).difference(map(self.site_of, images))
            if without:
                raise self._gets_nothing(min(without), split, len(images))

    def _gets_nothing(self, number: int, split: str, images: int) -> Exception:
        from arclight.vision.data.labels import DatasetError

        return DatasetError(
            f"{self.spec.file}: site {number} of {self.site.count} gets none of the {images} images of {split}: there must be more "
            "images, fewer sites, or another partition"
        )

    def site_of(self, image: Path) -> int:
        partition, count = self.site.partition, self.site.count
        if isinstance(partition, Merchant):
            return self._home[self.merchant(image)]
        merchant = self.merchant(image) if isinstance(partition, Dirichlet) else ""
        return site_at_random(partition, self._name(image).encode(), merchant, count)

    def merchant(self, image: Path) -> str:
        """Return the owner of an image.

        Raises DatasetError if it is unknown.
        """
        from arclight.vision.data.labels import DatasetError

        by = getattr(self.site.partition, "by", None) or "list"
        if by == "folder":
            return image.parent.name
        if by == "prefix":
            return image.name.replace("_", "-").partition("-")[0]
        name = self._name(image)
        if name not in self._listed:
            raise DatasetError(f"{self._list} does not say whose {name} is")
        return self._listed[name]

    def _name(self, image: Path) -> str:
        """Return an image's place in the data set, the same wherever the data set lies."""
        folder = self.spec.file.parent.resolve()
        path = image.resolve()
        return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()

    @property
    def _list(self) -> Path:
        return self.spec.file.parent / MERCHANT_LIST

    @cached_property
    def _listed(self) -> dict[str, str]:
        from arclight.vision.data.labels import DatasetError

        try:
            table = json.loads(self._list.read_text("utf-8"))
        except OSError as error:
            raise DatasetError(
                f"{self._list}: {error.strerror or error}; it says whose each image is. Where folders or names of images say it, "
                'divide with by = "folder" or "prefix"'
            ) from error
        except ValueError as error:
            raise DatasetError(f"{self._list} is not valid JSON: {error}") from error
        if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
            raise DatasetError(f'{self._list} must be a table such as {{"images/train/1.jpg": "a merchant"}}')
        return table

    @cached_property
    def _home(self) -> dict[str, int]:
        """Every merchant to its site, by how many images it has to train and to validate with."""
        from arclight.vision.data.labels import DatasetError

        splits = [split for split in ("train", "val", "test") if getattr(self.spec, split)]
        sizes = Counter(self.merchant(image) for split in splits for image in self.spec.images(split))
        try:
            return pack_sources(sizes, self.site.count)
        except ValueError as error:
            raise DatasetError(f"{self.spec.file}: {error}") from error
