"""Compute attention by one function: a `Mask` and a back end.

Blocks of ``families``, ``diffusion`` and ``vision_language`` call an `InnerAttention` with a `Mask`; `parallel.layers.context_parallel` sets its
`context`. All back ends must agree with softmax(q k^T * scale + mask) v, up to rounding; a new one is a branch of `attention` that refuses by
name the masks that it cannot compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Backend = Literal["auto", "sdpa", "flex", "varlen"]

_FEW = 128
"""Below so many queries a full mask costs less than finding its blocks, as in steps of generation."""


@dataclass
class Mask:
    """Mask of the keys that a query sees: all conditions must hold.

    A tensor that is None stands for 0, 1, 2, ...

    index: place of each token in its sequence, (T,) or (B, T); of queries and of keys, which differ where keys of earlier steps are
    cached or a process holds part of the queries only. documents: ids (B, T) of packed documents, each in one piece. positions: place of
    each token in its document, (B, T), for ``chunk``.
    """

    causal: bool = True
    """Only keys at the query's place or before it."""
    window: int | None = None
    """Only keys less than ``window`` places away: of a causal mask the newest ``window``, the query's own included."""
    chunk: int | None = None
    """Only keys of the same chunk: places in the document are cut into chunks of this length."""
    index_q: Tensor | None = None
    index_k: Tensor | None = None
    documents_q: Tensor | None = None
    documents_k: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None

    def __post_init__(self) -> None:
        self._made: dict[Any, Any] = {}

    @property
    def plain(self) -> bool:
        """True for the plain triangle of a causal mask, or if every query sees all keys."""
        if not self.causal and self.window is None and self.chunk is None:
            return self.documents_q is None
        tensors = (self.index_q, self.index_k, self.documents_q)
        return self.window is None and self.chunk is None and all(tensor is None for tensor in tensors)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the mask as bool (B or 1, 1, queries, keys), True where seen; made once."""

        def make() -> Tensor:
            seen = self._seen(
                lambda ids: _rows(ids, queries, device)[:, :, None], lambda ids: _rows(ids, keys, device)[:, None]
            )
            return seen.expand(-1, queries, keys)[:, None]

        made: Tensor = self._once(("dense", queries, keys), make)
        return made

    def blocks(self, queries: int, keys: int, device: torch.device) -> Any:
        """Return the mask as flex attention wants it; made once."""
        from torch.nn.attention.flex_attention import create_block_mask

        make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
        batch = self._batch()
        return self._once(
            ("blocks", queries, keys),
            lambda: make(self._mask_mod(device), batch if batch > 1 else None, None, queries, keys, device=str(device)),
        )

    def segments(self, batch: int, length: int, device: torch.device) -> tuple[Tensor, int]:
        """Return the bounds of pieces that do not see one another, and the longest piece.

        The last bound is the end. The places are among the ``batch * length`` tokens.

        Raises ValueError if queries and keys are not the same whole sequences.
        """
        if self.index_q is not None or self.index_k is not None or self.documents_q is not self.documents_k:
            raise ValueError("pieces of packed sequences are told where queries and keys are the same tokens, in order")
        if self.chunk is not None and self.positions_q is not self.positions_k:
            raise ValueError("pieces of packed sequences are told where queries and keys are the same tokens, in order")

        def make() -> tuple[Tensor, int]:
            begins = torch.zeros(batch, length, dtype=torch.bool, device=device)
            begins[:, 0] = True
            if self.documents_q is not None:
                begins[:, 1:] |= self.documents_q[:, 1:] != self.documents_q[:, :-1]
            if self.chunk is not None:
                part = _rows(self.positions_q, length, device) // self.chunk
                begins[:, 1:] |= part[:, 1:] != part[:, :-1]
            end = torch.tensor([batch * length], device=device)
            bounds = torch.cat((begins.flatten().nonzero().flatten(), end))
            return bounds.to(torch.int32), int(bounds.diff().max())

        made: tuple[Tensor, int] = self._once(("segments", batch, length), make)
        return made

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        key = tuple(map(str, key))  # sizes are symbols while a graph is captured, and these have no hash
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _batch(self) -> int:
        tensors = (self.index_q, self.index_k, self.documents_q, self.documents_k, self.positions_q, self.positions_k)
        batch = 1
        for tensor in tensors:
            if tensor is not None and tensor.ndim == 2:
                batch = max(batch, tensor.shape[0])
        return batch

    def _mask_mod(self, device: torch.device) -> Callable[[Any, Any, Any, Any], Tensor]:
        """Return a function of broadcast indices: True if, in sequence b, query i sees key j."""

        def at(ids: Tensor | None, row: Any, place: Any) -> Any:
            if ids is None:
                return place
            return ids[place] if ids.ndim == 1 else ids[row if len(ids) > 1 else 0, place]

        return lambda b, h, i, j: self._seen(lambda ids: at(ids, b, i), lambda ids: at(ids, b, j))

    def _seen(self, of_queries: Callable[[Tensor | None], Any], of_keys: Callable[[Tensor | None], Any]) -> Tensor:
        """Return which keys each query sees.

        The functions take from ids of a place (None: 0, 1, 2, ...) those to be compared.
        """
        q, k = of_queries(self.index_q), of_keys(self.index_k)
        seen: Tensor = k <= q if self.causal else k == k  # noqa: PLR0124  all of them, as a tensor
        if self.window is not None:
            seen = seen & (k > q - self.window)
            if not self.causal:
                seen = seen & (k < q + self.window)
        if self.documents_q is not None and self.documents_k is not None:
            seen = seen & (of_queries(self.documents_q) == of_keys(self.documents_k))
        if self.chunk is not None:
            place_q = q if self.positions_q is None else of_queries(self.positions_q)
            place_k = k if self.positions_k is None else of_keys(self.positions_k)
            seen = seen & (place_q // self.chunk == place_k // self.chunk)
        return seen


def _rows(index: Tensor | None, length: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device) if index is None else index
    return places if places.ndim == 2 else places[None]


def attention(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask, backend: Backend = "auto", scale: float | None = None
) -> Tensor:  # fmt: skip
    """Compute softmax(q k^T * scale + mask) v.

    q: (B, H, T, C); k, v: (B, K, S, C) with H a multiple of K (v may have another width); gives (B, H, T, width of v).
    scale: default 1 / sqrt(C). ``sdpa`` runs everywhere, with the mask in full if it is no plain triangle; ``flex`` leaves out
    blocks that no query sees (CUDA; on a CPU forward only); ``varlen`` runs FlashAttention over packed documents (CUDA, 16-bit).
    ``auto`` is sdpa if it needs no mask in full, there are under 128 queries, or the device is a CPU, else flex.
    Raises ValueError for heads that do not divide and masks that a back end does not know, RuntimeError if it does not run.
    """
    heads, kv_heads = q_BHTC.shape[1], k_BKSC.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    plain = mask.plain and (not mask.causal or q_BHTC.shape[2] == k_BKSC.shape[2])
    if backend == "auto":
        backend = "sdpa" if plain or q_BHTC.device.type == "cpu" or q_BHTC.shape[2] < _FEW else "flex"
    if backend == "sdpa":
        dense = None if plain else mask.dense(q_BHTC.shape[2], k_BKSC.shape[2], q_BHTC.device)
        if dense is not None and heads != kv_heads and torch.compiler.is_exporting():
            return _grouped_queries(q_BHTC, k_BKSC, v_BKSC, dense, scale)
        return scaled_dot_product_attention(
            q_BHTC, k_BKSC, v_BKSC, attn_mask=dense, is_causal=plain and mask.causal, scale=scale,
            enable_gqa=heads != kv_heads,
        )  # fmt: skip
    if backend == "flex":
        return _flex(q_BHTC, k_BKSC, v_BKSC, mask, scale)
    if backend == "varlen":
        return _varlen(q_BHTC, k_BKSC, v_BKSC, mask, scale)
    raise ValueError(f"attention has no back end {backend!r}; choose sdpa, flex or varlen")


def _grouped_queries(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, dense: Tensor, scale: float | None) -> Tensor:
    """Attend with grouped queries in one product per key, without copies of keys and values.

    A program would copy keys and values for each query.
    """
    shared = q_BHTC.shape[1] // k_BKSC.shape[1]
    q_BKRC = q_BHTC.unflatten(1, (-1, shared)).flatten(2, 3)
    mask = dense[:, :, None].expand(-1, -1, shared, -1, -1).flatten(2, 3)
    out_BKRC = scaled_dot_product_attention(q_BKRC, k_BKSC, v_BKSC, attn_mask=mask, scale=scale)
    out_BHTC: Tensor = out_BKRC.unflatten(2, (shared, -1)).flatten(1, 2)
    return out_BHTC


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _flex(q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask, scale: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    cpu = q_BHTC.device.type == "cpu"
    if cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHTC, k_BKSC, v_BKSC)):
        raise RuntimeError("flex attention has no backward on a CPU: train there with the back end 'sdpa' or 'auto'")
    blocks = mask.blocks(q_BHTC.shape[2], k_BKSC.shape[2], q_BHTC.device)
    run: Any = flex_attention if cpu else _compiled(flex_attention)
    grouped = q_BHTC.shape[1] != k_BKSC.shape[1]
    out: Tensor = run(q_BHTC, k_BKSC, v_BKSC, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return out


def _varlen(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, mask: Mask, scale: float | None) -> Tensor:
    if q_BHTC.device.type != "cuda":
        raise RuntimeError(f"varlen attention runs on CUDA only, not on {q_BHTC.device}: choose 'sdpa' or 'auto'")
    from torch.nn.attention.varlen import varlen_attn

    batch, _, length, _ = q_BHTC.shape
    bounds, longest = mask.segments(batch, length, q_BHTC.device)
    window = -1 if mask.window is None else mask.window - 1
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTC, k_BKTC, v_BKTC))
    out: Any = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(window, 0 if mask.causal else window),
        enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1],
    )  # fmt: skip
    result: Tensor = out.unflatten(0, (batch, length)).transpose(1, 2)
    return result


class InnerAttention(nn.Module):
    """Attention of a block as a module, so that context parallelism can be put in from outside."""

    def __init__(self, backend: Backend = "auto", scale: float | None = None) -> None:
        super().__init__()
        self.backend, self.scale = backend, scale
        self.context: Any = None
        """Called with (q, k, v, mask, attend) in the place of ``attend``; None if sequences are whole."""

    def forward(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask) -> Tensor:
        if self.context is not None:
            whole: Tensor = self.context(q_BHTC, k_BKSC, v_BKSC, mask, self.attend)
            return whole
        return self.attend(q_BHTC, k_BKSC, v_BKSC, mask)

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask) -> Tensor:
        return attention(q_BHTC, k_BKSC, v_BKSC, mask, self.backend, self.scale)
