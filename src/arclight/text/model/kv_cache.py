"""Cache keys and values of earlier tokens while text is generated.

`generate` fills one per batch; the attention of each family appends to it by `extend`, and `Decoder` takes masks and positions from it.
`language_program` derives a cache whose tensors a program takes in and gives out, in the order of `tensors`: that order is in exported
files. Logits must be those of a pass without a cache, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arclight.text.model.attention import Mask


class KVCache:
    """Keys and values of ``length`` tokens of ``batch`` sequences, by layer.

    Each layer's are allocated at its first write; a family may cache other tensors, as DeepSeek's latents.
    padding: (B,) int, tokens without meaning at the left of each sequence, so that sequences of different lengths end together.
    """

    def __init__(self, batch: int, length: int, padding: Tensor | None = None) -> None:
        self.batch, self.length, self.padding = batch, length, padding
        self.used = 0
        """Tokens held; `Decoder` advances it when all layers have written."""
        self._layers: dict[str, tuple[Tensor, ...]] = {}

    def extend(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        """Append the tensors (B, K, T, C) of a step; gives all tokens so far.

        Raises ValueError if the room is used up.
        """
        stop = self.used + new[0].shape[2]
        if stop > self.length:
            raise ValueError(f"the cache has room for {self.length} tokens; {stop} are needed: make it longer")
        if layer not in self._layers:
            self._layers[layer] = tuple(x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in new)
        for kept, x in zip(self._layers[layer], new, strict=True):
            kept[:, :, self.used : stop] = x
        return tuple(kept[:, :, :stop] for kept in self._layers[layer])

    def tensors(self) -> list[Tensor]:
        """Return the keys and values of all layers, in their order: each (B, K, T, C)."""
        return [kept[:, :, : self.used] for layer in self._layers.values() for kept in layer]

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences (indices into the batch)."""
        self.batch = len(rows)
        self.padding = None if self.padding is None else self.padding[rows]
        self._layers = {name: tuple(x[rows] for x in kept) for name, kept in self._layers.items()}

    def mask(self, new: int, device: torch.device) -> tuple[Mask, Tensor]:
        """Return the mask of the next ``new`` tokens, and their places in their sequences.

        Places are (T,) or (B, T).
        """
        places = torch.arange(self.used, self.used + new, device=device)
        if self.padding is None:
            # The newest token alone sees all keys: without a mask in full, kernels may choose their fastest way.
            return Mask(causal=new > 1 or not self.used, index_q=places if self.used else None), places
        columns, padding = torch.arange(self.used + new, device=device)[None], self.padding.to(device)[:, None]
        meant, positions = (columns >= padding).long(), (columns - padding).clamp(min=0)
        mask = Mask(
            index_q=places, documents_q=meant[:, self.used :], documents_k=meant,
            positions_q=positions[:, self.used :], positions_k=positions,
        )  # fmt: skip
        return mask, positions[:, self.used :]
