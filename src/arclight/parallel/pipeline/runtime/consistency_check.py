"""Verify that a pipeline's processes have one plan, and together own every parameter.

`PipeRunner` and `parallelize_steps` make a `PipelineFingerprint` of each process; before the first step `engine` exchanges these and calls
`verify_fingerprints` on all: without it, differing arguments would show as a hang or as wrong numbers. Fingerprints are exchanged as JSON, so
they hold plain data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from arclight.parallel.plan import PlanError


class DisagreementError(PlanError):
    """Error of a pipeline's processes with different arguments, raised alike on all of them."""


@dataclass(frozen=True)
class PipelineFingerprint:
    """One process's view of a pipeline."""

    plan: dict[str, Any]
    """Values that must be equal on all processes, by name."""
    parameters: dict[str, list[Any]]
    """Of each parameter of this process's stages, by its first name: [stages, shape, dtype, requires_grad, digest of its values]."""

    @classmethod
    def of(
        cls, stages: dict[int, nn.Module], plan: dict[str, Any], shared: dict[str, tuple[int, ...]]
    ) -> PipelineFingerprint:
        """Return the fingerprint of this process's stages.

        shared: the stages of each parameter that several use; only their values are hashed.
        """
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


_DIFFERENCES = ("", "has the shape", "has the dtype", "has requires_grad", "has other values:")
"""How an error names each entry of ``PipelineFingerprint.parameters``."""


def verify_fingerprints(
    fingerprints: list[PipelineFingerprint], shared: dict[str, tuple[int, ...]], expected: Iterable[str] | None = None
) -> None:
    """Raise DisagreementError, alike on all processes, if their ``fingerprints`` differ.

    It names two of them and the difference.

    shared: the stages of each parameter that several use. expected: first names of all parameters of the whole model.
    """
    first = fingerprints[0]
    for rank, other in enumerate(fingerprints[1:], 1):
        for key in first.plan.keys() | other.plan.keys():
            one, two = first.plan.get(key), other.plan.get(key)
            if one != two:
                raise DisagreementError(
                    f"process 0 and process {rank} of a pipeline were given different plans: {key} is {one!r} on one and {two!r} on the "
                    "other; build it from the same arguments on all processes"
                )
    owners: dict[str, list[tuple[int, list[Any]]]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        for name, facts in fingerprint.parameters.items():
            owners.setdefault(name, []).append((rank, facts))
    for name, users in owners.items():
        stages = sorted(stage for _, facts in users for stage in facts[0])
        holders = [f"stage {stage} (process {rank})" for rank, facts in users for stage in facts[0]]
        if len(stages) > 1 and tuple(stages) != tuple(shared.get(name, ())):
            known = f"stages {', '.join(map(str, shared[name]))} share it" if name in shared else "no stages share it"
            raise DisagreementError(
                f"{' and '.join(holders)} have {name}, but the plan says that {known}: split the model again"
            )
        rank, first_facts = users[0]
        for process, facts in users[1:]:
            for kind, one, two in list(zip(_DIFFERENCES, first_facts, facts, strict=True))[1:]:
                if one != two:
                    raise DisagreementError(
                        f"{name} is shared, and {kind} {one} on process {rank}, {two} on process {process}: "
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
    """Return a short digest of ``repr(value)``, to compare it between processes."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    local = getattr(tensor, "to_local", lambda: tensor)().detach().cpu().contiguous()
    return hashlib.sha256(local.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
