"""Encode a tensor for the wire, and decode it.

Clients encode updates (`encode_all`) and the server decodes them (`LazyTensors`); downloads go the other way through `delta_chain`. What
`decode` accepts is a wire format and stored on disk: thresholds, parts and settings of a codec stay as they are, and decoded values have
the same bits on every machine. A new codec needs a class in `settings`, its parts in `layout` and a case in ``_encoded`` and ``_decoded``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from arclight.checkpoint.tensorfile import DTYPES, NAMES
from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.manifest_io import Encoded, open_manifest
from arclight.federated.codecs import blockwise, layout, sparse
from arclight.federated.codecs.error_feedback import LARGEST, ErrorFeedback, chunks_of
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Lossy, Raw, TopK
from arclight.federated.errors import BlobError, FederatedError
from arclight.federated.protocol import Manifest

_ROW = 4096
"""Block size for codecs without a setting for it."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PARTS = {"raw": ("",), "bf16": ("",), "int8": ("", "scale"), "int4": ("", "scale"), "topk": ("index", "value", "level")}  # fmt: skip


def is_sent_raw(tensor: torch.Tensor, codec: Codec) -> bool:
    """Return True if ``codec`` sends a tensor unencoded: integers, and by `layout.is_sent_raw`."""
    return tensor.dtype not in _FLOATS or layout.is_sent_raw(tuple(tensor.shape), tensor.itemsize, codec)


@torch.no_grad()
def encode(
    key: str, tensor: torch.Tensor, codec: Codec, residual: torch.Tensor | None = None
) -> tuple[Encoded, torch.Tensor | None]:
    """Encode ``tensor + feedback * residual``; return the encoding and the new residual.

    Inputs are not changed. ``residual`` is the quantization error of the previous message of this key, or None. The new
    one (float32, on the CPU, the tensor's shape) is exactly the float32 difference between the encoded sum and what
    `decode` will return; None for a lossless encoding, or without error feedback. Works chunk by chunk, on a tensor of
    any device. Raises FederatedError for values that are NaN, infinite or beyond 2^126, and ValueError for a residual
    of another shape.
    """
    if residual is not None and residual.shape != tensor.shape:
        raise ValueError(
            f"{key} has shape {tuple(tensor.shape)}, its residual {tuple(residual.shape)}: they must be equal"
        )
    if not isinstance(codec, Lossy) or is_sent_raw(tensor, codec):
        return Encoded.raw(_raw(key, tensor, residual)), None
    block = _ROW if isinstance(codec, BF16) else codec.block
    feedback = ErrorFeedback(key, tensor, residual, codec.feedback, block)
    parts, settings = _encoded(feedback, codec), dict[str, Any](layout.entry_settings(codec))
    shape = tuple(tensor.shape)
    if isinstance(codec, BF16):
        parts = {"": parts[""].view(shape)}
    kind = type(codec).__name__.lower()
    encoded = Encoded(parts=parts, dtype=NAMES[tensor.dtype], shape=shape, codec=kind, settings=settings)
    return encoded, feedback.residual.view(shape) if feedback.residual is not None else None


def encode_all(
    tensors: Iterable[tuple[str, torch.Tensor]],
    codec: Codec,
    residuals: Mapping[str, torch.Tensor],
    left: MutableMapping[str, torch.Tensor],
) -> Iterator[tuple[str, Encoded]]:
    """Encode tensors one by one, lazily, as `write_blobs` takes them.

    ``residuals`` are those of the last accepted message; the new ones are put into ``left``. The two are separate so that a message
    that is lost can be sent again: the caller replaces the old ones once the server has accepted it. Residuals of keys that are not
    among ``tensors`` (not sent in this round) are in ``left`` unchanged. Optimizer moments are encoded as `for_moments` says.
    """
    left.update(residuals)
    for key, tensor in tensors:
        weight = key.startswith("model/")
        encoded, remains = encode(
            key, tensor, codec if weight else for_moments(codec), residuals.get(key) if weight else None
        )
        if remains is None:
            left.pop(key, None)
        else:
            left[key] = remains
        yield key, encoded


def for_moments(codec: Codec) -> Codec:
    """Return the codec of local optimizer states: at most `BF16` without error feedback.

    Optimizers divide by their square roots, so relative errors matter: a small value rounded to zero, or made negative by a residual,
    would make its weight diverge.
    """
    return codec if isinstance(codec, Raw) else BF16(feedback=0.0)


def _encoded(feedback: ErrorFeedback, codec: Lossy) -> dict[str, torch.Tensor]:
    if isinstance(codec, Int8):
        return blockwise.encode_int8(feedback)
    if isinstance(codec, Int4):
        return blockwise.encode_int4(feedback)
    if isinstance(codec, TopK):
        return sparse.encode_topk(feedback, codec.keep, codec.bits)
    values = torch.empty(feedback.numel, dtype=torch.bfloat16)
    for where, chunk in feedback.chunks():
        feedback.largest(chunk)
        rounded = chunk.to(torch.bfloat16)
        values[where] = rounded.view(-1)[: where.stop - where.start]
        if feedback.residual is not None:
            feedback.record(where, chunk, rounded.to(torch.float32))
    return {"": values}


def _raw(key: str, tensor: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor, plus a residual that an earlier, lossy codec left."""
    if residual is not None and tensor.dtype in _FLOATS:
        tensor = (tensor.to("cpu", torch.float64) + residual.to(torch.float64)).to(tensor.dtype)
    if tensor.is_floating_point() and tensor.numel() and tensor.dtype in _FLOATS:
        low, high = tensor.aminmax()
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise FederatedError(
                f"{key} has values that are NaN or infinite: it is not sent; lower the learning rate or clip gradients"
            )
    return tensor.detach().cpu()


@torch.no_grad()
def decode(key: str, encoded: Encoded) -> torch.Tensor:
    """Decode a tensor, to the same bits on every machine and with any number of threads.

    A raw tensor may be the given part itself. Raises BlobError for parts that do not fit codec and settings (type, length, range),
    before any memory is allocated for the values.
    """
    expected = _PARTS.get(encoded.codec)
    if expected is None:
        raise BlobError(f"{key}: there is no codec {encoded.codec!r} here; install the same arclight on both sides")
    if set(encoded.parts) != set(expected) or any(part.device.type != "cpu" for part in encoded.parts.values()):
        raise BlobError(f"{key}: {encoded.codec} has the parts {list(expected)}, got {list(encoded.parts)}")
    if any(size < 0 for size in encoded.shape):
        raise BlobError(f"{key}: the shape {encoded.shape} has a negative size")
    try:
        return _decoded(encoded).view(encoded.shape)
    except BlobError as error:
        raise BlobError(f"{key} ({encoded.codec}): {error}") from error


def _decoded(encoded: Encoded) -> torch.Tensor:
    codec, dtype, parts = encoded.codec, DTYPES.get(encoded.dtype), dict(encoded.parts)
    if dtype is None:
        raise BlobError(f"there is no type {encoded.dtype!r} here; install the same arclight on both sides")
    if codec in ("raw", "bf16"):
        part, stored = parts[""], dtype if codec == "raw" else torch.bfloat16
        if part.dtype != stored or tuple(part.shape) != encoded.shape:
            raise BlobError(f"expected {encoded.shape} of {stored}, got {tuple(part.shape)} of {part.dtype}")
        return part.contiguous() if codec == "raw" else _from_bfloat16(part, dtype)
    if dtype not in _FLOATS:
        raise BlobError(f"values of {dtype} cannot be quantized: only the codec raw carries them")
    numel = math.prod(encoded.shape)
    block = _setting(encoded, "block", 2, 1 << 20)
    if codec == "topk":
        if block > 1 << 16 or block & (block - 1):
            raise BlobError(f"block must be a power of two up to {1 << 16}, got {block}")
        keep, bits = _setting(encoded, "keep", 1, block), _setting(encoded, "bits", 1, 4)
        return sparse.decode_topk(numel, dtype, block, keep, bits, parts)
    if block % 2:
        raise BlobError(f"block must be even, got {block}")
    return (blockwise.decode_int8 if codec == "int8" else blockwise.decode_int4)(numel, dtype, block, parts)


def _from_bfloat16(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _FLOATS:
        raise BlobError("only floating point numbers are sent as bfloat16")
    flat, out = part.reshape(-1), torch.empty(part.numel(), dtype=dtype)
    for where in chunks_of(part.numel(), _ROW):
        wide = flat[where].to(torch.float32)
        low, high = wide.aminmax()
        if not -LARGEST <= low.item() <= high.item() <= LARGEST:
            raise BlobError("it has values that are not finite, or beyond 2^126")
        out[where] = wide
    return out


def _setting(encoded: Encoded, name: str, least: int, most: int) -> int:
    value = encoded.settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BlobError(f"{name} must be from {least} to {most}, got {value!r}")
    return value


class LazyTensors(Mapping[str, torch.Tensor]):
    """Map a manifest's keys to tensors, each read and decoded at every access and not kept.

    Raw ones are `StoredTensor` objects, which can be read in parts.
    """

    def __init__(self, manifest: Manifest, store: BlobStore) -> None:
        self._manifest, self._opened = manifest, open_manifest(manifest, store)

    def __getitem__(self, key: str) -> torch.Tensor:
        if self._manifest.tensors[key].codec == "raw":
            return self._opened.stored(key)
        return decode(key, self._opened.read(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.tensors)

    def __len__(self) -> int:
        return len(self._manifest.tensors)


class MappedTensors(LazyTensors):
    """Map a manifest's keys to tensors, memory-mapped if raw, without caching."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return decode(key, self._opened[key])
