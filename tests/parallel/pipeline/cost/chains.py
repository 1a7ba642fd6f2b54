"""Published sizes of language models as chains of units, and the rules by which others cut them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arclight.parallel.pipeline.unit_costs import UnitCost

RATE = 1e12
"""FLOP/s that times of units are said for; no ratio depends on it."""


@dataclass(frozen=True)
class Sizes:
    """A decoder as its authors publish it."""

    vocabulary: int
    width: int
    layers: int
    hidden: int
    sequence: int
    kv_share: float = 1.0
    """Heads of keys over heads of queries."""
    gated: bool = False

    def units(self) -> list[UnitCost]:
        """The embedding, the layers and the output. Multiply-adds of one token count twice; attention is causal; backward takes twice
        the forward, half of it for the weights; an embedding is a look-up."""
        attention = self.width**2 * (2 + 2 * self.kv_share)
        mlp = (3 if self.gated else 2) * self.width * self.hidden
        table = self.vocabulary * self.width
        flops = [0.04 * self.width, *[2 * (attention + mlp + self.sequence * self.width)] * self.layers, 2 * table]
        sizes = [table, *[attention + mlp] * self.layers, table]
        return [UnitCost(f / RATE, f / RATE, f / RATE, 4 * round(size)) for f, size in zip(flops, sizes, strict=True)]


GPT2 = Sizes(50257, 768, 12, 3072, 1024)
"""124M: Radford et al. 2019."""
QWEN2_5 = Sizes(151936, 896, 24, 4864, 2048, 2 / 14, gated=True)
"""0.5B: Qwen Team 2024; sequences of 2,048."""


def by_layers(layers: int, stages: int) -> list[int]:
    """As many layers on each stage, as far as that goes; the embedding and the output at the ends."""
    return [0, *(1 + round(layers * stage / stages) for stage in range(1, stages))]


def by_torchtitan(layers: int, stages: int, ends: int = 1) -> list[int]:
    """torchtitan's rule: embedding and output count as ``ends`` layers each, and stages differ by one, earlier ones having more."""
    each, more = divmod(layers + 2 * ends, stages)
    cuts, begin = [0], 1
    for stage in range(stages - 1):
        begin += each + (stage < more) - (ends if stage == 0 else 0)
        cuts.append(begin)
    return cuts


def by_parameters(sizes: Sequence[int], stages: int) -> list[int]:
    """PiPPy's rule: fill a stage until the next unit would take it over an equal share of the parameters.

    It can give other numbers of stages than were asked for.
    """
    share, filled, cuts = sum(sizes) // stages, 0, [0]
    for unit, size in enumerate(sizes):
        if filled + size <= share:
            filled += size
        elif filled == 0:
            cuts.append(unit + 1)
        else:
            cuts.append(unit)
            filled = size
    return [cut for cut in cuts if cut < len(sizes)][:stages]


def slowest(units: Sequence[UnitCost], cuts: Sequence[int]) -> float:
    """Seconds of the stage that takes longest."""
    ends = [*cuts[1:], len(units)]
    return max(sum(unit.seconds for unit in units[i:j]) for i, j in zip(cuts, ends, strict=True))


def bound(units: Sequence[UnitCost], stages: int) -> float:
    """Return a lower bound on the slowest stage for any cut of the chain."""
    return max(sum(unit.seconds for unit in units) / stages, *(unit.seconds for unit in units))
