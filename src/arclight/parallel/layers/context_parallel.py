"""Apply context parallelism: shard sequences; attention gathers keys and values.

`parallelize` sets the ``context`` of each attention (`apply_context_parallel`), for plans with ``cp``; `ContextRunner`, or the pipeline's
`StepRunner`, shards sequences and sums losses. `planning.sharded_shapes` repeats the exchanges. Losses must be those of one process, up to
rounding.

A sequence of T tokens is cut into 2 * cp chunks, of which process r holds chunks r and 2 * cp - 1 - r: in causal attention early
tokens see few keys and late ones many, so that every process has the same work (the zig-zag of Brandon et al. 2023 and of
Llama 3). Only attention mixes tokens; everything else computes on its part as it would on the whole.

Two ways to bring keys and queries together: ``gather`` collects keys and values of all parts (Llama 3), ``ulysses`` exchanges
the parts of sequences for parts of the heads and back (Jacobs et al. 2023). Names of tensors end in their dimensions: B batch,
H query heads, K key heads, t tokens of this process, T tokens of the sequence, C width of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from arclight.parallel.plan import PlanError
from arclight.parallel.step_protocol import Split, lacking, with_positions

Method = Literal["gather", "ulysses"]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""softmax(q k^T + mask) v, in this process: (q, k, v, mask) to (B, H, queries, width of v)."""


# -- sharding of sequences -----------------------------------------------------------------------------------------


def check_sequence(length: int, cp: int, tp: int = 1) -> None:
    """Raise PlanError for sequences of ``length`` tokens that ``cp`` and ``tp`` do not divide."""
    if length % (2 * cp) or (length // cp) % tp:
        step = 2 * cp * tp if tp > 1 else 2 * cp
        near = max(step, length // step * step)
        raise PlanError(
            f"sequences of {length} tokens do not divide into 2 * cp = {2 * cp} chunks"
            f"{f' and then by tp = {tp}' if tp > 1 else ''}: make them {near} or {near + step} tokens long"
        )


def sequence_index(length: int, cp: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Return the places of the tokens on process ``rank``, in its order: (length / cp,) int64."""
    check_sequence(length, cp)
    chunk = length // (2 * cp)
    places = torch.arange(chunk, device=device)
    return torch.cat((places + rank * chunk, places + (2 * cp - 1 - rank) * chunk))


def shard_sequence(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Return this process's part of a tensor whose dimension ``dim`` is the sequence.

    No communication; gradients flow.

    Raises PlanError for a length that is no multiple of 2 * cp.
    """
    cp, rank = mesh.size(), mesh.get_local_rank()
    check_sequence(tensor.shape[dim], cp)
    chunks = tensor.chunk(2 * cp, dim)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]), dim)


def unshard_sequence(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Invert :func:`shard_sequence`: gather whole sequences on every process.

    Gradients flow (and are summed).
    """
    parts = collectives.all_gather_single_autograd(tensor.contiguous(), gather_dim=0, group=mesh)
    return _in_order(parts.unflatten(0, (mesh.size(), tensor.shape[0])), dim)


def _in_order(parts: Tensor, dim: int) -> Tensor:
    """Join the parts of all processes (cp, ...) to whole sequences in dimension ``dim``.

    ``dim`` is counted without the first dimension.
    """
    front, back = parts.chunk(2, dim + 1)
    chunks = torch.cat((front, back.flip(0)))
    return chunks.movedim(0, dim).flatten(dim, dim + 1)


def _in_parts(whole: Tensor, dim: int, cp: int) -> Tensor:
    """Invert :func:`_in_order`."""
    chunks = whole.unflatten(dim, (2 * cp, -1)).movedim(dim, 0)
    return torch.cat((chunks[:cp], chunks[cp:].flip(0)), dim + 1)


# -- attention -----------------------------------------------------------------------------------------------------


@dataclass
class _RankMasks:
    """Hold one mask as whole sequences see it, and as each chunk of queries here does."""

    whole: Any
    chunks: list[tuple[Any, int, int]]
    """Mask, first key and end of the keys of each chunk; keys outside are not seen by any of its queries."""


class ContextParallel:
    """Attention over sequences sharded over ``mesh``: the ``context`` of attention modules.

    ``gather``: keys and values of all parts come together by an all-gather (in backward a reduce-scatter), and each of the two
    chunks of queries is computed with the keys up to its own end (and from where a window or a chunk of attention begins).
    ``ulysses``: one all-to-all gives each process whole sequences for its share of the heads, a second one gives the outputs
    back. Key heads are repeated if there are fewer than processes.

    Masks keep what they say of documents, windows, and positions: those of other parts are fetched once for each mask.
    """

    def __init__(self, mesh: DeviceMesh, method: Method = "gather") -> None:
        if method not in ("gather", "ulysses"):
            raise PlanError(f"there is no context parallelism {method!r}; choose gather or ulysses")
        self.mesh, self.method = mesh, method
        self.cp, self.rank = mesh.size(), mesh.get_local_rank()

    def __call__(self, q_BHtC: Tensor, k_BKtC: Tensor, v_BKtC: Tensor, mask: Any, attend: Attend) -> Tensor:
        if q_BHtC.shape[2] != k_BKtC.shape[2]:
            raise PlanError("context parallelism has no cache of keys: generate with cp = 1")
        if not hasattr(mask, "rank_masks"):
            mask.rank_masks = self._make_rank_masks(mask, q_BHtC.shape[2], q_BHtC.device)
        if self.method == "ulysses":
            return self._ulysses(q_BHtC, k_BKtC, v_BKtC, mask.rank_masks, attend)
        return self._gather(q_BHtC, k_BKtC, v_BKtC, mask.rank_masks, attend)

    def prepared(self, mask: Any) -> Any:
        """Return ``mask`` with the masks of this rank made, outside of compiled blocks.

        Blocks may be compiled, or computed again.
        """
        if mask.positions_q is not None:
            mask.rank_masks = self._make_rank_masks(mask, mask.positions_q.shape[-1], mask.positions_q.device)
        return mask

    def _make_rank_masks(self, mask: Any, tokens: int, device: torch.device) -> _RankMasks:
        length = tokens * self.cp
        whole = dataclasses.replace(mask, index_q=None, index_k=None, **self._whole_ids(mask))
        size, chunks = length // (2 * self.cp), []
        starts = self.rank * size, (2 * self.cp - 1 - self.rank) * size  # as `sequence_index` has them
        for places, first in zip(sequence_index(length, self.cp, self.rank, device).chunk(2), starts, strict=True):
            stop = first + size
            begin, end = self._keys(whole, first, stop, length)
            own: dict[str, Any] = {}
            if first if whole.causal else (whole.window or whole.chunk):  # else the triangle, or everything
                own |= {"index_q": places, "index_k": torch.arange(begin, end, device=device)}
            for name in ("documents", "positions"):
                ids = getattr(whole, f"{name}_q")
                if ids is not None:
                    own |= {f"{name}_q": ids[:, first:stop], f"{name}_k": ids[:, begin:end]}
            chunks.append((dataclasses.replace(whole, **own), begin, end))
        return _RankMasks(whole, chunks)

    def _whole_ids(self, mask: Any) -> dict[str, Tensor | None]:
        """Gather documents and positions of whole sequences, in one collective."""
        unused = () if mask.chunk is not None else ("positions",)
        given = {name: getattr(mask, f"{name}_q") for name in ("documents", "positions")}
        names = [name for name, ids in given.items() if ids is not None and name not in unused]
        whole: dict[str, Tensor | None] = {f"{name}_{side}": None for name in unused for side in "qk"}
        if not names:
            return whole
        own = torch.stack([given[name] for name in names]).long()
        # No functional collective: if activations are computed again what is kept of those is counted, and this runs once.
        parts = own.new_empty(self.cp * len(names), *own.shape[1:])
        dist.all_gather_into_tensor(parts, own, group=self.mesh.get_group())
        ids = _in_order(parts.unflatten(0, (self.cp, -1)), 2)
        return whole | {f"{name}_{side}": ids[i] for i, name in enumerate(names) for side in "qk"}

    @staticmethod
    def _keys(mask: Any, first: int, stop: int, length: int) -> tuple[int, int]:
        """Return the keys that queries ``first`` to ``stop`` may see, whatever documents there are."""
        if not mask.causal:
            return 0, length
        begin = 0
        if mask.window is not None:
            begin = max(begin, first - mask.window + 1)
        if mask.chunk is not None and mask.documents_q is not None:  # chunks of a document end where it does
            begin = max(begin, first - mask.chunk + 1)
        elif mask.chunk is not None and mask.positions_q is None:
            begin = max(begin, first // mask.chunk * mask.chunk)
        return begin, stop

    def _gather(
        self, q_BHtC: Tensor, k_BKtC: Tensor, v_BKtC: Tensor, rank_masks: _RankMasks, attend: Attend
    ) -> Tensor:  # fmt: skip
        both = unshard_sequence(torch.cat((k_BKtC, v_BKtC), -1), 2, self.mesh)
        k_BKTC, v_BKTC = both.split((k_BKtC.shape[-1], v_BKtC.shape[-1]), -1)
        outputs = [
            attend(q, k_BKTC[:, :, begin:end], v_BKTC[:, :, begin:end], mask)
            for q, (mask, begin, end) in zip(q_BHtC.chunk(2, 2), rank_masks.chunks, strict=True)
        ]
        return torch.cat(outputs, 2)

    def _ulysses(
        self, q_BHtC: Tensor, k_BKtC: Tensor, v_BKtC: Tensor, rank_masks: _RankMasks, attend: Attend
    ) -> Tensor:  # fmt: skip
        repeats = kv_repeats(q_BHtC.shape[1], k_BKtC.shape[1], self.cp)
        if repeats > 1:
            k_BKtC, v_BKtC = (x.repeat_interleave(repeats, 1) for x in (k_BKtC, v_BKtC))
        parts = [
            x.unflatten(1, (self.cp, -1)).movedim(1, 0) for x in (q_BHtC, k_BKtC, v_BKtC)
        ]  # (cp, B, heads / cp, t, C)
        sent = torch.cat([part.flatten(1) for part in parts], 1)
        received = self._exchange(sent).split([part[0].numel() for part in parts], 1)
        q, k, v = (_in_order(got.unflatten(1, part.shape[1:]), 2) for got, part in zip(received, parts, strict=True))
        out_BhTC = attend(q, k, v, rank_masks.whole)
        back = _in_parts(out_BhTC, 2, self.cp)
        return self._exchange(back.contiguous()).movedim(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of (cp, ...) to process i."""
        return collectives.all_to_all_single_autograd(parts, None, None, self.mesh)


def kv_repeats(heads: int, kv_heads: int, cp: int) -> int:
    """Count how often Ulysses repeats each key head.

    Raises PlanError for numbers of heads that cannot be divided.
    """
    if heads % cp:
        raise PlanError(
            f"{heads} heads (of this tensor-parallel part) cannot be divided among cp = {cp} processes: choose a cp that divides "
            "them, or context parallelism by gather"
        )
    if kv_heads % cp == 0:
        return 1
    if cp % kv_heads:
        raise PlanError(
            f"{kv_heads} key heads (of this tensor-parallel part) neither divide by cp = {cp} nor repeat up to it: choose a cp that is "
            "a multiple or a divisor of them, or context parallelism by gather"
        )
    return cp // kv_heads


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, method: Method = "gather") -> int:
    """Set context parallelism over ``mesh`` in each attention of ``model``; return how many.

    An attention is a module that has ``context`` and ``attend``; the masks are made by a module that has ``masks(mask)``. Raises PlanError if there is none.
    """
    context, found = ContextParallel(mesh, method), 0
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "context") and hasattr(module, "attend"):
            module.context, found = context, found + 1
        elif callable(getattr(module, "masks", None)):
            module.masks = partial(_prepared, module.masks, context)
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no attention that context parallelism could be put into: plan it with cp = 1"
        )
    return found


# -- steps ---------------------------------------------------------------------------------------------------------


def shard_arguments(split: Split, mesh: DeviceMesh) -> Split:
    """Shard the result of `Runnable.split_batch` along its sequences.

    Sequences are dimension 1 of every tensor that has it. ``positions`` that are None become 0, 1, 2, ... of the
    sequence. Raises PlanError if the model takes none.
    """
    from torch.utils._pytree import tree_map_only

    if "positions" not in split[1]:
        raise PlanError("cp > 1 needs a model that is told positions: split_batch must give them among the kwargs")

    def part(tensor: Tensor) -> Tensor:
        return shard_sequence(tensor, 1, mesh) if tensor.ndim > 1 else tensor

    sharded: Split = tree_map_only(Tensor, part, with_positions(split))
    return sharded


def over_sequences(total: Tensor, count: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return loss and count of whole sequences, from those of the parts.

    The value is the whole one on every process, the gradient cp times that of this process's part: their mean over processes
    is the gradient of the whole.
    """
    both = torch.stack((total.detach().double(), torch.as_tensor(count, device=total.device).double()))
    dist.all_reduce(both, group=mesh.get_group())
    own = total * mesh.size()
    return own + (both[0].to(own.dtype) - own).detach(), both[1].to(torch.as_tensor(count).dtype)


class ContextRunner:
    """Runner of a model that is whole but for its sequences (`arclight.parallel.step_protocol`)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, module: Any, batch: Any) -> tuple[Tensor, Tensor]:
        args, kwargs, targets = shard_arguments(module.split_batch(batch), self.mesh)
        total, count = module.loss(module.model(*args, **kwargs), targets)
        return over_sequences(total, count, self.mesh)


def _prepared(masks: Callable[[Any], dict[str, Any]], context: ContextParallel, mask: Any) -> dict[str, Any]:
    return {name: context.prepared(made) for name, made in masks(mask).items()}


def install_context_runner(module: Any, mesh: DeviceMesh) -> None:
    """Set the runner of ``module``, a `Runnable`, to compute losses on parts of sequences.

    Raises PlanError if it is no such module.
    """
    if (missing := lacking(module)) is not None:
        raise PlanError(
            f"{type(module).__name__} has no {missing}, so nothing can cut its sequences: write its steps as "
            "arclight.parallel.step_protocol says, or use cp = 1"
        )
    module.runner = ContextRunner(mesh)
