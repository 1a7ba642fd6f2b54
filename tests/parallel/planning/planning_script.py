"""Measure communication and memory of real processes beside the planner's: a line of JSON per case on rank 0."""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from arclight.parallel import Mesh, Plan, parallelize
from arclight.parallel.hardware import hardware
from arclight.parallel.layers.context_parallel import apply_context_parallel, sequence_index
from arclight.parallel.model.fsdp import FsdpTypes
from arclight.parallel.pipeline.runtime.install import install
from arclight.parallel.planning.chain import Chain, Workload
from arclight.parallel.planning.estimates import Estimate, estimate
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text import build_model
from arclight.text.loss import cross_entropy
from arclight.text.model.moe import Router

SEQUENCE = 256
FIELDS: dict[str, Any] = {"vocab_size": 768, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 352}


@dataclass(frozen=True)
class Case:
    """A plan, and the micro-batches of each process in a step."""

    plan: Plan
    samples: int = 2
    passes: int = 1
    half: bool = False
    model: str = "llama3-debug"
    tied: bool = False
    quick: bool = False

    def build(self) -> nn.Module:
        if "moe" not in self.model:
            return build_model(self.model, **FIELDS, tied=self.tied)
        model = build_model(self.model, vocab_size=FIELDS["vocab_size"], layers=2)
        for module in model.modules():
            if isinstance(module, Router):  # as the planner takes it to be
                module.config = dataclasses.replace(module.config, force_balance=True)
        return model

    @property
    def names(self) -> list[str]:
        """Of what is measured: one process of each stage."""
        return [f"{self} stage {stage}" for stage in range(self.plan.pp)]

    def workload(self) -> Workload:
        return Workload(
            self.build, batch, loss, self.samples * self.passes * self.plan.data_parallel, SEQUENCE, compiled=False,
            compute=torch.bfloat16 if self.half else torch.float32, device=hardware("cpu"),
        )  # fmt: skip


CASES = [
    Case(Plan(dp_shard=2)),
    Case(Plan(dp_shard=2), passes=2, quick=True),
    Case(Plan(dp_shard=2, reshard_after_forward="never"), passes=2),
    Case(Plan(dp_shard=2, activation_checkpointing="full"), half=True),
    Case(Plan(dp_shard=2, activation_checkpointing="selective")),
    Case(Plan(dp_shard=2), tied=True),
    Case(Plan(tp=2)),
    Case(Plan(tp=2, sequence_parallel=False)),
    Case(Plan(cp=2)),
    Case(Plan(cp=2, context="ulysses", activation_checkpointing="full")),
    Case(Plan(tp=2, activation_checkpointing="full"), samples=4),
    Case(Plan(tp=2, activation_checkpointing="selective"), samples=4),
    Case(Plan(dp_replicate=2, dp_shard=2)),
    Case(Plan(dp_shard=2, tp=2), half=True),
    Case(Plan(dp_shard=3), samples=1),
    Case(Plan(dp_shard=2), model="qwen3-moe-debug"),
    Case(Plan(dp_shard=2, ep=2), model="qwen3-moe-debug"),
    Case(Plan(tp=2), model="qwen3-moe-debug"),
    Case(Plan(pp=2, micro_batches=4), passes=4, quick=True),
    Case(Plan(pp=2, micro_batches=4, activation_checkpointing="full"), samples=4, passes=4, half=True),
    Case(Plan(pp=2, micro_batches=4, schedule="GPipe"), passes=4),
    Case(Plan(pp=2, micro_batches=4, schedule="Interleaved1F1B"), passes=4),
    Case(Plan(pp=2, micro_batches=4, schedule="LoopedBFS"), passes=4),
    Case(Plan(pp=2, micro_batches=4, dp_shard=2), passes=4),
    Case(Plan(pp=2, micro_batches=4, tp=2), passes=4),
    Case(Plan(pp=2, micro_batches=4, dp_replicate=2), passes=4),
]


def batch(samples: int, sequence: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, FIELDS["vocab_size"], (samples, sequence + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """The mean over tokens, from hidden states and the output's weight, as language models are trained."""
    (weight,) = model.output.parameters(recurse=False)
    positions = given[2] if len(given) > 2 else None
    return cross_entropy(model(given[0], positions=positions, logits=False), weight, given[1]) / given[1].numel()


class Root(nn.Module):
    """A module around the model that is called in its place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return loss(self.model, given)


class Piped(nn.Module):
    """A module whose model a pipeline cuts, with the same loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.runner = model, None

    def split_batch(self, given: tuple[Tensor, ...]) -> Split:
        tokens, labels = given
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        return (tokens,), {"positions": places, "logits": False}, labels

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = self.model.output.parameters(recurse=False)
        return cross_entropy(output, weight, targets), torch.tensor(targets.numel())

    def batch_weight(self, given: tuple[Tensor, ...]) -> Tensor:
        return torch.tensor(given[1].numel())

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        total, count = batch_loss(self, given)
        return total / count


class Exchanges(TorchDispatchMode):
    """Bytes of each collective's whole tensor, by dimension and kind; told apart by the names of process groups."""

    KINDS = {
        "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
        "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce",
        "all_to_all_single": "all_to_all", "alltoall_base_": "all_to_all", "send": "send",
    }  # fmt: skip

    def __init__(self, groups: dict[str, str]) -> None:
        super().__init__()
        self.groups, self.bytes = groups, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        kind = self.KINDS.get(func._overloadpacket.__name__)
        if func.namespace in ("c10d", "_c10d_functional") and kind is not None:
            flat = [x for a in args for x in (a if isinstance(a, list) else [a])]
            tensors = [x for x in (*flat, out) if isinstance(x, Tensor)]
            names = [x if isinstance(x, str) else _name(x) for x in flat if isinstance(x, (str, torch.ScriptObject))]
            (dimension,) = [self.groups[name] for name in names if name in self.groups]
            if dimension:
                self.bytes[f"{dimension} {kind}"] += max(x.nbytes for x in tensors)
        return out


def _name(boxed: torch.ScriptObject) -> str:
    try:
        return str(dist.ProcessGroup.unbox(boxed).group_name)
    except RuntimeError:  # the kind of reduction is such an object too
        return ""


class Held(TorchDispatchMode):
    """The most bytes of all tensors made or met so far that exist at once, asked of their storages after each operation.

    FSDP lets go of weights by shrinking storages, which no operation tells.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        storages = [tensor.untyped_storage() for tensor in known]
        self.storages = {id(storage): weakref.ref(storage) for storage in storages}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and not is_traceable_wrapper_subclass(leaf):
                storage = leaf.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        living = {key: storage for key, reference in self.storages.items() if (storage := reference()) is not None}
        self.storages = {key: self.storages[key] for key in living}
        self.most = max(self.most, sum(storage.nbytes() for storage in living.values()))
        return out


GROUPS: dict[str, str] = {}
"""Dimensions by names of groups, of earlier cases too: DTensor remembers what it did on a mesh that was equal, by its groups."""


def measure(case: Case) -> dict[str, Any]:
    """Bytes exchanged in a step, and the most bytes held in it."""
    mesh = Mesh(case.plan)
    with torch.device("meta"):
        model = case.build()
    types = FsdpTypes(torch.bfloat16, torch.float32) if case.half else None
    spread = partial(parallelize, types=types, seed=1, sequence_length=SEQUENCE)
    if case.plan.pp > 1:
        root: nn.Module = Piped(model)
        install(root, mesh, lambda part, outer: spread(part, mesh, root=outer), torch.device("cpu"))
    else:
        root = spread(model, mesh, root=Root(model))
    if case.plan.cp > 1:
        apply_context_parallel(model, mesh.grid["cp"], case.plan.context)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    groups = {mesh.group(name).group_name: name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    dense = {
        "dp_replicate": "dp_replicate",
        "fsdp": "dp_shard",
        "tp": "tp",
    }  # the same processes, in groups of their own
    groups |= {mesh.dense[name].get_group().group_name: dimension for name, dimension in dense.items()}
    if case.plan.pp > 1 and case.plan.data_parallel > 1:
        groups[mesh.loss_group.group_name] = ""  # numbers that a pipeline agrees on
    if mesh.sparse is not None and case.plan.ep < case.plan.dp_shard:
        groups[mesh.sparse["ep"].get_group().group_name] = "ep"
    GROUPS.update(groups)
    for watched in (False, True):  # in the first step the optimizer makes its state
        state = [_own(x) for entries in optimizer.state.values() for x in entries.values()]
        exchanges, held = Exchanges(GROUPS), Held([_own(p) for p in model.parameters()] + state)
        with held if watched else nullcontext():
            optimizer.zero_grad()
            for _ in range(1 if case.plan.pp > 1 else case.passes):  # a pipeline takes all of them at once
                samples = case.samples * (case.passes if case.plan.pp > 1 else 1)
                given = batch(samples, SEQUENCE // case.plan.cp)
                if case.plan.cp > 1:
                    positions = sequence_index(SEQUENCE, case.plan.cp, mesh.rank("cp"))
                    given = (*given, positions.expand_as(given[0]))
                with exchanges if watched else nullcontext():
                    root(given).backward()
            optimizer.step()
    shares = sum(_own(p).nbytes for p in model.parameters())
    return {
        "bytes": dict(exchanges.bytes), "peak": held.most, "parameters": shares, "optimizer": sum(x.nbytes for x in state),
    }  # fmt: skip


def _own(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@cache
def estimated(case: Case) -> Estimate:
    return estimate(Chain(case.workload()), case.plan, case.samples)


def predict(case: Case, stage: int) -> dict[str, Any]:
    made = estimated(case)
    said = Counter[str]()
    for message in made.traffic[stage]:
        # Where cp or ep has all the processes that weights are spread over, it is the same group.
        same = (message.dimension == "cp" and case.plan.dp_shard == 1) or case.plan.ep == case.plan.dp_shard > 1
        dimension = "dp_shard" if same and message.dimension in ("cp", "ep") else message.dimension
        said[f"{dimension} {message.collective}"] += int(message.bytes)
    worst = made.memory[stage]
    classes = dataclasses.asdict(worst)
    return {
        "bytes": said,
        "peak": worst.total,
        "classes": classes,
        "parameters": worst.parameters,
        "optimizer": worst.optimizer,
    }


def run() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        if case.plan.world_size == dist.get_world_size() and case.quick == ("quick" in sys.argv):
            measured: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(measured, measure(case))
            for stage, name in enumerate(case.names if dist.get_rank() == 0 else ()):
                first = measured[stage * (case.plan.world_size // case.plan.pp)]
                print(json.dumps({"case": name, "measured": first, "predicted": predict(case, stage)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
