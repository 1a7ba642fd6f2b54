"""Settings of augmentation (no torch or OpenCV here: a recipe is read without them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arclight._intervals import Checked, Fraction, Interval, ProperFraction


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Random changes to training images; defaults suit codes and text, which have no mirror image."""

    mosaic: Fraction = 1.0
    """Probability of composing four images into one, in [0, 1]."""
    mixup: Fraction = 0.0
    """Probability of blending two images, in [0, 1]."""
    degrees: Annotated[float, Interval(ge=0, le=180)] = 0.0
    """Largest rotation, degrees."""
    translate: Fraction = 0.1
    """Largest shift, as a share of the image side."""
    scale: ProperFraction = 0.5
    """Largest change of size: factors in [1 - scale, 1 + scale]."""
    shear: Annotated[float, Interval(ge=0, lt=90)] = 0.0
    """Largest shear, degrees."""
    perspective: Annotated[float, Interval(ge=0, le=0.001)] = 0.0
    """Largest perspective term, in [0, 0.001]."""
    hsv_h: Fraction = 0.015
    """Largest change of hue, share of the circle."""
    hsv_s: Fraction = 0.7
    """Largest change of saturation, share."""
    hsv_v: Fraction = 0.4
    """Largest change of brightness, share."""
    fliplr: Fraction = 0.0
    """Probability of mirroring left-right, in [0, 1]; leave at 0 for codes and text."""
    flipud: Fraction = 0.0
    """Probability of mirroring top-bottom, in [0, 1]; leave at 0 for codes and text."""
    close_mosaic: Fraction = 0.1
    """Final fraction of training without mosaics."""
