"""Compare loss and gradients of a small model under each plan with those of one process.

`run(cases)` in every process of a group prints one line of JSON per case on rank 0.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from arclight.fabric.distributed.sharding import full_tensor
from arclight.parallel import Mesh, Plan, initialize, parallelize
from arclight.parallel.layers.context_parallel import ContextRunner
from arclight.parallel.model.fsdp import FsdpTypes
from arclight.parallel.pipeline.runtime.install import install
from arclight.parallel.step_protocol import Split, batch_loss
from arclight.text import build_model
from arclight.text.families.zoo import model_config
from arclight.text.model.balance import scale_balance_loss, update_expert_bias

SMALL: dict[str, Any] = {"vocab_size": 96, "dim": 32, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 48}


@dataclass(frozen=True)
class Case:
    """A plan and the model that it spreads."""

    plan: Plan
    model: str = "llama3-debug"
    fields: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    meta: bool = True
    quick: bool = False
    half: bool = False
    """Whether matrices are multiplied in bfloat16, as by ``bf16-mixed``."""

    @property
    def tolerance(self) -> tuple[float, float]:
        """Of the loss and of any element of a gradient; in bfloat16 of a gradient's norm, as a part of that."""
        if self.half:  # where matrices or sequences are cut, parts of sums are rounded
            return (1e-4, 0.02) if self.plan.tp > 1 or self.plan.cp > 1 else (1e-6, 0.005)
        return (1e-12, 1e-12) if self.dtype == torch.float64 else (1e-6, 2e-7)

    @property
    def name(self) -> str:
        other = (
            [f"{k}={v}" for k, v in self.fields.items()]
            + ([] if self.dtype == torch.float32 else [str(self.dtype)])
            + ["bf16-mixed"] * self.half
        )
        return " ".join([str(self.plan), self.model, *other])

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.half, cache_enabled=False)

    @property
    def types(self) -> FsdpTypes:
        """In which FSDP gathers and sums, as the strategy says."""
        return FsdpTypes(torch.bfloat16, torch.float32) if self.half else FsdpTypes()


EXPERTS: dict[str, Any] = {"head_dim": 8}
LATENT: dict[str, Any] = {
    "kv_heads": None, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8
}  # fmt: skip
UNBALANCED = LATENT | {"moe": dataclasses.replace(model_config("deepseek-v3-debug").moe, balance_loss=0.0)}
"""Without the loss that is a mean over sequences: parts of them and micro-batches have others."""
MPT: dict[str, Any] = {"kv_heads": None, "hidden": None, "tied": False}
MUP = MPT | {"mup": {"base_dim": 16, "base_layers": 1}}
SIGMA = MPT | {"layers": 2}
UNEVEN = SIGMA | {"moe": dataclasses.replace(model_config("sigma-moe-debug").moe, entropy_loss=0.0)}
"""Without the loss of a batch's mean choice: micro-batches have others."""
SWITCH_EVEN = SIGMA | {"switch_head": {"entropy_loss": 0.0}}
REPEATED = SIGMA | {"layers": 4, "group": 2, "head_dim": 8}
ONCE = REPEATED | SWITCH_EVEN | {"layers": 2, "moe": {"entropy_loss": 0.0}}
CHUNKS: dict[str, Any] = {"chunk": 16, "temperature_floor": 8}

HALF = [
    Case(Plan(dp_replicate=2), half=True),
    Case(Plan(dp_shard=2), half=True, quick=True),
    Case(Plan(tp=2), half=True, quick=True),
    Case(Plan(pp=2, micro_batches=4), half=True),
    Case(Plan(dp_shard=2), "gpt2-debug", fields={"kv_heads": None, "hidden": None}, half=True),
    Case(Plan(dp_shard=2), "deepseek-v3-debug", fields=UNBALANCED, half=True),
    Case(Plan(dp_shard=2, ep=2), "qwen3-moe-debug", fields=EXPERTS, half=True),
    Case(Plan(cp=2), half=True),
    Case(Plan(dp_shard=2, tp=2), "qwen3-debug", fields={"head_dim": 8}, half=True),
    Case(Plan(dp_shard=2, pp=2, micro_batches=4), half=True),
]
"""The same numbers on one device as where FSDP gathers weights in bfloat16."""

CASES = [
    *HALF,
    Case(Plan(dp_replicate=2), quick=True),
    Case(Plan(dp_shard=2), quick=True),
    Case(Plan(tp=2), quick=True),
    Case(Plan(tp=2, sequence_parallel=False, loss_parallel=False), quick=True),
    Case(Plan(tp=2, loss_parallel=False)),
    Case(Plan(dp_shard=2), fields={"tied": True}),
    Case(Plan(tp=2), fields={"tied": True}),
    Case(Plan(tp=2), "gpt2-debug", fields={"kv_heads": None, "hidden": None}),
    Case(Plan(tp=2), "mpt-debug", fields=MPT | {"clip_qkv": 0.1}, quick=True),
    Case(Plan(dp_shard=2), "mpt-mup-debug", fields=MUP | {"tied": True}, quick=True),
    Case(Plan(tp=2, pp=2, micro_batches=4), "mpt-mup-debug", fields=MUP),
    Case(Plan(dp_shard=2, activation_checkpointing="selective"), "mpt-debug", fields=MPT),
    Case(Plan(cp=2), "mpt-debug", fields=MPT, dtype=torch.float64),
    Case(Plan(cp=2, context="ulysses"), "mpt-debug", fields=MPT, dtype=torch.float64),
    Case(Plan(dp_shard=2, compile="aot_eager"), "mpt-debug", fields=MPT),
    Case(Plan(dp_replicate=2), "sigma-moe-debug", fields=SIGMA),
    Case(Plan(dp_shard=2, ep=2), "sigma-moe-debug", fields=SIGMA, quick=True),
    Case(Plan(tp=2), "sigma-moe-debug", fields=SIGMA, quick=True),
    Case(Plan(cp=2), "sigma-moe-debug", fields=SIGMA),
    Case(Plan(dp_shard=2, activation_checkpointing="selective"), "sigma-moe-debug", fields=SIGMA, dtype=torch.float64),
    Case(Plan(pp=2, micro_batches=4), "sigma-moe-debug", fields=UNEVEN),
    Case(Plan(dp_shard=2, pp=2, ep=2, micro_batches=4), "sigma-moe-debug", fields=UNEVEN),
    Case(Plan(dp_shard=2), "switch-head-debug", fields=SIGMA),
    Case(Plan(tp=2), "switch-head-debug", fields=SIGMA, quick=True),
    Case(Plan(tp=2, activation_checkpointing="selective"), "switch-head-debug", fields=SIGMA, dtype=torch.float64),
    Case(Plan(cp=2, context="ulysses"), "switch-head-debug", fields=SIGMA, dtype=torch.float64),
    Case(Plan(pp=2, micro_batches=4), "switch-head-debug", fields=SWITCH_EVEN),
    Case(Plan(dp_shard=2, ep=2), "deptoe-debug", fields=REPEATED, dtype=torch.float64),
    Case(Plan(tp=2), "deptoe-debug", fields=REPEATED, dtype=torch.float64),
    Case(Plan(dp_replicate=2), "deptoe-debug", fields=REPEATED | {"tied": True}),
    Case(
        Plan(dp_shard=2, activation_checkpointing="selective"),
        "deptoe-debug",
        fields=REPEATED | {"xpos": True},
        dtype=torch.float64,
    ),
    Case(
        Plan(dp_replicate=2, compile="aot_eager", activation_checkpointing="full"),
        "deptoe-debug",
        fields=REPEATED | {"peri_norm": False},
    ),  # which has what sigma-moe and switch-head have
    Case(Plan(cp=2), "deptoe-debug", fields=REPEATED | {"xpos": True, "interleaved": True}, dtype=torch.float64),
    Case(Plan(dp_shard=2, tp=2, ep=2), "deptoe-debug", fields=REPEATED, dtype=torch.float64),
    Case(Plan(pp=2, micro_batches=4), "deptoe-debug", fields=ONCE, dtype=torch.float64),
    Case(Plan(tp=2), "qwen3-debug", fields={"head_dim": 8}),
    Case(Plan(tp=2, sequence_parallel=False), "qwen3-debug", fields={"head_dim": 8}),
    Case(Plan(dp_shard=2, activation_checkpointing="full")),
    Case(Plan(dp_shard=2, activation_checkpointing="selective", reshard_after_forward="never")),
    Case(Plan(dp_shard=2, cpu_offload=True)),
    Case(Plan(dp_shard=2, compile="aot_eager", activation_checkpointing="selective")),
    Case(Plan(tp=2, activation_checkpointing="selective")),
    Case(Plan(tp=2, activation_checkpointing="full")),
    Case(Plan(tp=2, compile="aot_eager")),
    Case(Plan(tp=2, compile="aot_eager", activation_checkpointing="selective")),
    Case(Plan(dp_shard=2, tp=2), quick=True),
    Case(Plan(dp_replicate=2, dp_shard=2)),
    Case(
        Plan(dp_shard=2, tp=2),
        "qwen3-debug",
        fields={"head_dim": 8, "hidden": 44, "vocab_size": 94},
        dtype=torch.float64,
    ),
    Case(Plan(dp_replicate=2, tp=2), meta=False),
    Case(Plan(dp_replicate=2, dp_shard=2, tp=2, ep=2), "deepseek-v3-debug", fields=LATENT),
    Case(Plan(dp_shard=2, ep=2), "qwen3-moe-debug", fields=EXPERTS, quick=True),
    Case(Plan(dp_shard=2), "deepseek-v3-debug", fields=LATENT),
    Case(Plan(tp=2), "deepseek-v3-debug", fields=LATENT),
    Case(Plan(tp=2, sequence_parallel=False), "deepseek-v3-debug", fields=LATENT),
    Case(Plan(tp=2), "llama4-debug", fields=CHUNKS),
    Case(Plan(dp_shard=2, tp=2, ep=2), "deepseek-v3-debug", fields=LATENT),
    Case(Plan(dp_shard=4, ep=2), "deepseek-v3-debug", fields=LATENT, dtype=torch.float64),
    Case(Plan(dp_replicate=2, dp_shard=2, ep=2), "qwen3-moe-debug", fields=EXPERTS),
    Case(Plan(dp_shard=4, ep=4, activation_checkpointing="selective"), "deepseek-v3-debug", fields=LATENT),
    Case(Plan(dp_shard=2, ep=2, compile="aot_eager"), "qwen3-moe-debug", fields=EXPERTS),
    Case(Plan(dp_shard=2, ep=2, expert_capacity=4096), "qwen3-moe-debug", fields=EXPERTS),
    Case(Plan(cp=2, ep=2), "deepseek-v3-debug", fields=UNBALANCED),
    Case(Plan(cp=2, context="ulysses"), "deepseek-v3-debug", fields=UNBALANCED, dtype=torch.float64),
    Case(Plan(cp=2), "llama4-debug", fields=CHUNKS),
    Case(Plan(pp=2, schedule="ZBVZeroBubble", micro_batches=4), "deepseek-v3-debug", fields=UNBALANCED | {"layers": 4}),
    Case(Plan(dp_shard=2, cp=2, ep=4), "llama4-debug", fields=CHUNKS),
    Case(Plan(dp_shard=2, cp=2, tp=2, ep=4), "deepseek-v3-debug", fields=UNBALANCED),
    Case(
        Plan(dp_shard=2, tp=2, pp=2, ep=2, schedule="ZBVZeroBubble", micro_batches=4),
        "qwen3-moe-debug",
        fields=EXPERTS | {"layers": 4},
    ),
    Case(Plan(cp=2), quick=True),
    Case(Plan(cp=2, context="ulysses"), quick=True),
    Case(Plan(cp=2), "qwen3-debug", fields={"head_dim": 8, "kv_heads": 2}),
    Case(Plan(cp=2, context="ulysses"), "gpt2-debug", fields={"kv_heads": None, "hidden": None}),
    Case(Plan(cp=4), dtype=torch.float64),
    Case(Plan(cp=4, context="ulysses"), fields={"kv_heads": 2}, dtype=torch.float64),
    Case(Plan(dp_shard=2, cp=2), quick=True),
    Case(Plan(dp_replicate=2, cp=2, context="ulysses")),
    Case(Plan(cp=2, tp=2)),
    Case(Plan(cp=2, tp=2, context="ulysses")),
    *(  # tests of pipelines take all schedules on two processes, and on four
        Case(Plan(pp=2, schedule=name, micro_batches=4), fields={"layers": 4}, quick=True)
        for name in ("1F1B", "ZBVZeroBubble")
    ),
    *(
        Case(Plan(pp=4, schedule=name, micro_batches=8), fields={"layers": 8}, dtype=torch.float64)
        for name in ("ZB-H1", "Interleaved1F1B", "DualPipeV")
    ),
    Case(
        Plan(pp=2, micro_batches=5),
        "gpt2-debug",
        fields={"kv_heads": None, "hidden": None, "tied": False},
        dtype=torch.float64,
        meta=False,
    ),
    Case(Plan(cp=2, activation_checkpointing="selective")),
    Case(Plan(cp=2, compile="aot_eager", context="ulysses")),
    Case(Plan(pp=2, schedule="ZBVZeroBubble", micro_batches=4, activation_checkpointing="full"), fields={"layers": 4}),
    Case(Plan(pp=2, micro_batches=4, activation_checkpointing="selective", compile="aot_eager")),
    Case(Plan(dp_shard=2, pp=2, micro_batches=4), quick=True),
    Case(Plan(pp=2, micro_batches=4), fields={"mup": {"base_dim": 16, "base_layers": 1}}),
    Case(Plan(dp_shard=2, tp=2), "qwen3-debug", fields={"head_dim": 8, "mup": {"base_dim": 16, "base_layers": 3}}),
    Case(Plan(dp_shard=2, pp=2, schedule="ZBVZeroBubble", micro_batches=4), fields={"layers": 4}, dtype=torch.float64),
    Case(Plan(dp_replicate=2, pp=2, schedule="InterleavedZeroBubble", micro_batches=3), fields={"layers": 4}),
    Case(Plan(tp=2, pp=2, schedule="DualPipeV", micro_batches=4, sequence_parallel=False), fields={"layers": 4}),
    Case(Plan(cp=2, pp=2, schedule="Interleaved1F1B", micro_batches=4), fields={"layers": 4}),
    Case(Plan(cp=2, context="ulysses"), "deepseek-v3-debug", fields=LATENT | {"dense_layers": 3}),
    Case(Plan(cp=2, ep=2), "qwen3-moe-debug", fields=EXPERTS),
    Case(Plan(pp=2, micro_batches=4), "deepseek-v3-debug", fields=LATENT, dtype=torch.float64),
    Case(
        Plan(pp=2, schedule="ZBVZeroBubble", micro_batches=4),
        "deepseek-v3-debug",
        fields=LATENT | {"layers": 4},
        dtype=torch.float64,
    ),
    Case(Plan(dp_shard=2, ep=2, pp=2, micro_batches=4), "deepseek-v3-debug", fields=LATENT, dtype=torch.float64),
    Case(Plan(dp_shard=2, cp=2, pp=2, context="ulysses", micro_batches=4)),
    Case(Plan(cp=2, tp=2, pp=2, schedule="DualPipeV", micro_batches=4), fields={"layers": 4}),
    Case(Plan(dp_replicate=2, dp_shard=2, pp=2, schedule="LoopedBFS", micro_batches=4), fields={"layers": 4}),
]


def batch(vocabulary: int, samples: int = 16, length: int = 48) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(case: Case, meta: bool = False) -> nn.Module:
    fields = {name: value for name, value in (SMALL | case.fields).items() if value is not None}
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with torch.device("meta" if meta else "cpu"):
            return build_model(case.model, **fields)
    finally:
        torch.set_default_dtype(before)


def wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


Found = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
REFERENCES: dict[str, Found] = {}


def reference(case: Case) -> Found:
    """Loss, gradients and loads of experts of one process, the first: computed once for all plans that spread the same model."""
    key = repr((case.model, sorted(case.fields.items()), case.dtype, case.half))
    if key not in REFERENCES:
        made = [of_one_process(case) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(made)
        assert made[0] is not None
        REFERENCES[key] = made[0]
    return REFERENCES[key]


def of_one_process(case: Case) -> Found:
    model = build(case)
    initialize(model, 3)
    inputs, targets = batch(48)
    with case.autocast():
        loss = cross_entropy(wide(model(inputs)).flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, update_expert_bias(model)


class Language(nn.Module):
    """A module whose steps a plan's runner takes over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.runner: Any = None

    def split_batch(self, batch: tuple[Tensor, Tensor]) -> Split:
        return (batch[0],), {"positions": None}, batch[1]

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total = cross_entropy(wide(full_tensor(output)).flatten(0, 1), targets.flatten(), reduction="sum")
        return total, torch.tensor(targets.numel())

    def batch_weight(self, batch: tuple[Tensor, Tensor]) -> int:
        return batch[1].numel()

    def scale_losses(self, share: Tensor, batch: tuple[Tensor, Tensor]) -> None:
        scale_balance_loss(self.model, share, per_token=True)


def by_runner(case: Case, mesh: Mesh, model: nn.Module) -> tuple[Tensor, nn.Module]:
    """This process's loss, after its backward, and what has its parameters."""
    module = Language(model)
    if case.plan.pp > 1:
        install(
            module, mesh, lambda part, root: parallelize(part, mesh, seed=3, root=root, types=case.types), torch.device("cpu")
        )  # fmt: skip
    else:
        parallelize(model, mesh, seed=3, sequence_length=48, types=case.types)
        module.runner = ContextRunner(mesh.grid["cp"])
    with case.autocast():
        total, count = batch_loss(module, share(case, mesh))
    (total / count).backward()
    return total.detach() / count, module.model


def by_hand(case: Case, mesh: Mesh, model: nn.Module) -> tuple[Tensor, nn.Module]:
    model = parallelize(model, mesh, seed=3, sequence_length=48, types=case.types)
    inputs, targets = share(case, mesh)
    with case.autocast():
        logits = wide(model(inputs))
    with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    return full_tensor(loss.detach()), model


def share(case: Case, mesh: Mesh) -> tuple[Tensor, Tensor]:
    inputs, targets = (t.chunk(case.plan.data_parallel)[mesh.data_rank] for t in batch(48))
    return inputs, targets


def compare(case: Case) -> dict[str, Any]:
    """Largest differences of loss, gradients and loads of experts between ``case`` and one process."""
    wanted_loss, wanted, wanted_loads = reference(case)
    torch._dynamo.reset()  # else sizes that differ from those of earlier cases are compiled as symbols, which takes seconds
    mesh = Mesh(case.plan)
    model = build(case, case.meta)
    if not case.meta:
        initialize(model, 3)
    value, model = (by_runner if case.plan.pp > 1 or case.plan.cp > 1 else by_hand)(case, mesh, model)
    value = value.double()
    dist.all_reduce(value)
    value /= dist.get_world_size()
    names = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, set(names))
    assert set().union(*everyones) == wanted.keys()
    pairs = [(full_tensor(p.grad).double(), wanted[name].double()) for name, p in names.items()]
    least = max(two.norm() for _, two in pairs) / 100  # some gradients are nothing but rounding (biases of keys)
    errors = [(a - b).norm() / b.norm().clamp(min=least) if case.half else (a - b).abs().max() for a, b in pairs]
    error = torch.stack(errors).max()
    loads = torch.zeros((), dtype=torch.float64)
    if (
        case.plan.pp == 1 and not case.half
    ):  # a stage has some of the layers, and bfloat16 chooses otherwise where scores are close
        found_loads = update_expert_bias(model, mesh.loss_group)
        assert not found_loads.pop("dropped", torch.zeros(()))
        assert found_loads.keys() == wanted_loads.keys()
        loads = max([loads, *((found_loads[name] - value).abs().double() for name, value in wanted_loads.items())])
    worst = torch.stack([(value - wanted_loss).abs(), error, loads])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    found = {"case": case.name, "loss": float(worst[0]), "gradient": float(worst[1]), "loads": float(worst[2])}
    if case.plan.compile != "none":
        found |= {"graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])}
        counters.clear()
    return found


def run(cases: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Compiled ones first: behind others the same case takes the compiler three times as long.
    for case in sorted(cases, key=lambda case: case.plan.compile == "none"):
        if case.plan.world_size == dist.get_world_size():
            found = compare(case)
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run([case for case in CASES if sys.argv[1] == "all" or case.quick == (sys.argv[1] == "quick")])
