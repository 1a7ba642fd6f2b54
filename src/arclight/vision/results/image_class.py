"""Hold the classes of one image, likeliest first.

`Classifier.predict` and programs return a `Classification` for each photo; `writers` writes it to files. Names follow YOLOv5's results
(``probs``, ``top1``, ``to_txt``) and stay, as do the keys of `Classification.to_json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SHOWN = 5
"""Most classes that are listed of an image; also the 5 of top-5 accuracy."""


@dataclass(frozen=True, eq=False)
class Classification:
    """Classes of one image.

    >>> found = classifier.predict([photo])[0]
    >>> found.label, found.probs[found.top1], [found.names[c] for c in found.top5]
    """

    probs: Floats
    """(C,) probability of each class; the array cannot be written to."""
    names: tuple[str, ...]
    """Class names by number."""
    image: NDArray[np.uint8] | None = None
    """The photo, RGB uint8 (height, width, 3), if it was kept."""
    path: str | None = None
    """File of the photo, if it has one."""

    def __post_init__(self) -> None:
        probs = np.array(self.probs, dtype=np.float32)
        if probs.shape != (len(self.names),):
            raise ValueError(
                f"probs must have a number for each of {len(self.names)} classes, their shape is {probs.shape}"
            )
        probs.setflags(write=False)
        object.__setattr__(self, "probs", probs)

    def __len__(self) -> int:
        return 1

    @property
    def top5(self) -> list[int]:
        """Numbers of the five likeliest classes, or all if there are fewer; equal ones by number."""
        return [int(c) for c in np.argsort(-self.probs, kind="stable")[:SHOWN]]

    @property
    def top1(self) -> int:
        """Number of the likeliest class."""
        return self.top5[0]

    @property
    def label(self) -> str:
        """Name of the likeliest class."""
        return self.names[self.top1]

    @property
    def labels(self) -> list[str]:
        """The likeliest class alone, as a list."""
        return [self.label]

    def summary(self) -> str:
        """List the likeliest classes in a line, as in "disc 0.98, square 0.02"."""
        return ", ".join(f"{self.names[c]} {self.probs[c]:.2f}" for c in self.top5)

    def to_json(self) -> list[dict[str, Any]]:
        """List the likeliest classes as plain dictionaries, label and confidence, five at most."""
        return [{"label": self.names[c], "confidence": round(float(self.probs[c]), 4)} for c in self.top5]

    def to_txt(self, shape: Sequence[int] | None = None) -> str:
        """Write a line for each of the top-5 classes: its probability and its name (YOLOv5).

        ``shape`` is ignored.
        """
        return "".join(f"{self.probs[c]:.4f} {self.names[c]}\n" for c in self.top5)

    def plot(self) -> NDArray[np.uint8]:
        """Write the likeliest classes on the photo, RGB; ValueError if it was not kept."""
        from arclight.vision.results.draw import draw_lines

        if self.image is None:
            raise ValueError("this classification holds no image to draw on: pass image= when making it")
        return draw_lines(self.image, [(f"{self.names[c]} {self.probs[c]:.2f}", c) for c in self.top5])

    def save(self, path: str | Path) -> Path:
        """Write ``plot()`` as an image, in the format of the suffix.

        Raises ValueError for a suffix that is none.
        """
        from arclight.vision.results.detections import write_image

        return write_image(path, self.plot())
