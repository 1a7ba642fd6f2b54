"""Define the settings of augmentation, without importing torch or OpenCV.

``tasks.settings`` puts one of these into a recipe; `augment`, `dataset` and `image_folder` change images by it. Names of fields and kinds are
recipe keys and are in saved runs: they must stay. A preset's values are YOLOv5's, but for `never_mirrored` and `close_mosaic`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from arclight._intervals import Checked, Fraction, Interval, ProperFraction


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Settings of random augmentation; the defaults suit codes and text: no mirroring."""

    mosaic: Fraction = 1.0
    """Probability of composing several images into one, in [0, 1]."""
    mosaic9: Fraction = 0.0
    """Share of these compositions that have nine smaller images instead of four."""
    mixup: Fraction = 0.0
    """Probability of blending two images, in [0, 1]."""
    copy_paste: Fraction = 0.0
    """Probability of pasting objects of another image where they hide little of others, in [0, 1]."""
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
    never_mirrored: tuple[str, ...] = ("*qr*", "*barcode*", "*matrix*", "*text*")
    """Classes, as patterns of names, whose images are not mirrored whatever fliplr and flipud say: nobody meets them so."""
    close_mosaic: Fraction = 0.1
    """Final fraction of training without mosaics, mixed images and pasted objects."""


@dataclass(frozen=True, kw_only=True)
class NoAugment(Augment):
    """Leave training images as they are (hyp.no-augmentation of YOLOv5)."""

    recipe_kind: ClassVar[str] = "none"

    mosaic: Fraction = 0.0
    translate: Fraction = 0.0
    scale: ProperFraction = 0.0
    hsv_h: Fraction = 0.0
    hsv_s: Fraction = 0.0
    hsv_v: Fraction = 0.0
    close_mosaic: Fraction = 0.0


@dataclass(frozen=True, kw_only=True)
class ScratchLow(Augment):
    """Augmentation of YOLOv5's small models (hyp.scratch-low): flips, and mosaics to the end."""

    recipe_kind: ClassVar[str] = "scratch-low"

    fliplr: Fraction = 0.5
    close_mosaic: Fraction = 0.0


@dataclass(frozen=True, kw_only=True)
class ScratchMed(ScratchLow):
    """Augmentation of YOLOv5's medium models (hyp.scratch-med).

    Its obj_gain is 0.7, its cls_gain 0.3.
    """

    recipe_kind: ClassVar[str] = "scratch-med"

    scale: ProperFraction = 0.9
    mixup: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class ScratchHigh(ScratchMed):
    """Augmentation of YOLOv5's large models (hyp.scratch-high).

    Its obj_gain is 0.7, its cls_gain 0.3.
    """

    recipe_kind: ClassVar[str] = "scratch-high"

    copy_paste: Fraction = 0.1


@dataclass(frozen=True, kw_only=True)
class PascalVOC(ScratchLow):
    """Change images as YOLOv5's evolution found best for fine-tuning on Pascal VOC (hyp.VOC)."""

    recipe_kind: ClassVar[str] = "voc"

    mosaic: Fraction = 0.85834
    mixup: Fraction = 0.04266
    translate: Fraction = 0.04591
    scale: ProperFraction = 0.75544
    hsv_h: Fraction = 0.01041
    hsv_s: Fraction = 0.54703
    hsv_v: Fraction = 0.27739


@dataclass(frozen=True, kw_only=True)
class Objects365(ScratchLow):
    """Change images as YOLOv5 does for Objects365 (hyp.Objects365)."""

    recipe_kind: ClassVar[str] = "objects365"

    translate: Fraction = 0.0902
    scale: ProperFraction = 0.491
    hsv_h: Fraction = 0.0188
    hsv_s: Fraction = 0.704
    hsv_v: Fraction = 0.36


AnyAugment = Augment | NoAugment | ScratchLow | ScratchMed | ScratchHigh | PascalVOC | Objects365


@dataclass(frozen=True, kw_only=True)
class CropAugment(Checked):
    """Random changes to training images that have one class each."""

    min_area: Annotated[float, Interval(gt=0, le=1)] = 0.25
    """Smallest part of an image that is cut out, as a share of its area; with 1 it is the middle square nearly always."""
    hsv_h: Fraction = 0.015
    """Largest change of hue, share of the circle."""
    hsv_s: Fraction = 0.4
    """Largest change of saturation, share."""
    hsv_v: Fraction = 0.4
    """Largest change of brightness, share."""
    fliplr: Fraction = 0.5
    """Probability of mirroring left-right, in [0, 1]; set it to 0 for codes and text."""
    flipud: Fraction = 0.0
    """Probability of mirroring top-bottom, in [0, 1]."""
