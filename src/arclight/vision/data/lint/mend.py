"""Write a repaired copy of a data set, and list each change and what is left to decide.

``arclight data lint --fix`` calls `mend` with the report of `lint`. The original is never written; a fault that has several remedies is
listed, not mended.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from arclight.fabric.extras import require
from arclight.vision.data.data_yaml import write_data_yaml
from arclight.vision.data.images import ImageError, decode_image
from arclight.vision.data.labels import DatasetError, label_path, names_below
from arclight.vision.data.lint.checks import Finding, LintReport

cv2 = require("cv2", extra="vision")

DROPPED_ROWS = ("repeated-row", "near-equal-box", "malformed-row")
"""Checks whose rows are left out."""
REDRAWN = ("exif-turn", "odd-image")
"""Checks whose images are written again."""
JPEG_QUALITY = 97
CHANGES = "changes.txt"
"""File of the copy that lists all changes."""


@dataclass(frozen=True)
class MendReport:
    """Result of a repair: the new data.yaml, one line per change, and what a person must decide."""

    file: Path
    changes: list[str]
    left: list[str] = field(default_factory=list)


def mend(report: LintReport, to: Path) -> MendReport:
    """Copy the data set of ``report`` into the new folder ``to``, repairing unambiguous faults.

    Left out: images that cannot be read; images that look like one of a later split (of train, val, test); second copies of equal files
    with equal boxes; rows that cannot be read, or whose box all but equals another one (a polygon only if it repeats a row); label files
    without an image. Rewritten as 8-bit RGB: images that EXIF turns, of 16 bits, CMYK, with transparency, several pictures or one pixel.
    Other images are copied byte for byte and other rows as they are; the original is never touched. Raises DatasetError if ``to`` holds
    something, lies in the data set, or if no image of a split would be left.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DatasetError(f"{to} holds something already; name a folder that is empty or does not exist")
    inside = {label_path(image).parent.resolve() for found in report.splits.values() for image in found.images}
    inside |= {image.parent.resolve() for found in report.splits.values() for image in found.images}
    for folder in inside:
        if to.resolve() == folder or folder in to.resolve().parents:
            raise DatasetError(f"{to} lies in {folder}, which is a part of the data set: name a folder outside of it")
    if not report.splits:
        raise DatasetError(
            f"{report.file}: no split can be used, so that there is nothing to copy: see what the lint names"
        )
    plan = _Plan.of(report)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as unfinished:
        folder = Path(unfinished) / "set"
        for split, found in report.splits.items():
            kept = [image for image in found.images if image not in plan.left_out[split]]
            if not kept:
                raise DatasetError(
                    f"{report.file}: no image of {split} would be left: another split has them too; divide them with "
                    "`arclight data split`"
                )
            _copy_split(split, kept, folder, plan)
        places: dict[str, str | list[str]] = {split: f"images/{split}" for split in report.splits}
        write_data_yaml(folder, report.names, places, report.keypoints)
        (folder / CHANGES).write_text("\n".join(plan.changes) + "\n", "utf-8", errors="replace")
        if to.exists():
            to.rmdir()
        folder.replace(to)
    left = [f"{plan.outlines:,} x outlines of their own whose boxes repeat another's"] * (plan.outlines > 0)
    return MendReport(to / "data.yaml", plan.changes, left + _undecided(report))


@dataclass
class _Plan:
    """Changes by file, and the sentences about them."""

    left_out: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))
    redrawn: dict[Path, list[str]] = field(default_factory=lambda: defaultdict(list))
    dropped_lines: dict[Path, set[int]] = field(default_factory=lambda: defaultdict(set))
    changes: list[str] = field(default_factory=list)
    outlines: int = 0
    """Rows that stay though their boxes repeat another's: their outlines do not."""

    @classmethod
    def of(cls, report: LintReport) -> _Plan:
        plan, grouped = cls(), report.by_check()
        for finding in grouped.get("corrupt-image", []):
            plan.left_out[finding.split].add(Path(finding.path))  # those whose header is broken are not listed anyway
            plan.changes.append(f"left out {finding}")
        plan._leave_out_leaks(report.look_alikes)
        contradicted = {Path(finding.path) for finding in grouped.get("contradiction", [])}
        for finding in grouped.get("duplicate-image", []):
            if Path(finding.path) not in contradicted:
                plan.left_out[finding.split].add(Path(finding.path))
                plan.changes.append(f"left out {finding}")
        for check in DROPPED_ROWS:
            for finding in grouped.get(check, []):
                if check != "malformed-row" and _has_own_outline(finding):
                    plan.outlines += 1
                    continue
                plan.dropped_lines[Path(finding.path)].add(finding.line)
                plan.changes.append(f"dropped row {finding}")
        for check in REDRAWN:
            for finding in grouped.get(check, []):
                plan.redrawn[Path(finding.path)].append(finding.message)
        plan.changes += [f"left out {finding}" for finding in grouped.get("orphan-label", [])]
        return plan

    def _leave_out_leaks(self, look_alikes: Sequence[Sequence[tuple[str, Path]]]) -> None:
        """Leave out near-duplicates across splits, in train before val, and in val before test."""
        for group in look_alikes:
            kept_split, kept = group[-1]  # groups are in the order train, val, test
            for split, image in group:
                if split != kept_split and image not in self.left_out[split]:
                    self.left_out[split].add(image)
                    self.changes.append(f"left out {image} of {split}: {kept_split} has {kept}, which looks the same")


def _has_own_outline(finding: Finding) -> bool:
    """Return True for a polygon whose corners equal those of no earlier row of its file.

    Its box may equal another's.
    """
    rows = [line.split() for line in Path(finding.path).read_text("utf-8-sig").splitlines()[: finding.line]]
    return len(rows[-1]) > 5 and rows[-1] not in rows[:-1]


def _undecided(report: LintReport) -> list[str]:
    """Return the checks whose findings stay, with how many there are."""
    stay = (
        "split",
        "shared-label",
        "contradiction",
        "disputed-box",
        "tiny-box",
        "covering-box",
        "upright-box",
        "class",
        "anchors",
        "similar-images",
    )
    grouped = report.by_check()
    return [f"{len(grouped[name]):,} x {name}" for name in stay if name in grouped]


def _copy_split(split: str, images: Sequence[Path], folder: Path, plan: _Plan) -> None:
    taken: set[PurePosixPath] = set()
    for image, name in zip(images, names_below(images)):
        if image in plan.redrawn and image.suffix.lower() not in (".jpg", ".jpeg", ".png"):
            name = name.with_suffix(".png")
        while name.with_suffix("") in taken:  # two images shared a label file: each gets its own
            name = name.with_name(f"{name.stem}_{image.suffix[1:]}{name.suffix}")
        taken.add(name.with_suffix(""))
        target = folder / "images" / split / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if image in plan.redrawn:
            _redraw(image, target)
            plan.changes.append(f"wrote {image} again as 8-bit RGB: {'; '.join(plan.redrawn[image])}")
        else:
            shutil.copyfile(image, target)
        _copy_labels(label_path(image), label_path(target), plan)


def _redraw(image: Path, target: Path) -> None:
    try:
        pixels = cv2.cvtColor(decode_image(image), cv2.COLOR_RGB2BGR)
    except ImageError as error:
        raise DatasetError(f"{image}: {error}; run the lint with hashes, which finds damaged pixels") from error
    quality = [] if target.suffix.lower() == ".png" else [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    encoded = cv2.imencode(target.suffix, pixels, quality)[1]
    target.write_bytes(encoded.tobytes())


def _copy_labels(source: Path, target: Path, plan: _Plan) -> None:
    """Copy the rows that stay, as they are; a file that is no text becomes none."""
    dropped = plan.dropped_lines.get(source, set())
    if 0 in dropped or not source.exists():
        return
    lines = source.read_text("utf-8-sig").splitlines()
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = (line.strip() for number, line in enumerate(lines, 1) if number not in dropped and line.strip())
    target.write_text("".join(f"{line}\n" for line in kept), "utf-8")
