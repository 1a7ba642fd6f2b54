"""Record operations, messages and live bytes of a piece of a model while it runs.

The planner (`chain`, `sharded_shapes`) and the pipeline's costs (`measure`, `timed_pass`) measure with it; `hardware` turns each `Op` into
seconds. With fake tensors nothing is computed and no memory is taken, so that a model of any size can be traced; on a real device the same
recorder measures what a run holds. It depends on torch's dispatch; its records are not stored, so their form is free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Dimension = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
Kind = Literal["matmul", "attention", "other"]


class Op(NamedTuple):
    """One operation: its floating-point operations, and its memory traffic."""

    kind: Kind
    dtype: torch.dtype
    flops: float
    bytes: float
    fused: bool = False
    """True if it needs no kernel of its own."""


class Message(NamedTuple):
    """Collective of one process.

    bytes: of the whole tensor (gathered, to be scattered, reduced or exchanged), or sent.
    """

    collective: Collective
    dimension: Dimension
    bytes: float
    times: float = 1


def summed(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Sum messages of the same collective and dimension."""
    total: dict[tuple[Collective, Dimension], tuple[float, float]] = {}
    for message in messages:
        size, times = total.get(message[:2], (0.0, 0.0))
        total[message[:2]] = (size + message.bytes, times + message.times)
    return tuple(Message(*key, *sizes) for key, sizes in total.items())


class Work(NamedTuple):
    """Work of one phase, summed up over its operations."""

    seconds: float = 0.0
    """Seconds of computing."""
    products: float = 0.0
    """Floating-point operations of matrix products."""
    attention: float = 0.0
    """Floating-point operations of attention."""
    uncut: float = 0.0
    """Those of forward, counted as if nothing were masked: of a causal mask both sides of the diagonal."""
    messages: tuple[Message, ...] = ()

    def line_to(self, other: Work, at: float) -> Work:
        """Interpolate between this (0) and ``other`` (1) at ``at``."""
        messages = tuple(
            one._replace(bytes=one.bytes + at * (two.bytes - one.bytes), times=one.times + at * (two.times - one.times))
            for one, two in zip(self.messages, other.messages, strict=True)
        )
        seconds, products, scores, uncut = (a + at * (b - a) for a, b in zip(self[:4], other[:4], strict=True))
        return Work(seconds, products, scores, uncut, messages)


_LIBRARY = torch.library.Library("arclight", "FRAGMENT")
_LIBRARY.define("exchange(Tensor x, int dim, int size, str collective, str dimension) -> Tensor")


def _exchange(x: Tensor, dim: int, size: int, collective: str, dimension: str) -> Tensor:
    return x.new_empty([size if i == dim else length for i, length in enumerate(x.shape)])


_LIBRARY.impl("exchange", _exchange, "Meta")
exchange = torch.ops.arclight.exchange.default
"""Stands for a collective over ``dimension`` that leaves ``x`` with ``size`` elements in dimension ``dim``; of fake tensors only."""


class _LiveStorage(NamedTuple):
    reference: weakref.ref[torch.UntypedStorage]
    bytes: int


class OpRecorder(TorchDispatchMode):
    """Records operations and the bytes of tensors made while it is on.

    seconds: time of an operation. fused: operations that are no matrix products are compiled into their neighbours, so that only
    what a product reads or writes passes through memory.
    """

    def __init__(self, seconds: Callable[[Op], float] = lambda op: 0.0, fused: bool = False) -> None:
        super().__init__()
        self.seconds, self.fused = seconds, fused
        self.live = self.peak = 0
        self.shares: dict[tuple[int, int], tuple[float, bool]] = {}
        """Share of pairs that the mask leaves to attention, and whether it is causal, by numbers of queries and keys."""
        self._ops: list[Op] = []
        self._messages: list[Message] = []
        self._uncut = 0.0
        self._known: dict[int, _LiveStorage] = {}
        self._unwritten: set[int] = set()
        self._read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come by next
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            self._note_storage(tensor, 0)
        out = _called(func, args, kwargs)
        new = [tensor for tensor in tensors_in(out) if self._note_storage(tensor, tensor.untyped_storage().nbytes())]
        if new or func._schema.is_mutable:
            self._note(func, args, kwargs, out, inputs, new)
        return out

    def begin(self) -> None:
        """Begin a phase: peak and operations count from here."""
        self._ops, self._messages, self._read, self._uncut, self.peak = [], [], set(), 0.0, self.live

    def work(self) -> Work:
        """Sum up the work since :meth:`begin`."""
        products, attention = (sum(op.flops for op in self._ops if op.kind == kind) for kind in ("matmul", "attention"))
        return Work(sum(map(self.seconds, self._ops)), products, attention, self._uncut, summed(self._messages))

    def _note_storage(self, tensor: Tensor, size: int) -> bool:
        """Return True for new memory; ``size`` bytes of it are live until it goes."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known.reference() is storage:
            return False

        def gone(_: Any, key: int = key, size: int = size) -> None:
            self.live -= size
            self._known.pop(key, None)
            self._unwritten.discard(key)

        self._known[key] = _LiveStorage(weakref.ref(storage, gone), size)
        self.live += size
        self.peak = max(self.peak, self.live)
        return True

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], new: list[Tensor]) -> None:
        name = func._overloadpacket.__name__
        if func is exchange:
            tensor = out if args[3] == "all_gather" else args[0]  # the larger one
            self._messages.append(Message(args[3], args[4], size_of(tensor)))
            return
        if name.startswith(("empty", "new_empty")) or name in ("detach", "alias"):
            return
        dtype = next((tensor.dtype for tensor in (*new, *inputs) if tensor.dtype.is_floating_point), torch.int64)
        flops, kind = self._flops(func, args, kwargs, out)
        if not self.fused:
            moved = sum(map(size_of, inputs)) + sum(map(size_of, new or inputs[:1]))
        elif kind == "other":
            self._unwritten.update(id(tensor.untyped_storage()) for tensor in new)
            moved = sum(map(self._first_read, inputs))
        else:
            moved = sum(self._write(tensor) + size_of(tensor) for tensor in inputs) + sum(map(size_of, new))
        self._ops.append(Op(kind, dtype, flops, moved, self.fused and kind == "other"))

    def _flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, Kind]:
        packet = func._overloadpacket
        name = packet.__name__
        if name == "_grouped_mm":
            rows, weights = args[0], args[1]
            # The second operand is a stack of weights, or (their gradient) a matrix with as many columns as the first has rows.
            return 2.0 * rows.shape[0] * rows.shape[1] * weights.shape[-1], "matmul"
        if "attention" in name:
            query, key, value = args[1:4] if "backward" in name else args[:3]
            share, causal = self.shares.get((query.shape[2], key.shape[2]), (1.0, False))
            pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * share
            # Forward: scores and their product with the values. Backward: scores again, and two products for each.
            c, w = query.shape[3], value.shape[3]
            if "backward" in name:
                return 2.0 * pairs * (3 * c + 2 * w), "attention"
            self._uncut += 2.0 * pairs * (c + w) * (2 if causal else 1)
            return 2.0 * pairs * (c + w), "attention"
        if packet in flop_registry:
            return float(flop_registry[packet](*args, **kwargs, out_val=out)), "matmul"
        return 0.0, "other"

    def _first_read(self, tensor: Tensor) -> int:
        """Return the bytes that fused operations read of a tensor in memory, once in a phase."""
        key = id(tensor.untyped_storage())
        if key in self._unwritten or key in self._read:
            return 0
        self._read.add(key)
        return size_of(tensor)

    def _write(self, tensor: Tensor) -> int:
        """Return the bytes written because a product needs what fused operations have computed."""
        key = id(tensor.untyped_storage())
        if key not in self._unwritten:
            return 0
        self._unwritten.discard(key)
        return size_of(tensor)


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the operation; grouped products of fake float32 or float64 tensors via bfloat16.

    Torch 2.13 takes fake ones in bfloat16 alone, and real ones in any dtype.
    """
    if (
        func is torch.ops.aten._grouped_mm.default
        and isinstance(args[0], FakeTensor)
        and args[0].dtype in (torch.float32, torch.float64)
    ):
        return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def size_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class FusedAttentionMode(TorchFunctionMode):
    """Mode that records scaled dot-product attention as a fused kernel on any device.

    There is no matrix of scores in memory.
    """

    def __init__(self, recorder: OpRecorder, cpu: bool) -> None:
        super().__init__()
        self.recorder, self.cpu = recorder, cpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, *_ = args
        causal = bool((kwargs or {}).get("is_causal"))
        self.recorder.shares[query.shape[2], key.shape[2]] = (0.5 if causal else 1.0, causal)
        return fused_attention(query, key, value, self.cpu)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, cpu: bool) -> Tensor:
    """Compute softmax(q k^T) v by the operation of a GPU or, with ``cpu``, of a CPU.

    No mask is needed, since it would cost nothing here.
    query: (B, H, T, C), key: (B, K, S, C), value: (B, K, S, W) -> (B, H, T, W), all fake.
    """
    ops = torch.ops.aten
    if key.shape[3] != value.shape[3]:
        if key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out: Tensor = ops._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]
    elif cpu:
        out = ops._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    else:
        out = ops._scaled_dot_product_flash_attention(query, key, value)[0]
    return out


class _PassMarker(torch.autograd.Function):
    """Identity that calls back when forward and backward pass it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[str], None]) -> Tensor:
        ctx.passed = passed
        passed("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.passed("backward")
        return grad, None


def mark_passes(x: Tensor, passed: Callable[[str], None]) -> Tensor:
    """Return ``x``; ``passed("forward")`` is called now, ``passed("backward")`` at its gradient."""
    out: Tensor = _PassMarker.apply(x, passed)
    return out
