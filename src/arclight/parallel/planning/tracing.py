"""One pass through the parts of a chain with fake tensors: shapes as on a device, no memory, no arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from arclight.parallel.planning.chain import Chain, Cost, Recompute
from arclight.parallel.planning.local import Cut
from arclight.parallel.planning.trace import (
    Attending,
    Message,
    Recorder,
    Work,
    exchange,
    marked,
    size_of,
    summed,
    tensors_in,
)
from arclight.parallel.tensor import declared

State = tuple[int, int, Work]
"""Live bytes, and most of them and the work since the last state."""


class _StoppedError(Exception):
    """Raised where nothing but what blocks are given was asked for."""


class _Stop(nn.Module):
    """In the place of the first block: keeps what blocks are given, and marks where the first part ends."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: Callable[[str], None] = lambda where: None
        self.ends = False
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.given = ((x.detach(), *args), kwargs)
        if self.ends:
            raise _StoppedError
        return marked(x, self.passed)


class _Through(nn.Module):
    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class _Tracing:
    """A share of the model made of fake tensors, and what must be on while it runs."""

    def __init__(self, chain: Chain, cut: Cut, fused: bool) -> None:
        self.workload = chain.workload
        self.recorder = Recorder(self.workload.device.seconds, fused)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.model, container = chain.reduced(cut, self.recorder)
        with self.fake:
            self.model.to_empty(device="cpu")
        self.blocks = list(container.children()) if container is not None else []
        heads = any(style == "head" for _, _, style in declared(self.model))
        self.parts_of_vocabulary = cut.tp if heads and cut.loss_parallel else 1
        self.stop = _Stop()
        if container is not None:
            for number, name in enumerate(list(container._modules)):
                container._modules[name] = _Through() if number else self.stop

    def running(self) -> ExitStack:
        modes = ExitStack()
        for mode in (self.fake, Attending(self.recorder, self.workload.device.kind == "cpu"), self.recorder):
            modes.enter_context(mode)
        self.recorder.begin()
        return modes

    def state(self) -> State:
        found = (self.recorder.live, self.recorder.peak, self.recorder.work())
        self.recorder.begin()
        return found

    def batch(self, samples: int, sequence: int) -> Any:
        with self.fake:
            return self.workload.batch(samples, sequence)


def trace_ends(chain: Chain, cut: Cut, low: int, high: int) -> tuple[dict[str | int, Cost], dict[str | int, Cost]]:
    """Costs of the first part, and of the last one with the loss, for one sequence of ``low`` and of ``high`` tokens."""
    traced = _Tracing(chain, cut, fused=False)
    return _pass_through(traced, low), _pass_through(traced, high)


def _pass_through(traced: _Tracing, sequence: int) -> dict[str | int, Cost]:
    batch = traced.batch(1, sequence)
    traced.model.zero_grad()
    base = traced.recorder.live
    marks: dict[str, State] = {}

    def state() -> State:
        live, peak, work = traced.state()
        return live - base, peak - base, work

    def passed(where: str) -> None:
        marks[where] = state()

    traced.stop.passed = passed
    with traced.running():
        loss = traced.workload.loss(traced.model, batch)
        marks["end"] = state()
        loss.backward()
        marks["back"] = state()
        del loss
    if traced.parts_of_vocabulary > 1:
        # A loss over a vocabulary in parts (`arclight.text.loss`) sums three float32 numbers of each token over `tp`, in two exchanges.
        live, peak, work = marks["end"]
        exchanged = (Message("all_reduce", "tp", 12.0 * sequence, 2.0),)
        marks["end"] = (live, peak, work._replace(messages=summed((*work.messages, *exchanged))))
    boundary = sum(size_of(x) for x in tensors_in(traced.stop.given[0][:1]))
    traced.stop.given = ((), {})
    return _ends(marks, boundary)


def _ends(marks: dict[str, State], boundary: int) -> dict[str | int, Cost]:
    """Costs of the first and the last part, from (live, peak, work) at each mark of one pass through both."""
    end, back = marks["end"], marks["back"]
    if "forward" not in marks:
        whole = Cost(end[0], end[1], back[1], end[2], back[2], 0)
        return {"first": Cost(0, 0, 0, Work(), Work(), 0), "last": whole}
    between, turned = marks["forward"], marks["backward"]
    held = between[0]
    return {
        # What the last part leaves when backward comes by the mark: its weights' gradients, which are not the first part's.
        "first": Cost(held, between[1], back[1] - turned[0] + held + boundary, between[2], back[2], boundary),
        "last": Cost(end[0] - held, end[1] - held, turned[1] - held, end[2], turned[2], 0),
    }


def trace_blocks(chain: Chain, cut: Cut, samples: int, recompute: Recompute) -> dict[str | int, Cost]:
    """Costs of a block of each kind."""
    traced = _Tracing(chain, cut, fused=chain.workload.compiled)
    batch = traced.batch(samples, chain.workload.sequence // cut.cp)
    traced.stop.ends = True
    with contextlib.suppress(_StoppedError), traced.running():
        traced.workload.loss(traced.model, batch)
    return {
        kind: _trace_block(traced, block, recompute)
        for kind, block in zip(dict.fromkeys(chain.kinds), traced.blocks, strict=True)
    }


def _trace_block(traced: _Tracing, block: nn.Module, recompute: Recompute) -> Cost:
    (x, *rest), kwargs = traced.stop.given
    x = x.detach().requires_grad_()
    start = traced.recorder.live
    with traced.running():
        out = recomputed(block, recompute, traced.workload.compiled)(x, *rest, **kwargs)
        live, peak, forward = traced.state()
        gradient = torch.empty_like(out)
        out.backward(gradient)
        _, most, backward = traced.state()
        cost = Cost(live - start, peak - start, most - start, forward, backward, size_of(out))
        del out, gradient
    block.zero_grad()
    return cost


def recomputed(block: nn.Module, recompute: Recompute, compiled: bool) -> Callable[..., Tensor]:
    """The block's forward, keeping for backward what it would keep.

    A compiler keeps what is dear (products, attention, what was received) and computes the rest again, as it fuses it into
    backward's own operations: "none" when compiled. "selective" computes every second matrix product again too.
    """
    if recompute == "none" and not compiled:
        return block
    options: dict[str, Any] = {}
    if recompute != "full":
        options["context_fn"] = partial(_keeping, 2 if recompute == "selective" else 1)
    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False, **options)


def _keeping(every: int) -> Any:
    """Contexts of a checkpoint that keeps attention, exchanges and every ``every``-th matrix product, beginning with the first."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = func._overloadpacket.__name__
        keep = func is exchange or "attention" in name or name == "topk"
        if name in ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_mm"):
            keep = counts[context.is_recompute] % every == 0
            counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
