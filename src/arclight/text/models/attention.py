"""Attention as one function: who may see whom is a `Mask`, how it is computed is a back end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Backend = Literal["auto", "sdpa", "flex", "varlen"]


@dataclass
class Mask:
    """Which keys a query sees. All conditions must hold; a tensor that is None stands for 0, 1, 2, ...

    index: place of each token in its sequence, (T,) or (B, T); of queries and of keys, which differ where keys of earlier steps are
    cached or a process holds part of the queries only. documents: ids (B, T) of packed documents. positions: place of
    each token in its document, (B, T), for ``chunk``.
    """

    causal: bool = True
    """Only keys at the query's place or before it."""
    window: int | None = None
    """Only the newest ``window`` keys, the query's own included."""
    chunk: int | None = None
    """Only keys of the same chunk: places in the document are cut into chunks of this length."""
    index_q: Tensor | None = None
    index_k: Tensor | None = None
    documents_q: Tensor | None = None
    documents_k: Tensor | None = None
    positions_q: Tensor | None = None
    positions_k: Tensor | None = None

    def __post_init__(self) -> None:
        self._dense: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the mask is the lower triangle (or nothing at all) over equal places of queries and keys."""
        tensors = (self.index_q, self.index_k, self.documents_q)
        return self.window is None and self.chunk is None and all(tensor is None for tensor in tensors)

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The mask as bool (B or 1, 1, queries, keys), True where seen; computed once."""
        if self._dense is None:
            self._dense = self._seen(queries, keys, device)
        return self._dense

    @cached_property
    def blocks(self) -> dict[tuple[int, int], Any]:
        """Block masks of flex attention by (queries, keys), made when first needed."""
        return {}

    def _seen(self, queries: int, keys: int, device: torch.device) -> Tensor:
        q = _rows(self.index_q, queries, device)[..., :, None]
        k = _rows(self.index_k, keys, device)[..., None, :]
        seen = k <= q if self.causal else torch.ones(1, queries, keys, dtype=torch.bool, device=device)
        if self.window is not None:
            seen = seen & (k > q - self.window)
            if not self.causal:
                seen = seen & (k < q + self.window)
        if self.documents_q is not None and self.documents_k is not None:
            seen = seen & (self.documents_q[:, :, None] == self.documents_k[:, None, :])
        if self.chunk is not None:
            place_q = q if self.positions_q is None else self.positions_q[:, :, None]
            place_k = k if self.positions_k is None else self.positions_k[:, None, :]
            seen = seen & (place_q // self.chunk == place_k // self.chunk)
        return seen[:, None]


def _rows(index: Tensor | None, length: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device) if index is None else index
    return places if places.ndim == 2 else places[None]


def attention(
    q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask, backend: Backend = "auto", scale: float | None = None
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale + mask) v.

    q: (B, H, T, C); k, v: (B, K, S, C) with H a multiple of K (v may have another width); gives (B, H, T, width of v).
    scale: default 1 / sqrt(C). ``auto`` is SDPA wherever it needs no mask tensor or the device is a CPU, flex attention elsewhere.
    Raises ValueError for heads that do not divide, RuntimeError from a back end that the device does not have.
    """
    heads, kv_heads = q_BHTC.shape[1], k_BKSC.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key heads")
    plain = mask.plain and (not mask.causal or q_BHTC.shape[2] == k_BKSC.shape[2])
    if backend == "auto":
        backend = "sdpa" if plain or q_BHTC.device.type == "cpu" else "flex"
    if backend == "sdpa":
        dense = None if plain else mask.dense(q_BHTC.shape[2], k_BKSC.shape[2], q_BHTC.device)
        return scaled_dot_product_attention(
            q_BHTC, k_BKSC, v_BKSC, attn_mask=dense, is_causal=plain and mask.causal, scale=scale,
            enable_gqa=heads != kv_heads,
        )  # fmt: skip
    raise ValueError(f"attention has no back end {backend!r}; choose sdpa, flex or varlen")


class InnerAttention(nn.Module):
    """Where a block's attention is computed, and where context parallelism is put in from outside."""

    def __init__(self, backend: Backend = "auto", scale: float | None = None) -> None:
        super().__init__()
        self.backend, self.scale = backend, scale
        self.context: Any = None
        """Called with (q, k, v, mask, attend) in the place of ``attend``; None where sequences are whole."""

    def forward(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask) -> Tensor:
        if self.context is not None:
            whole: Tensor = self.context(q_BHTC, k_BKSC, v_BKSC, mask, self.attend)
            return whole
        return self.attend(q_BHTC, k_BKSC, v_BKSC, mask)

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Mask) -> Tensor:
        return attention(q_BHTC, k_BKSC, v_BKSC, mask, self.backend, self.scale)
