"""Generate merchants with their own photographing conditions: non-IID federated sites.

A merchant is a function of (seed, number). What differs is what differs between real shops that photograph with their own
phones on their own counters, so that data divided by merchant are not alike at any two sites.

`generate` makes a `MerchantStyle` by `merchant_of` for each photo, `scene` draws in it. Another order of random draws changes every generated
data set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.backgrounds import BACKGROUNDS
from arclight.vision.qris.scenes.contents import qris_content
from arclight.vision.qris.scenes.drawing import Sprite, blank, contrasting, cv2, rounded, vivid, write_centred
from arclight.vision.qris.scenes.symbols import Colour

CONCENTRATION = 0.35
"""Concentration of the Dirichlet distributions of a merchant's surroundings and carriers: few of each are common."""
CARRIER_KINDS = 12
"""Number of kinds of carriers: must equal the length of ``scene._CARRIERS``."""


@dataclass(frozen=True)
class MerchantStyle:
    """Habits of one merchant's photos."""

    name: str
    surroundings: tuple[float, ...]
    """Probability of each of BACKGROUNDS."""
    carriers: tuple[float, ...]
    """Probability of each kind of carrier, in the order of ``scene._CARRIERS``."""
    sizes: tuple[float, float]
    """Sides of codes, from smallest to largest, as shares of the picture's."""
    gains: tuple[float, float, float]
    """Gains of red, green and blue under this place's lamps."""
    gamma: float
    """Gamma of brightness: above 1 the place is dim."""
    brand: tuple[Colour, Colour]
    emblem: int
    """Shape of its logo: 0 disc, 1 triangle, 2 square."""
    sign_share: float
    """Share of photos with its sign."""
    empty_share: float
    """Share of photos without a code."""

    def side(self, rng: np.random.Generator) -> float:
        low, high = self.sizes
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    def lit(self, picture: Image) -> Image:
        """Return ``picture`` under the light of this place."""
        levels = 255 * (np.arange(256) / 255) ** self.gamma
        table = (levels[:, None] * np.array(self.gains)).clip(0, 255).round().astype(np.uint8)
        return np.asarray(cv2.LUT(picture, table[:, None, :]), np.uint8)

    def sign(self, rng: np.random.Generator, width: float) -> Sprite:
        """Return a board in the merchant's colours with its logo and name."""
        ground, accent = self.brand
        canvas = blank(width, width * rng.uniform(0.3, 0.5), ground)
        height, wide = canvas.shape[:2]
        centre, radius = (round(height * 0.5), round(height * 0.42)), max(2, round(height * 0.26))
        if self.emblem == 0:
            cv2.circle(canvas, centre, radius, accent, -1, cv2.LINE_AA)
        elif self.emblem == 1:
            corners = np.array([[0, -1], [1, 0.8], [-1, 0.8]]) * radius + centre
            cv2.fillPoly(canvas, [corners.round().astype(np.int32)], accent, cv2.LINE_AA)
        else:
            low, high = (centre[0] - radius, centre[1] - radius), (centre[0] + radius, centre[1] + radius)
            cv2.rectangle(canvas, low, high, accent, -1)
        cv2.circle(canvas, centre, max(1, radius // 2), ground, -1, cv2.LINE_AA)
        write_centred(canvas, self.name.partition(" ")[2], height * 0.92, height * 0.2, contrasting(ground), bold=True)
        if height > 20:
            cv2.rectangle(canvas, (0, 0), (wide - 1, height - 1), accent, max(1, height // 30))
        return Sprite(canvas, rounded(canvas, height * 0.08))


def merchant_of(seed: int, number: int) -> MerchantStyle:
    """Draw the habits of merchant ``number`` of a data set."""
    rng = np.random.default_rng([seed, number, 77])
    low = float(np.exp(rng.uniform(np.log(0.1), np.log(0.4))))
    warmth = float(rng.normal(0, 0.16))
    return MerchantStyle(
        name=f"{number:03d} {qris_content(rng).merchant}",
        surroundings=tuple(rng.dirichlet([CONCENTRATION] * len(BACKGROUNDS)).tolist()),
        carriers=tuple(rng.dirichlet([CONCENTRATION] * CARRIER_KINDS).tolist()),
        sizes=(low, min(0.85, low * float(rng.uniform(1.5, 2.5)))),
        gains=tuple(np.clip([1 + warmth, 1 + rng.normal(0, 0.03), 1 - 1.2 * warmth], 0.4, 1.5).tolist()),
        gamma=float(np.exp(rng.normal(0, 0.35))),
        brand=(vivid(rng), vivid(rng)),
        emblem=int(rng.integers(3)),
        sign_share=float(rng.uniform(0.2, 0.9)),
        empty_share=float(rng.uniform(0.02, 0.15)),
    )
