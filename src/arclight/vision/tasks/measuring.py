"""Measure the batch size that fits into memory, and the faster memory format.

Only ``tasks.module`` calls it, for ``batch_size = "auto"`` and ``memory_format = "auto"``. What is found is part of a run
(docs/decisions/006): checkpoints hold it, and a resumed run does not measure again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from arclight.fabric.memory import free_memory, is_out_of_memory
from arclight.fabric.modules import keeping_modes
from arclight.fabric.seeding import isolate_rng
from arclight.vision.data.dataset import available_memory
from arclight.vision.models.yolov5 import Yolo

UNMEASURED = 16
"""Images per batch as long as none was measured, as in validation and testing without training."""
CPU_MARGIN = 2.0
"""Factor from the bytes that a step keeps for the backward pass to its peak: gradients of maps, and what convolutions unfold, come on top."""


class BatchSizeError(ValueError):
    """Error of a batch size that cannot be chosen: what was measured, and what to set."""


class MemoryMeter(Protocol):
    """Protocol of a memory meter: a device's memory for a step, and that of a step."""

    tried: tuple[int, ...]
    """Batches that are measured, ascending; batch norms want more than one value."""
    most: int
    """Most images of a batch: larger ones need other learning rates."""
    share: float
    """Part of the free memory that a step may take by default."""
    tries_out: bool
    """Whether the computed size is also run before it is used."""

    def free(self) -> int:
        """Return the bytes that are free now."""

    def step_bytes(self, step: Callable[[], Tensor]) -> int:
        """Run a step, a function that returns its loss; return its peak memory in bytes.

        May raise an out-of-memory error.
        """


class CPUMeter:
    """Memory meter of a CPU, which adds up what a step's graph keeps.

    At most 16 images: a CPU is no faster with more.
    """

    tried: tuple[int, ...] = (2, 4)
    most, share, tries_out = 16, 0.25, False

    def __init__(self, model: Yolo) -> None:
        self._model = model

    def free(self) -> int:
        known = available_memory()
        if known is None:
            raise BatchSizeError(
                'batch_size = "auto": this system does not say how much memory is free: set batch_memory_gib'
            )
        return known

    def step_bytes(self, step: Callable[[], Tensor]) -> int:
        with _kept_for_backward(self._model) as kept:
            step()
        return int(CPU_MARGIN * sum(kept.values()))


class CUDAMeter:
    """Measure the peak memory of the CUDA allocator.

    Libraries take workspaces by size, so that small batches alone would underestimate.
    """

    tried: tuple[int, ...] = (2, 4, 8, 16)
    most, share, tries_out = 64, 0.7, True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused

    def step_bytes(self, step: Callable[[], Tensor]) -> int:
        free_memory()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        step().backward()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def fitting_batch_size(
    model: Yolo,
    side: int,
    context: Callable[[], AbstractContextManager[Any]],
    budget_gib: float | None,
    images: int,
    *,
    share: float | None = None,
    meter: MemoryMeter | None = None,
) -> int:
    """Return the largest power-of-two batch size of which a training step fits into memory.

    ``side``: of the images, in pixels.
    budget_gib: memory for a step; if not given, ``share`` of the free memory of the model's device, less what gradients and an
    optimizer's moments will take. images: of the data set, of which a batch has at most all. meter: the device's own if not given.
    A few batches are measured under ``context`` until one takes more or the images end, a straight line that lies on or above all of them says what
    larger ones take, and on a GPU the size found is tried out, and halved while it runs out of memory. Weights, statistics,
    gradients and random streams are as before. Raises BatchSizeError if one image does not fit.
    """
    weight = next(model.parameters())
    on_gpu = weight.device.type == "cuda"
    own: MemoryMeter = meter or (CUDAMeter(weight.device) if on_gpu else CPUMeter(model))

    def measure(count: int) -> int:
        model.zero_grad(set_to_none=True)
        batch = torch.rand(count, 3, side, side, device=weight.device, dtype=weight.dtype)

        def step() -> Tensor:
            with context():
                return _any_loss(model, batch)

        return own.step_bytes(step)

    states = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with keeping_modes(model), isolate_rng():
            model.train()
            budget = _budget(model, own, budget_gib, share)
            return largest_batch(measure, own, budget, images, f"of {side} pixels")
    finally:
        model.load_state_dict(states)
        model.zero_grad(set_to_none=True)


def largest_batch(measure: Callable[[int], int], meter: MemoryMeter, budget: int, images: int, what: str) -> int:
    """Return the largest power-of-two batch size, at most ``images``, within ``budget`` bytes.

    measure: gives the bytes of a step over so many images, or raises an out-of-memory error. what: the images in messages, such as
    "of 640 pixels". Raises BatchSizeError if one does not fit.
    """
    found: dict[int, int] = {}
    most = min(images, meter.most)
    for size in meter.tried:
        if found and size > most:
            break
        if (taken := _unless_out_of_memory(measure, size)) is None:
            most = min(most, size - 1)
            break
        found[size] = taken
        if taken > budget:
            break
    if not found and (taken := _unless_out_of_memory(measure, 1)) is not None:
        found[1] = taken
    if not found:
        raise _no_size(what, "runs out of memory", budget)
    fixed, each = memory_line(found)
    fitting = min((budget - fixed) // each, most)
    if fixed + each > budget:
        raise _no_size(what, f"takes {(fixed + each) / 2**30:.2f} GiB", budget)
    size = 1 << (max(1, fitting).bit_length() - 1)
    while (meter.tries_out or len(found) == 1) and size not in found:  # one point gives no line
        taken = _unless_out_of_memory(measure, size)
        if taken is not None and taken <= budget:
            break
        if size == 1:
            raise _no_size(what, "runs out of memory" if taken is None else f"takes {taken / 2**30:.2f} GiB", budget)
        size //= 2
    return size


def _no_size(what: str, needed: str, budget: int) -> BatchSizeError:
    return BatchSizeError(
        f'batch_size = "auto": a step with one image {what} {needed}, and there are {budget / 2**30:.2f}: use a smaller model or '
        "image_size, or set batch_size and batch_memory_gib yourself"
    )


def memory_line(found: dict[int, int]) -> tuple[int, int]:
    """Fit a line to memory by batch size: bytes of a step without images, and of each image.

    The slope fits ``found`` best, and no point lies above the line.
    found: bytes by number of images, at least one. Of a single one all bytes are its images'.
    """
    if len(found) == 1:
        ((size, taken),) = found.items()
        return 0, max(1, -(-taken // size))
    count, sizes, taken_bytes = len(found), sum(found), sum(found.values())
    rise = count * sum(size * taken for size, taken in found.items()) - sizes * taken_bytes
    run = count * sum(size * size for size in found) - sizes * sizes
    # in integers: floats would round up what lies a hair above one, differently on each processor
    each = max(1, -(-rise // run))
    return max(0, *(taken - each * size for size, taken in found.items())), each


def _unless_out_of_memory(measure: Callable[[int], int], size: int) -> int | None:
    try:
        return measure(size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    free_memory()  # here, where the error and the tensors of its frames are gone
    return None


def _budget(model: Yolo, meter: MemoryMeter, budget_gib: float | None, share: float | None) -> int:
    """Return the bytes that a step may take; gradients and an optimizer's moments come on top."""
    if budget_gib is not None:
        return int(budget_gib * 2**30)
    later = 3 * sum(value.numel() * value.element_size() for value in model.parameters() if value.requires_grad)
    return max(0, int((meter.share if share is None else share) * meter.free()) - later)


@contextmanager
def _kept_for_backward(model: Yolo) -> Iterator[dict[int, int]]:
    """Collect the bytes of each storage that the backward pass reads, weights left out."""
    weights = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


REPEATS = 3
"""Steps that are timed in each memory format; the shortest counts."""


def fastest_memory_format(
    model: Yolo, image_size: int, context: Callable[[], AbstractContextManager[Any]], batch_size: int = 4
) -> torch.memory_format:
    """Return the memory format in which a training step of ``model`` is faster on its device.

    It is measured under ``context`` on a CPU, and channels last on any other device. The model's weights, statistics, gradients and the
    random streams are as before when this returns; its mode and memory format are not.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        return torch.channels_last  # tensor cores want it; timing a cold GPU would say little
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with isolate_rng():
        images = torch.rand(batch_size, 3, image_size, image_size)
        seconds = {
            layout: _time(model, images, layout, context) for layout in (torch.contiguous_format, torch.channels_last)
        }
    model.load_state_dict(weights)
    model.zero_grad(set_to_none=True)
    return min(seconds, key=lambda layout: seconds[layout])


def _any_loss(model: Yolo, images: Tensor) -> Tensor:
    """Return a loss that all outputs have a part in."""
    return sum((part.float().square().mean() for part in _tensors(model.raw(images))), torch.zeros(()))


def _tensors(output: Any) -> list[Tensor]:
    """List the tensors of nested lists and tuples."""
    return [output] if isinstance(output, Tensor) else [tensor for part in output for tensor in _tensors(part)]


def _time(
    model: Yolo, images: torch.Tensor, layout: torch.memory_format, context: Callable[[], AbstractContextManager[Any]]
) -> float:
    model.to(memory_format=layout)  # type: ignore[call-overload]
    model.train()
    images = images.contiguous(memory_format=layout)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        with context():
            loss = _any_loss(model, images)
        loss.backward()
        times.append(time.perf_counter() - start)
    return min(times)
