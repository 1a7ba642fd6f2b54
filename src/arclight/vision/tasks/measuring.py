"""Measure what settings leave to the machine: the batch size that fits into memory, and the faster memory layout.

What is found is part of a run (docs/decisions/006): checkpoints hold it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from arclight.fabric.memory import free_memory
from arclight.fabric.seeding import isolate_rng
from arclight.vision.data.dataset import available_memory
from arclight.vision.models.yolov5 import Yolo

UNMEASURED = 16
"""Images per batch where nothing is trained: in validation and testing."""
MOST_IMAGES, MOST_IMAGES_ON_CPU = 64, 16  # larger ones ask for other learning rates, and are no faster on a CPU
SHARE_OF_FREE, SHARE_OF_FREE_ON_CPU = 0.7, 0.25
CPU_MARGIN = 2.0
"""Memory of a step over what it keeps for the backward pass: gradients of maps, and what convolutions unfold."""
TRIED = (2, 4)
"""Batches that are measured; batch norms want more than one value."""


class BatchSizeError(ValueError):
    """No batch size can be chosen: what was measured, and what to set."""


def fitting_batch_size(
    model: Yolo, side: int, context: Callable[[], AbstractContextManager[Any]], budget_gib: float | None, images: int
) -> int:
    """Return the largest power of two of images of ``side`` pixels with which a step of ``model`` fits into memory.

    budget_gib: memory for a step; a share of what is free on the model's device where not given. images: of the data set, of which a batch
    has at most all. At most 64, on a CPU 16. Two small batches are measured under ``context`` and the rest is taken to grow in
    proportion; weights, statistics, gradients and random streams are as before. Raises BatchSizeError if one image does not fit.
    """
    device = next(model.parameters()).device
    on_cpu = device.type == "cpu"
    states = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {part: part.training for part in model.modules()}
    try:
        with isolate_rng():
            low, high = (_step_bytes(model.train(), side, count, context) for count in TRIED)
    finally:
        model.load_state_dict(states)
        model.zero_grad(set_to_none=True)
        for part, training in modes.items():
            part.training = training
    each = max(1, (high - low) // (TRIED[1] - TRIED[0]))
    fixed = max(0, low - each * TRIED[0])
    budget = int(budget_gib * 2**30) if budget_gib is not None else _free_bytes(model, device)
    if fixed + each > budget:
        raise BatchSizeError(
            f'batch_size = "auto": a step with one image of {side} pixels takes {(fixed + each) / 2**30:.2f} GiB, and there are '
            f"{budget / 2**30:.2f}: use a smaller model or image_size, or set batch_size and batch_memory_gib yourself"
        )
    fitting = min((budget - fixed) // each, images, MOST_IMAGES_ON_CPU if on_cpu else MOST_IMAGES)
    return 1 << (max(1, fitting).bit_length() - 1)


def _step_bytes(model: Yolo, side: int, count: int, context: Callable[[], AbstractContextManager[Any]]) -> int:
    """Measure the memory of forward and backward over ``count`` images, without weights."""
    weight = next(model.parameters())
    images = torch.rand(count, 3, side, side, device=weight.device, dtype=weight.dtype)
    on_gpu = weight.device.type == "cuda"
    if on_gpu:
        free_memory()
        torch.cuda.reset_peak_memory_stats(weight.device)
    before = torch.cuda.memory_allocated(weight.device) if on_gpu else 0
    with _kept_for_backward(model) as kept:
        with context():
            loss = _any_loss(model, images)
        if not on_gpu:
            return int(CPU_MARGIN * sum(kept.values()))
        loss.backward()
    return torch.cuda.max_memory_allocated(weight.device) - before


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


def _free_bytes(model: Yolo, device: torch.device) -> int:
    """Return the share of free memory that a step may take; gradients and an optimizer's moments come on top."""
    later = 3 * sum(value.numel() * value.element_size() for value in model.parameters() if value.requires_grad)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, int(SHARE_OF_FREE * (free + reserved)) - later)
    known = available_memory()
    if known is None:
        raise BatchSizeError(
            'batch_size = "auto": this system does not say how much memory is free: set batch_memory_gib'
        )
    return max(0, int(SHARE_OF_FREE_ON_CPU * known) - later)


REPEATS = 3


def fastest_memory_format(
    model: Yolo, image_size: int, context: Callable[[], AbstractContextManager[Any]], batch_size: int = 4
) -> torch.memory_format:
    """Return the layout in which forward and backward of ``model`` take less time on its device under ``context``.

    The model's weights, statistics, gradients and the random streams are as before when this returns.
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
