"""Attention: masks as their definitions say, and back ends that agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from arclight.text.model.attention import Mask, attention

B, H, K, T, C = 2, 4, 2, 37, 8
DOCUMENTS = torch.tensor([[0] * 11 + [1] * 20 + [2] * 6, [5] * 30 + [6] * 7])
POSITIONS = torch.tensor([[*range(11), *range(20), *range(6)], [*range(30), *range(7)]])
IDS = {"documents_q": DOCUMENTS, "documents_k": DOCUMENTS, "positions_q": POSITIONS, "positions_k": POSITIONS}
MASKS: dict[str, dict[str, Any]] = {
    "triangle": {},
    "everything": {"causal": False},
    "window": {"window": 5},
    "window on both sides": {"window": 5, "causal": False},
    "chunks": {"chunk": 8},
    "documents": IDS,
    "documents, window": IDS | {"window": 4},
    "chunks of documents": IDS | {"chunk": 8},
    "documents both ways": IDS | {"causal": False},
}


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, C), (B, K, T, C), (B, K, T, 6))  # values of another width, as in DeepSeek's
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def by_definition(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, window: int | None = None, chunk: int | None = None,
                  documents_q: Tensor | None = None, positions_q: Tensor | None = None, **_: Any) -> Tensor:  # fmt: skip
    """Softmax over the keys that are seen, query by query, in float64."""
    out = torch.zeros(B, H, T, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for i in range(T):
            seen = [
                j
                for j in range(T)
                if (not causal or j <= i)
                and (window is None or abs(i - j) < window)
                and (documents_q is None or documents_q[b, i] == documents_q[b, j])
                and (
                    chunk is None
                    or (
                        i // chunk == j // chunk
                        if positions_q is None
                        else positions_q[b, i] // chunk == positions_q[b, j] // chunk
                    )
                )
            ]
            for h in range(H):
                weights = (k[b, h // (H // K), seen].double() @ q[b, h, i].double() / C**0.5).softmax(0)
                out[b, h, i] = weights @ v[b, h // (H // K), seen].double()
    return out


@pytest.mark.parametrize("name", MASKS)
def test_back_ends_agree_with_the_definition(name: str) -> None:
    q, k, v = tensors()
    expected = by_definition(q, k, v, **MASKS[name])
    for backend in ("sdpa", "flex", "auto"):
        got = attention(q, k, v, Mask(**MASKS[name]), backend)  # type: ignore[arg-type]
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6, msg=backend)


@pytest.mark.parametrize(
    "name", ["triangle", "window", "chunks", "documents", "documents, window", "chunks of documents"]
)
def test_pieces_of_packed_sequences_match_the_mask(name: str) -> None:
    """Varlen attention gets pieces that, each within the window, make up the whole."""
    fields = MASKS[name]
    bounds, longest = Mask(**fields).segments(B, T, torch.device("cpu"))
    assert bounds[0] == 0
    assert bounds[-1] == B * T
    assert longest == bounds.diff().max()
    q, k, v = tensors()
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    pieces = []
    for start, stop in zip(bounds.tolist(), bounds.tolist()[1:]):
        one = [x[start:stop].transpose(0, 1)[None] for x in packed]
        pieces.append(attention(one[0], one[1], one[2], Mask(window=fields.get("window")))[0].transpose(0, 1))
    together = torch.cat(pieces).unflatten(0, (B, T)).transpose(1, 2)
    torch.testing.assert_close(together, attention(q, k, v, Mask(**fields)), rtol=0, atol=1e-6)


def test_cached_keys_and_parts_of_queries() -> None:
    q, k, v = tensors()
    whole = attention(q, k, v, Mask(**IDS, window=9))
    part = torch.cat((torch.arange(3, 9), torch.arange(20, 31)))
    mask = Mask(
        window=9, index_q=part, documents_q=DOCUMENTS[:, part], documents_k=DOCUMENTS, positions_q=POSITIONS[:, part],
        positions_k=POSITIONS,
    )  # fmt: skip
    for backend in ("sdpa", "flex"):
        torch.testing.assert_close(attention(q[:, :, part], k, v, mask, backend), whole[:, :, part], rtol=0, atol=1e-6)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same tokens"):
        mask.segments(B, T, torch.device("cpu"))


def test_unsupported_back_ends_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match="no backward on a CPU"):
        attention(q.requires_grad_(), k, v, Mask(), "flex")
    with pytest.raises(RuntimeError, match="CUDA only"):
        attention(q, k, v, Mask(), "varlen")
    with pytest.raises(ValueError, match="choose sdpa, flex or varlen"):
        attention(q, k, v, Mask(), "magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        attention(q, torch.randn(B, 3, T, C), torch.randn(B, 3, T, C), Mask())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MASKS)
def test_back_ends_agree_on_a_gpu(name: str) -> None:
    results = {}
    for backend in ("sdpa", "flex") + (() if name == "everything" else ("varlen",)):
        fields = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in MASKS[name].items()}
        for side in ("documents", "positions"):
            fields |= {f"{side}_k": fields[f"{side}_q"]} if f"{side}_q" in fields else {}
        q, k, _ = (x.cuda().bfloat16().repeat(1, 1, 1, 4).requires_grad_() for x in tensors())
        out = attention(q, k, k, Mask(**fields), backend)  # type: ignore[arg-type]
        results[backend] = (out, *torch.autograd.grad(out.float().square().sum(), (q, k)))
    for backend, got in results.items():
        for value, expected in zip(got, results["sdpa"], strict=True):
            torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2, msg=backend)
