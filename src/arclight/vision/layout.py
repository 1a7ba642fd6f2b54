"""Which memory layout a model computes faster in here: measured, not assumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from arclight.fabric.seeding import isolate_rng
from arclight.vision.yolo import Yolo

REPEATS = 3


def faster_memory_format(
    model: Yolo, image_size: int, context: Callable[[], AbstractContextManager[Any]], batch_size: int = 4
) -> torch.memory_format:
    """The layout in which forward and backward of ``model`` take less time on its device under ``context``.

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
            loss = sum(level.float().square().mean() for level in model.raw(images))
        loss.backward()  # type: ignore[union-attr]
        times.append(time.perf_counter() - start)
    return min(times)
