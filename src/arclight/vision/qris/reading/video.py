"""Read codes in video: track each code while the camera moves, and vote over sightings.

Codes stand still, cameras move: the way of the picture between two frames (Lucas and Kanade's optical flow) says where every
code of the last frame is now. A code that no single frame shows well enough is read from all of them together: each sighting's
module grid gives every module a soft vote, dark or light, weighted by how well the grid fits; their mean is decoded, and corrected by how
sure each module is. If sightings are read as different texts, the text of most frames stands.

``arclight scan`` makes a `VideoScanner` for each video and camera: frames come in, codes with their texts go out. Keys of
`CodeTrack.to_json` stay.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from arclight.vision.data.images import Image
from arclight.vision.qris.reading.decode import (
    MAX_DOUBT,
    DecodedCode,
    Grey,
    LaidGrid,
    decode_grids,
    finish_grids,
    laid_grids,
    read_symbol,
    read_zxing,
    soft_modules,
    unread_quads,
    widened,
)  # fmt: skip
from arclight.vision.qris.reading.error_correction import SoftSymbol
from arclight.vision.qris.reading.finder_patterns import Floats
from arclight.vision.qris.reading.grid import Box, Grid, cv2
from arclight.vision.qris.reading.grid_search import PLAIN_SCORE
from arclight.vision.qris.reading.scanner import (
    WIDER,
    Code,
    DetectFn,
    DetectorBox,
    as_grey,
    code_of,
    detector_boxes,
    read_views,
)

MAX_GRIDS = 6
"""Module grids laid per frame: each costs a hundred plain readings."""
MAX_VOTES, MAX_UNLIKELY_VOTES = 24, 6
"""Most sightings that vote on one code's modules, since more seldom help; and most for a track that never looked like a code. Beyond them
vote only sightings clearer than all before, as when a camera finds its focus, and one each time the age of a track has doubled."""
CLEARER = 1.1
"""Factor in clearness over all sightings before from which every reader is tried."""
SAME_PLACE = 0.15
"""Distance, in sizes of a code, within which another text is a second opinion on the same code, not a second code."""
LEAST_VOTING_SCORE, MAX_VOTING_SCORE = 0.5, 0.98
"""Least correlation of a grid whose modules vote, and the correlation beyond which its weight grows no more."""
MAX_VOTE = 1.5
"""Most that a sighting says for a module being dark, or light."""
FLOW_SIDE = 320
"""Longest side of the reduced frames between which the camera's way is measured, pixels."""
MAX_GAP = 15
"""Frames after which a code that was not seen again is no longer looked for at its place."""
MAX_TRACKS = 1000
"""Tracks that are kept: cameras have no end. Lost ones are dropped first, of these the unread before the read."""
MAX_FRAMES = 10_000
"""Most frame numbers that a track keeps: the latest ones."""
MAX_TEXTS = 16
"""Most different texts that a track keeps. A further one takes the place of the one that was read least, never of the
one that was read most."""


@dataclass
class WeightedSum:
    """Soft votes on modules, each (n, n), summed up by weight."""

    total: npt.NDArray[np.float64]
    weight: float = 0.0

    def add(self, soft: Floats, score: float) -> Floats:
        """Add the vote of a grid, weighted by its signal-to-noise ratio; return the mean.

        That ratio follows from its correlation ``score``.
        """
        weight = score**2 / (1 - min(score, MAX_VOTING_SCORE) ** 2)
        self.total += weight * soft.clip(-MAX_VOTE, MAX_VOTE)
        self.weight += weight
        return np.asarray(self.total / self.weight, np.float32)


@dataclass
class CodeTrack:
    """One code through the frames in which it was seen."""

    id: int
    box: Box
    """Box in the latest frame, moved with the camera while the code is not seen."""
    frames: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_FRAMES))
    """Numbers of the latest frames in which it was detected or read, at most ``MAX_FRAMES``."""
    sightings: int = 0
    """Frames in which it was detected or read, of the whole video."""
    texts: Counter[str] = field(default_factory=Counter)
    """Frames in which each text was read, at most ``MAX_TEXTS`` texts; modules that were decoded together count as one."""
    best: Code | None = None
    """The largest sighting that was read as the text of most frames, or the latest one if none was read."""
    sums: dict[int, WeightedSum] = field(default_factory=dict)
    """Soft votes on the modules, by version of the code."""
    votes: int = 0
    last_vote: int = 0
    """Sightings up to the latest that voted."""
    likeness: float = 0.0
    """Best correlation of a finished grid in any sighting."""
    margin: float = 0.0
    """Share of the box that was added on every side where that grid was found."""
    clearness: float = 0.0
    """Clearness of the clearest sighting that was tried: see `_clearness`."""

    @property
    def text(self) -> str | None:
        return self.texts.most_common(1)[0][0] if self.texts else None

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and text."""
        return {
            "id": self.id,
            "text": self.text,
            "frames": list(self.frames),
            "sightings": self.sightings,
            "texts": dict(self.texts),
            "code": None if self.best is None else self.best.to_json(),
        }

    @property
    def is_likely(self) -> bool:
        """Return True if any sighting looked like a code."""
        return self.likeness >= LEAST_VOTING_SCORE

    def may_vote(self, clearness: float) -> bool:
        """Return True if a sighting of this clearness is worth a vote."""
        most = MAX_VOTES if self.is_likely else MAX_UNLIKELY_VOTES
        return self.votes < most or self.sightings >= 2 * self.last_vote or self.is_clearest(clearness)

    def is_clearest(self, clearness: float) -> bool:
        return clearness > CLEARER * self.clearness

    @property
    def centre(self) -> npt.NDArray[np.float64]:
        x0, y0, x1, y1 = self.box
        return np.array([(x0 + x1) / 2, (y0 + y1) / 2])

    @property
    def size(self) -> float:
        return max(self.box[2] - self.box[0], self.box[3] - self.box[1])


class VideoScanner:
    """Read the codes of a video's frames, in order: ``add`` each, then look at ``tracks``."""

    def __init__(self, detector: DetectFn | None = None) -> None:
        """Initialise the scanner.

        ``detector`` finds codes that no plain reader reads; without one, what a reader takes for a code is tried.
        """
        self.detector = detector
        self.tracks: list[CodeTrack] = []
        self.dropped = 0
        """Tracks that are no longer in ``tracks``, as more than ``MAX_TRACKS`` codes were seen."""
        self.frame = -1
        self._last: Grey | None = None

    def add(self, image: Image) -> list[CodeTrack]:
        """Read one frame, (H, W, 3) RGB or (H, W) grey, uint8; return the tracks seen in it."""
        grey = as_grey(image)
        if min(grey.shape) < 8:
            raise ValueError(f"need frames of at least 8 x 8 pixels; got {grey.shape[1]} x {grey.shape[0]}")
        self.frame += 1
        self._follow(grey)
        found = read_zxing(grey)
        boxes = detector_boxes(self.detector(image), grey.shape) if self.detector else _taken_for_codes(grey)
        seen = [self._add_sighting(read, boxes) for read in found]
        left = [box for box in boxes if not any(_inside(read.centre, box.xyxy) for read in found)]
        open_tracks = [(self._at(box), box) for box in left]
        seen += [track for track, _ in open_tracks]
        unread = [(track, box) for track, box in open_tracks if track.text is None]
        read_more = read_views(grey, [box for _, box in unread], [])
        for track, box in unread:
            for read in read_more:
                if _inside(read.centre, box.xyxy):
                    self._note(track, read, box)
        grids = 0
        for track, box in sorted(unread, key=lambda pair: pair[0].votes / (1 + pair[0].is_likely)):
            if grids == MAX_GRIDS:
                break
            if track.text is None and track.may_vote(clearness := _clearness(grey, box.xyxy)):
                grids += 1
                self._vote(track, grey, box, clearness)
        self._trim()
        return seen

    def _trim(self) -> None:
        """Free the votes on codes that were read or lost, and drop the tracks that are too many."""
        for track in self.tracks:
            if track.sums and (track.text is not None or self.frame - track.frames[-1] > MAX_GAP):
                track.sums.clear()
        surplus = len(self.tracks) - MAX_TRACKS
        if surplus > 0:
            lost = [track for track in self.tracks if self.frame - track.frames[-1] > MAX_GAP]
            lost.sort(key=lambda track: (track.text is not None, track.frames[-1]))
            dropped = {track.id for track in lost[:surplus]}
            self.tracks = [track for track in self.tracks if track.id not in dropped]
            self.dropped += len(dropped)

    def _follow(self, grey: Grey) -> None:
        """Move every track along with the camera."""
        scale = FLOW_SIDE / max(grey.shape)
        small = cv2.resize(grey, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA) if scale < 1 else grey
        before, self._last = self._last, small
        if before is None or before.shape != small.shape:
            return
        matrix = camera_motion(before, small)
        if matrix is None:
            return
        for track in self.tracks:
            if self.frame - track.frames[-1] > MAX_GAP:
                continue  # no longer looked for at its place
            x0, y0, x1, y1 = track.box
            corners = np.array([[[x0, y0], [x1, y0], [x1, y1], [x0, y1]]], np.float32) * min(scale, 1.0)
            moved = cv2.transform(corners, matrix)[0] / min(scale, 1.0)
            (a, b), (c, d) = moved.min(0), moved.max(0)
            track.box = (float(a), float(b), float(c), float(d))

    def _nearest(
        self, centre: npt.NDArray[np.float64], size: float, text: str | None, taken: list[CodeTrack]
    ) -> CodeTrack | None:
        """Return the track at a place, if one is near enough and of the same or unknown text.

        It must not have been seen elsewhere in this frame.
        """

        def distance(track: CodeTrack) -> float:
            return float(np.abs(track.centre - centre).max())

        near = [
            track for track in self.tracks
            if track not in taken and self.frame - track.frames[-1] <= MAX_GAP
            and distance(track) < 0.5 * max(size, track.size) and 0.4 < size / max(track.size, 1e-6) < 2.5
        ]  # fmt: skip
        alike = [track for track in near if text is not None and text in track.texts]
        silent = [track for track in near if text is None or track.text is None]
        same_place = [track for track in near if distance(track) < SAME_PLACE * max(size, track.size)]
        return min(alike or silent or same_place, key=distance, default=None)

    def _track(self, box: Box, text: str | None, taken: list[CodeTrack]) -> CodeTrack:
        centre, size = np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]), max(box[2] - box[0], box[3] - box[1])
        track = self._nearest(centre, size, text, taken)
        if track is None and text is not None:  # seen again after it was lost
            track = next((one for one in self.tracks if one not in taken and one.text == text), None)
        if track is None:
            track = CodeTrack(self.dropped + len(self.tracks), box)
            self.tracks.append(track)
        track.box = box
        track.frames.append(self.frame)
        track.sightings += 1
        return track

    def _add_sighting(self, read: DecodedCode, boxes: list[DetectorBox]) -> CodeTrack:
        holder = next((box for box in boxes if _inside(read.centre, box.xyxy)), None)
        (x0, y0), (x1, y1) = read.corners.min(0), read.corners.max(0)
        hull = (float(x0), float(y0), float(x1), float(y1))
        track = self._track(hull, read.text, [one for one in self.tracks if one.frames[-1] == self.frame])
        self._note(track, read, holder)
        return track

    def _at(self, box: DetectorBox) -> CodeTrack:
        """Return the track of a box in which nothing was read."""
        taken = [track for track in self.tracks if track.frames[-1] == self.frame]
        track = self._track(box.xyxy, None, taken)
        if track.best is None:
            track.best = code_of(None, box)
        return track

    def _note(self, track: CodeTrack, read: DecodedCode, box: DetectorBox | None) -> None:
        if read.text not in track.texts and len(track.texts) == MAX_TEXTS:
            others = [text for text in track.texts if text != track.text]  # what `best` was read as stays
            del track.texts[min(others, key=track.texts.__getitem__)]
        track.texts[read.text] += 1
        code = code_of(read, box)
        known = track.best
        if track.text == read.text and (known is None or known.text != read.text or _area(code) > _area(known)):
            track.best = code

    def _vote(self, track: CodeTrack, grey: Grey, box: DetectorBox, clearness: float) -> None:
        """Add one sighting's vote to a code's modules, and decode the sum.

        The clearest sightings are decoded by themselves, too.
        """
        track.votes, track.last_vote = track.votes + 1, track.sightings
        is_clearest = track.is_clearest(clearness)
        track.clearness = max(track.clearness, clearness)
        margin = track.margin if track.likeness >= PLAIN_SCORE else (WIDER, 0.0)[track.votes % 2]
        for view, slopes, near in laid_grids(grey, widened(box.xyxy, margin), tries=2 if is_clearest else 1):
            if not (grids := finish_grids(slopes, near)):
                return
            grid = max(grids, key=lambda one: one.score)
            if grid.score > track.likeness:
                track.likeness, track.margin = grid.score, margin
            read = None
            if grid.score >= LEAST_VOTING_SCORE:
                soft = soft_modules(LaidGrid(slopes.picture, grid))
                votes = track.sums.setdefault(grid.version, WeightedSum(np.zeros(soft.shape)))
                read = _read_soft(votes.add(soft, grid.score), grid) or _read_soft(soft, grid)
            if read is None and is_clearest:
                read, _ = decode_grids(slopes, near)
            if read is not None:
                self._note(track, view.back(read), box)
                return


def _read_soft(soft: Floats, grid: Grid) -> DecodedCode | None:
    """Decode soft modules (n, n) under a grid, unless there is too much doubt about them."""
    symbol = SoftSymbol.of(soft, grid.version)
    return read_symbol(symbol, grid)[0] if symbol.doubt() <= MAX_DOUBT else None


def scan_video(frames: Iterable[Image], detector: DetectFn | None = None) -> list[CodeTrack]:
    """Scan the ``frames`` of a video, (H, W, 3) RGB or (H, W) grey, uint8; one track per code."""
    scanner = VideoScanner(detector)
    for frame in frames:
        scanner.add(frame)
    return scanner.tracks


def camera_motion(before: Grey, after: Grey) -> npt.NDArray[np.float64] | None:
    """Estimate the camera's motion (2, 3) between two frames; None with too few points.

    It is a rotation, a scaling and a shift.
    """
    points = cv2.goodFeaturesToTrack(before, 200, 0.01, 7)
    if points is None or len(points) < 8:
        return None
    moved, found, _ = cv2.calcOpticalFlowPyrLK(before, after, points, None, winSize=(21, 21), maxLevel=4)
    good = found.reshape(-1) > 0
    if good.sum() < 8:
        return None
    matrix, inliers = cv2.estimateAffinePartial2D(points[good], moved[good], ransacReprojThreshold=3.0)
    return matrix if matrix is not None and inliers.sum() >= 6 else None


def _taken_for_codes(grey: Grey) -> list[DetectorBox]:
    """Return boxes around what a plain reader detects as codes but cannot read."""
    boxes = []
    for quad in unread_quads(grey):
        (x0, y0), (x1, y1) = quad.min(0), quad.max(0)
        if x1 - x0 >= 20 and y1 - y0 >= 20:
            boxes.append(DetectorBox((float(x0), float(y0), float(x1), float(y1)), 0.5))
    return boxes


def _inside(point: npt.NDArray[np.generic], box: Box) -> bool:
    return bool(box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3])


def _clearness(grey: Grey, box: Box) -> float:
    """Return the clearness of a code: size in pixels times edge steepness over contrast."""
    x0, y0, x1, y1 = (max(0, int(v)) for v in box)
    crop = grey[y0:y1, x0:x1]
    if min(crop.shape) < 4:
        return 0.0
    steep = float(np.percentile(np.abs(cv2.Sobel(crop, cv2.CV_32F, 1, 0)), 90))
    return float(np.sqrt(crop.size)) * steep / max(8.0, float(crop.std()))


def _area(code: Code) -> float:
    return float(abs(cv2.contourArea(np.array(code.corners_px, np.float32))))
