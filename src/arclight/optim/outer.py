"""Step weights by pseudo-gradients: the outer optimizer of DiLoCo and federated averaging.

Federated averaging (McMahan et al. 2017), DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) and its streaming form in
fragments (Douillard et al. 2025, arXiv 2501.18512). Weights are dicts from parameter name to tensor; nothing here communicates or
changes what it is given.

``federated.strategies.server_optimizers`` and the callback `DiLoCo` step with `Outer`: a change here changes both. `fragments_of` also
divides the weights of ``federated.masks.transfer_mask`` and ``federated.simulation.sizes``; runs resume with the same fragments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from arclight._intervals import Checked, PositiveFloat, ProperFraction

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Outer(Checked):
    """Step by SGD on pseudo-gradients. ``lr=1, momentum=0`` is federated averaging."""

    lr: PositiveFloat = 0.7
    """Rate; 1 goes to the mean of the local weights."""
    momentum: ProperFraction = 0.9
    """Momentum, in [0, 1)."""
    nesterov: bool = True
    """Use Nesterov momentum."""

    def step(
        self, anchor: Tensors, gradient: Tensors, velocity: Tensors
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the anchor and velocity after one step.

        v <- momentum v + g; anchor <- anchor - lr (g + momentum v), or lr v without ``nesterov``.

        ``velocity`` may lack names, which then start at zero; without momentum it is returned as it is, and so is every anchor that the
        gradient does not name. Raises KeyError for a gradient without an anchor.
        """
        anchors, velocities = dict(anchor), dict(velocity)
        for name, push in gradient.items():
            update = push
            if self.momentum:
                velocities[name] = push + self.momentum * velocity[name] if name in velocity else push.clone()
                update = push + self.momentum * velocities[name] if self.nesterov else velocities[name]
            anchors[name] = (anchor[name].to(update.dtype) - self.lr * update).to(anchor[name].dtype)
        return anchors, velocities


def pseudo_gradient(anchor: Tensors, local: Tensors, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Return ``anchor - local`` of all or the given names.

    Float32 and float64 are subtracted in float64, narrower types in float32: for float32, a step of rate 1 from ``anchor`` then comes
    back to ``local`` exactly unless the two are a factor of 2^29 apart. Raises ValueError if names or shapes differ.
    """
    chosen = list(anchor) if names is None else list(names)
    if missing := [name for name in chosen if name not in local or name not in anchor]:
        raise ValueError(f"{missing[0]} is not in both the anchor and the local weights ({len(missing)} in all)")
    result = {}
    for name in chosen:
        if anchor[name].shape != local[name].shape:
            raise ValueError(f"{name} is {tuple(local[name].shape)}, its anchor {tuple(anchor[name].shape)}")
        wide = torch.float64 if anchor[name].dtype in (torch.float32, torch.float64) else torch.float32
        result[name] = anchor[name].to(wide) - local[name].to(wide)
    return result


def fragments_of(names: Iterable[str], count: int) -> list[list[str]]:
    """Divide names into ``count`` fragments of whole blocks, dealt in turn.

    A block is the names that agree up to their first ``.number.`` (``layers.0.``); names without one form one block together. Dealing in
    turn spreads what each exchange changes over the depth of the model (streaming DiLoCo, section 2.1). Raises ValueError if there are
    fewer blocks than fragments.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r"(.*?\.\d+)\.", name)
        blocks.setdefault(found[1] if found else "", []).append(name)
    if not 1 <= count <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks of parameters cannot be dealt into {count} fragments")
    dealt: list[list[str]] = [[] for _ in range(count)]
    for number, block in enumerate(blocks.values()):
        dealt[number % count] += block
    return dealt


def due(step: int, sync_every: int, fragments: int = 1) -> list[int]:
    """List the fragments to exchange after ``step`` steps: each every ``sync_every``, in turn."""
    return [f for f in range(fragments) if step > 0 and (step - f * sync_every // fragments) % sync_every == 0]
