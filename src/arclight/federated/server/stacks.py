"""Tensors that hold a model's experts: folded and stepped expert by expert, written whole.

An expert's mean is over the clients that have it, and one that nobody has sent stays as it is, its optimizer state too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from arclight.checkpoint.stored import StoredTensor
from arclight.federated.aggregation.step import Stepped
from arclight.federated.masks.experts import expert_key, expert_of

Described = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Stacks:
    """``counts``: how many experts each tensor that holds some has, by whole key; others have none."""

    counts: Mapping[str, int]

    @classmethod
    def among(cls, described: Mapping[str, Described], is_stack: Callable[[str], bool]) -> Stacks:
        return cls({key: shape[0] for key, (_, shape) in described.items() if shape and is_stack(key)})

    def whole(self, key: str) -> str:
        """The key of the tensor that ``key`` is a part of, or is."""
        found = expert_of(key)
        return found[0] if found is not None and found[0] in self.counts else key

    def parts(self, key: str) -> list[str]:
        """The keys that a whole tensor is folded under."""
        return [expert_key(key, number) for number in range(self.counts[key])] if key in self.counts else [key]

    def apart(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by the keys that they are folded under. What is stored stays so until it is used."""
        found: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            if key not in self.counts:
                found[key] = tensor
            else:
                for number in range(self.counts[key]):
                    found[expert_key(key, number)] = (
                        tensor.row(number) if isinstance(tensor, StoredTensor) else tensor[number]
                    )
        return found

    def states_apart(
        self, states: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, int]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """The strategy's tensors; an expert that was never stepped has none, whatever lies in its place."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, kinds in states.items():
            for kind, tensor in kinds.items():
                for part, value in self.apart({key: tensor}).items():
                    if key == part or counts.get(part):
                        found.setdefault(part, {})[kind] = value
        return found

    def described(self, parts: Mapping[str, Mapping[str, Described]]) -> dict[str, dict[str, Described]]:
        """Types and shapes by whole key, of those by the keys that are folded."""
        found: dict[str, dict[str, Described]] = {}
        for part, kinds in parts.items():
            key = self.whole(part)
            count = (self.counts[key],) if key != part else ()
            found.setdefault(key, {}).update(
                {kind: (dtype, (*count, *shape)) for kind, (dtype, shape) in kinds.items()}
            )
        return found

    def together(self, stepped: Iterable[Stepped]) -> Iterator[tuple[str, torch.Tensor, dict[str, torch.Tensor]]]:
        """Whole key, value and state of each tensor; experts of one come one after another. What no expert gave is zero."""
        held: list[Stepped] = []
        for one in stepped:
            if held and self.whole(one.key) != self.whole(held[0].key):
                yield self._stacked(held)
                held = []
            if one.key in self.counts or self.whole(one.key) == one.key:
                yield one.key, one.value, one.state
            else:
                held.append(one)
            del one
        if held:
            yield self._stacked(held)

    def _stacked(self, experts: list[Stepped]) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
        key = self.whole(experts[0].key)

        def stack(values: Mapping[int, torch.Tensor]) -> torch.Tensor:
            first = next(iter(values.values()))
            out = torch.zeros((self.counts[key], *first.shape), dtype=first.dtype)
            for number, value in values.items():
                out[number] = value
            return out

        numbered = {found[1]: one for one in experts if (found := expert_of(one.key)) is not None}
        kinds = dict.fromkeys(kind for one in experts for kind in one.state)
        state = {
            kind: stack({n: one.state[kind] for n, one in numbered.items() if kind in one.state}) for kind in kinds
        }
        return key, stack({n: one.value for n, one in numbered.items()}), state
