"""Estimate the probability that a code was pasted over something, from its surroundings.

All is measured on the surroundings as the code's own corners rectify them: what was printed together with a code is square to it,
what it was stuck on is not. Brightness is in units of the code's contrast, 0 for its ink and 1 for its paper; lengths are in the
code's sides. A logistic regression maps the measurements to log odds. Its weights are those of ``fit`` on pairs that `scenes.fraud`
draws, as `benchmarks/qr_photos.py --calibrate` writes them; one honest drawn photo in a hundred exceeds its threshold.

`verifier` measures by it, the benchmark fits it. Weights and threshold are in tampering.json, by the names of measurements: fit both again after a
change of a measurement, or of ``reading.finder_patterns``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.qris.reading.finder_patterns import Floats, find_patterns

cv2 = require("cv2", extra="vision")

Mask = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

SIDE = 160
"""Pixels of a rectified code's side."""
MARGIN = 0.7
"""Width of the surroundings that are measured on every side of a code, in its sides."""
BANDS = ((0.02, 0.09), (0.09, 0.2), (0.2, 0.4), (0.4, 0.68))
"""Bands of distance from a code, in its sides, in which lines are looked for."""
RINGS = {"near": (0.04, 0.25), "far": (0.2, 0.68)}
TILTS_DEG = np.arange(-6.0, 6.1, 0.5)
FAINT, STRONG = 0.06, 0.5
"""Steps of brightness from which a line counts as fully seen, and beyond which its contrast counts no more."""
STRIP = round((MARGIN - 0.02) * SIDE)
MIN_STEP = 0.03
"""Least gradient, per pixel, whose direction is counted."""
FILE = Path(__file__).with_name("tampering.json")
FALSE_ALARMS = 0.01
"""Share of honest drawn photos above the threshold."""
LEAST, MOST = -4.0, 6.0
"""Bounds of the log odds that a look at a print gives: drawn pairs say nothing about what is rarer."""
RIDGE = 2.0
ROUNDS = 8
"""Newton steps; far fewer are enough."""


@dataclass(frozen=True)
class Surroundings:
    """Code with its surroundings, rectified: (n, n), the code in the middle."""

    rgb: Floats
    even: Floats
    """Brightness: 0 the code's ink, 1 its paper."""
    seen: Mask
    """What lies in the photo."""

    def ring(self, low: float, high: float) -> Mask:
        """Return the pixels between ``low`` and ``high`` sides from the code."""
        size = self.even.shape[0]
        away = np.abs(np.arange(size) - (size - 1) / 2) / SIDE - 0.5
        distance = np.maximum.outer(away, away)
        return np.asarray((distance >= low) & (distance < high) & self.seen)


def look_around(image: Image, corners: npt.ArrayLike) -> Surroundings:
    """Rectify a code, (4, 2) corners clockwise from its own top left, and its surroundings."""
    low, high = MARGIN * SIDE, (1 + MARGIN) * SIDE
    target = np.array([[low, low], [high, low], [high, high], [low, high]], np.float32)
    matrix = cv2.getPerspectiveTransform(np.asarray(corners, np.float32), target)
    size = (round(high + low),) * 2
    rgb = image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2)
    flat = cv2.warpPerspective(rgb, matrix, size, borderMode=cv2.BORDER_REPLICATE).astype(np.float32)
    seen = cv2.warpPerspective(np.ones(rgb.shape[:2], np.uint8), matrix, size, flags=cv2.INTER_NEAREST) > 0
    grey = flat.mean(2)
    inside = grey[round(low) : round(high), round(low) : round(high)]
    dark, light = np.percentile(inside, (15, 85))
    return Surroundings(flat, ((grey - dark) / max(light - dark, 8.0)).astype(np.float32), seen)


def measure(image: Image, corners: npt.ArrayLike) -> dict[str, float]:
    """Return every measurement around a code by name; see the functions below for each."""
    around = look_around(image, corners)
    return {**_lines(around), **_turns(around), **_paper(around), **_remains(around)}


def _lines(around: Surroundings) -> dict[str, float]:
    """Measure straight lines along the four sides, by band of distance, weakest side first.

    ``line``: how much of a side a line follows, 0 to 1; ``step``: its contrast; ``rim``: that of a thin line darker or lighter than
    what is on both sides of it, as shadows and cut edges are; ``tilt``: how far lines are turned against the code, degrees.
    """
    low, high = round(MARGIN * SIDE), round((1 + MARGIN) * SIDE)
    start = high + round(0.02 * SIDE)
    step = np.array([[-1, -1, -1, 0, 1, 1, 1]], np.float32) / 3
    thin = np.array([[1, 1, 0, -2, -2, 0, 1, 1]], np.float32) / 4
    rows = []
    for turn in range(4):
        strip = np.ascontiguousarray(np.rot90(around.even, turn)[low - 8 : high + 8, start : start + STRIP])
        seen = np.rot90(around.seen, turn)[low - 8 : high + 8, start : start + STRIP].mean(0) > 0.8
        steps, rims = cv2.filter2D(strip, -1, step), cv2.filter2D(strip, -1, thin)
        faint = _along(np.clip(steps / FAINT, -1, 1)) * seen
        contrast = _along(np.clip(steps, -STRONG, STRONG)) * seen
        rim = _along(np.clip(rims, -STRONG, STRONG)) * seen
        rows.append([_peaks(*limits, faint, contrast, rim) for limits in BANDS])
    found = np.array(rows)  # side, band, (line, step, rim, tilt)
    values: dict[str, float] = {}
    for band in range(len(BANDS)):
        for index, name in enumerate(("line", "step", "rim")):
            for rank, value in enumerate(np.sort(found[:, band, index])):
                values[f"{name}_{band}_{rank}"] = float(value)
        turned = np.minimum(found[:, band, 1], 0.2) * found[:, band, 3]
        values[f"tilt_{band}_sum"], values[f"tilt_{band}_max"] = float(turned.sum()), float(turned.max())
    return values


def _along(strip: Floats) -> Floats:
    """Average a strip along lines of every tilt: (tilts, width)."""
    height, width = strip.shape
    means = np.empty((len(TILTS_DEG), width), np.float32)
    for index, tilt in enumerate(np.tan(np.radians(TILTS_DEG))):
        shear = np.array([[1, tilt, -tilt * height / 2], [0, 1, 0]], np.float32)
        flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
        sheared = cv2.warpAffine(strip, shear, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
        means[index] = cv2.reduce(sheared, 0, cv2.REDUCE_AVG)[0]
    return means


def _peaks(low: float, high: float, faint: Floats, contrast: Floats, rim: Floats) -> tuple[float, float, float, float]:
    part = np.s_[:, round((low - 0.02) * SIDE) : round((high - 0.02) * SIDE)]
    steps = np.abs(contrast[part])
    tilt = np.abs(TILTS_DEG[np.unravel_index(int(steps.argmax()), steps.shape)[0]])
    return float(np.abs(faint[part]).max()), float(steps.max()), float(np.abs(rim[part]).max()), float(tilt)


def _turns(around: Surroundings) -> dict[str, float]:
    """Measure the directions of edges around the code, against the code's own.

    ``turn``: the likeliest, degrees; ``sharp``, ``square`` and ``off``: shares of edges that have it, that are square to the code,
    and that are turned by up to ten degrees; ``edges``: how much there is.
    """
    soft = cv2.GaussianBlur(np.clip(around.even, -1, 2), (0, 0), 1.0)
    way = (cv2.Sobel(soft, cv2.CV_32F, 1, 0) + 1j * cv2.Sobel(soft, cv2.CV_32F, 0, 1)) / 8
    values: dict[str, float] = {}
    for name, (low, high) in RINGS.items():
        ring = around.ring(low, high)
        edges = way[ring]
        edges = edges[np.abs(edges) > MIN_STEP]
        weights = np.minimum(np.abs(edges), 0.15)
        turned = np.degrees(np.angle((edges / np.abs(edges)) ** 4)) / 4
        counts = np.histogram(turned, bins=np.arange(-45, 45.1, 0.5), weights=weights)[0]
        counts = np.convolve(counts, np.ones(3) / 3, "same")
        total = counts.sum() + 1e-6
        near = counts[70:110]  # ten degrees to both sides
        values[f"turn_{name}"] = float(abs(near.argmax() - 19.5) / 2)
        values[f"sharp_{name}"] = float(near.max() / total)
        values[f"square_{name}"] = float(counts[88:92].sum() / total)
        values[f"off_{name}"] = float((near.sum() - counts[87:93].sum()) / total)
        values[f"edges_{name}"] = float(weights.sum() / max(1, int(ring.sum())))
    return values


def _paper(around: Surroundings) -> dict[str, float]:
    """Measure tone and tint of the lightest parts outside, against the code's own paper."""
    inner = around.ring(-1, 0)
    light = inner & (around.even >= np.percentile(around.even[inner], 80))
    paper = around.rgb[light].mean(0)
    values: dict[str, float] = {}
    for name, (low, high) in {"quiet": (0.01, 0.05), "near": (0.1, 0.25), "far": (0.25, 0.45)}.items():
        ring = around.ring(low, high)
        values[f"tone_{name}"] = values[f"tint_{name}"] = 0.0
        if ring.sum() < 50:
            continue
        other = around.rgb[ring & (around.even >= np.percentile(around.even[ring], 60))].mean(0)
        values[f"tone_{name}"] = float(abs(np.log((other.mean() + 4) / (paper.mean() + 4))))
        values[f"tint_{name}"] = float(np.abs(other / (other.mean() + 4) - paper / (paper.mean() + 4)).sum())
    return values


def _remains(around: Surroundings) -> dict[str, float]:
    """Measure remains of another code around this one.

    ``busy``: texture like modules right outside the code; ``finder``: finder patterns.
    """
    texture = np.abs(cv2.Laplacian(cv2.GaussianBlur(around.even, (0, 0), 1.2), cv2.CV_32F)) > 0.08
    values = {}
    for name, (low, high) in {"quiet": (0.015, 0.06), "near": (0.06, 0.16), "mid": (0.16, 0.3)}.items():
        ring = around.ring(low, high)
        values[f"busy_{name}"] = float(texture[ring].mean()) if ring.any() else 0.0
    low, high = round((MARGIN - 0.04) * SIDE), round((1 + MARGIN + 0.04) * SIDE)
    rest = around.even.copy()
    rest[low:high, low:high] = np.median(around.even[around.ring(0.01, 0.05)]) if around.ring(0.01, 0.05).any() else 1.0
    edge = round(0.35 * SIDE)
    outside = np.ascontiguousarray(np.clip(rest, 0, 1.2)[edge:-edge, edge:-edge] * 200, np.float32)
    fits = [p.correlation for p in find_patterns(outside, 16) if SIDE / 90 < p.module_px < SIDE / 15]
    for rank, value in zip(("first", "second"), [*sorted(fits, reverse=True), 0.0, 0.0], strict=False):
        values[f"finder_{rank}"] = float(value)
    return values


def remarks(measured: Mapping[str, float]) -> list[str]:
    """Describe the measurements that stand out, in words."""
    found = []
    for band, (low, high) in enumerate(BANDS[:3]):
        sides = sum(measured[f"line_{band}_{rank}"] > 0.6 for rank in range(4))
        if sides >= 2:
            found.append(f"straight edges on {sides} of its sides, {low:.2f} to {high:.2f} of its size away")
            break
    if 0.8 < measured["turn_far"] < 8 and measured["sharp_far"] > 0.12:
        found.append(f"its surroundings are turned by {measured['turn_far']:.1f} degrees")
    if measured["finder_first"] > 0.6:
        found.append("a finder pattern of another code sticks out beside it")
    if measured["tone_near"] > 0.12:
        found.append("its paper has another brightness than what is around it")
    return found


@dataclass(frozen=True)
class TamperingModel:
    """Weights of measurements, by name, in the log odds that a code was pasted on."""

    names: tuple[str, ...]
    mean: Doubles
    scale: Doubles
    weights: Doubles
    """(3 measurements + 1,): of each standardised value, of its size, of its sign, and the intercept."""
    threshold: float

    def log_odds(self, measured: Mapping[str, float]) -> float:
        return float(np.clip(self.raw(np.array([[measured[name] for name in self.names]]))[0], LEAST, MOST))

    def raw(self, values: Doubles) -> Doubles:
        """Return unbounded log odds of (N, measurements) values."""
        return np.asarray(_terms(values, self.mean, self.scale) @ self.weights)

    def save(self, file: Path = FILE) -> None:
        document = {
            "threshold": round(self.threshold, 4), "names": list(self.names),
            **{key: np.round(getattr(self, key), 5).tolist() for key in ("mean", "scale", "weights")},
        }  # fmt: skip
        file.write_text(json.dumps(document) + "\n")


@cache
def calibrated() -> TamperingModel:
    """Read the weights that come with the package."""
    document = json.loads(FILE.read_text())
    arrays = {key: np.array(document[key]) for key in ("mean", "scale", "weights")}
    return TamperingModel(tuple(document["names"]), threshold=document["threshold"], **arrays)


def fit(measured: Sequence[Mapping[str, float]], pasted: Sequence[bool], *, folds: int = 5) -> TamperingModel:
    """Fit a model; its threshold comes from honest photos that the folds' models have not seen.

    Photos come in pairs, honest and pasted side by side, and no pair is divided between folds.
    """
    names = tuple(measured[0])
    values = np.array([[row[name] for name in names] for row in measured])
    labels = np.array(pasted, np.float64)
    fold = np.arange(len(labels)) // 2 % folds
    unseen = [
        _fitted(names, values[fold != k], labels[fold != k]).raw(values[(fold == k) & (labels == 0)])
        for k in range(folds)
    ]
    model = _fitted(names, values, labels)
    threshold = float(np.quantile(np.concatenate(unseen), 1 - FALSE_ALARMS))
    return TamperingModel(names, model.mean, model.scale, model.weights, min(threshold, MOST - 0.1))


def _fitted(names: tuple[str, ...], values: Doubles, labels: Doubles) -> TamperingModel:
    """Minimise cross-entropy and a ridge penalty by Newton's method."""
    mean, scale = values.mean(0), values.std(0) + 1e-6
    terms = _terms(values, mean, scale)
    penalty = np.diag([*[RIDGE] * (terms.shape[1] - 1), 1e-6])
    weights = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        shares = 1 / (1 + np.exp(-np.clip(terms @ weights, -30, 30)))
        slope = terms.T @ (shares - labels) + penalty @ weights
        weights -= np.linalg.solve((terms * (shares * (1 - shares))[:, None]).T @ terms + penalty, slope)
    return TamperingModel(names, mean, scale, weights, threshold=0.0)


def _terms(values: Doubles, mean: Doubles, scale: Doubles) -> Doubles:
    standard = np.clip((values - mean) / scale, -4, 4)
    return np.hstack([standard, np.abs(standard), np.tanh(2 * standard), np.ones((len(standard), 1))])
