"""What is to be said, chunk by chunk: a tensor plus what earlier messages left unsaid; and what this one leaves."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from arclight.federated.errors import FederatedError

LARGEST = 2.0**126
"""Values beyond are refused as infinite ones are: their multiples would not be numbers."""
SMALLEST = 2.0**-100
"""Blocks whose values are all below are written as zeros: products with their scales would depend on how a machine treats denormal numbers."""
CHUNK = 1 << 18
"""Elements per thread that are worked on at a time: 1 MB of float32 stays in a core's cache."""


class ErrorFeedback:
    """The values to encode, float32 in rows of ``block``, and the residual that encoding them leaves."""

    def __init__(
        self, key: str, tensor: torch.Tensor, residual: torch.Tensor | None, feedback: float, block: int
    ) -> None:
        self.key, self.block, self.dtype, self.numel = key, block, tensor.dtype, tensor.numel()
        self.left = torch.empty(self.numel) if feedback else None
        """What could not be said; None where nobody wants to know."""
        self._flat = tensor.detach().reshape(-1)
        self._residual = residual.detach().reshape(-1) if residual is not None and feedback else None
        self._feedback = feedback
        size = min(next(chunks_of(self.numel, block)).stop + block, self.numel + block) if self.numel else block
        self._sum, self._spare = (
            torch.empty(size) for _ in range(2)
        )  # fresh memory for each chunk costs as much as the work

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Where in the flat tensor, and the values there, shape (rows, block), the last row filled up with zeros. Not to be changed."""
        for where in chunks_of(self.numel, self.block):
            count = where.stop - where.start
            some = self._flat[where].to("cpu", torch.float32)
            if self._residual is not None:
                some = torch.add(some, self._residual[where], alpha=self._feedback, out=self._sum[:count])
            if count % self.block:
                some = torch.nn.functional.pad(some, (0, -count % self.block))
            yield where, some.view(-1, self.block)

    def spare(self, chunk: torch.Tensor) -> torch.Tensor:
        """Memory for values that are needed until the next call, of the chunk's shape."""
        return self._spare[: chunk.numel()].view(chunk.shape)

    def largest(self, chunk: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each row, shape (rows, 1). Raises FederatedError for values that are no finite numbers."""
        largest = torch.maximum(chunk.amax(1, keepdim=True), chunk.amin(1, keepdim=True).neg_())
        check_finite(self.key, largest)
        return largest

    def said(self, where: slice, chunk: torch.Tensor, decoded: torch.Tensor) -> None:
        """Note what the other side will read for ``chunk``."""
        if self.left is not None:
            count = where.stop - where.start
            seen = cast_values(decoded.view(-1)[:count], self.dtype).to(torch.float32)
            torch.sub(chunk.view(-1)[:count], seen, out=self.left[where])

    def said_few(self, where: slice, chunk: torch.Tensor) -> torch.Tensor | None:
        """As if nothing were read for ``chunk``: its flat residual, in which those who do say something note what is left of it."""
        if self.left is None:
            return None
        left = self.left[where]
        return left.copy_(chunk.view(-1)[: where.stop - where.start])


def check_finite(key: str, largest: torch.Tensor) -> None:
    if not bool((largest <= LARGEST).all()):
        raise FederatedError(
            f"{key} has values that are not finite, or beyond 2^126: it is not sent; lower the learning rate or clip gradients"
        )


def cast_values(decoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values in the type that they are decoded to; float16 stops at its largest number."""
    return (decoded.clamp(-65504.0, 65504.0) if dtype == torch.float16 else decoded).to(dtype)


def chunks_of(numel: int, block: int) -> Iterator[slice]:
    """Slices of whole blocks, but for the last."""
    size = max(1, CHUNK * torch.get_num_threads() // block) * block
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))
