"""Keep parameters that several stages use tied: sum the gradients of their copies.

`PipeRunner` and `parallelize_steps` make a `TiedParameters`; `runner` sums gradients by it after backward, before the optimizer. All ranks that
share a parameter must take part, in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arclight.fabric.distributed.dtensor import local_tensor
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology

BUCKET = 25 * 2**20
"""Bytes that are summed at once."""
GradientMap = dict[nn.Parameter, Tensor | None]


class TiedParameters:
    """Sum the gradients of parameters that stages of several processes have.

    If these are some of the pipeline's they exchange messages in its group: a group of their own would be made from the
    communicator of all processes, which under NCCL all of them must enter, and other pipelines do not know of it.
    """

    def __init__(
        self, topology: PipelineTopology, stages: Mapping[int, nn.Module], users: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Initialise on all processes of the pipeline.

        users: numbers of the stages that have a parameter, by the first of its names.
        """
        self.counted_by_others: set[nn.Parameter] = set()
        """Parameters of this process that an earlier stage counts in norms and saves in states."""
        self._topology = topology
        self._sums: list[tuple[tuple[int, ...], list[nn.Parameter]]] = []
        self._copies: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name in sorted(users):
            places = tuple(sorted({topology.place(stage) for stage in users[name]}))
            if topology.rank not in places:
                continue
            first, *copies = dict.fromkeys(stages[n].get_parameter(name) for n in users[name] if n in stages)
            if copies:  # stages that were loaded one by one
                self._copies.append((first, copies))
                self.counted_by_others.update(copies)
            if len(places) > 1:
                groups.setdefault(places, []).append(first)
            if topology.place(min(users[name])) != topology.rank:
                self.counted_by_others.add(first)
        self._sums = sorted(groups.items(), key=lambda one: one[0])

    def sum(self, gradients: GradientMap) -> None:
        """Replace the gradients of tied parameters in ``gradients`` by their sums over stages."""
        for first, copies in self._copies:
            found = [gradient for one in (first, *copies) if (gradient := gradients.get(one)) is not None]
            gradients[first] = torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None
        for places, members in self._sums:
            some = places if len(places) < self._topology.ranks else None
            sum_gradients_over(
                self._topology.group, [parameter for parameter in members if parameter.requires_grad], gradients, some
            )
        for first, copies in self._copies:
            total = gradients[first]
            for copy in copies:
                gradients[copy] = total.clone() if total is not None else None


@torch.no_grad()
def sum_gradients_over(
    group: Any, parameters: Sequence[nn.Parameter], gradients: GradientMap, places: tuple[int, ...] | None = None
) -> None:  # fmt: skip
    """Sum the gradients of ``parameters`` over the processes of ``group``, in few messages.

    places: ranks in the group of those that take part, of which this process is one; None: all. A process where a parameter has
    none counts as zero; if none has one it stays so. What each has is in the same message.
    """
    for bucket in _buckets(parameters):
        sizes = [local_tensor(parameter).numel() for parameter in bucket]
        like = local_tensor(bucket[0])
        flat = like.new_zeros(sum(sizes) + len(bucket))
        for place, (parameter, part) in enumerate(zip(bucket, flat[: sum(sizes)].split(sizes), strict=True)):
            gradient = gradients.get(parameter)
            if gradient is not None:
                part.copy_(local_tensor(gradient).flatten())
                flat[sum(sizes) + place] = 1
        if places is None:
            dist.all_reduce(flat, group=group)
        else:
            _sum_by_messages(flat, group, places)
        here = all(gradients.get(parameter) is not None for parameter in bucket)
        holders = [1.0] * len(bucket) if here else flat[sum(sizes) :].tolist()
        for parameter, part, count in zip(bucket, flat[: sum(sizes)].split(sizes), holders, strict=True):
            if count:
                gradient = gradients.get(parameter)
                if gradient is None:
                    gradient = gradients[parameter] = torch.empty_like(parameter)
                own = local_tensor(gradient)
                own.copy_(part.view(own.shape))


def _sum_by_messages(flat: Tensor, group: Any, places: tuple[int, ...]) -> None:
    """Sum ``flat`` over ``places`` by messages, part by part, in the same order on all."""
    rank = dist.get_rank(group)
    for part in flat.split(max(1, BUCKET // flat.element_size())):
        found = {place: part if place == rank else torch.empty_like(part) for place in places}
        messages = [
            dist.P2POp(operation, tensor, group=group, group_peer=place)
            for place in places
            if place != rank
            for operation, tensor in ((dist.isend, part), (dist.irecv, found[place]))
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        part.copy_(functools.reduce(torch.add, found.values()))


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group ``parameters`` by type and device into buckets of up to :data:`BUCKET` bytes.

    Their order stays.
    """
    found: list[list[nn.Parameter]] = []
    current: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        size = local_tensor(parameter).numel() * parameter.element_size()
        members, filled = current.get(key, ([], BUCKET))
        if filled + size > BUCKET:
            members, filled = [], 0
            found.append(members)
        members.append(parameter)
        current[key] = members, filled + size
    return found
