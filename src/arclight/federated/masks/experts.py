"""Experts of a mixture: who has which, and tensors that hold all of them taken apart and put together again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from arclight.federated.errors import FederatedError
from arclight.federated.masks.settings import Experts

if TYPE_CHECKING:
    import torch

_PART = re.compile(r"(?P<key>.+)\[(?P<number>0|[1-9]\d*)\]")


def expert_key(key: str, number: int) -> str:
    """What one expert of the tensor ``key`` travels as: ``model/blocks.0.w1[3]``."""
    return f"{key}[{number}]"


def expert_of(key: str) -> tuple[str, int] | None:
    """Inverse of `expert_key`; None for a key that is not of one expert."""
    found = _PART.fullmatch(key)
    return (found["key"], int(found["number"])) if found else None


def assign_experts(experts: Experts, count: int, seed: int, client: int, round: int) -> tuple[int, ...]:
    """Rising numbers of the experts, of ``count``, that the run's ``client``-th client has in ``round``.

    Fixed: client i has ``per_client`` consecutive ones from ``i (per_client - overlap)`` on, modulo ``count``. Random: the first
    of all experts in the order of SHA-256 of (seed, client, draw, expert). Raises FederatedError where there are too few.
    """
    if experts.per_client > count:
        raise FederatedError(f"masks.experts.per_client is {experts.per_client}, the model has {count} experts")
    if experts.assign == "fixed":
        first = client * (experts.per_client - experts.overlap)
        return tuple(sorted((first + number) % count for number in range(experts.per_client)))
    draw = round // experts.every

    def place(number: int) -> bytes:
        return hashlib.sha256(f"{seed}\0experts\0{client}\0{draw}\0{number}".encode()).digest()

    return tuple(sorted(sorted(range(count), key=place)[: experts.per_client]))


def split(
    tensors: Iterable[tuple[str, torch.Tensor]], stacks: Iterable[str], numbers: Sequence[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors, those named in ``stacks`` as one for each expert (of ``numbers``, or all); views, nothing is copied."""
    chosen = set(stacks)
    for key, tensor in tensors:
        if key not in chosen:
            yield key, tensor
            continue
        for number in range(len(tensor)) if numbers is None else numbers:
            if not 0 <= number < len(tensor):
                raise FederatedError(f"{key} has {len(tensor)} experts, and number {number} was asked for")
            yield expert_key(key, number), tensor[number]


class ExpertParts(Mapping[str, "torch.Tensor"]):
    """Tensors by key that also know each expert of theirs as a key, ``model/w1[3]``; they are iterated over whole."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], numbers: Sequence[int] | None = None) -> None:
        """``numbers``: which experts the stacks hold, where they are those of a smaller model."""
        self._tensors, self._numbers = tensors, numbers
        self._newest: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, key: str) -> torch.Tensor:
        found = expert_of(key)
        if found is None or key in self._tensors:
            return self._tensors[key]
        if self._newest is None or self._newest[0] != found[0]:
            self._newest = (found[0], self._tensors[found[0]])
        stack, number = self._newest[1], found[1]
        if self._numbers is not None and len(stack) == len(self._numbers):
            number = self._numbers.index(number) if number in self._numbers else len(stack)
        if number >= len(stack):
            raise KeyError(key)
        return stack[number]

    def __contains__(self, key: object) -> bool:
        found = expert_of(key) if isinstance(key, str) else None
        return key in self._tensors or (found is not None and found[0] in self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def merge(
    parts: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Inverse of `split`: experts that are missing among ``parts`` are as in ``before`` (whole tensors by key).

    Raises FederatedError for missing ones without ``before``, and for parts that do not fit together.
    """
    whole: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in parts.items():
        found = expert_of(key)
        if found is None:
            whole[key] = tensor
        else:
            stacks.setdefault(found[0], {})[found[1]] = tensor
    for key, experts in stacks.items():
        whole[key] = _stacked(key, experts, None if before is None else before.get(key))
    return whole


def _stacked(key: str, experts: Mapping[int, torch.Tensor], before: torch.Tensor | None) -> torch.Tensor:
    import torch

    if before is None:
        if missing := [number for number in range(max(experts) + 1) if number not in experts]:
            raise FederatedError(f"{key}: expert {missing[0]} is missing, and there is nothing to leave it as")
        first = experts[0]
        whole = torch.empty((len(experts), *first.shape), dtype=first.dtype)
    else:
        whole = before.detach().clone()
    for number, tensor in experts.items():
        if number >= len(whole) or tensor.shape != whole.shape[1:] or tensor.dtype != whole.dtype:
            raise FederatedError(
                f"{expert_key(key, number)} is {tuple(tensor.shape)} of {tensor.dtype}, and is to be part of {tuple(whole.shape)} "
                f"of {whole.dtype}"
            )
        whole[number] = tensor
    return whole


def select_experts(tensor: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """The stack of a client's own experts, in the order of its ``numbers``, from the stack of all: what a smaller model holds."""
    import torch

    return tensor.index_select(0, torch.tensor(numbers, device=tensor.device))


def to_global(keys: Mapping[str, torch.Tensor], numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Experts of a smaller model (``...[0]`` is its first) under the numbers that they have in the whole one."""
    renamed = {}
    for key, tensor in keys.items():
        found = expert_of(key)
        if found is not None and found[1] >= len(numbers):
            raise FederatedError(f"{key}: this client has {len(numbers)} experts")
        renamed[key if found is None else expert_key(found[0], numbers[found[1]])] = tensor
    return renamed
