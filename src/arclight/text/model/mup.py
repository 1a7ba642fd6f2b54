"""Scale initial weights, multipliers and learning rates with width and depth (muP).

A learning rate found on a small model is then right for a large one. muP: Yang et al. 2022 (arXiv 2203.03466). CompleteP, which scales
with depth too: Dey et al. 2025 (arXiv 2505.01618).

`zoo` turns a recipe's table ``overrides.mup`` into a `MuP`: `decoder` scales initial weights and multipliers by it, `LanguageModel` and
``heads`` give its `rates` to the optimizer, and `hf.write` folds multipliers into weights. Factors are the papers'; field names are recipe keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arclight._intervals import Checked, Fraction, PositiveInt
from arclight.optim.settings import Scale

if TYPE_CHECKING:
    from torch import nn

_BLOCK = re.compile(r"(^|\.)layers\.\w+\.")


@dataclass(frozen=True, kw_only=True)
class MuP(Checked):
    """Settings of muP: base shapes for which rates are meant.

    m = dim / base_dim and l = layers / base_layers. Of the blocks' matrices, initial variance is divided by m, the rate
    is multiplied by l^(alpha - 1) / m, decay by m and eps by l^-alpha / m; of their norms and biases the rate by
    l^(alpha - 1) and eps likewise. Attention is scaled by 1 / head width, logits by 1 / m, residual branches by
    l^-alpha. Embeddings, the last norm and the output learn at the plain rate.

    SGD has factors of its own (Yang et al., table 8): the blocks' matrices learn at the plain rate, all other parameters at m times it,
    those of the blocks times l^(2 alpha - 1), as gradients in a branch are l^-alpha times as large; the decay of each step is the base's.
    """

    base_dim: PositiveInt
    """Width at which rates were found."""
    base_layers: PositiveInt | None = None
    """Depth at which rates were found; none: depth scales nothing (muP), else CompleteP."""
    alpha: Fraction = 1.0
    """Exponent of the depth, 0.5 to 1 in CompleteP."""

    def check(self, dim: int, layers: int) -> None:
        """Raise ValueError for shapes that are no multiples of the base shapes."""
        for name, base, size, field in (
            ("dim", self.base_dim, dim, "base_dim"),
            ("layers", self.base_layers, layers, "base_layers"),
        ):
            if base is not None and size % base:
                raise ValueError(f"{name} = {size} is not a multiple of mup.{field} = {base}: change one of them")

    def widths(self, dim: int) -> float:
        return dim / self.base_dim

    def depths(self, layers: int) -> float:
        return layers / self.base_layers if self.base_layers else 1.0

    def rates(self, dim: int, layers: int) -> Callable[[str, nn.Parameter], Scale]:
        """Return a function from names and parameters to the factors of their rates.

        It is for a model of this width and depth.
        """
        m, depths = self.widths(dim), self.depths(layers)
        rate, eps = depths ** (self.alpha - 1), depths**-self.alpha / m
        deep = depths ** (2 * self.alpha - 1)
        matrix, vector = (
            Scale(lr=rate / m, weight_decay=m, eps=eps, width=m, sgd_lr=deep),
            Scale(lr=rate, eps=eps, sgd_lr=m * deep),
        )
        outer = Scale(sgd_lr=m)

        def scale(name: str, parameter: nn.Parameter) -> Scale:
            if _BLOCK.search(name) is None:
                return outer
            return matrix if parameter.ndim > 1 else vector

        return scale


def mup_of(value: dict[str, Any]) -> MuP:
    """Parse the table ``mup`` of a recipe.

    Raises ValueError for a missing base width and for unknown fields.
    """
    unknown = sorted(value.keys() - {"base_dim", "base_layers", "alpha"})
    if unknown or "base_dim" not in value:
        wrong = (
            f"mup has no {unknown[0]!r}"
            if unknown
            else f"mup = {value} lacks base_dim, the width at which rates were found"
        )
        raise ValueError(f"{wrong}: set base_dim, and base_layers and alpha for CompleteP")
    return MuP(**value)


def folded_factor(config: Any, name: str) -> float:
    """Return the factor that folds muP's multipliers into a parameter.

    The result is for a model that knows no multipliers. Queries (or their norm's weight) take that of attention, the
    last maps of a block's branches that of the branches, the last norm that of logits; 1 for all others, and without
    muP.
    """
    if getattr(config, "mup", None) is None:
        return 1.0
    if name == "norm.weight":
        return float(config.output_scale)
    if name.endswith((".attention.wo.weight", ".feed_forward.w2.weight")):
        return float(config.branch_scale)
    if name.endswith(config.scaled_queries):
        return float(config.attention_scale(config.width) * config.width**0.5)
    return 1.0
