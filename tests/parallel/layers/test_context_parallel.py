"""Context parallelism equals whole sequences: values, gradients, and the bytes it says it moves."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import arclight as al
from arclight.fabric.strategies import DDPStrategy
from arclight.parallel import PlanError
from arclight.parallel.layers.context_parallel import (
    ContextParallel,
    ContextRunner,
    apply_context_parallel,
    kv_repeats,
    sequence_index,
    shard_arguments,
    shard_sequence,
    unshard_sequence,
)
from arclight.parallel.step_protocol import batch_loss
from arclight.text.families.llama import Llama, LlamaConfig
from arclight.text.model.attention import Mask, attention

BATCH, LENGTH = 2, 32


def everywhere(processes: int, function: Any, *arguments: Any) -> list[Any]:
    """Return the result of ``function(fabric, ...)`` on each of several real processes."""

    def run(fabric: al.Fabric) -> list[Any]:
        torch.set_num_threads(1)
        return fabric.strategy.all_gather_object(function(fabric, *arguments))

    fabric = al.Fabric(accelerator="cpu", devices=processes, strategy=DDPStrategy(start_method="fork"))
    return fabric.launch(run)


def cp_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    """Documents (B, T) that begin at other places in each row, and positions in them."""
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    starts[0, [5, 6, 21]] = 1
    starts[1, [16, 30]] = 1
    documents = starts.cumsum(1)
    places = torch.arange(LENGTH).expand(BATCH, -1)
    first = torch.where(starts.bool(), places, 0).cummax(1).values
    return documents, places - first


DOCUMENTS, POSITIONS = packed()
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 7},
    "documents": {"documents_q": DOCUMENTS, "documents_k": DOCUMENTS},
    "window and documents": {"window": 5, "documents_q": DOCUMENTS, "documents_k": DOCUMENTS},
    "chunks": {"chunk": 6},
    "chunks of documents": {
        "chunk": 4, "documents_q": DOCUMENTS, "documents_k": DOCUMENTS, "positions_q": POSITIONS, "positions_k": POSITIONS,
    },
    "both directions": {"causal": False},
    "both directions, window": {"causal": False, "window": 3},
}  # fmt: skip


def tensors(heads: int = 4, kv_heads: int = 2, width: int = 8, v_width: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width)]
    return [torch.randn(BATCH, n, LENGTH, c, generator=generator, dtype=torch.float64) for n, c in shapes]


def attended(mesh: Any, method: Any, options: dict[str, Any], kv_heads: int) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, whole; without a mesh in one process."""
    *inputs, grad = tensors(kv_heads=kv_heads)
    inputs = [x.requires_grad_() for x in inputs]
    if mesh is None:
        out = attention(*inputs, Mask(**options))
        out.backward(grad)
        return [out.detach(), *(x.grad for x in inputs)]
    part = partial(shard_sequence, mesh=mesh)
    local = {n: part(x, 1) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    context, mask = ContextParallel(mesh, method), Mask(**local)
    out = context(*(part(x, 2) for x in inputs), mask, attention)
    again = context(*(part(x, 2) for x in inputs), mask, attention)
    assert torch.equal(out, again)  # what is kept of a mask does not change it
    out.backward(part(grad, 2))
    for x in inputs:
        dist.all_reduce(x.grad)
    return [unshard_sequence(out.detach(), 2, mesh), *(x.grad for x in inputs)]


@functools.cache
def alone() -> dict[tuple[str, int], list[torch.Tensor]]:
    """Compute the result of one process, by mask and number of key heads."""
    return {
        (name, kv_heads): attended(None, None, options, kv_heads)
        for name, options in MASKS.items()
        for kv_heads in (4, 2, 1)
    }


def attention_errors(fabric: al.Fabric) -> dict[str, float]:
    mesh, errors = cp_mesh(), {}
    for method in ("gather", "ulysses"):
        for (name, kv_heads), wanted in alone().items():
            found = attended(mesh, method, MASKS[name], kv_heads)
            errors[f"{method}, {name}, {kv_heads}"] = max(
                float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)
            )
    return errors


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_equals_one_process(processes: int) -> None:
    alone()  # known to the processes, which are forked
    for errors in everywhere(processes, attention_errors):
        assert len(errors) == 48
        assert max(errors.values()) < 1e-13, {name: e for name, e in errors.items() if e >= 1e-13}


class Language(nn.Module):
    """The protocol in its shortest form."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=61, dim=32, layers=2, heads=4, kv_heads=2, hidden=48)
        torch.manual_seed(0)
        self.model = Llama(config).to(dtype)
        self.runner: Any = None

    def split_batch(self, batch: dict[str, Any]) -> Any:
        return (batch["tokens"],), {"positions": batch["positions"], "documents": batch["documents"]}, batch["labels"]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()


def batch(documents: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 61, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :9] = labels[1, 20:23] = -100  # the parts of the processes count differently
    return {
        "tokens": tokens[:, :-1], "labels": labels,
        "positions": POSITIONS if documents else None, "documents": DOCUMENTS if documents else None,
    }  # fmt: skip


def losses(module: Language, documents: bool, share: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    module.zero_grad()
    total, count = batch_loss(module, batch(documents))
    (total / count).backward()
    gradients = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
        if share > 1:
            dist.all_reduce(gradients[name])
            gradients[name] /= share
    return float(total.detach()), int(count), gradients


def model_errors(fabric: al.Fabric, dtype: torch.dtype) -> dict[str, float]:
    mesh, errors = cp_mesh(), {}
    for documents in (False, True):
        whole_total, whole_count, wanted = losses(Language(dtype), documents, 1)
        for method in ("gather", "ulysses"):
            module = Language(dtype)
            assert apply_context_parallel(module.model, mesh, method) == 2
            module.runner = ContextRunner(mesh)
            total, count, found = losses(module, documents, mesh.size())
            assert count == whole_count == BATCH * LENGTH - 12
            errors[f"{method}, {documents}"] = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
            assert total == pytest.approx(whole_total, rel=1e-6 if dtype == torch.float32 else 1e-13)
    return errors


@pytest.mark.parametrize(
    ("processes", "dtype", "limit"),
    [
        (2, torch.float64, 1e-12),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in ((2, torch.float32, 1e-7), (4, torch.float64, 1e-12))
        ),
    ],
    ids=str,
)
def test_a_model_equals_one_process(processes: int, dtype: torch.dtype, limit: float) -> None:
    for errors in everywhere(processes, model_errors, dtype):
        assert len(errors) == 4
        for name, error in errors.items():
            assert error < limit, name


class Bytes(TorchDispatchMode):
    """The size of the larger buffer of each collective, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = str(function).replace("_allgather_base", "all_gather")
        for kind in ("all_gather", "reduce_scatter", "all_to_all"):
            if kind in name:
                tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
                self.seen[kind] = self.seen.get(kind, 0) + max(x.nbytes for x in tensors)
        return out


def traffic(fabric: al.Fabric, method: Any, options: dict[str, Any], kv_heads: int) -> tuple[dict[str, int], Any]:
    mesh = cp_mesh()
    inputs = [shard_sequence(x, 2, mesh).requires_grad_() for x in tensors(kv_heads=kv_heads)[:3]]
    local = {n: shard_sequence(x, 1, mesh) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with CommDebugMode() as calls, Bytes() as moved:
        ContextParallel(mesh, method)(*inputs, Mask(**local), attention).sum().backward()
    return moved.seen, {str(function): number for function, number in calls.get_comm_counts().items()}


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize("kv_heads", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_bytes_of_an_attention_layer_are_as_counted_by_hand(method: Any, kv_heads: int) -> None:
    heads, width, v_width, itemsize, cp = 4, 8, 6, 8, 2
    if method == "gather":  # keys and values of all tokens, and their gradients back
        gathered = BATCH * kv_heads * LENGTH * (width + v_width) * itemsize
        plain = {"all_gather": gathered, "reduce_scatter": gathered}
    else:  # own tokens of all heads there, outputs back, and both again in backward; a single key head is sent twice
        keys = max(kv_heads, cp) * (width + v_width)
        plain = {"all_to_all": 2 * BATCH * (LENGTH // cp) * (heads * width + keys + heads * v_width) * itemsize}
    for seen, calls in everywhere(2, traffic, method, {}, kv_heads):
        assert seen == plain
        assert sorted(calls.values()) == ([1, 1] if method == "gather" else [4])
    ids = 2 * 8 * BATCH * LENGTH  # documents and positions, once for a mask
    for seen, _ in everywhere(2, traffic, method, MASKS["chunks of documents"], kv_heads):
        assert seen == plain | {"all_gather": plain.get("all_gather", 0) + ids}


def test_the_work_of_causal_attention_is_shared_out_evenly() -> None:
    cp, length = 4, 64
    work = [int((sequence_index(length, cp, rank) + 1).sum()) for rank in range(cp)]
    assert len(set(work)) == 1
    assert torch.cat([sequence_index(length, cp, rank) for rank in range(cp)]).sort().values.tolist() == list(range(64))


def computed(fabric: al.Fabric) -> int:
    """Pairs of query and key that attention was called with."""
    pairs = 0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        nonlocal pairs
        pairs += q.shape[2] * k.shape[2]
        return attention(q, k, v, mask)

    mesh = cp_mesh()
    ContextParallel(mesh)(*(shard_sequence(x, 2, mesh) for x in tensors()[:3]), Mask(), attend)
    ContextParallel(mesh)(*(shard_sequence(x, 2, mesh) for x in tensors()[:3]), Mask(window=4), attend)
    return pairs


def test_keys_that_no_query_sees_are_left_out() -> None:
    chunk = LENGTH // 8
    causal = 9 * chunk * chunk  # chunks r and 7 - r see r + 1 and 8 - r chunks of keys
    found = everywhere(4, computed)
    assert found[1:] == [causal + 2 * chunk * (chunk + 3)] * 3
    assert found[0] == causal + chunk * chunk + chunk * (chunk + 3)  # nothing lies before the first chunk


def test_indivisible_sequences_and_heads_are_refused_with_the_fix() -> None:
    with pytest.raises(PlanError, match=r"30 tokens do not divide into 2 \* cp = 8 chunks: make them 24 or 32 tokens"):
        sequence_index(30, 4, 0)
    with pytest.raises(PlanError, match=r"6 heads .* cp = 4 .* by gather"):
        kv_repeats(6, 2, 4)
    with pytest.raises(PlanError, match=r"3 key heads .* cp = 2"):
        kv_repeats(6, 3, 2)
    with pytest.raises(PlanError, match="split_batch must give them"):
        shard_arguments(((torch.zeros(2, 8),), {}, None), None)  # type: ignore[arg-type]
