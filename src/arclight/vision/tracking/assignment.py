"""Match tracks to boxes at least cost, and put track ids on the boxes.

The trackers `byte_track` and `oc_sort` match by it in each frame, `mot_metrics` matches tracks to the truth. Among equally good answers
it must always choose the same, so that a video gives the same tracks twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from arclight.vision.boxes import box_iou
from arclight.vision.results.detections import Detections

T = TypeVar("T")


def assign(cost: ArrayLike, limit: float) -> list[tuple[int, int]]:
    """Solve the linear assignment problem; return pairs (row, column), sorted by row.

    Leaving a row without a column costs ``limit``.
    cost: (n, m), infinite where a pair is impossible. No pair costs more than ``limit``. Among equally good answers always the same.
    Successive shortest augmenting paths with potentials (Jonker and Volgenant 1987), O(n^2 (n + m)).
    """
    costs = np.asarray(cost, np.float64)
    rows, columns = costs.shape
    if not rows or not columns:
        return []
    if np.isnan(costs).any():
        raise ValueError("costs must be numbers, got NaN: boxes with NaN must be left out before they are matched")
    # A column for each row that stands for none, which costs the limit; what costs more is never better than it.
    extended = np.full((rows, columns + rows), limit, np.float64)
    extended[:, :columns] = np.where(costs > limit, 2.0 * abs(limit) + 1e6, costs)
    owners = _shortest_paths(extended)
    return sorted(
        (row, column)
        for column, row in enumerate(owners[:columns].tolist())
        if row >= 0 and costs[row, column] <= limit
    )


def match(
    cost: NDArray[np.float64], limit: float, tracks: Sequence[T], numbers: NDArray[np.intp], matched: dict[int, T]
) -> NDArray[np.intp]:
    """Assign boxes to ``tracks`` by ``cost`` (tracks, boxes); return the boxes left over.

    ``numbers``: of the boxes, in the frame's detections. Pairs are added to ``matched``, box number to track.
    """
    pairs = assign(cost, limit)
    matched.update({int(numbers[column]): tracks[row] for row, column in pairs})
    return np.delete(numbers, [column for _, column in pairs])


def _shortest_paths(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the row of each column (-1 for none) in the least-cost assignment of all rows.

    There must be at least as many columns as rows.
    """
    rows, columns = cost.shape
    row_price, column_price = np.zeros(rows), np.zeros(columns)
    owners = np.full(columns, -1, np.int64)
    for start in range(rows):
        distance, before = np.full(columns, np.inf), np.full(columns, -1, np.int64)
        done = np.zeros(columns, np.bool_)
        row, column, reached = start, -1, 0.0
        while True:
            # lengthen the shortest path known by each edge of this row
            through = reached + cost[row] - row_price[row] - column_price
            shorter = ~done & (through < distance)
            distance[shorter], before[shorter] = through[shorter], column
            column = int(np.where(done, np.inf, distance).argmin())
            reached, done[column] = float(distance[column]), True
            if owners[column] < 0:
                break
            row = int(owners[column])
        row_price[start] += reached
        taken = done & (owners >= 0)
        row_price[owners[taken]] += reached - distance[taken]
        column_price[done] -= reached - distance[done]
        while column >= 0:  # swap owners along the path
            previous = int(before[column])
            owners[column] = start if previous < 0 else owners[previous]
            column = previous
    return owners


def overlaps(tracks: ArrayLike, boxes: ArrayLike) -> NDArray[np.float64]:
    """Compute the IoU (n, m) of boxes xyxy (n, 4) and (m, 4) in float64."""
    a, b = (torch.from_numpy(np.asarray(each, np.float64).reshape(-1, 4)) for each in (tracks, boxes))
    return box_iou(a, b).numpy()


def with_ids(found: Detections, ids: Mapping[int, int]) -> Detections:
    """Return the boxes that belong to tracks, with ids.

    ``ids``: number of the box in ``found`` to number of its track.
    """
    kept = sorted(ids)
    return replace(found[kept], ids=np.array([ids[number] for number in kept], np.int64))
