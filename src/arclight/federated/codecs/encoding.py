"""A tensor to what goes on the wire, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from arclight.checkpoint.tensorfile import DTYPES, NAMES
from arclight.federated.codecs import blockwise, sparse
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Lossy, Raw, TopK
from arclight.federated.codecs.target import LARGEST, Target, check_finite, chunks_of
from arclight.federated.errors import BlobError, FederatedError
from arclight.federated.protocol import Entry

SMALL = 1024
"""Tensors of fewer elements are sent as they are."""
VECTOR = 1 << 16
"""So are vectors of at most as many: norms and biases weigh next to nothing and are sensitive."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PARTS = {"raw": ("",), "bf16": ("",), "int8": ("", "scale"), "int4": ("", "scale"), "topk": ("index", "value", "level")}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A tensor as it is sent: all that its manifest entry says but the blob, and its parts."""

    codec: str
    dtype: str
    shape: tuple[int, ...]
    parts: dict[str, torch.Tensor]
    """By suffix, see `Entry.parts`; on the CPU."""
    settings: dict[str, Any] = field(default_factory=dict)
    residual: torch.Tensor | None = None
    """What was left unsaid (float32, CPU, the tensor's shape), for the next message; None where nothing is or nobody keeps it."""

    def entry(self, blob: str) -> Entry:
        """Its place in a manifest, once the blob is written."""
        return Entry(
            blob=blob,
            dtype=self.dtype,
            shape=self.shape,
            codec=self.codec,
            parts=tuple(self.parts),
            settings=self.settings,
        )

    def named(self, key: str) -> dict[str, torch.Tensor]:
        """Its parts as they are called in a blob."""
        return {name_of(key, part): tensor for part, tensor in self.parts.items()}


def name_of(key: str, part: str) -> str:
    """What a part of the tensor ``key`` is called in its blob."""
    return f"{key}#{part}" if part else key


def goes_raw(tensor: torch.Tensor, codec: Codec) -> bool:
    """Whether a tensor is sent as it is: with `Raw`, and with any codec if it holds no floating point numbers, or few.

    Few are less than `SMALL`, or a vector of at most `VECTOR`. Values of 16 bits gain nothing by `BF16`.
    """
    if isinstance(codec, Raw) or tensor.dtype not in _FLOATS or tensor.numel() < SMALL:
        return True
    return (tensor.dim() < 2 and tensor.numel() <= VECTOR) or (isinstance(codec, BF16) and tensor.itemsize == 2)


@torch.no_grad()
def encode(key: str, tensor: torch.Tensor, codec: Codec, residual: torch.Tensor | None = None) -> Encoded:
    """``tensor + feedback * residual`` under ``codec``; nothing given is changed. Works chunk by chunk, on any device's tensor.

    ``residual`` is what the previous `Encoded` of this key left, or None. The new one is exactly the difference, in float32,
    between what was to be said and what `decode` will give. Raises FederatedError for values that are not finite numbers, or
    beyond 2^126, and ValueError for a residual of another shape.
    """
    if residual is not None and residual.shape != tensor.shape:
        raise ValueError(f"{key} is {tuple(tensor.shape)}, its residual {tuple(residual.shape)}")
    dtype, shape = NAMES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise FederatedError(f"{key} is of {tensor.dtype}, which cannot be sent")
    if not isinstance(codec, Lossy) or goes_raw(tensor, codec):
        value = _raw(key, tensor, residual)
        return Encoded(codec="raw", dtype=dtype, shape=shape, parts={"": value})
    block = 1 if isinstance(codec, BF16) else codec.block
    target = Target(key, tensor, residual, codec.feedback, block)
    parts, settings = _encoded(target, codec)
    if isinstance(codec, BF16):
        parts = {"": parts[""].view(shape)}
    left = target.left.view(shape) if target.left is not None else None
    kind = type(codec).__name__.lower()
    return Encoded(codec=kind, dtype=dtype, shape=shape, parts=parts, settings=settings, residual=left)


def _encoded(target: Target, codec: Lossy) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if isinstance(codec, Int8):
        return blockwise.encode_int8(target), {"block": codec.block}
    if isinstance(codec, Int4):
        return blockwise.encode_int4(target), {"block": codec.block}
    if isinstance(codec, TopK):
        settings = {"block": codec.block, "keep": codec.keep, "bits": codec.bits}
        return sparse.encode_topk(target, codec.keep, codec.bits), settings
    values = torch.empty(target.numel, dtype=torch.bfloat16)
    for where, chunk in target.chunks():
        check_finite(target.key, chunk.abs().amax())
        values[where] = chunk.view(-1)
        target.said(where, chunk, values[where].to(torch.float32))
    return {"": values}, {}


def _raw(key: str, tensor: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The tensor itself, with what another codec left unsaid before."""
    if residual is not None and tensor.dtype in _FLOATS:
        tensor = (tensor.to("cpu", torch.float64) + residual.to(torch.float64)).to(tensor.dtype)
    if tensor.is_floating_point() and tensor.numel() and tensor.dtype in _FLOATS:
        low, high = tensor.aminmax()
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise FederatedError(
                f"{key} has values that are not finite: it is not sent; lower the learning rate or clip"
            )
    return tensor.detach().cpu()


@torch.no_grad()
def decode(key: str, entry: Entry, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that ``entry`` describes, from its parts by suffix. The same bits on every machine and with any threads.

    Raw values may be the given part itself. Raises BlobError for parts that are not what the entry says, out of range, or of
    another length; nothing is allocated for the values before that is known.
    """
    expected = _PARTS.get(entry.codec)
    dtype = DTYPES.get(entry.dtype)
    if expected is None or dtype is None:
        raise BlobError(f"{key}: there is no codec {entry.codec!r} for {entry.dtype!r} here; install the same arclight")
    if set(parts) != set(expected) or any(not part.device.type == "cpu" for part in parts.values()):
        raise BlobError(f"{key}: {entry.codec} has the parts {list(expected)}, got {list(parts)}")
    if any(size < 0 for size in entry.shape):
        raise BlobError(f"{key}: the shape {entry.shape} cannot be")
    try:
        return _decoded(entry, dtype, dict(parts)).view(entry.shape)
    except BlobError as error:
        raise BlobError(f"{key} ({entry.codec}): {error}") from error


def _decoded(entry: Entry, dtype: torch.dtype, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if entry.codec in ("raw", "bf16"):
        part, stored = parts[""], dtype if entry.codec == "raw" else torch.bfloat16
        if part.dtype != stored or tuple(part.shape) != entry.shape:
            raise BlobError(f"expected {entry.shape} of {stored}, got {tuple(part.shape)} of {part.dtype}")
        return part.contiguous() if entry.codec == "raw" else _widened(part, dtype)
    if dtype not in _FLOATS:
        raise BlobError(f"values of {entry.dtype} are only sent as they are")
    numel = math.prod(entry.shape)
    block = _setting(entry, "block", 2, 1 << 20)
    if entry.codec == "topk":
        if block > 1 << 16 or block & (block - 1):
            raise BlobError(f"a block of {block} cannot be")
        keep, bits = _setting(entry, "keep", 1, block), _setting(entry, "bits", 1, 4)
        return sparse.decode_topk(numel, dtype, block, keep, bits, parts)
    if block % 2:
        raise BlobError(f"a block of {block} cannot be")
    return (blockwise.decode_int8 if entry.codec == "int8" else blockwise.decode_int4)(numel, dtype, block, parts)


def _widened(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _FLOATS:
        raise BlobError("only floating point numbers are sent as bfloat16")
    flat, out = part.reshape(-1), torch.empty(part.numel(), dtype=dtype)
    for where in chunks_of(part.numel(), 1):
        if not bool((flat[where].abs() <= LARGEST).all()):
            raise BlobError("it has values that are not finite, or beyond 2^126")
        out[where] = flat[where]
    return out


def _setting(entry: Entry, name: str, least: int, most: int) -> int:
    value = entry.settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BlobError(f"{name} must be from {least} to {most}, got {value!r}")
    return value
