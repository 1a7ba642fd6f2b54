"""Write a data set of drawn scenes: YOLO images and labels, and codes with their payloads.

Files depend on seed, index, size, merchants and the kind of labels, never on the number of processes.

``arclight demo`` and ``arclight data qris`` call `generate`. Out: a folder with ``data.yaml``; tasks of boxes read its labels, with ``corners``
those of keypoints and corners too, with ``rotated`` task obb. A change of what is drawn for a seed changes data sets that others rebuild;
keys of codes.json stay.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.data.images import encode_jpeg
from arclight.vision.data.site_split import MERCHANT_LIST
from arclight.vision.qris.scenes.merchants import merchant_of

cv2 = require("cv2", extra="vision")

CLASS_NAME = "qr_code"
Progress = Callable[[int, int], None]


class GenerateError(ValueError):
    """The data set asked for cannot be written."""


@dataclass(frozen=True)
class _Job:
    folder: Path
    seed: int
    size: int
    count: int
    validation: int
    merchants: int | None = None
    corners: bool = False
    rotated: bool = False

    def split_of(self, index: int) -> str:
        return "val" if index >= self.count - self.validation else "train"

    def name_of(self, index: int) -> str:
        return f"images/{self.split_of(index)}/{index:06d}.jpg"


def generate(
    out: Path | str,
    count: int,
    seed: int = 0,
    *,
    size: int = 640,
    val_share: float = 0.2,
    merchants: int | None = None,
    corners: bool = False,
    rotated: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Generate ``count`` scenes of ``size`` x ``size`` pixels; return their ``data.yaml``.

    They are written into the folder ``out``. The last ``val_share`` of them is for validation. ``codes.json`` maps
    every image to its codes: corners_px (the code's own top left, top right, bottom right, bottom left), box_xyxy_px,
    payload, kind, merchant, nmid and modules (along a side). With ``merchants`` the scenes belong to so many places in
    turn, each with surroundings, sizes, light and a sign of its own, and ``merchants.json`` says which image is whose.
    With ``corners`` the labels are boxes with four keypoints, the code's own corners in the order of ``corners_px``,
    those outside of the picture not labelled; with ``rotated`` they are these corners alone, moved to the picture's
    edge where they are outside, as the task obb reads them. ``progress`` is called with (done, count). ``workers``
    processes draw, as many as there are processors unless given. The folder appears complete or not at all;
    GenerateError if it holds something already.
    """
    out = Path(out)
    if count < 1 or size < 64 or not 0 <= val_share < 1:
        raise GenerateError(f"need count >= 1, size >= 64 and 0 <= val_share < 1; got {count}, {size} and {val_share}")
    if seed < 0:
        raise GenerateError(f"seed = {seed}: give 0 or more")
    if corners and rotated:
        raise GenerateError("corners and rotated are two kinds of labels: leave one of them out")
    if merchants is not None and not 1 <= merchants <= count:
        raise GenerateError(
            f"{merchants} merchants for {count} scenes: there must be one merchant, and a scene for each"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GenerateError(f"{out} holds something already; name a folder that is empty or does not exist")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as unfinished:
        folder = Path(unfinished) / "set"
        job = _Job(folder, seed, size, count, round(count * val_share), merchants, corners, rotated)
        for part in ("images", "labels"):
            for split in ("train", "val"):
                (folder / part / split).mkdir(parents=True)
        codes: dict[str, Any] = {}
        with closing(_drawn(job, os.cpu_count() or 1 if workers is None else workers)) as drawn:
            for done, (name, found) in enumerate(drawn, 1):
                codes[name] = found
                if progress:
                    progress(done, count)
        (folder / "codes.json").write_text(json.dumps(dict(sorted(codes.items())), indent=1) + "\n")
        described = f"path: .\ntrain: images/train\nval: images/val\nnames: [{CLASS_NAME}]\n"
        (folder / "data.yaml").write_text(described + ("kpt_shape: [4, 3]\n" if corners else ""))
        if merchants is not None:
            whose = {job.name_of(index): merchant_of(seed, index % merchants).name for index in range(count)}
            (folder / MERCHANT_LIST).write_text(json.dumps(dict(sorted(whose.items())), indent=1) + "\n")
        _move(folder, out)
    return out / "data.yaml"


def _move(folder: Path, out: Path) -> None:
    """Move a finished set to ``out``; GenerateError if another process has filled it meanwhile."""
    try:
        if out.exists():
            out.rmdir()
        folder.replace(out)
    except OSError as error:
        if not (out.is_dir() and any(out.iterdir())):
            raise
        raise GenerateError(
            f"{out} was filled by another process while its scenes were drawn, and is left as it is: use it, or name another folder"
        ) from error


def _drawn(job: _Job, workers: int) -> Generator[tuple[str, list[dict[str, Any]]]]:
    """Yield every image's name and codes, as they get done; the files are written on the way."""
    draw = partial(draw_files, job)
    if workers <= 1 or job.count < 8:
        yield from map(draw, range(job.count))
        return
    spawn = multiprocessing.get_context("spawn")  # a forked copy of a process with threads can hang
    pool = ProcessPoolExecutor(min(workers, job.count), mp_context=spawn, initializer=_one_thread)
    try:
        yield from pool.map(draw, range(job.count), chunksize=min(16, max(1, job.count // (4 * workers))))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted run stops here instead of drawing to the end


def _one_thread() -> None:
    cv2.setNumThreads(1)


def draw_files(job: _Job, index: int) -> tuple[str, list[dict[str, Any]]]:
    """Draw scene ``index``, write its image and label, and return its name and codes."""
    from arclight.vision.qris.scenes.scene import draw_scene

    rng = np.random.default_rng([job.seed, index])
    merchant = None if job.merchants is None else merchant_of(job.seed, index % job.merchants)
    scene = draw_scene(rng, job.size, merchant)
    quality = int(rng.integers(45, 96))
    split = job.split_of(index)
    (job.folder / "images" / split / f"{index:06d}.jpg").write_bytes(encode_jpeg(scene.image, quality))
    rows = []
    for code in scene.codes:
        x0, y0, x1, y1 = (v / job.size for v in code.box)
        row = f"0 {(x0 + x1) / 2:.6f} {(y0 + y1) / 2:.6f} {x1 - x0:.6f} {y1 - y0:.6f}"
        if job.rotated:
            row = "0 " + " ".join(f"{value:.6f}" for value in (code.corners / job.size).clip(0, 1).flatten())
        rows.append(row + (_corner_columns(code.corners / job.size) if job.corners else "") + "\n")
    (job.folder / "labels" / split / f"{index:06d}.txt").write_text("".join(rows))
    found = [
        {
            "corners_px": code.corners.round(2).tolist(),
            "box_xyxy_px": [round(v, 2) for v in code.box],
            "payload": code.content.text,
            "kind": code.content.kind,
            "merchant": code.content.merchant,
            "nmid": code.content.nmid,
            "modules": code.modules,
        }
        for code in scene.codes
    ]
    return job.name_of(index), found


def _corner_columns(corners: npt.NDArray[np.float64]) -> str:
    """Write corners (4, 2), shares of the picture, as keypoints x y v of a label row."""
    inside = [0 <= x <= 1 and 0 <= y <= 1 for x, y in corners]
    return "".join(f" {x:.6f} {y:.6f} 2" if seen else " 0 0 0" for (x, y), seen in zip(corners, inside, strict=True))
