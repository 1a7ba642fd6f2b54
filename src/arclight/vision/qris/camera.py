"""What light and a phone's camera do to a scene: shading, casts, glare, shadows, blur, noise."""

from __future__ import annotations

import numpy as np

from arclight.vision.qris.backgrounds import Field, clouds, soften, white_noise
from arclight.vision.qris.drawing import cv2
from arclight.vision.qris.symbols import Image


def photograph(rng: np.random.Generator, scene: Image, finest: float | None) -> Image:
    """``scene`` (S, S, 3) as a phone would take it; blur stays below what ``finest``, pixels per module, can bear."""
    picture = _light(rng, scene)
    if rng.random() < 0.15:
        picture = _glare(rng, picture)
    limit = 2.0 if finest is None else float(np.clip(finest * rng.uniform(0.3, 1.3), 0.3, 5.0))
    if rng.random() < 0.45:
        picture = soften(picture, float(rng.uniform(0.2, 0.7)) * limit)
    if rng.random() < 0.12:
        picture = _motion(rng, picture, limit * float(rng.uniform(1.0, 2.5)))
    if rng.random() < 0.75:
        picture = _grain(rng, picture)
    if rng.random() < 0.25:  # phones sharpen
        picture = cv2.addWeighted(picture, 1.6, cv2.GaussianBlur(picture, (0, 0), 1.0), -0.6, 0)
    return np.asarray(picture, np.uint8)


def _light(rng: np.random.Generator, scene: Image) -> Image:
    """Uneven light, a shadow's edge, colour of the lamp, exposure and contrast."""
    size = scene.shape[0]
    coarse = 32
    y, x = np.mgrid[0:coarse, 0:coarse].astype(np.float32) / coarse - 0.5
    slope = rng.normal(0, 0.3, 2)
    field = 1.0 + slope[0] * x + slope[1] * y
    if rng.random() < 0.3:  # vignette or a spot of light
        centre = rng.uniform(-0.4, 0.4, 2)
        distance = np.hypot(x - centre[0], y - centre[1])
        field *= 1.0 - rng.uniform(0.2, 1.0) * np.minimum(distance, 0.9)
    field = np.repeat(np.clip(field, 0.15, 1.9)[..., None], 3, axis=2) * _cast(rng)
    field = cv2.resize(field.astype(np.float32), (size, size), interpolation=cv2.INTER_LINEAR)
    if rng.random() < 0.25:
        field *= _shadow(rng, size)[..., None]
    picture = cv2.multiply(scene, field, dtype=cv2.CV_8U)
    gamma, low, high = rng.uniform(0.65, 1.3), rng.uniform(0, 35), rng.uniform(225, 275)
    if rng.random() < 0.08:  # a dim place
        high *= rng.uniform(0.35, 0.7)
        low *= 0.5
    curve = low + (high - low) * (np.arange(256) / 255) ** gamma
    return np.asarray(cv2.LUT(picture, curve.clip(0, 255).round().astype(np.uint8)), np.uint8)


def _cast(rng: np.random.Generator) -> Field:
    """Gains of red, green and blue: daylight to a warm lamp."""
    warmth = rng.normal(0.03, 0.07) + (rng.uniform(0.1, 0.3) if rng.random() < 0.1 else 0)
    gains = np.array([1 + warmth, 1 + rng.normal(0, 0.02), 1 - 1.3 * warmth], np.float32)
    return gains.clip(0.3, 1.6)


def _shadow(rng: np.random.Generator, size: int) -> Field:
    """A darker region with a soft edge, or blinds' stripes: (size, size) factors."""
    small = 80
    mask = np.zeros((small, small), np.float32)
    if rng.random() < 0.25:
        x = np.arange(small, dtype=np.float32)
        stripes = np.sin((x[:, None] * rng.normal() + x[None] * rng.normal()) * 0.5) > rng.uniform(-0.3, 0.5)
        mask[:] = stripes
    else:
        corners = rng.uniform(-0.4, 1.4, (int(rng.integers(3, 7)), 2)) * small
        cv2.fillPoly(mask, [cv2.convexHull(corners.astype(np.int32))], 1.0)
    mask = cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(0.3, 6)))
    return np.asarray(1 - rng.uniform(0.2, 0.65) * cv2.resize(mask, (size, size), interpolation=cv2.INTER_LINEAR))


def _glare(rng: np.random.Generator, picture: Image) -> Image:
    """A streak or blob of reflected light, as lamination and glass show."""
    size, small = picture.shape[0], 96
    mask = np.zeros((small, small), np.float32)
    centre = tuple(int(v) for v in rng.integers(0, small, 2))
    axes = (int(rng.integers(2, 10)), int(rng.integers(6, 60)))
    cv2.ellipse(mask, centre, axes, float(rng.uniform(0, 180)), 0, 360, 1.0, -1)
    mask = cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(1, 6)))
    mask = cv2.resize(mask * rng.uniform(60, 230), (size, size), interpolation=cv2.INTER_LINEAR)
    return np.asarray(cv2.add(picture, cv2.merge([cv2.convertScaleAbs(mask)] * 3)), np.uint8)


def _motion(rng: np.random.Generator, picture: Image, length: float) -> Image:
    """Blur along a line of ``length`` pixels, as a moving hand gives."""
    reach = max(1, int(np.ceil(length / 2)))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
    turn = rng.uniform(0, np.pi)
    step = np.array([np.cos(turn), np.sin(turn)]) * length / 2
    start, end = np.array([reach, reach]) - step, np.array([reach, reach]) + step
    cv2.line(
        kernel, tuple(start.round().astype(int).tolist()), tuple(end.round().astype(int).tolist()), 1.0, 1, cv2.LINE_AA
    )
    return np.asarray(cv2.filter2D(picture, -1, kernel / kernel.sum()), np.uint8)


def _grain(rng: np.random.Generator, picture: Image) -> Image:
    """Sensor noise: mostly in brightness, sometimes blotchy or in colour."""
    size = picture.shape[0]
    strength = float(rng.exponential(4.0))
    strength = min(strength, 22.0)
    noise = white_noise(rng, size, size)
    if rng.random() < 0.3:
        noise = cv2.GaussianBlur(noise, (0, 0), 0.8) * 2
    if rng.random() < 0.35:
        layers = [noise, white_noise(rng, size, size), white_noise(rng, size, size)]
        return np.asarray(cv2.add(picture, cv2.merge(layers) * np.float32(strength), dtype=cv2.CV_8U), np.uint8)
    grey = noise * np.float32(strength)
    return np.asarray(cv2.add(picture, cv2.merge([grey, grey, grey]), dtype=cv2.CV_8U), np.uint8)


def surface_light(rng: np.random.Generator, image: Image) -> Image:
    """The light on one thing: brighter or darker than its surroundings, and uneven."""
    gain = float(np.clip(rng.normal(0.92, 0.13), 0.45, 1.2))
    if rng.random() < 0.5:
        return np.asarray(cv2.convertScaleAbs(image, alpha=gain), np.uint8)
    uneven = clouds(rng, 32, roughness=0.4) * np.float32(rng.uniform(0.1, 0.5))
    field = cv2.resize((gain + 0.1 - uneven).astype(np.float32), image.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    return np.asarray(cv2.multiply(image, cv2.merge([field, field, field]), dtype=cv2.CV_8U), np.uint8)
