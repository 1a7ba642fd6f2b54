"""Compare predicted bytes of weights with what `parallelize` makes at real size.

`recipe_plan` calls `verify` and `line` for ``arclight plan --verify``. Each verified rank is a process of its own
(``python -m arclight.cli.plan.verification``, which reads standard input) in a group of the plan's size whose exchanges are not carried out
(torch's backend "fake"), with the model on the meta device: shapes are real, no memory is taken.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from arclight.parallel.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from arclight.parallel.planning.estimates import Estimate


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes of one rank's weights, as they are made and as they were predicted."""

    rank: int
    bytes: int
    """Bytes of its weights, as `parallelize` makes them."""
    predicted: int
    seconds: float
    """CPU seconds."""


def verify(best: Estimate, model: str, overrides: dict[str, Any]) -> list[Share]:
    """Verify the first, a middle and the last rank of the plan.

    Raises RuntimeError if one of their processes fails, with what it printed.
    """
    size = best.plan.world_size
    return [_share(best, rank, model, overrides) for rank in sorted({0, size // 2, size - 1})]


def _share(best: Estimate, rank: int, model: str, overrides: dict[str, Any]) -> Share:
    plan = dataclasses.replace(best.plan, compile="none")  # what is compiled has the same weights
    task = {"plan": dataclasses.asdict(plan), "rank": rank, "model": model, "overrides": overrides}
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(task), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"rank {rank} of {plan} could not be built:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    stage = rank // (plan.world_size // plan.pp)
    return Share(rank, found["bytes"], best.memory[stage].parameters, found["seconds"])


def line(best: Estimate, shares: list[Share]) -> str:
    """Return one line on the ranks and bytes that were compared, and whether they are equal."""
    ranks = ", ".join(f"{share.rank:,}" for share in shares)
    sizes = ", ".join(f"{share.bytes / 2**20:,.1f}" for share in shares)
    start = f"of {best.plan.world_size:,} processes, ranks {ranks} have {sizes} MiB of weights (as much of gradients and each moment)"
    wrong = [share for share in shares if share.bytes != share.predicted]
    if wrong:
        differences = ", ".join(f"{share.predicted / 2**20:,.1f} MiB of rank {share.rank:,}" for share in wrong)
        return f"not verified: {start}; predicted were {differences}"
    return f"verified: {start}, as predicted; {sum(share.seconds for share in shares):.0f} s of CPU"


def main() -> None:
    """Build what standard input describes and print its bytes."""
    import time

    import torch
    import torch.distributed as dist

    from arclight.parallel import Mesh, parallelize
    from arclight.parallel.pipeline.runtime.install import install
    from arclight.text import build_model

    task = json.load(sys.stdin)
    plan = Plan(**task["plan"])
    dist.init_process_group("fake", rank=task["rank"], world_size=plan.world_size)
    meta = torch.device("meta")
    with meta:
        model = build_model(task["model"], **task["overrides"])
    mesh = Mesh(plan)

    def shard(part: nn.Module, root: nn.Module | None) -> nn.Module:
        return parallelize(part, mesh, device=meta, root=root)

    if plan.pp > 1:
        install(_module(model), mesh, shard, meta)
    else:
        shard(model, None)
    own = {id(p): _bytes(p) for p in model.parameters()}
    print(json.dumps({"bytes": sum(own.values()), "seconds": time.process_time()}))


def _module(model: nn.Module) -> nn.Module:
    """Wrap the model as a module that a pipeline can be installed in; it is not run."""
    from torch import nn

    class Module(nn.Module):
        runner = None

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def split_batch(self, batch: Any) -> Any:
            raise NotImplementedError("nothing is run")

        def loss(self, output: Any, targets: Any) -> Any:
            raise NotImplementedError("nothing is run")

    return Module()


def _bytes(parameter: nn.Parameter) -> int:
    """Count the bytes of a parameter's local storage, with the padding of FSDP."""
    from torch.distributed.tensor import DTensor

    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.untyped_storage().nbytes()


if __name__ == "__main__":
    main()
