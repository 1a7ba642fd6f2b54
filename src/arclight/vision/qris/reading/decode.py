"""Decode QR codes: fast decoders for whole pictures, a robust one for crops of found codes.

`scanner` and `video` call the readers here, `evidence` the plain ones. The robust one reads modules one by one under a grid laid over them, and
removes blur, motion and uneven light by an equalizer: every code has two hundred modules or more that are known beforehand (ISO/IEC 18004,
6.3). A linear filter that maps the picture around these to +1 (dark) and -1 (light) also undoes on all others what the camera did
everywhere alike. It is fitted by ridge regression, and refitted on its own most certain decisions, like decision-directed equalizers of
modems (Lucky 1966). Limits may be tuned if ``benchmarks/qr_photos.py`` reads as many codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.qris.reading.error_correction import SoftSymbol, version_modules
from arclight.vision.qris.reading.finder_patterns import Floats
from arclight.vision.qris.reading.grid import MAX_VERSION, Box, Grid, fixed_modules, rectify
from arclight.vision.qris.reading.grid_search import PLAIN_SCORE, find_grids, grids_near, refined_grids, rivals
from arclight.vision.qris.reading.refinement import Slopes, Stiffness, climb, right_versions

cv2 = require("cv2", extra="vision")
zxingcpp = require("zxingcpp", extra="vision")

Grey = npt.NDArray[np.uint8]

MAX_UPSCALED_SIDE = 1600
"""Longest side of an enlarged picture, pixels: beyond it enlarging costs much and reads nothing more."""
OTHER_SYMBOLOGIES = ("Aztec", "Code128", "Code93", "DataMatrix", "EAN13", "EAN8", "MaxiCode", "PDF417", "UPCA", "UPCE")
"""Symbologies beside QR codes that `read_other_symbols` names, as zxing-cpp calls them."""
MIN_PX_PER_MODULE = 1.05
"""Fewest pixels per module at which laying a grid still reads something."""


@dataclass(frozen=True)
class DecodedCode:
    """Decoded code: its text, and its corners (4, 2) in pixels, clockwise from its own top left."""

    text: str
    corners: Floats

    @property
    def centre(self) -> Floats:
        return np.asarray(self.corners.mean(0), np.float32)


def read_zxing(image: Image) -> list[DecodedCode]:
    """Read codes in a whole picture (grey or RGB) by zxing-cpp alone, its options as they come."""
    return [_read(code) for code in _zxing(image)]


def read_opencv(image: Image) -> list[DecodedCode]:
    """Read codes in a whole picture (grey or RGB) by OpenCV's own reader."""
    try:
        found, texts, quads, _ = cv2.QRCodeDetector().detectAndDecodeMulti(to_grey(image))
    except (cv2.error, UnicodeDecodeError):  # it raises on payloads that are not UTF-8 and on some tiny pictures
        return []
    if not found:
        return []
    return [DecodedCode(text, np.asarray(quad, np.float32)) for text, quad in zip(texts, quads, strict=True) if text]


def to_grey(image: Image) -> Grey:
    """Convert RGB (H, W, 3) or grey (H, W), uint8, to grey."""
    return image if image.ndim == 2 else np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)


def _zxing(image: Image, **options: Any) -> list[Any]:
    """Find codes with zxing-cpp; with ``return_errors``, those it cannot read too.

    Micro QR codes of version M1 are left out: they detect errors and correct none, so that noise passes for one too easily.
    """
    grey = np.ascontiguousarray(to_grey(image))
    options.setdefault("formats", zxingcpp.BarcodeFormat.QRCode)
    codes = zxingcpp.read_barcodes(grey, text_mode=zxingcpp.TextMode.Plain, **options)
    return [
        code
        for code in codes
        if options.get("return_errors") or (code.valid and (code.extra or {}).get("Version") != "M1")
    ]


def read_other_symbols(image: Image) -> list[tuple[str, DecodedCode]]:
    """Read the symbols of a whole picture (grey or RGB) that are no QR codes.

    Each comes behind the name of its symbology.
    Symbologies that detect hardly any error (Codabar, Code 39, ITF) are left out: stripes of a photo pass for them.
    """
    formats = [getattr(zxingcpp.BarcodeFormat, name) for name in OTHER_SYMBOLOGIES]
    return [(code.format.name, _read(code)) for code in _zxing(image, formats=formats)]


def _read(code: Any) -> DecodedCode:
    return DecodedCode(decoded_text(code), _corners(code))


def decoded_text(code: Any) -> str:
    """Return the text of a zxing-cpp code; binary content as ISO 8859-1 characters."""
    binary = code.content_type == zxingcpp.ContentType.Binary
    return bytes(code.bytes).decode("latin-1") if binary else str(code.text)


def unread_quads(grey: Grey) -> list[Floats]:
    """Return the corners (4, 2) of what zxing-cpp takes for codes that it cannot read."""
    return [quad for quad, is_read in symbol_quads(grey) if not is_read]


def symbol_quads(grey: Grey) -> list[tuple[Floats, bool]]:
    """Return the corners (4, 2) of what zxing-cpp takes for codes, and whether each is read."""
    return [(_corners(code), bool(code.valid)) for code in _zxing(grey, return_errors=True)]


def _corners(code: Any) -> Floats:
    place = code.position
    points = (place.top_left, place.top_right, place.bottom_right, place.bottom_left)
    return np.array([[point.x, point.y] for point in points], np.float32)


@dataclass(frozen=True)
class View:
    """Enlarged part of the picture: view = (picture pixels - ``origin``) x ``scale`` (x, y)."""

    image: Grey
    origin: Floats
    scale: Floats

    def local(self, box: Box) -> Floats:
        """Return a box of the picture (4,) in pixels of the view."""
        corners = np.array(box, np.float32).reshape(2, 2)
        return np.asarray(((corners - self.origin) * self.scale).reshape(4), np.float32)

    def outer(self, box: Floats) -> Box:
        """Return a box of the view (4,) in pixels of the picture."""
        x0, y0, x1, y1 = (box.reshape(2, 2) / self.scale + self.origin).reshape(4).tolist()
        return x0, y0, x1, y1

    def back(self, read: DecodedCode) -> DecodedCode:
        """Return a read in this view as a read in the whole picture."""
        return DecodedCode(read.text, np.asarray(read.corners / self.scale + self.origin, np.float32))


@dataclass(frozen=True)
class StraightView:
    """Part of the picture rectified to a square; ``matrix`` (3, 3) maps it back to the picture."""

    image: Grey
    matrix: npt.NDArray[np.float64]

    def back(self, read: DecodedCode) -> DecodedCode:
        """Return a read in this view as a read in the whole picture."""
        corners = cv2.perspectiveTransform(read.corners.astype(np.float64)[None], self.matrix)[0]
        return DecodedCode(read.text, np.asarray(corners, np.float32))


def widened(box: Box, margin: float) -> Box:
    """Return the box with ``margin`` of its width and height added on every side."""
    x0, y0, x1, y1 = box
    across, down = margin * (x1 - x0), margin * (y1 - y0)
    return x0 - across, y0 - down, x1 + across, y1 + down


def _crop(grey: Grey, box: Box, margin: float) -> tuple[Grey, Floats]:
    """Crop ``grey`` around ``box`` with ``margin``, a share of the box; return crop and origin."""
    height, width = grey.shape
    x0, y0, x1, y1 = widened(box, margin)
    left, top = max(0, int(x0)), max(0, int(y0))
    right, bottom = min(width, int(np.ceil(x1))), min(height, int(np.ceil(y1)))
    return grey[top:bottom, left:right], np.array([left, top], np.float32)


def _enlarged(crop: Grey, origin: Floats, size: tuple[int, int]) -> View:
    """Resize ``crop`` to ``size`` (width, height) pixels."""
    scale = np.array([size[0] / crop.shape[1], size[1] / crop.shape[0]], np.float32)
    method = cv2.INTER_CUBIC if scale.min() >= 1 else cv2.INTER_AREA
    return View(np.asarray(cv2.resize(crop, size, interpolation=method), np.uint8), origin, scale)


def enlarged_crop(grey: Grey, box: Box, margin: float, size: Callable[[int, int], tuple[int, int]]) -> View:
    """Crop and resize the part of ``grey`` around ``box``.

    ``margin``: share of the box added on every side. ``size`` maps the crop's width and height to the view's.
    """
    crop, origin = _crop(grey, box, margin)
    return _enlarged(crop, origin, size(crop.shape[1], crop.shape[0]))


def enlarged_sharp(crop: Grey, origin: Floats, size: tuple[int, int], amount: float, radius: float) -> View:
    """Resize ``crop`` and sharpen it by an unsharp mask of ``radius`` pixels of the result.

    What is blurred is the crop, which has far fewer pixels: the mask of `sharpened` within rounding, at a fraction of its time.
    """
    view = _enlarged(crop, origin, size)
    sigma_x, sigma_y = (radius / float(scale) for scale in view.scale)
    soft = _enlarged(cv2.GaussianBlur(crop, (0, 0), sigma_x, sigmaY=sigma_y), origin, size).image
    return View(np.asarray(cv2.addWeighted(view.image, 1 + amount, soft, -amount, 0), np.uint8), origin, view.scale)


def sharpened(image: Grey, amount: float, radius: float) -> Grey:
    """Sharpen by an unsharp mask."""
    soft = cv2.GaussianBlur(image, (0, 0), radius)
    return np.asarray(cv2.addWeighted(image, 1 + amount, soft, -amount, 0), np.uint8)


def views_of(grey: Grey, box: Box) -> Iterator[View]:
    """Yield enlarged, squared and sharpened views of a box, the most useful for its time first.

    Squaring undoes the foreshortening of a tilted code along the axes, which costs finders more than anything else. The first view reads
    four in five of the codes that any view reads. Larger and other views read nothing in photos that grids do not read.
    """
    crop, origin = _crop(grey, box, 0.2)
    tight, tight_origin = _crop(grey, box, 0.08)
    height, width = crop.shape
    if min(height, width, *tight.shape) < 4:
        return
    longest = max(height, width)

    def times(factor: float) -> tuple[int, int]:
        factor = min(factor, max(1.0, MAX_UPSCALED_SIDE / longest))
        return round(width * factor), round(height * factor)

    def square(side: float) -> tuple[int, int]:
        pixels = round(min(max(side, 1.25 * longest), MAX_UPSCALED_SIDE))
        return pixels, pixels

    yield _enlarged(crop, origin, square(200))
    yield enlarged_sharp(crop, origin, times(3), 1.5, 3)
    yield enlarged_sharp(tight, tight_origin, square(300), 1.5, 6)
    yield enlarged_sharp(crop, origin, square(200), 1.5, 4)
    yield enlarged_sharp(crop, origin, times(2), 1.5, 2)


STRAIGHT_SIDE = 200
"""Side of a straightened view, pixels."""
STRAIGHT_QUAD = np.array([[36, 36], [164, 36], [164, 164], [36, 164]], np.float32)
"""Corners in the straightened picture; there is a margin around them, as they are only approximate."""


def straightened(grey: Grey, corners: Floats) -> StraightView:
    """Rectify the part of ``grey`` inside four corners (4, 2), clockwise, to a square."""
    matrix = cv2.getPerspectiveTransform(STRAIGHT_QUAD, corners.astype(np.float32))
    flags = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    image = cv2.warpPerspective(
        grey, matrix, (STRAIGHT_SIDE, STRAIGHT_SIDE), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return StraightView(np.asarray(image, np.uint8), matrix)


def read_view(view: View | StraightView) -> list[DecodedCode]:
    """Read codes in a view, by zxing-cpp, as codes in the whole picture."""
    return [view.back(_read(code)) for code in _zxing(view.image)]


GRID_VIEWS: tuple[tuple[int, bool], ...] = ((200, True), (330, True))
"""Views of a box in which a grid is laid, in order: longest side in pixels, and whether it is made square, which undoes foreshortening."""

LEAST_LONGEST = 400
"""Least longest side, in pixels, of a view of a crop of more than 800: three pixels per module of the largest code. Smaller crops are reduced
to half their side at most."""
MIN_GRID_SIDE = 30.0
"""Smallest box, as the root of its area in pixels, in which a grid is searched for; none of 200 smaller ones was read."""
MIN_PROMISING_SCORE = 0.55
"""Least correlation of a grid that could not be decoded for another view to be tried."""
FINE_MODULES = 45
"""Modules along a side from which another view is tried after a grid failed: it shows more of fine codes. No coarser one was read by it."""


@dataclass(frozen=True)
class GridReading:
    """Result of a grid search in a box: codes, number of views, and the best grid's score."""

    codes: list[DecodedCode]
    views: int
    score: float | None
    """Best correlation of a grid, 0 if there was none; None if none was looked for."""


def is_large_enough(box: Box) -> bool:
    """Return True if a grid is searched for in a box of this size."""
    return (box[2] - box[0]) * (box[3] - box[1]) >= MIN_GRID_SIDE**2


def read_grid(grey: Grey, box: Box, tries: int = len(GRID_VIEWS), *, thorough: bool = True) -> GridReading:
    """Read the code in ``box`` module by module, under grids laid over at most ``tries`` views.

    No view is tried of a box that is too small, and no further ones where not even a likely grid was found, or what was found is
    too doubtful. ``thorough`` as in `find_grids`.
    """
    if not is_large_enough(box):
        return GridReading([], 0, None)
    count, best = 0, 0.0
    for view, slopes, near in laid_grids(grey, box, tries, thorough=thorough):
        count += 1
        score = near[0].score if near else 0.0
        best = max(best, score)
        code, doubt = decode_grids(slopes, near)
        if code:
            return GridReading([view.back(code)], count, best)
        if score < MIN_PROMISING_SCORE or doubt > MAX_DOUBT or near[0].modules < FINE_MODULES:
            break
    return GridReading([], count, best)


def laid_grids(
    grey: Grey, box: Box, tries: int = len(GRID_VIEWS), *, thorough: bool = True
) -> Iterator[tuple[View, Slopes, list[Grid]]]:
    """Yield at most ``tries`` views of ``box``, each with the grids found in it, best first.

    The picture of a view is (H, W). Grids that are plain in one view are refined in the next, not looked for again.
    ``thorough`` as in `find_grids`.
    """
    crop, origin = _crop(grey, box, 0.2)
    side = float(np.sqrt((box[2] - box[0]) * (box[3] - box[1])))
    largest = largest_version(side)
    if largest < 1 or min(crop.shape) < 4:
        return
    grids: list[Grid] = []
    scale = np.ones(2, np.float32)
    for longest, square in GRID_VIEWS[:tries]:
        least = min(0.5, LEAST_LONGEST / max(crop.shape))
        factor = float(np.clip(longest / max(crop.shape), least, 6))
        width, height = (max(crop.shape),) * 2 if square else crop.shape[::-1]
        view = _enlarged(crop, origin, (round(width * factor), round(height * factor)))
        slopes = Slopes(contrast_stretched(view.image))
        left, top, right, bottom = view.local(box).tolist()
        local = (left, top, right, bottom)
        if grids and grids[0].score >= PLAIN_SCORE:
            ratio = view.scale / scale
            moved = [replace(grid, shape=grid.shape * ratio) for grid in rivals(grids)]
            grids = refined_grids(slopes, moved, largest)
        else:
            grids = find_grids(slopes, local, largest, partial(_proposals, slopes.picture) if thorough else None)
        scale = view.scale
        yield view, slopes, grids


def read_near(grey: Grey, corners: Floats) -> list[DecodedCode]:
    """Read the code near the rough ``corners`` (4, 2), clockwise from any.

    It is rectified, then read module by module.
    """
    view = straightened(grey, corners)
    if codes := read_view(view):
        return codes
    slopes = Slopes(contrast_stretched(view.image))
    side = float(np.sqrt(cv2.contourArea(corners.astype(np.float32))))
    code, _ = decode_grids(slopes, grids_near(slopes, STRAIGHT_QUAD, largest_version(side)))
    return [view.back(code)] if code else []


def largest_version(side: float) -> int:
    """Return the highest version to try on a code of ``side`` pixels; below 1 for none."""
    return min(MAX_VERSION, int((side / MIN_PX_PER_MODULE - 17) / 4))


def read_at(grey: Grey, corners: Floats, modules: int) -> DecodedCode | None:
    """Read the code whose ``corners`` (4, 2) are known, clockwise from its own top left.

    For codes that were drawn: what this cannot read, no search for a code's place can. Edges that are not straight are fitted.
    """
    low, high = corners.min(0), corners.max(0)
    crop, origin = _crop(grey, (float(low[0]), float(low[1]), float(high[0]), float(high[1])), 0.2)
    if min(crop.shape) < 4:
        return None
    factor = float(np.clip(4 * modules / max(crop.shape), 1, 6))
    view = _enlarged(crop, origin, (round(crop.shape[1] * factor), round(crop.shape[0] * factor)))
    slopes = Slopes(contrast_stretched(view.image))
    shape = np.concatenate([(corners - origin) * view.scale, np.zeros((4, 2))]).astype(np.float32)
    known = Grid((modules - 17) // 4, shape, 1.0)
    code = _read_patiently(LaidGrid(slopes.picture, known)) or decode_grids(slopes, [known])[0]
    return view.back(code) if code else None


def contrast_stretched(image: Grey) -> Floats:
    """Stretch brightness to 0 to 255 between the darkest and lightest hundredth."""
    below = np.cumsum(np.bincount(image.ravel(), minlength=256))
    low, high = (_percentile(below, percent) for percent in (1, 99))
    stretched = (np.arange(256) - low) * (255 / max(high - low, 1.0))
    return np.asarray(cv2.LUT(image, stretched.clip(0, 255).astype(np.float32)), np.float32)


def _percentile(below: npt.NDArray[np.intp], percent: float) -> float:
    """Return a percentile of grey levels as `numpy.percentile` does.

    Of the pixels ``below[g]`` are of level g or less, (256,).
    """
    rank = (int(below[-1]) - 1) * percent / 100
    lower, upper = np.searchsorted(below, [int(rank), int(np.ceil(rank))], side="right")
    return float(lower + (upper - lower) * (rank - int(rank)))


def _proposals(picture: Floats) -> list[Floats]:
    """List quadrilaterals that readers take for a code, though they cannot read it."""
    image = picture.astype(np.uint8)
    quads = [quad for quad, _ in symbol_quads(image)]
    try:
        found, points = cv2.QRCodeDetectorAruco().detectMulti(image)
    except cv2.error:  # it gives up on some pictures; the other proposals remain
        found = False
    if found:
        quads += [np.asarray(quad, np.float32).reshape(4, 2) for quad in points]
    extent = max(image.shape)
    return [quad for quad in quads if np.abs(np.diff(quad, axis=0)).max() > 0.2 * extent]


MIN_CONTRAST = 2.0
"""Least spread of brightness, grey levels, by which a window is scaled: noise on plain paper is no contrast."""


class LaidGrid:
    """Module grid over the picture that it was found in, with its rectified views cached."""

    def __init__(self, picture: Floats, grid: Grid) -> None:
        self.picture, self.grid = picture, grid
        self._rectified: dict[tuple[int, int], Floats] = {}

    def rectified(self, *, cell: int, quiet: int) -> Floats:
        """Return the rectified view, see `grid.rectify`; the array is shared and read-only."""
        if (cell, quiet) not in self._rectified:
            self._rectified[cell, quiet] = rectify(self.picture, self.grid, cell=cell, quiet=quiet)
        return self._rectified[cell, quiet]


@dataclass(frozen=True, kw_only=True)
class Equalizer:
    """Fit a filter on a code's fixed modules and apply it to all.

    The filter sees ``reach`` modules to every side, ``cells`` x ``cells`` samples of each, after brightness and contrast were
    made even over ``window`` modules. ``ridge`` is the penalty on its weights per known module; ``rounds`` is how often it is
    fitted again on its own decisions.
    """

    reach: int
    cells: int
    window: int
    ridge: float
    rounds: int = 0

    def dark(self, laid: LaidGrid) -> npt.NDArray[np.bool_]:
        """Return which modules under a grid are dark, (n, n)."""
        return np.asarray(self.soft(laid) > 0)

    def soft(self, laid: LaidGrid) -> Floats:
        """Return how dark modules under a grid are, (n, n): about 1 where dark and -1 where light."""
        grid, features = laid.grid, self._features(laid)
        wanted = fixed_modules(grid.version).reshape(-1).astype(np.float32)
        known = wanted != 0
        penalty = np.diag([self.ridge * known.sum()] * (features.shape[1] - 1) + [1e-6])
        fixed = features[known]
        guess = _fitted(features, fixed, wanted[known], penalty)
        penalty *= len(features) / known.sum() / 3
        decided = wanted
        for _ in range(self.rounds):
            before, decided = decided, np.where(known, wanted, np.sign(guess))
            if (decided == before).all():
                break
            trust = np.where(known, 1, np.abs(guess).clip(0, 1))
            guess = _fitted(features, trust[:, None] * features, trust * decided, penalty)
        size = grid.modules + 2
        return np.asarray(guess.reshape(size, size)[1:-1, 1:-1])

    def _features(self, laid: LaidGrid) -> Floats:
        """Return the samples around every module and one ring of quiet zone, ((n + 2)^2, features).

        The last feature is constant.
        """
        even = self._even(laid.rectified(cell=self.cells, quiet=self.reach + 1))
        size, reach = (laid.grid.modules + 2) * self.cells, self.reach * self.cells
        side = 2 * reach + self.cells
        windows = sliding_window_view(even, (side, side))[: size : self.cells, : size : self.cells]
        features = np.ones((len(windows) ** 2, side * side + 1), np.float32)
        features[:, :-1] = windows.reshape(-1, side * side)
        return features

    def _even(self, seen: Floats) -> Floats:
        """Normalise brightness to the mean and deviation in a window."""
        side = self.window * self.cells | 1
        mean = cv2.blur(seen, (side, side))
        spread = cv2.blur(seen * seen, (side, side)) - mean * mean
        return np.asarray((seen - mean) / np.sqrt(np.maximum(spread, MIN_CONTRAST**2)), np.float32)


def _fitted(features: Floats, known: Floats, wanted: Floats, penalty: npt.NDArray[np.float64]) -> Floats:
    """Fit ridge regression of ``wanted`` (K,) on ``known`` (K, F); predict ``features`` (M, F).

    The products, nearly all of the work, are of single precision; the system is solved in double.
    """
    normal, sides = (known.T @ known).astype(np.float64) + penalty, (known.T @ wanted).astype(np.float64)
    solved, weights = cv2.solve(normal, sides[:, None], flags=cv2.DECOMP_CHOLESKY)
    if not solved:  # by rounding the system may lose its definiteness
        weights = np.linalg.solve(normal, sides)
    return np.asarray(features @ weights.reshape(-1).astype(np.float32))


def with_fixed_modules(dark: npt.NDArray[np.bool_], version: int) -> npt.NDArray[np.bool_]:
    """Replace the fixed modules of ``dark`` (n, n) by those of the standard.

    A finger may have hidden them.
    """
    fixed = fixed_modules(version)[1:-1, 1:-1]
    known = np.where(fixed == 0, dark, fixed > 0)
    if version >= 7:
        known[:6, -11:-8] = version_modules(version)
        known[-11:-8, :6] = version_modules(version).T
    return np.asarray(known)


QUICK = Equalizer(reach=1, cells=2, window=11, ridge=0.03)
PATIENT = (
    Equalizer(reach=1, cells=2, window=31, ridge=0.03),
    Equalizer(reach=2, cells=2, window=11, ridge=0.03, rounds=4),
    Equalizer(reach=2, cells=2, window=17, ridge=0.01, rounds=6),
)
"""Slower equalizers: what misleads one does not mislead another, and their mean is surer than each."""
USUAL, STIFF, FREE = Stiffness(lean=2, bow=3), Stiffness(lean=20, bow=20), Stiffness(bow=3)
"""Stiffness of finished grids: as most codes lean and bow; as small flat ones do; free in perspective, with bows."""
MAX_DOUBT, MAX_DOUBT_OF_USUAL = 0.7, 0.4
"""Largest doubt at which, after a failure, stiff grids and another view are tried; and at which free grids and simpler guesses are. No code
that these read had more."""
HOPELESS_EXCESS = 200.0
"""Bits by which correction may miss under a plain grid (`PLAIN_SCORE`); if it misses by more, it is no code, and no other grid is tried. For
codes that another grid read, the first grid missed by 107 at most, or by 184 if it was not plain."""
NEAR_EXCESS, MAX_DOUBT_OF_NEAR = 40.0, 0.45
"""Bits by which correction of a doubtful symbol may miss for another grid to be tried, and the doubt from which that holds. Codes of such
doubt that another grid read missed by 33 at most."""
MIN_NEAR_SCORE = 0.4
"""Least correlation of the best grid for grids to be finished, which is to bring them to `MIN_FINISHED_SCORE`: codes that were read in photos
had 0.75 and more."""
MIN_FINISHED_SCORE = 0.5
"""Least correlation of a finished grid whose modules are decoded: codes that were read had 0.62 and more, and nine in ten grids in boxes
without a code have less than this."""
BEHIND = 0.12
"""Correlation below the best at which a straight grid is not finished: the gap to the true one only widens."""


def soft_modules(laid: LaidGrid) -> Floats:
    """Return how dark modules under a grid are, (n, n), in the mean of the patient equalizers."""
    return np.asarray(np.mean([equalizer.soft(laid) for equalizer in PATIENT], 0))


def finish_grids(slopes: Slopes, near: Sequence[Grid], stiffness: Stiffness = USUAL) -> list[Grid]:
    """Fit the likeliest two of ``near`` (best first) as ``stiffness`` has it."""
    best = [grid for grid in near[:2] if grid.score > near[0].score - BEHIND]
    fitted = climb(slopes, best, rounds=10, stiffness=stiffness)
    renamed = right_versions(slopes.picture, fitted, MAX_VERSION)
    if all(one.version == other.version for one, other in zip(fitted, renamed, strict=True)):
        return fitted
    return climb(slopes, renamed, rounds=10, stiffness=stiffness)


def decode_grids(slopes: Slopes, near: Sequence[Grid]) -> tuple[DecodedCode | None, float]:
    """Decode the modules under ``near`` grids (best first); also return the least doubt.

    It is infinite if what is seen can be no code. Modules are equalized and corrected by how sure each is. If that fails by little,
    simpler guesses follow, then a plain reader. Grids that fit too badly are not finished.
    """
    least = np.inf
    if not near or near[0].score < MIN_NEAR_SCORE:
        return None, least
    for stiffness, most in ((USUAL, np.inf), (STIFF, MAX_DOUBT), (FREE, MAX_DOUBT_OF_USUAL)):
        if least > most:
            break
        for grid in finish_grids(slopes, near, stiffness):
            if grid.score < MIN_FINISHED_SCORE:
                continue
            laid = LaidGrid(slopes.picture, grid)
            symbol = SoftSymbol.of(soft_modules(laid), grid.version)
            doubt = symbol.doubt()
            least = min(least, doubt)
            code, excess = read_symbol(symbol, grid)
            if code:
                return code, least
            if grid.score >= PLAIN_SCORE and excess > HOPELESS_EXCESS:
                return None, np.inf
            if least > MAX_DOUBT_OF_NEAR and excess > NEAR_EXCESS:
                return None, least
            if doubt > MAX_DOUBT:
                continue  # as likely a wrong grid
            if stiffness != STIFF and doubt <= MAX_DOUBT_OF_USUAL and (code := _read_patiently(laid)):
                return code, least
            break
    return None, least


def read_symbol(symbol: SoftSymbol, grid: Grid) -> tuple[DecodedCode | None, float]:
    """Decode the modules of ``symbol``, soft-corrected if plain decoding fails.

    They lie under ``grid``. Also returns by how many bits correction misses.
    """
    code, excess = decode_modules(symbol.dark, grid.version), 0.0
    if not code:
        corrected, excess = symbol.corrected()
        code = None if corrected is None else decode_modules(corrected, grid.version)
    return (DecodedCode(decoded_text(code), grid.corners) if code else None), excess


def _read_patiently(laid: LaidGrid) -> DecodedCode | None:
    """Decode a grid by simple thresholds, then by a plain reader of the rectified picture."""
    for dark in _guesses(laid):
        if code := decode_modules(dark, laid.grid.version):
            return DecodedCode(decoded_text(code), laid.grid.corners)
    flat = np.clip(rectify(laid.picture, laid.grid), 0, 255).astype(np.uint8)
    for seen in (flat, sharpened(flat, 1.0, 5.0)):
        for code in _zxing(seen):
            if code.extra.get("Version") == str(laid.grid.version):  # by chance, a part of it may pass for a micro code
                return DecodedCode(decoded_text(code), laid.grid.corners)
    return None


def _guesses(laid: LaidGrid) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield guesses of the dark modules (n, n), the cheapest first."""
    seen = laid.rectified(cell=1, quiet=0)
    yield seen < (np.percentile(seen, 90) + np.percentile(seen, 10)) / 2
    yield QUICK.dark(laid)
    for amount in (0.6, 1.2):
        crisp = seen + amount * (seen - cv2.GaussianBlur(seen, (0, 0), 1.0))
        yield crisp < cv2.blur(crisp, (7, 7))


def decode_modules(dark: npt.NDArray[np.bool_], version: int) -> Any:
    """Decode modules (n, n), with the standard's fixed ones; None if there are too many errors."""
    codes = _zxing(_symbol(with_fixed_modules(dark, version)), is_pure=True)
    return codes[0] if codes else None


def _symbol(dark: npt.NDArray[np.bool_]) -> Grey:
    """Draw a clean picture of a symbol, three pixels per module."""
    framed = np.pad(np.where(dark, 0, 255).astype(np.uint8), 4, constant_values=255)
    return framed.repeat(3, 0).repeat(3, 1)
