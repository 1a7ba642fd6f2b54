"""Read samples from token shards as batches of tensors, without work per token.

``text.data.data_module`` makes this data set of `packing` layouts for its loaders; ``text.heads`` and ``text.multiple_choice`` take
`IGNORED`. Keys, shapes and -100 are what ``text.language_model`` reads; keep them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from arclight.data.computed_order import PADDING
from arclight.data.packing import Layout
from arclight.data.token_shards import TokenShards

IGNORED = -100
"""The label of a position that predicts nothing, as PyTorch's cross-entropy has it."""


class TokenSamples(Dataset[dict[str, torch.Tensor]]):
    """The samples of one or more layouts, one after another, as whole batches.

    token_bytes: (V,) bytes of text that each token stands for. pad: the token at positions that hold none.
    mask_documents: give ``positions`` and ``documents``, and predict nothing across the end of a document.

    A batch is a dict: ``tokens`` and ``labels`` (B, T) int64, labels -100 where nothing is predicted; ``bytes`` (B,)
    int64, the text that the labels stand for; ``positions`` (B, T) int64, from 0 in each document or part of one;
    ``documents`` (B, T) int64, a number for each of them, its own for unused positions. Sample -1 has no labels at all.
    Give it to a DataLoader with ``collate_fn=arclight.data.fetching.identity``. Raises ValueError for layouts of
    different lengths.
    """

    def __init__(
        self, layouts: Sequence[Layout], token_bytes: npt.NDArray[Any], *, pad: int = 0, mask_documents: bool = True
    ) -> None:
        lengths = {layout.length for layout in layouts}
        if len(lengths) != 1:
            raise ValueError(f"all parts need samples of one length, got {sorted(lengths)}")
        (self.length,) = lengths
        self.layouts, self.token_bytes = list(layouts), token_bytes
        self.pad, self.mask_documents = pad, mask_documents
        self._firsts = list(accumulate((len(layout) for layout in layouts), initial=0))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        """Return one sample, without a batch dimension."""
        return {name: values[0] for name, values in self.__getitems__([sample]).items()}

    def __getitems__(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        shape = (len(samples), self.length)
        tokens, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        begins = np.zeros(shape, np.bool_)
        for row, sample in enumerate(samples):
            if sample != PADDING:
                self._fill(sample, tokens[row], labels[row], begins[row])
        predicted = labels != IGNORED
        stands_for = np.where(predicted, self.token_bytes[np.where(predicted, labels, 0)], 0)
        batch = {"tokens": tokens, "labels": labels, "bytes": stands_for.sum(1, dtype=np.int64)}
        if self.mask_documents:
            columns = np.arange(self.length)
            batch["positions"] = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
            batch["documents"] = np.cumsum(begins, axis=1, dtype=np.int64)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    @property
    def read_ahead(self) -> int:
        """Number of batches to prefetch ahead: the largest of any of its shards."""
        return max((layout.shards.read_ahead for layout in self.layouts), default=0)

    def prefetch(self, samples: Sequence[int], consumer: Hashable) -> list[tuple[TokenShards, Any]]:
        """Prefetch what a batch needs from shards at an address; return a handle for `release`.

        consumer: identifies the pass; concurrent ones share the space.
        """
        spans: dict[int, list[tuple[int, int]]] = {}
        for sample in samples:
            if sample != PADDING:
                part = bisect_right(self._firsts, sample) - 1
                pieces = self.layouts[part].pieces(sample - self._firsts[part])
                spans.setdefault(part, []).extend((start, start + size + 1) for start, size in pieces)
        found = []
        for part, wanted in spans.items():
            layout = self.layouts[part]
            boundaries = self.mask_documents and not layout.inside_documents
            found.append((layout.shards, layout.shards.prefetch(wanted, boundaries=boundaries, consumer=consumer)))
        return found

    def release(self, prefetched: list[tuple[TokenShards, Any]]) -> None:
        """Release what `prefetch` reserved."""
        for shards, wanted in prefetched:
            shards.release(wanted)

    def _fill(self, sample: int, tokens: npt.NDArray[Any], labels: npt.NDArray[Any], begins: npt.NDArray[Any]) -> None:
        part = bisect_right(self._firsts, sample) - 1
        layout, column = self.layouts[part], 0
        for start, size in layout.pieces(sample - self._firsts[part]):
            data = layout.shards.read(start, start + size + 1)
            tokens[column : column + size], labels[column : column + size] = data[:-1], data[1:]
            begins[column] = column > 0
            if self.mask_documents and not layout.inside_documents:
                meets = layout.shards.boundaries(start, start + size + 1) - start
                labels[meets - 1] = IGNORED
                begins[meets[meets < size]] = True
            column += size
        if 0 < column < self.length:
            begins[column] = True
