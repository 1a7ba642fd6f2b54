"""Apply error feedback in chunks: encode a tensor plus its residual, compute the new one.

`encoding` makes one `ErrorFeedback` for each tensor that it encodes lossily; it, `blockwise` and `sparse` read its ``chunks`` and record what
they encoded. Bits of encoded values are part of a run's reproducibility: `LARGEST`, `SMALLEST` and the order of operations stay; `CHUNK` may
be tuned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from arclight.federated.errors import FederatedError

LARGEST = 2.0**126
"""Larger magnitudes are refused like infinite ones: sums and multiples of them would overflow."""
SMALLEST = 2.0**-100
"""Blocks of smaller magnitudes are encoded as zeros: products with their scales would depend on how a machine treats denormal numbers."""
CHUNK = 1 << 18
"""Elements per thread in a chunk: 1 MB of float32 stays in a core's cache."""


class ErrorFeedback:
    """Iterate over the values to encode, in rows of ``block``, and record their residual."""

    def __init__(
        self, key: str, tensor: torch.Tensor, residual: torch.Tensor | None, feedback: float, block: int
    ) -> None:
        self.key, self.block, self.dtype, self.numel = key, block, tensor.dtype, tensor.numel()
        self.residual = torch.empty(self.numel) if feedback else None
        """The new residual, as far as chunks have been recorded; None without feedback."""
        self._flat = tensor.detach().reshape(-1)
        self._residual = residual.detach().reshape(-1) if residual is not None and feedback else None
        self._feedback = feedback
        size = min(next(chunks_of(self.numel, block)).stop + block, self.numel + block) if self.numel else block
        # new memory for each chunk would cost as much time as encoding it
        self._sum, self._spare = torch.empty(size), torch.empty(size)

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the flat tensor and the values there, shape (rows, block).

        The last row is padded with zeros. Callers must not change the values.
        """
        for where in chunks_of(self.numel, self.block):
            count = where.stop - where.start
            values = self._flat[where].to("cpu", torch.float32)
            if self._residual is not None:
                values = torch.add(values, self._residual[where], alpha=self._feedback, out=self._sum[:count])
            if count % self.block:
                values = torch.nn.functional.pad(values, (0, -count % self.block))
            yield where, values.view(-1, self.block)

    def spare(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return scratch memory of the chunk's shape, valid until the next call."""
        return self._spare[: chunk.numel()].view(chunk.shape)

    def largest(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each row, shape (rows, 1).

        Raises FederatedError for values that are NaN or infinite.
        """
        largest = torch.maximum(chunk.amax(1, keepdim=True), chunk.amin(1, keepdim=True).neg_())
        check_finite(self.key, largest)
        return largest

    def record(self, where: slice, chunk: torch.Tensor, decoded: torch.Tensor) -> None:
        """Record the values that the receiver will decode for ``chunk``."""
        if self.residual is not None:
            count = where.stop - where.start
            received = cast_values(decoded.view(-1)[:count], self.dtype).to(torch.float32)
            torch.sub(chunk.view(-1)[:count], received, out=self.residual[where])

    def record_zeros(self, where: slice, chunk: torch.Tensor) -> torch.Tensor | None:
        """Record that ``chunk`` is decoded as zeros; return its flat residual.

        None without feedback. The encoder then writes the errors of the values that it sends into it.
        """
        if self.residual is None:
            return None
        return self.residual[where].copy_(chunk.view(-1)[: where.stop - where.start])


def check_finite(key: str, largest: torch.Tensor) -> None:
    """Raise FederatedError unless all magnitudes ``largest`` are numbers up to `LARGEST`."""
    if not bool((largest <= LARGEST).all()):
        raise FederatedError(
            f"{key} has values that are not finite, or beyond 2^126: it is not sent; lower the learning rate or clip gradients"
        )


def cast_values(decoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast decoded float32 values to ``dtype``; float16 saturates at its largest number."""
    return (decoded.clamp(-65504.0, 65504.0) if dtype == torch.float16 else decoded).to(dtype)


def chunks_of(numel: int, block: int) -> Iterator[slice]:
    """Yield slices that divide ``numel`` elements into chunks of whole blocks.

    The last may end inside a block.
    """
    size = max(1, CHUNK * torch.get_num_threads() // block) * block
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))
