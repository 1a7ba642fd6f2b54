"""Train and sample rectified flows: latents as tokens, the velocity loss, Euler's sampler.

Users' own modules call `flow_loss` and `sample` with a `Flux`; nothing else in Arclight does. Latents come from an autoencoder
that is not part of this package. Order of tokens and `schedule` are those of FLUX.1's published weights and stay.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from arclight.text.diffusion.flux import Conditions, Flux


def to_tokens(latents_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Split latents into tokens (B, N, 4 C), two by two, and their places (N, 3).

    Tokens go row by row. A place is 0, row, column.
    """
    batch, channels, height, width = latents_BCHW.shape
    if height % 2 or width % 2:
        raise ValueError(f"latents of {height} x {width} do not divide into squares of two by two")
    cut = latents_BCHW.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    rows, columns = torch.arange(height // 2), torch.arange(width // 2)
    places = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), rows, columns)
    return cut.flatten(3).flatten(1, 2), places.to(latents_BCHW.device)


def to_latents(tokens_BNI: Tensor, height: int, width: int) -> Tensor:
    """Invert :func:`to_tokens` for latents of ``height`` x ``width``."""
    cut = tokens_BNI.unflatten(2, (-1, 2, 2)).unflatten(1, (height // 2, width // 2))  # (B, h, w, C, 2, 2)
    latents: Tensor = cut.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return latents


def flow_loss(
    model: Flux, image_BNI: Tensor, places_NA: Tensor, conditions: Conditions, generator: torch.Generator | None = None
) -> Tensor:  # fmt: skip
    """Compute the mean squared error of the velocity noise - image on the line between them.

    Liu et al. 2022; times are drawn from the logistic of a normal distribution (Esser et al. 2024). The random numbers are drawn on
    the generator's device.
    """
    device = generator.device if generator is not None else image_BNI.device
    noise = torch.randn(image_BNI.shape, generator=generator, device=device).to(image_BNI)
    times = torch.randn(len(image_BNI), generator=generator, device=device).sigmoid().to(image_BNI.device)
    along = times[:, None, None].to(image_BNI.dtype)
    velocity = model((1 - along) * image_BNI + along * noise, places_NA, times, conditions)
    loss: Tensor = F.mse_loss(velocity.float(), (noise - image_BNI).float())
    return loss


def schedule(steps: int, tokens: int, shifted: bool = True) -> list[float]:
    """Return ``steps`` + 1 times from 1 to 0.

    ``shifted`` ones stay near noise longer for larger images. As FLUX.1 dev: e^m / (e^m + 1 / t - 1), with m on the
    line through 0.5 at 256 and 1.15 at 4096 tokens.
    """
    times = [1 - step / steps for step in range(steps + 1)]
    if not shifted:
        return times
    strength = math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
    return [strength / (strength - 1 + 1 / time) if time else 0.0 for time in times]


@torch.no_grad()
def sample(
    model: Flux, noise_BNI: Tensor, places_NA: Tensor, conditions: Conditions, steps: int = 28, shifted: bool = True,
    without: Conditions | None = None, strength: float = 1.0,
) -> Tensor:  # fmt: skip
    """Sample image tokens from noise by Euler's method, against the velocity from time 1 to 0.

    With conditions ``without`` (an empty text), velocities are led away from theirs by ``strength`` (Ho and Salimans 2022).
    """
    image = noise_BNI
    times = schedule(steps, noise_BNI.shape[1], shifted)
    for now, then in pairwise(times):
        at = torch.full((len(image),), now, device=image.device)
        velocity = model(image, places_NA, at, conditions)
        if without is not None:
            free = model(image, places_NA, at, without)
            velocity = free + strength * (velocity - free)
        image = image + (then - now) * velocity
    return image
