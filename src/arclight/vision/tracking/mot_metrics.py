"""Score a tracker: MOTA and identity switches (CLEAR MOT), IDF1.

CLEAR MOT: Bernardin and Stiefelhagen 2008; IDF1: Ristani et al. 2016.

Users call `score_tracks` from Python to compare trackers (docs/vision.md), and so do benchmarks; no command does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from arclight.vision.tracking.assignment import assign, overlaps

NumberedBoxes = tuple[ArrayLike, ArrayLike]
"""Numbers (k,) and boxes xyxy (k, 4) of one frame."""


@dataclass(frozen=True)
class TrackingScores:
    """Counts of a tracker's right and wrong answers through a video."""

    truths: int
    found: int
    misses: int
    false_positives: int
    switches: int
    """How often an object goes on under another number than the one it had last."""
    identity_true_positives: int
    """Boxes that agree where each object has one number, and each number one object, for the whole video."""

    @property
    def mota(self) -> float:
        """MOTA: 1 minus misses, false positives and switches over the true boxes.

        Below 0 for bad trackers, NaN without true boxes.
        """
        errors = self.misses + self.false_positives + self.switches
        return 1 - errors / self.truths if self.truths else float("nan")

    @property
    def idf1(self) -> float:
        """IDF1, the share of boxes under the right identity: 2 IDTP / (true boxes + boxes found).

        NaN if there is no box at all.
        """
        both = self.truths + self.found
        return 2 * self.identity_true_positives / both if both else float("nan")


def score_tracks(frames: Iterable[tuple[NumberedBoxes, NumberedBoxes]], min_overlap: float = 0.5) -> TrackingScores:
    """Score the frames of one video, each of true and tracked numbers with their boxes.

    A box agrees with a true one if their IoU is ``min_overlap`` or more. An object keeps the number that it had last if that still
    agrees; the others are matched for the most overlap.
    """
    together, totals = Counter[tuple[int, int]](), Counter[str]()
    true_frames, found_frames = Counter[int](), Counter[int]()
    partner: dict[int, int] = {}
    for (true_ids, true_boxes), (found_ids, found_boxes) in frames:
        truths, found = np.asarray(true_ids).tolist(), np.asarray(found_ids).tolist()
        likeness = overlaps(true_boxes, found_boxes)
        agree = likeness >= min_overlap
        together.update((truths[row], found[column]) for row, column in zip(*agree.nonzero(), strict=True))
        true_frames.update(truths)
        found_frames.update(found)
        cost = np.where(agree, 1 - likeness, np.inf)
        for row, truth in enumerate(truths):
            if (column := found.index(partner[truth]) if partner.get(truth) in found else -1) >= 0 and agree[
                row, column
            ]:
                cost[row, :], cost[:, column], cost[row, column] = np.inf, np.inf, 0.0
        pairs = {truths[row]: found[column] for row, column in assign(cost, 1.0)}
        totals["switches"] += sum(partner.get(truth, number) != number for truth, number in pairs.items())
        totals["truths"] += len(truths)
        totals["found"] += len(found)
        totals["matched"] += len(pairs)
        partner |= pairs
    return TrackingScores(
        totals["truths"], totals["found"], totals["truths"] - totals["matched"], totals["found"] - totals["matched"],
        totals["switches"], _identity_true_positives(together, list(true_frames), list(found_frames)),
    )  # fmt: skip


def _identity_true_positives(together: Counter[tuple[int, int]], truths: list[int], found: list[int]) -> int:
    """Count the frames that agree under the best one-to-one choice of a number for each object."""
    shared = np.array([[together[truth, number] for number in found] for truth in truths], np.float64)
    if not shared.size:
        return 0
    return int(sum(shared[row, column] for row, column in assign(-shared, 0.0)))
