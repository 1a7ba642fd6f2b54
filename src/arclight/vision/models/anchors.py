"""Check how anchors fit a data set; fit better ones by k-means and evolution (autoanchor).

A detector (``tasks.detection``) checks its anchors before a fit; with ``anchors = "auto"`` it fits and evolves new ones if recall is low.
`loss` shares `ANCHOR_T`. Sizes of boxes in input pixels come in, anchors in the
same unit go out; no file is read here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arclight.vision.anchor_limits import ANCHOR_T

MUTATED = 0.9
"""Probability that `evolve_anchors` changes a side of an anchor."""
MUTATION = 0.1
"""Largest standard deviation of such a change, as a share of the side."""


def _fit(box_sizes: Tensor, anchors: Tensor) -> Tensor:
    """Return how well each box (n, 2) fits each anchor (k, 2): (n, k) in (0, 1].

    It is the minimum over width and height of min(r, 1 / r), r being the box's side over the anchor's.
    """
    ratio = box_sizes[:, None] / anchors
    return torch.minimum(ratio, 1 / ratio).amin(-1)


def best_possible_recall(box_sizes: Tensor, anchors: Tensor, anchor_t: float = ANCHOR_T) -> float:
    """Compute the best possible recall: the share of boxes (n, 2) that anchors (k, 2) can match.

    Sizes are in the same unit.
    """
    return float((_fit(box_sizes.float(), anchors.float()) > 1 / anchor_t).any(dim=1).float().mean())


def fit_anchors(
    box_sizes_wh_px: Tensor, image_size: int, num: int = 9, *, seed: int = 0, anchor_t: float = ANCHOR_T
) -> Tensor:
    """Fit ``num`` anchors (num, 2), small to large, to boxes (n, 2) in input pixels.

    k-means on logarithms of sizes, where distance is ratio, the measure by which boxes meet anchors. Ten starts compete
    by recall plus mean fit of a box to its best anchor; deterministic for a seed. Boxes under 2 pixels are left out,
    boxes over ``image_size`` are cut to it. With fewer distinct sizes than ``num``, anchors are spread around them
    within a factor of 2. Raises ValueError if no box is left.
    """
    sizes = box_sizes_wh_px.detach().double().cpu().reshape(-1, 2).clamp(max=image_size)
    sizes = sizes[(sizes >= 2).all(dim=1)]
    if len(sizes) == 0:
        raise ValueError(f"anchors need boxes of at least 2 x 2 pixels; none of the {len(box_sizes_wh_px)} given is")
    logs = sizes.log()
    generator = torch.Generator().manual_seed(seed)
    if len(logs.unique(dim=0)) < num:
        spread = torch.rand(num, len(logs), 2, generator=generator, dtype=torch.float64).mul(2).sub(1)
        logs = (logs + spread * torch.tensor(2.0).log()).flatten(0, 1)
    best_score, best = -1.0, logs[:num]
    for _ in range(10):
        centres = _k_means(logs, num, generator)
        anchors = centres.exp()
        score = float(_fit(sizes, anchors).amax(dim=1).mean()) + best_possible_recall(sizes, anchors, anchor_t)
        if score > best_score:
            best_score, best = score, centres
    anchors = best.exp()
    return anchors[anchors.prod(dim=1).argsort(stable=True)].float()


def evolve_anchors(
    anchors: Tensor, box_sizes_wh_px: Tensor, *, generations: int = 1000, seed: int = 0, anchor_t: float = ANCHOR_T
) -> Tensor:
    """Evolve ``anchors`` (k, 2) by mutation, keeping each change that fits boxes (n, 2) better.

    Anchors are ordered from small to large.
    Better: a larger mean, over boxes, of the fit to the best anchor, if one within ``anchor_t`` is there (YOLOv5's fitness).
    The result is never worse, and deterministic for a seed.
    """
    sizes = box_sizes_wh_px.detach().double().cpu().reshape(-1, 2)
    sizes = sizes[(sizes >= 2).all(dim=1)]
    generator = torch.Generator().manual_seed(seed)

    def fitness(candidate: Tensor) -> float:
        best = _fit(sizes, candidate).amax(dim=1)
        return float((best * (best > 1 / anchor_t)).mean())

    best = anchors.detach().double().cpu()
    best_fitness = fitness(best)
    for _ in range(generations if len(sizes) else 0):
        size = MUTATION * torch.rand(
            (), generator=generator, dtype=torch.float64
        )  # steps of random size: large and small ones are tried all along
        change = 1 + size * torch.randn(best.shape, generator=generator, dtype=torch.float64)
        kept = torch.rand(best.shape, generator=generator, dtype=torch.float64) >= MUTATED
        candidate = (best * torch.where(kept, 1.0, change.clamp(0.3, 3.0))).clamp(min=2.0)
        if (found := fitness(candidate)) > best_fitness:
            best_fitness, best = found, candidate
    return best[best.prod(dim=1).argsort(stable=True)].float()


def _k_means(points: Tensor, num: int, generator: torch.Generator, rounds: int = 30) -> Tensor:
    """Cluster ``points`` (n, d) by k-means: Lloyd's algorithm after k-means++.

    The initialisation is that of Arthur and Vassilvitskii 2007.
    """
    first = torch.randint(len(points), (1,), generator=generator)
    centres = points[first]
    while len(centres) < num:
        distance = torch.cdist(points, centres).amin(dim=1).square()
        # a little everywhere, so that equal points cannot leave all distances at zero
        centres = torch.cat((centres, points[torch.multinomial(distance + 1e-12, 1, generator=generator)]))
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(dim=1)
        counts = torch.bincount(nearest, minlength=num)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centres)
    return centres
