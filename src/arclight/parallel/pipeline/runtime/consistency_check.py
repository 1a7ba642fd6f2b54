"""Check that the processes of a pipeline were given one plan, and own every parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from arclight.parallel.plan import PlanError


class DisagreementError(PlanError):
    """Processes of one pipeline were given different things; all of them raise it, in the same words."""


@dataclass(frozen=True)
class PipelineFingerprint:
    """Describe one process's view of a pipeline in plain data, to be sent as JSON."""

    plan: dict[str, Any]
    """What must be the same everywhere, by its name."""
    parameters: dict[str, list[Any]]
    """For each parameter of this process's stages, by its first name: the stages, shape, type, whether it trains, digest of its values."""

    @classmethod
    def of(
        cls, stages: dict[int, nn.Module], plan: dict[str, Any], shared: dict[str, tuple[int, ...]]
    ) -> PipelineFingerprint:
        """shared: the stages that use a parameter, where they are several; only such parameters' values are looked at."""
        found: dict[str, list[Any]] = {}
        for number, stage in stages.items():
            for name, parameter in stage.named_parameters():
                if name in found:
                    found[name][0].append(number)
                    continue
                digest = _digest(parameter) if name in shared else ""
                found[name] = [
                    [number], list(parameter.shape), str(parameter.dtype), parameter.requires_grad, digest
                ]  # fmt: skip
        return cls({"torch": str(torch.__version__), **plan}, found)


_SAYS = ("", "has the shape", "has the type", "says whether it trains:", "has other values:")


def verify_fingerprints(
    statements: list[PipelineFingerprint], shared: dict[str, tuple[int, ...]], expected: Iterable[str] | None = None
) -> None:
    """Raise DisagreementError, the same on all processes, where their ``statements`` differ; it names two of them and what differs.

    shared: the stages that use a parameter, where they are several. expected: first names of all parameters of the whole model.
    """
    first = statements[0]
    for rank, other in enumerate(statements[1:], 1):
        for key in first.plan.keys() | other.plan.keys():
            one, two = first.plan.get(key), other.plan.get(key)
            if one != two:
                raise DisagreementError(
                    f"process 0 and process {rank} of a pipeline were given different plans: {key} is {one!r} on one and {two!r} on the "
                    "other; build it from the same arguments on all processes"
                )
    owners: dict[str, list[tuple[int, list[Any]]]] = {}
    for rank, statement in enumerate(statements):
        for name, said in statement.parameters.items():
            owners.setdefault(name, []).append((rank, said))
    for name, users in owners.items():
        stages = sorted(stage for _, said in users for stage in said[0])
        told = [f"stage {stage} (process {rank})" for rank, said in users for stage in said[0]]
        if len(stages) > 1 and tuple(stages) != tuple(shared.get(name, ())):
            known = f"stages {', '.join(map(str, shared[name]))} share it" if name in shared else "no stages share it"
            raise DisagreementError(
                f"{' and '.join(told)} have {name}, but the plan says that {known}: split the model again"
            )
        rank, said = users[0]
        for process, theirs in users[1:]:
            for place in range(1, len(said)):
                if said[place] != theirs[place]:
                    raise DisagreementError(
                        f"{name} is shared, and {_SAYS[place]} {said[place]} on process {rank}, {theirs[place]} on process {process}: "
                        "begin with the same model on all processes"
                    )
    missing = sorted(set(expected or ()) - owners.keys())
    if missing:
        raise DisagreementError(
            f"no process of the pipeline has {missing[0]}"
            + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
            + ": all stages must be on one of them"
        )


def digest(value: Any) -> str:
    """Return a few letters that stand for ``value``, by what it prints."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    local = getattr(tensor, "to_local", lambda: tensor)().detach().cpu().contiguous()
    return hashlib.sha256(local.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
